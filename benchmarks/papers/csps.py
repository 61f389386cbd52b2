"""CSPS: its sequence parallelism compared with the cost model and the simulator, and all its claims.

    python benchmarks/papers/csps.py             # some seconds; uses the stored figures of serving
    python benchmarks/papers/csps.py --serving   # simulates section 5 again, some ten minutes

Exits with 1 if a row that compares CSPS with Sarathi-Serve lacks the number of GPUs per request of either system. It
also exits with 1 unless queries travel 100 times as quickly as keys and values (Table 3).

The devices are 64 A100 of 40 GB on 8 hosts with 400 Gb/s each. `csps_serving.py` describes the requests and systems.
Two mistakes of the paper are not tested. The first are the absolute times of Table 3. The second are throughputs in
Table 4 that contradict its TTFT: 113K tokens at 226 per second take 500 s.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import csps_oracle
import csps_prompts
import csps_serving
from csps_serving import (
    CSA,
    GPUS_PER_HOST,
    LONG,
    NTP,
    SARATHI,
    TP,
    TUNED,
    Case,
    Means,
    Times,
)
from rich.console import Console
from rich.table import Table
from verdicts import Claim, PageTable, bound, in_range, numbers, order, report_claims

_PAPER_RATE = 1.0
_NOT_KEPT = "The stored run did not keep these numbers: run csps.py --serving."


def main(cases: Sequence[Case] | None = None) -> bool:
    """Print the claims and the numbers behind them. Return True if all required claims and rows are fine."""
    cases = csps_serving.stored() if cases is None else cases
    for case in cases:
        _print_rows(case)
    passed = rows_are_complete([row for case in cases for row in rows(case)])
    if cases:
        _print_response(cases)
    csps_prompts.print_shares()
    csps_prompts.print_load()
    return report_claims("CSPS", claims(cases)) and passed


def claims(cases: Sequence[Case] | None = None) -> list[Claim]:
    """Return the claims of the paper. Claims of section 5 use `cases`, by default the stored ones."""
    cases = csps_serving.stored() if cases is None else cases
    return [
        *csps_prompts.chunks(),
        Claim("3.2.3, Fig. 5", "SP-NTP spends 13 to 34 % of TTFT on messages.", csps_prompts.messages(), _BY_FLOPS),
        Claim("3.2.3, Fig. 5", "SP-NTP spends 18 to 43 % of TTFT on attention.", csps_prompts.attention(), _BY_FLOPS),
        Claim(
            "4.1, Table 3",
            "Queries of a token travel 100 times as quickly as all keys and values, or more (879 times in Table 3).",
            bound(csps_prompts.kv_over_q(), least=100),
            required=True,
            weak="The bound is far below the numbers of Table 3: 1,173, 984, 1,085 and 879, in this order.",
        ),
        *csps_prompts.mixed_decodes(),
        Claim(
            "3.2.5",
            "Denominators of the softmax are at most 0.1 % of the queries, keys and values.",
            bound(csps_prompts.denominators(), most=0.1, unit=" %"),
            "The paper counts as many elements in a query as the sequence has tokens. It has as many as the head size, "
            "and a denominator is in float32.",
        ),
        _over_sarathi(cases, "TTFT", "5.3, Fig. 14", "TTFT of Sarathi-Serve is {} times as long.", (6.1, 7.5)),
        _over_sarathi(cases, "TBT", "5.3, Fig. 15", "TBT of Sarathi-Serve is {} times as long.", (1.6, 1.92)),
        _tbt_order(cases),
        _ntp_over_tp(cases, "TTFT", (1.32, 1.51)),
        _ntp_over_tp(cases, "TBT", (1.24, 1.39)),
        *_oracle(),
        Claim(
            "5.3",
            "Dropping 22 % of the tokens saves 19 % of the messages' time and 28 % of the computation's.",
            csps_prompts.dropped(),
            "Queries, keys and values are dropped alike. So bytes fall by the drop ratio, and pairs above level "
            "1 by nearly twice that. By the paper's rule three levels drop 23 % at least, so there are two. How ratios "
            "differ by layer, head and level in the paper is not given.",
        ),
        _over_sarathi(
            cases, "response", "5.3, Fig. 16", "Response times of Sarathi-Serve are {} times as long.", (8.3, 9.8)
        ),
        _over_sarathi(
            cases, "prefill", "5.3, Table 4", "Throughput of prefill is {} times that of Sarathi-Serve.", (7.1, 8.2)
        ),
        _over_sarathi(
            cases, "decode", "5.3, Table 4", "Throughput of decode is {} times that of Sarathi-Serve.", (4.3, 5.2)
        ),
        _rate(cases),
        Claim(
            "Supplement A",
            "SP-NTP with gathered weights sends less than SP-TP from 96K tokens on (three GPUs, model size 16K).",
            numbers({"": (96 * 1024, csps_prompts.crossing(csps_prompts.wide(), 3))}),
        ),
    ]


_BY_FLOPS = (
    "Attention grows with the length while a GPU's partition does not. At 1M tokens it has 95 % of the FLOPs. To take "
    "43 % of the time, with 34 % for messages, it would have to reach ten times the products' part of the peak. "
    "The arithmetic is printed by csps.py."
)
_PRODUCTS = (
    "By 64K tokens a GPU, prompts of 100K to 448K have fewer GPUs than with Sarathi-Serve, and the products are the "
    "same. With 8 GPUs each, the gain of CSPS is the loss by chunks of 256, the work on dropped tokens, and the "
    "queue that follows. At 1 request/s NeedleBench needs more than the peak of 64 A100, which csps.py prints."
)
_DECODE = (
    "A decode on few GPUs without TP reads all weights on each of them, where Sarathi-Serve splits them over 8. "
    "Concurrently with prompts, our decodes wait for steps of whole prompts, since no GPU there only decodes."
)


# ---------------------------------------------------------------- tables of the docs


def tables() -> dict[str, PageTable]:
    """Return the tables of the page of `csps`, by name."""
    cases = csps_serving.stored()
    return {"csps_serving": _serving_table(cases), "csps_numbers": _numbers_table(cases)}


def _serving_table(cases: Sequence[Case]) -> PageTable:
    """Return ratios to Sarathi-Serve, as ranges over the models."""
    kinds = {
        f"alone: by length / {SARATHI}": "alone, by length as in the paper, over chunks of 256",
        f"alone: by length / {TUNED}": "the same over tuned chunks",
        f"served: {CSA} / {SARATHI}": "served at 1 request/s of 64 GPUs, sparse, over chunks of 256",
        f"served: {CSA} / {TUNED}": "the same over tuned chunks",
    }
    names, lines = ("TTFT", "TBT", "response"), []
    for (wanted, title), data_set in product(kinds.items(), dict.fromkeys(case.data_set for case in cases)):
        found = [row for case in cases if case.data_set == data_set for row in rows(case) if row.name == wanted]
        ranges = (_range([row.ratios[name] for row in found]) for name in names)
        lines.append((f"{title}, {data_set}", found[0].gpus_text, *ranges))
    lines.append(("the paper", "not given", "6.1 to 7.5", "1.6 to 1.92", "8.3 to 9.8"))
    return PageTable(("", "GPUs", *names), lines)


def _numbers_table(cases: Sequence[Case]) -> PageTable:
    """Return further numbers, as ranges over models and data sets."""

    def ttft(name: str) -> str:
        return _range([row.ratios["TTFT"] for case in cases for row in rows(case) if row.name == name])

    def rate_over(name: str) -> str:
        by_case = [rates(case) for case in cases]
        return _range([(by[CSA] or math.nan) / (by[name] or math.nan) for by in by_case])

    saved = csps_prompts.dropping("internlm2.5-7b", csps_serving.DATA_SETS[0])
    long = [csps_prompts.prefill(model, csps_prompts.LENGTHS["1M"]) for model in csps_serving.MODELS]
    lines = [
        ("TTFT of chunks of 256 over exact SP-TP, alone, 8 GPUs each", ttft(f"alone: {TP} / {SARATHI}"), "not given"),
        ("the same of tuned chunks", ttft(f"alone: {TP} / {TUNED}"), "not given"),
        ("request rate at twice the response time alone, over chunks of 256", rate_over(SARATHI), "1.6 to 2.5"),
        ("the same over tuned chunks", rate_over(TUNED), "not given"),
        ("bytes saved by dropping 22 %, %", f"{100 * saved.bytes_saved_share:.0f}", "19"),
        ("products of attention saved, %", f"{100 * saved.attention_flops_saved_share:.0f}", "28"),
        (
            "messages at 1M tokens, % of TTFT",
            _range([100 * one.breakdown.exchange_s / one.seconds for one in long]),
            "13 to 34",
        ),
        (
            "attention at 1M tokens, % of TTFT",
            _range([100 * one.breakdown.attention_s / one.seconds for one in long]),
            "18 to 43",
        ),
        (
            "time of keys and values over queries (Table 3)",
            _range(list(csps_prompts.kv_over_q().values())),
            "879 to 1,173",
        ),
        (
            "peak of 64 A100 that attention of NeedleBench needs at 1 request/s",
            _range([csps_prompts.least_load(model, csps_serving.DATA_SETS[0]) for model in csps_serving.MODELS]),
            "not given",
        ),
    ]
    return PageTable(("", "ours", "the paper"), lines)


def _range(values: Sequence[float]) -> str:
    ends = [f"{value:,.0f}" if value >= 10 else f"{value:.2f}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


# ---------------------------------------------------------------- serving


@dataclass(frozen=True, kw_only=True)
class Row:
    """A system compared with a baseline.

    Attributes:
        gpus, baseline_gpus: mean number of GPUs per request. None if it was not stored.
        ratios: times of the baseline over ours, and throughput of ours over the baseline. Higher is better.
    """

    name: str
    gpus: float | None
    baseline_gpus: float | None
    ratios: Mapping[str, float]

    @property
    def gpus_text(self) -> str:
        return " : ".join("?" if gpus is None else f"{gpus:.3g}" for gpus in (self.gpus, self.baseline_gpus))


def rows(case: Case) -> list[Row]:
    """Compare each system of CSPS with both of Sarathi-Serve: alone, and served at the paper's rate."""
    compared = []
    systems = {"by length": case.chosen(), **{name: case.alone[name] for name in (NTP, CSA, TP)}}
    for (name, ours), over in product(systems.items(), (SARATHI, TUNED)):
        baseline = case.alone[over]
        ratios = {
            "TTFT": _mean(baseline.ttft_s) / _mean(ours.ttft_s),
            "TBT": _mean(baseline.tbt_s) / _mean(ours.tbt_s),
            "response": _mean(baseline.response_s) / _mean(ours.response_s),
            "prefill": _prefill_rate(case, ours) / _prefill_rate(case, baseline),
            "decode": _decode_rate(ours) / _decode_rate(baseline),
        }
        title = f"alone: {name} / {over}"
        compared.append(Row(name=title, gpus=_gpus(ours), baseline_gpus=_gpus(baseline), ratios=ratios))
    served = case.served.get(_PAPER_RATE, {})
    for name, over in product((NTP, CSA), (SARATHI, TUNED)):
        if name in served and over in served:
            means, base = served[name], served[over]
            title = f"served: {name} / {over}"
            ratios = _ratios(means, base)
            compared.append(Row(name=title, gpus=means.gpus or None, baseline_gpus=base.gpus or None, ratios=ratios))
    return compared


