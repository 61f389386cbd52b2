"""Seesaw: its numbers on parallelism and throughput, compared with the cost model and the simulator, and its claims.

    python benchmarks/papers/seesaw.py             # some two minutes; uses the stored figures of serving
    python benchmarks/papers/seesaw.py --serving   # simulates Figures 10 to 14 again, an hour or more

Exits with 1 unless these hold. Decoding 70B on 4 of 8 devices of 40 GB has 10 to 20 % of the throughput of all 8. On
eight L4, PP8 has the fastest prefill of 13B, and TP8 or TP4PP2 the fastest decode. Eq. 1 is within 15 % of the
simulator.

Figure 1 has 16 requests whose length the paper does not give. It is 1,000 tokens here. Other requests fill idle stages,
so the time of idle stages is excluded. Figure 4 has no length either. It compares the largest batches that fit, with
requests of 3,000 tokens, as articles of arxiv-summarization have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import seesaw_serving
from cells import Cell, Setting, report
from closed_form import OfflineWork, layer_terms, max_batch, stage_s, static_throughput
from rich.console import Console
from rich.table import Table
from seesaw_serving import INPUT_LEN, OUTPUT_LENS, Machine, Point
from verdicts import Check, Claim, PageTable, bound, choice, in_range, numbers, order, report_claims

from longspan.cost.estimate import Estimate
from longspan.cost.memory import USED_MEMORY

_BATCH, _TOKENS, _ARTICLE = 16, 1000, 3000
_PREFILL, _DECODE = ("pp8", "tp2pp4", "tp4pp2", "tp8"), ("tp8", "pp8")
_HALF, _WHOLE = "tp4", "tp8"
_NUM_BARS = 6
"""Models times workloads of a device in Fig. 10."""
_SPEEDUPS = {"a10": (1.45, 1.78), "l4": (1.29, 1.52)}
_STATIC_WINNERS = {
    (12, "34B, 4 a10"): "tp2pp2",
    (13, "1"): "pp8",
    (13, "1000"): "tp4pp2",
    (14, "0.1"): "pp8",
    (14, "50"): "tp8",
}
"""The best single parallelism of points that the text mentions. Seesaw is the best of all in Figs. 12 to 14."""
_RESHARDING = "Weights are not re-sharded while serving, and no policy fills the tier on the host before it decodes."
_NOT_KEPT = "The stored run did not keep these numbers. They need a run of an hour or more."
_LENGTHS = "Lengths of requests are not given, and the throughput of decoding depends on them."


def main(arxiv: Path = seesaw_serving.ARXIV) -> bool:
    """Print the claims and the required cells. Return True if all required ones hold."""
    points = seesaw_serving.stored()
    passed = report("Seesaw: what its text says of static parallelism", _required())
    passed = _fig_1_holds() and passed
    _print_half()
    cells = [*equation_1(), *equation_1_of_pairs(points)]
    passed = report("Seesaw, Eq. 1: requests per second, 'paper' is the simulator", cells) and passed
    for figure in seesaw_serving.FIGURES:
        if of_figure := [point for point in points if point.figure == figure]:
            Console(width=160).print(_table(figure, of_figure))
    if cells := _speedups(points):
        passed = report("Seesaw, Fig. 10: over the best single parallelism", cells) and passed
    _print_winners(points)
    _print_sums()
    _print_stragglers(arxiv)
    return report_claims("Seesaw", claims(points)) and passed


def claims(points: Sequence[Point] | None = None) -> list[Claim]:
    """Return the claims of the paper. Claims of figures use `points`, by default the stored ones."""
    points = seesaw_serving.stored() if points is None else points
    return [
        Claim("Fig. 1, 3.1", "Pipeline parallelism is best for prefill, tensor parallelism for decoding.", _fig_1()),
        Claim(
            "3.2",
            "Decoding on 4 of 8 GPUs has only 15 % of the throughput of that on 8 (70B).",
            numbers({"": (0.15, _share_of_half(_ARTICLE))}),
            "The share depends on the length, which is not given: it is less for longer requests.",
        ),
        Claim(
            "3.2, Fig. 4",
            "With 4 of 8 GPUs each, prefill has over 6 times the throughput of decoding (70B, tokens per second).",
            bound({"": _prefill_over_decode(_ARTICLE)}, least=6),
            _LENGTHS,
        ),
        *(_speedup(points, hardware) for hardware in _SPEEDUPS),
        *_all_bars(points),
        *(make(points, figure) for figure in (12, 13, 14) for make in (_winners, _gains)),
        *_a100(points),
        Claim(
            "A.3, Fig. 15",
            "More data parallelism loads more for a token, fits fewer requests, and communicates less "
            "(13B on 8 L4, 1,000 tokens each).",
            _data_parallel(),
        ),
    ]


def tables() -> dict[str, PageTable]:
    """Return the table of the page of `seesaw`: the gain over the best single parallelism in each figure."""
    points, given = (
        seesaw_serving.stored(),
        {10: "1.36", 11: "not shown", 12: "above 1", 13: "at least 1", 14: "above 1"},
    )
    rows = []
    for figure, title in _TITLES.items():
        ratios = [point.ratio for point in points if point.figure == figure and point.ratio is not None]
        if ratios:
            mean, ends = statistics.geometric_mean(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append((f"Fig. {figure}", title, f"{len(ratios)}", f"{mean:.2f}", ends, given[figure]))
    return {"seesaw_gains": PageTable(("", "points", "number", "mean", "range", "the paper"), rows)}


_TITLES = {
    10: "three models, articles and chats, A10 and L4",
    11: "70B on eight A100, by NVLink and PCIe",
    12: "34B on four A10, articles",
    13: "70B on eight A10, prompts of 3,000 tokens, answers of 1 to 1,000",
    14: "34B on eight A10, articles, links of 0.1 to 50 times the speed",
}


# ---------------------------------------------------------------- static parallelism


def _required() -> list[Cell]:
    """Return the required cell, which must be within 5 points of 15 %."""
    share = _share_of_half(_ARTICLE)
    return [Cell(name="decoding on 4 of 8 (70B)", paper=0.15, ours=share, tolerance=1 / 3, unit="")]


def _fig_1_holds() -> bool:
    """Print the specs with the fastest prefill and decode on eight L4. Return True if they are the paper's."""
    prefill, decode = (min(times, key=times.__getitem__) for times in _l4().values())
    passed = prefill == "pp8" and decode in ("tp8", "tp4pp2")
    print(f"13B on 8 L4: {prefill} prefills quickest, {decode} decodes quickest: {'pass' if passed else 'FAIL'}\n")
    return passed