def _ratios(ours: Means, baseline: Means) -> dict[str, float]:
    return {
        "TTFT": baseline.ttft_s / ours.ttft_s,
        "TBT": baseline.tbt_s / ours.tbt_s,
        "response": baseline.response_s / ours.response_s,
        "prefill": ours.prefill_tokens_per_s / baseline.prefill_tokens_per_s,
        "decode": ours.decode_tokens_per_s / baseline.decode_tokens_per_s,
    }


def rows_are_complete(compared: Sequence[Row]) -> bool:
    """Print the rows that lack the GPUs of either system. Return True if there are none."""
    incomplete = [row.name for row in compared if row.gpus is None or row.baseline_gpus is None]
    for name in incomplete:
        print(f"FAIL: a row lacks the number of GPUs per request: {name}")
    return not incomplete


def _gpus(times: Times) -> float | None:
    return times.mean_gpus if times.gpus and all(times.gpus) else None


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _prefill_rate(case: Case, times: Times) -> float:
    """Return the mean over requests of prompt tokens per second of TTFT."""
    return _mean([length / ttft_s for length, ttft_s in zip(case.input_lens, times.ttft_s, strict=True)])


def _decode_rate(times: Times) -> float:
    return _mean([1 / tbt_s for tbt_s in times.tbt_s])


def _print_rows(case: Case) -> None:
    names = "TTFT", "TBT", "response", "prefill", "decode"
    title = f"{case.name}: Sarathi-Serve's times over CSPS's, CSPS's tokens/s over Sarathi-Serve's"
    shown = Table("", "GPUs of a request", *names, title=title)
    for row in rows(case):
        shown.add_row(row.name, row.gpus_text, *(f"{row.ratios[name]:.2f}" for name in names))
    Console(width=120).print(shown)
    seconds = ", ".join(
        f"{name} {_mean(times.ttft_s):.3g} / {1e3 * _mean(times.tbt_s):.3g} / {_mean(times.response_s):.3g}"
        for name, times in case.alone.items()
    )
    print(f"Alone, mean TTFT (s) / TBT (ms) / response (s): {seconds}; tuned is {case.tuned} tokens a chunk.\n")


def _over_sarathi(cases: Sequence[Case], key: str, where: str, says: str, given: tuple[float, float]) -> Claim:
    """Compare means of requests alone, with the paper's numbers of GPUs, and of requests served by 8 GPUs each."""
    paper = f"{given[0]:g} to {given[1]:g}"
    if not cases:
        return Claim(where, says.format(paper), paper, _NOT_KEPT)
    ours = {}
    for kind, wanted in (("alone", f"alone: by length / {SARATHI}"), ("served", f"served: {CSA} / {SARATHI}")):
        for case in cases:
            row = next(row for row in rows(case) if row.name == wanted)
            ours[f"{case.name}, {kind} ({row.gpus_text} GPUs)"] = row.ratios[key]
    why = _DECODE if key in {"TBT", "decode"} else _PRODUCTS
    return Claim(where, says.format(paper), in_range(*given, ours), why)