def _fig_1() -> Check:
    times = _l4()
    return order(
        {
            "prefill": {spec: times["prefill"][spec] for spec in _PREFILL},
            "decode": {spec: times["decode"][spec] for spec in _DECODE},
        }
    )


def _l4() -> dict[str, dict[str, float]]:
    l4 = Setting(model="llama-2-13b", hardware="l4")
    return {
        "prefill": {spec: _filled_s(l4.prefill(spec, "local", _TOKENS, batch=_BATCH)) for spec in _PREFILL},
        "decode": {spec: l4.decode(spec, _TOKENS, _BATCH).seconds for spec in _PREFILL},
    }


def static_times(specs: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the seconds of Fig. 1 by phase, spec and kind of work."""
    l4 = Setting(model="llama-2-13b", hardware="l4")
    estimates = {
        "prefill": {spec: l4.prefill(spec, "local", _TOKENS, batch=_BATCH) for spec in specs},
        "decode": {spec: l4.decode(spec, _TOKENS, _BATCH) for spec in specs},
    }
    return {
        phase: {
            spec: {
                "communication": one.breakdown.all_reduce_s,
                "attention": one.breakdown.attention_s,
                "products and the rest": _filled_s(one) - one.breakdown.all_reduce_s - one.breakdown.attention_s,
            }
            for spec, one in by_spec.items()
        }
        for phase, by_spec in estimates.items()
    }


def _filled_s(estimate: Estimate) -> float:
    return estimate.seconds - estimate.breakdown.pipeline_s


def _half() -> Setting:
    return Setting(model="llama-2-70b", hardware="a100-sxm-40g")


def _share_of_half(tokens: int, used: float = 1.0) -> float:
    """Return the ratio of tokens per second on four devices to eight, of the largest batches that fit."""
    four, eight = (_decode_rate(spec, tokens, used) for spec in (_HALF, _WHOLE))
    return four / eight


def _decode_rate(spec: str, tokens: int, used: float = 1.0) -> float:
    """Return the highest tokens per second of batches that use at most a share `used` of the memory."""
    setting, best, batch = _half(), 0.0, 1
    while (step := setting.decode(spec, tokens, batch)).memory.used <= used * step.memory.capacity:
        best = max(best, batch / step.seconds)
        batch += 1
    return best


def disaggregated() -> dict[str, float]:
    """Return the tokens per second of Fig. 4: of each phase on 4 of 8 GPUs, and of decoding on 8."""
    decode = {f"decode on {num}": _decode_rate(spec, _ARTICLE) for num, spec in ((4, _HALF), (8, _WHOLE))}
    return {"prefill on 4": _ARTICLE / _half().prefill(_HALF, "local", _ARTICLE).seconds, **decode}


def _prefill_over_decode(tokens: int) -> float:
    prefilled = tokens / _half().prefill(_HALF, "local", tokens).seconds
    return prefilled / _decode_rate(_HALF, tokens)


def decoding(instances: int) -> tuple[float, float, float]:
    """Return the milliseconds of loads and of communication for a token of a request, and the number of requests.

    The model is 13B on 8 L4, evenly divided among `instances` by tensor parallelism. Memory is full of requests.
    """
    line = Machine(model="llama-2-13b", hardware="l4", gpus=8).line(f"tp{8 // instances}")
    work = OfflineWork(num_requests=1, input_len=_TOKENS, output_len=1)
    batch = max_batch(line, work, _EQ_1_TOKENS[0])
    terms, layers = layer_terms(line, work.passed(0, batch)), line.layer.model.attention.num_layers
    per_token_ms = 1e3 * layers / (batch * instances)
    return (terms.weights_s + terms.kv_s) * per_token_ms, terms.network_s * per_token_ms, batch * instances


def _data_parallel() -> Check:
    named = {"TP8": 1, "2 x TP4": 2, "4 x TP2": 4}
    taken = {name: decoding(instances) for name, instances in named.items()}
    return order(
        {
            "loads of a token, ms": {name: taken[name][0] for name in named},
            "communication, ms": {name: taken[name][1] for name in reversed(named)},
            "requests": {name: taken[name][2] for name in reversed(named)},
        }
    )


def _print_half() -> None:
    """Print the share of Fig. 4 for several lengths and shares of memory, which the paper does not give."""
    shown = Table("tokens", "all memory", f"{USED_MEMORY:.0%} of it", title="Decoding 70B on 4 of 8 GPUs of 40 GB")
    for tokens in (500, 1000, 2000, 3000):
        shares = (_share_of_half(tokens, used) for used in (1.0, USED_MEMORY))
        shown.add_row(f"{tokens:,}", *(f"{share:.1%}" for share in shares))
    Console().print(shown)
    step = _half().decode(_HALF, _ARTICLE, 1)
    print(f"On 4: {step.memory.arithmetic}. Appendix A uses all memory except for weights for KV (b_max), vLLM 90 %.\n")


# ---------------------------------------------------------------- Eq. 1


def equation_1() -> list[Cell]:
    """Compare the closed form with the simulator on Fig. 13's requests, each spec with its best pass size."""
    machine, cells = Machine(model="llama-2-70b", hardware="a10", gpus=8), []
    for length in OUTPUT_LENS:
        requests = seesaw_serving.constant(length)
        work = OfflineWork(num_requests=len(requests.arrivals), input_len=INPUT_LEN, output_len=length)
        for spec in _PREFILL:
            line = machine.line(spec)
            rates = {tokens: static_throughput(line, 1, work, tokens * len(line.stages)) for tokens in _EQ_1_TOKENS}
            tokens = max(rates, key=rates.__getitem__)
            simulated = seesaw_serving.throughput(machine, requests, tokens, spec)
            name = f"{spec}, {length} out, {tokens} per pass"
            cells.append(Cell(name=name, paper=simulated, ours=rates[tokens], tolerance=0.15, unit="/s"))
    return cells


def equation_1_of_pairs(points: Sequence[Point]) -> list[Cell]:
    """Compare the closed form with the simulator on the stored best pairs of Fig. 13."""
    machine, cells = Machine(model="llama-2-70b", hardware="a10", gpus=8), []
    for point in points:
        if point.figure != 13 or (pair := point.best_pair) is None:
            continue
        requests, kept = seesaw_serving.constant(int(point.name)), point.pairs[pair]
        work = OfflineWork(num_requests=len(requests.arrivals), input_len=INPUT_LEN, output_len=int(point.name))
        prefill, decode = pair.split(" → ")
        expected = seesaw_serving.expected_pair_throughput(machine, work, kept.pass_tokens, prefill, decode)
        name = f"{pair}, {point.name} out, {kept.pass_tokens} per pass"
        cells.append(Cell(name=name, paper=kept.requests_per_s, ours=expected, tolerance=0.15, unit="/s"))
    return cells


_FIG_12_SPECS, _CUT = ("tp4", "tp2pp2", "pp4"), 600
_EQ_1_TOKENS = (256, 512, 1024, 2048)


def _print_sums() -> None:
    """Print the terms of Eq. 1 for TP8 and TP4PP2. TP8 decodes faster here, TP4PP2 in Fig. 13 for long answers."""
    machine, length = Machine(model="llama-2-70b", hardware="a10", gpus=8), OUTPUT_LENS[-1]
    work, taken = OfflineWork(num_requests=1, input_len=INPUT_LEN, output_len=length), {}
    batch = round(max_batch(machine.line("tp8"), work, _EQ_1_TOKENS[0]))
    for spec in ("tp8", "tp4pp2"):
        line = machine.line(spec)
        forward = work.passed(0, batch / len(line.stages))
        terms, stage = layer_terms(line, forward), stage_s(line, forward)
        taken[spec] = stage * len(line.stages)
        print(
            f"{spec}: a token of {batch} requests in {1e3 * taken[spec]:.0f} ms = {len(line.stages)} passes; a layer: "
            f"weights {1e6 * terms.weights_s:.0f}, products {1e6 * terms.products_s:.0f}, KV {1e6 * terms.kv_s:.0f}, "
            f"2 sums {1e6 * terms.network_s:.0f}, all {1e6 * terms.total_s:.0f} us"
        )
    line = machine.line("tp8")
    num_sums, shape = 2 * line.layer.model.attention.num_layers, line.layer.model.attention
    num_bytes = batch * shape.hidden_size * shape.bytes_per_element
    now_s = line.topology.all_reduce_s(num_bytes)
    needed_s = now_s + (taken["tp4pp2"] - taken["tp8"]) / num_sums
    print(
        f"The paper has TP4PP2 as the best for long answers. It would be here if a sum of {num_bytes / 1e3:.0f} kB\n"
        f"over 8 ranks took {1e6 * needed_s:.0f} us; it takes {1e6 * now_s:.0f} here, as measured of 4 ranks on PCIe.\n"
    )


def _print_stragglers(arxiv: Path) -> None:
    """Print the effect of a few long answers on Fig. 12, in which the paper has a different best spec."""
    whole = seesaw_serving.articles(arxiv)
    longest = max(arrival.output_len for arrival in whole.arrivals)
    shown = Table("answers", *(_FIG_12_SPECS), title="34B on four A10, articles: requests/s with passes of 256 tokens")
    for max_tokens in (longest, _CUT):
        arrivals = [replace(arrival, output_len=min(arrival.output_len, max_tokens)) for arrival in whole.arrivals]
        requests, machine = replace(whole, arrivals=arrivals), Machine(model="codellama-34b", hardware="a10", gpus=4)
        rates = (seesaw_serving.throughput(machine, requests, 256, spec) for spec in _FIG_12_SPECS)
        shown.add_row(f"up to {max_tokens:,} tokens", *(f"{rate:.3g}" for rate in rates))
    Console().print(shown)
    print("The longest answers decode alone at the end. TP makes that faster, and PP does not.\n")


# ---------------------------------------------------------------- figures of serving


def _speedup(points: Sequence[Point], hardware: str) -> Claim:
    mean, most = _SPEEDUPS[hardware]
    says = f"On {hardware.upper()} throughput is {mean} times the best single parallelism's on average."
    ratios = _mean_and_most(points, hardware)
    check = f"up to {most}" if ratios is None else numbers({"mean": (mean, ratios[0]), "most": (most, ratios[1])})
    return Claim("6.2, Fig. 10", says, check, _missing(points) if ratios is None else _WORKLOADS)


def _all_bars(points: Sequence[Point]) -> list[Claim]:
    """Compare all bars of Fig. 10 together."""
    means = {hardware: _mean_and_most(points, hardware) for hardware in _SPEEDUPS}
    bars = {point.name: point.ratio for point in points if point.figure == 10 and point.ratio is not None}
    given = (
        ("6.2", "Over all models, workloads and devices the mean is 1.36.", "1.36"),
        ("6.2", "The gain is larger on A10 than on L4.", "no number"),
        ("8", "Each gain is between 1.06 and 1.78.", "1.06 to 1.78"),
    )
    a10, l4 = means["a10"], means["l4"]
    if a10 is None or l4 is None:
        return [Claim(where, says, paper, _missing(points)) for where, says, paper in given]
    checks = (
        numbers({"mean": (1.36, statistics.geometric_mean(bars.values()))}),
        order({"": {"L4": l4[0], "A10": a10[0]}}),
        in_range(1.06, 1.78, {"least": min(bars.values()), "most": max(bars.values())}),
    )
    return [Claim(where, says, check, _WORKLOADS) for (where, says, _), check in zip(given, checks, strict=True)]


def _mean_and_most(points: Sequence[Point], hardware: str) -> tuple[float, float] | None:
    """Return the geometric mean and the maximum of all ratios on a device, or None if ratios are missing."""
    ratios = [point.ratio for point in points if point.figure == 10 and point.name.startswith(hardware) and point.ratio]
    return (statistics.geometric_mean(ratios), max(ratios)) if len(ratios) == _NUM_BARS else None


def _speedups(points: Sequence[Point]) -> list[Cell]:
    """Return the averages and maxima of Fig. 10 for devices with all ratios."""
    return [
        Cell(name=f"{hardware}, {name}", paper=paper, ours=ours, tolerance=0.2, unit="x")
        for hardware, papers in _SPEEDUPS.items()
        if (ratios := _mean_and_most(points, hardware)) is not None
        for name, paper, ours in zip(("mean", "most"), papers, ratios, strict=True)
    ]


def _winners(points: Sequence[Point], figure: int) -> Claim:
    """Compare the best single parallelism at the points for which the paper gives it."""
    where, says, why = _BEST_STATIC[figure]
    kept = {point.name: point.best_static for point in points if point.figure == figure}
    told = {name: winner for (number, name), winner in _STATIC_WINNERS.items() if number == figure}
    if not told.keys() <= kept.keys():
        return Claim(where, says, "no number", _NOT_KEPT)
    return Claim(where, says, choice({name: (winner, kept[name]) for name, winner in told.items()}), why)


def _gains(points: Sequence[Point], figure: int) -> Claim:
    """Compare the best pair with the best single parallelism at all points of a figure."""
    where, says, given = _BEST_OF_ALL[figure]
    ratios = {point.name: point.ratio for point in points if point.figure == figure}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known or len(known) < len(ratios):
        return Claim(where, says, given, _missing(points))
    return Claim(where, says, bound(known, least=1), _LEVEL)


def _a100(points: Sequence[Point]) -> list[Claim]:
    """Compare A100 on PCIe with A100 on NVLink, and Seesaw on both."""
    where, rates = "6.4, Fig. 11", {point.name: point for point in points if point.figure == 11}
    best = {name: point.static[point.best_static].requests_per_s for name, point in rates.items()}
    says = "On A100 by PCIe single parallelism has 60 % of the throughput by NVLink."
    parts = {
        name: best[f"a100-pcie-40g, {name}"] / best[f"a100-sxm-40g, {name}"] for name in ("arxiv", "sharegpt") if best
    }
    check = numbers({name: (0.6, part) for name, part in parts.items()}) if parts else "60 %"
    return [Claim(where, says, check, _PCIE if parts else _NOT_KEPT), _gains(points, 11)]


def _missing(points: Sequence[Point]) -> str:
    return _NOT_KEPT if any(point.pairs for point in points) or seesaw_serving.has_resharding() else _RESHARDING


_SLOWER = "Sums over 8 ranks are priced to start as quickly as measured over 4. The script has the arithmetic."
_WORKLOADS = "The paper's lengths are not public. Ours are of the same kind."
_STRAGGLERS = (
    "Some answers of up to 3,716 tokens decode alone at the end, quicker by TP. Cut at 600 tokens, TP2PP2 is best."
)
_BEST_STATIC = {
    12: ("6.3, Fig. 12", "The best single parallelism of 34B on four A10 is TP2PP2.", _STRAGGLERS),
    13: ("6.5, Fig. 13", "Of single ones, PP8 is the best for prompts alone, TP4PP2 for long answers.", _SLOWER),
    14: ("6.5, Fig. 14", "Of single ones, PP is the best on slow links, TP on fast ones.", _SLOWER),
}
_BEST_OF_ALL = {
    11: ("6.4, Fig. 11", "It is quicker on A100s, too, by NVLink and by PCIe.", "kept for later"),
    12: ("6.3, Fig. 12", "It is quicker than the best single parallelism (34B, four A10).", "no number"),
    13: ("6.5, Fig. 13", "It is the best at every ratio of lengths of output and input.", "no number"),
    14: ("6.5, Fig. 14", "It is the best for links of 0.1 to 50 times PCIe's speed.", "0.1 to 50"),
}
_LEVEL = "Where one spec is the best for both, changing it gains nothing."
_PCIE = "The paper's lengths and batches are not public."


def _table(figure: int, points: Sequence[Point]) -> Table:
    shown = Table("", "best single", "requests/s", "next", "Seesaw", "requests/s", "ratio", title=f"Fig. {figure}")
    for point in points:
        ranked = sorted(point.static, key=lambda spec: -point.static[spec].requests_per_s)
        rates = [f"{spec} {point.static[spec].requests_per_s:.3g}" for spec in ranked[1:3]]
        best, pair = point.static[ranked[0]], point.best_pair
        mine = (
            ("-", "-", "-") if pair is None else (pair, f"{point.pairs[pair].requests_per_s:.3g}", f"{point.ratio:.2f}")
        )
        shown.add_row(point.name, ranked[0], f"{best.requests_per_s:.3g}", ", ".join(rates), *mine)
    return shown


def _print_winners(points: Sequence[Point]) -> None:
    """Print our best system and the paper's at each point of Figs. 12 to 14, and the number of equal ones."""
    shown, agree, given = Table("", "paper", "ours", "paper, single", "ours, single", title="Best system"), 0, 0
    for point in points:
        if point.figure not in (12, 13, 14):
            continue
        paper, ours = _STATIC_WINNERS.get((point.figure, point.name)), point.best_static
        winner = "-" if point.ratio is None else "seesaw" if point.ratio > 1 else ours
        shown.add_row(f"Fig. {point.figure}, {point.name}", "seesaw", winner, paper or "not given", ours)
        agree += (winner == "seesaw") + (paper == ours)
        given += (point.ratio is not None) + (paper is not None)
    Console(width=120).print(shown)
    print(f"{agree} of {given} agree\n")


def _main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serving", action="store_true", help="simulate Figures 10 to 14")
    seesaw_serving.options(parser)
    args = parser.parse_args()
    if not args.serving:
        return main(args.arxiv)
    return report_claims("Seesaw, serving", claims(seesaw_serving.run(args)))


if __name__ == "__main__":
    sys.exit(not _main())