def _ntp_over_tp(cases: Sequence[Case], key: str, given: tuple[float, float]) -> Claim:
    """Compare long prompts, which SP-NTP serves, with short prompts, which SP-TP serves."""
    paper = f"{given[0]:g} to {given[1]:g}"
    says = f"SP-NTP has {paper} times the {key} of SP-TP, although it is preferred for long prompts."
    if not cases:
        return Claim("5.3", says, paper, _NOT_KEPT)
    ours = {}
    for case in cases:
        is_long = [length > LONG for length in case.input_lens]
        ntp, tp = case.alone[CSA], case.alone[TP]
        of_ntp, of_tp = ((times.ttft_s if key == "TTFT" else times.tbt_s) for times in (ntp, tp))
        gpus = _mean([number for long, number in zip(is_long, ntp.gpus, strict=True) if long])
        long_s = _mean([seconds for long, seconds in zip(is_long, of_ntp, strict=True) if long])
        short_s = _mean([seconds for long, seconds in zip(is_long, of_tp, strict=True) if not long])
        ours[f"{case.name} ({gpus:.3g} : {GPUS_PER_HOST} GPUs)"] = long_s / short_s
    why = (
        f"Longer than {LONG:,} tokens is for SP-NTP, on a GPU for each 64K. The rest is for SP-TP on 8. Their numbers "
        "of GPUs and lengths differ more than their exchanges do. csps.py has both on the same requests."
    )
    weak = "The lengths are unequal, in the paper, too: long prompts are compared with short ones."
    return Claim("5.3", says, in_range(*given, ours), why, weak=weak)


def _tbt_order(cases: Sequence[Case]) -> Claim:
    says = "TBT is longest with Sarathi-Serve, then with SP-NTP, and shortest with SP-TP."
    if not cases:
        return Claim("5.3, Fig. 15", says, "no number", _NOT_KEPT)
    ours = {
        case.name: {
            "SP-TP": _mean(case.alone[TP].tbt_s),
            "SP-NTP": _mean(case.alone[CSA].tbt_s),
            "Sarathi-Serve": _mean(case.alone[SARATHI].tbt_s),
        }
        for case in cases
    }
    return Claim("5.3, Fig. 15", says, order(ours), _DECODE)


def _oracle() -> list[Claim]:
    """Compare chosen settings with the best of an enumeration, by a stored run."""
    says = "TTFT is at most 2 to 3 % longer than with the best settings (Oracle)."
    ratios = csps_oracle.stored()["time_ratios"]
    more = {"mean": 100 * (_mean(ratios) - 1), "most": 100 * (max(ratios) - 1)} if ratios else {}
    return [
        Claim(
            "5.3, Fig. 14",
            says,
            bound(more, most=3, unit=" %") if more else "at most 3 %",
            "Lengths are rounded up, and ratios have coarser steps than in the enumeration." if more else _NOT_KEPT,
            weak="Both are predicted for a small model: SmolLM2 on four instances, with random lengths, links and "
            "limits of loss.",
        ),
        Claim(
            "5.3, Fig. 15",
            "TBT is at most 2 to 4 % longer than with the best settings (Oracle).",
            "at most 4 %",
            "No setting that is chosen changes TBT here: decodes attend to all KV.",
        ),
    ]


def _rate(cases: Sequence[Case]) -> Claim:
    """Compare rates at twice the mean response time of Sarathi-Serve for requests alone."""
    says = "1.6 to 2.5 times the request rate of Sarathi-Serve is served at the same latency."
    ours, tuned = {}, []
    for case in cases:
        by_system = rates(case)
        csa, sarathi, best = by_system[CSA], by_system[SARATHI], by_system[TUNED]
        if csa is not None and sarathi is not None and best is not None:
            tuned.append(csa / best)
            ours[f"{case.name} (8 : 8 GPUs)"] = csa / sarathi
    if not ours or len(ours) < len(cases):
        return Claim("5.3, Fig. 17", says, "1.6 to 2.5", _NOT_KEPT)
    why = (
        "At twice the response time of Sarathi-Serve alone, between simulated rates. The paper gives neither its "
        f"latency nor its GPUs. With tuned chunks of Sarathi-Serve it is {min(tuned):.2f} to {max(tuned):.2f} times."
    )
    return Claim("5.3, Fig. 17", says, in_range(1.6, 2.5, ours), why)


def rates(case: Case) -> dict[str, float | None]:
    """Return requests per second of 64 GPUs by each system at the limit of the mean response time.

    The limit is twice the mean response time of Sarathi-Serve for requests alone.
    """
    limit_s = 2 * _mean(case.alone[SARATHI].response_s)
    return {
        name: rate_at(limit_s, {rate: by[name].response_s for rate, by in case.served.items()})
        for name in (SARATHI, TUNED, NTP, CSA)
    }


def rate_at(limit_s: float, response_s: Mapping[float, float]) -> float | None:
    """Return the rate at which the response time reaches a limit, by log-log interpolation, or None if none does."""
    for (low, low_s), (high, high_s) in pairwise(sorted(response_s.items())):
        if low_s <= limit_s < high_s:
            part = math.log(limit_s / low_s) / math.log(high_s / low_s)
            return low * math.exp(part * math.log(high / low))
    return None


def _print_response(cases: Sequence[Case]) -> None:
    shown = Table("requests/s of 64 GPUs", *(f"{rate:g}" for rate in cases[0].served), title="Mean response time, s")
    for case in cases:
        for name in (SARATHI, TUNED, NTP, CSA):
            shown.add_row(f"{case.name}: {name}", *(f"{by[name].response_s:.3g}" for by in case.served.values()))
    Console(width=140).print(shown)
    for case in cases:
        listed = ", ".join(f"{name} {rate or math.nan:.3g}" for name, rate in rates(case).items())
        print(f"{case.name}, requests/s at twice Sarathi-Serve's response time alone, 8 GPUs each: {listed}")
    print()


def _main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serving", action="store_true", help="simulate section 5")
    csps_serving.options(parser)
    args = parser.parse_args()
    return main(csps_serving.run(args) if args.serving else None)


if __name__ == "__main__":
    sys.exit(not _main())
