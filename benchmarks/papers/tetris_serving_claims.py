"""Tetris: its claims about clusters that serve (section 7), compared with the figures of `tetris_serving`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tetris_serving import FIXED_RATES, Figures
from verdicts import Check, Claim, PageTable, bound, choice, in_range, numbers, order


@dataclass(frozen=True, kw_only=True)
class _Claimed:
    """The paper's ranges for one model (minimum, maximum), its best baseline, and systems by load, worst first."""

    name: str
    load: tuple[float, float]
    ttft_p50: tuple[float, float]
    ttft_p99: tuple[float, float]
    throughput: tuple[float, float]
    single_p50: tuple[float, float]
    single_p99: tuple[float, float]
    best: str
    order: tuple[tuple[str, ...], ...]


_CLAIMED = {
    "llama-3-8b": _Claimed(
        name="8B",
        load=(1.20, 1.45),
        ttft_p50=(1.64, 2.78),
        ttft_p99=(1.52, 3.13),
        throughput=(1.24, 3.38),
        single_p50=(2.33, 4.17),
        single_p99=(2.64, 3.58),
        best="fixed-sp 8",
        order=(
            ("fixed-sp 16", "loongserve-disagg", "fixed-sp 8", "tetris"),
            ("fixed-sp 16", "loongserve", "fixed-sp 8", "tetris"),
        ),
    ),
    "llama-3-70b": _Claimed(
        name="70B",
        load=(1.21, 1.43),
        ttft_p50=(2.86, 4.17),
        ttft_p99=(2.27, 4.35),
        throughput=(1.15, 1.81),
        single_p50=(2.71, 4.77),
        single_p99=(2.43, 3.23),
        best="loongserve",
        order=(("fixed-sp 8", "loongserve-disagg", "tetris"), ("fixed-sp 8", "loongserve", "tetris")),
    ),
}
_BUSY = (
    "Near saturation prefill instances compute 80 to 95 % of the time even without chunks, so there is little time "
    "to fill."
)
_READING = "The paper's traces and lengths of answers are not public. Ours have its ranges and means of prompts."
_NOT_KEPT = "The stored run did not keep these numbers. They need a run of an hour or more."


def claims(stored: Mapping[str, Figures]) -> list[Claim]:
    """Return the claims about clusters that serve."""
    return [
        claim
        for model, figures in stored.items()
        for claim in (*_against_baselines(_CLAIMED[model], figures), *_ablations_of(_CLAIMED[model], figures))
    ]


def table(stored: Mapping[str, Figures]) -> PageTable:
    """Return the comparison with the best baseline of each case."""
    head = ("case", "`tetris`, baseline (requests/s)", "rate", "TTFT P50", "TTFT P99", "TBT")
    rows = []
    for model, found in stored.items():
        for workload, rates in found.max_rates.items():
            own, name = rates["tetris"], max((name for name in rates if name != "tetris"), key=rates.__getitem__)
            longer = f"{100 * (found.tbt_p50[workload] - 1):+.0f} %" if _CLAIMED[model].name == "8B" else ""
            times = (f"{ratios[workload]:.2g}x" for ratios in (found.ttft_p50, found.ttft_p99))
            gain = f"{100 * (own / rates[name] - 1):+.0f} %"
            highest = f"{own:.2f}, {rates[name]:.2f} (`{name}`)"
            rows.append((f"{_CLAIMED[model].name}, `{workload}`", highest, gain, *times, longer))
    rows.append(("the paper", "", "+20 to +45 %", "1.64 to 4.17x", "1.52 to 4.35x", "+55 to +67 %"))
    return PageTable(head, rows)


def _against_baselines(paper: _Claimed, found: Figures) -> list[Claim]:
    of, rates = paper.name, found.max_rates
    baselines = {
        name: {system: rate for system, rate in every.items() if system != "tetris"} for name, every in rates.items()
    }
    load = {name: rates[name]["tetris"] / max(others.values()) for name, others in baselines.items()}
    every = {system for systems in paper.order for system in systems}
    claims = [
        Claim(
            "Fig. 8",
            f"{of}: served load over that of the best baseline ({found.num_requests:,} requests per case).",
            in_range(*paper.load, load),
            _READING,
        ),
        Claim(
            "Fig. 8",
            f"{of}: which baseline serves most.",
            choice({name: (paper.best, _most(of, of_systems)) for name, of_systems in baselines.items()}),
            "Not known. Groups of 8 that never change are not always the best of ours.",
        ),
        _if_kept(
            "Fig. 8",
            f"{of}: the order of all systems by load.",
            all(every <= set(of_systems) for of_systems in rates.values()),
            lambda: order(
                {
                    f"{name}, {systems[1]}": {system: of_systems[system] for system in systems}
                    for name, of_systems in rates.items()
                    for systems in paper.order
                }
            ),
        ),
        Claim(
            "Fig. 9",
            f"{of}: P50 of TTFT of the best baseline, at its highest load, over that of Tetris.",
            in_range(*paper.ttft_p50, found.ttft_p50),
            _READING,
        ),
        Claim("Fig. 9", f"{of}: P99 of TTFT, the same.", in_range(*paper.ttft_p99, found.ttft_p99), _READING),
        Claim(
            "Fig. 10",
            f"{of}: throughput over that of the baselines, at the best baseline's highest load.",
            in_range(*paper.throughput, found.throughput),
            "At the same load the same number of tokens is served. The reason for the paper's large differences is not "
            "clear.",
        ),
    ]
    if of == "70B":
        return claims
    return [
        *claims,
        Claim(
            "Fig. 8",
            "8B: P50 of LoongServe's TBT is 55 to 67 % longer than with decode instances of TP 8.",
            in_range(1.55, 1.67, found.tbt_p50),
            "It depends on the length of answers, which the paper does not give. Ours was chosen with this in view.",
        ),
        _if_kept(
            "Fig. 8",
            "8B: P99 of its TBT is about the same.",
            bool(found.tbt_p99),
            lambda: numbers({name: (1.0, ratio) for name, ratio in found.tbt_p99.items()}),
        ),
    ]


def _most(model: str, rates: Mapping[str, float]) -> str:
    """Return the names of all systems with the highest rate. Both LoongServe systems of 70B count as one."""
    best = [system for system, rate in rates.items() if rate == max(rates.values())]
    return " and ".join(dict.fromkeys(system.removesuffix("-disagg") if model == "70B" else system for system in best))


def _ablations_of(paper: _Claimed, figures: Figures) -> list[Claim]:
    figure, of = ("Fig. 11" if paper.name == "8B" else "Fig. 12"), paper.name
    small, large = str(FIXED_RATES[0]), str(FIXED_RATES[-1])
    return [
        Claim(
            figure,
            f"{of}: no fixed improvement rate gives lower TTFT than the profiled table.",
            bound(figures.fixed_rate, least=0.9),
            "The table has the least mean TTFT of other requests: neither P50 nor P99 of these.",
        ),
        _if_kept(
            figure,
            f"{of}: at low load an improvement rate of {small} is better than {large} (P50).",
            bool(figures.low_load),
            lambda: order(
                {name: {small: rates[small], large: rates[large]} for name, rates in figures.low_load.items()}
            ),
        ),
        _if_kept(
            figure,
            f"{of}: near saturation {large} is better than {small} (P50).",
            bool(figures.high_load),
            lambda: order(
                {name: {large: rates[large], small: rates[small]} for name, rates in figures.high_load.items()}
            ),
        ),
        Claim(
            "Fig. 13",
            f"{of}: the largest factor of P50 of TTFT without chunks.",
            in_range(*paper.single_p50, figures.single_p50),
            _BUSY,
        ),
        Claim(
            "Fig. 13",
            f"{of}: the largest factor of P99 of TTFT without chunks.",
            in_range(*paper.single_p99, figures.single_p99),
            _BUSY,
        ),
    ]


def _if_kept(where: str, says: str, kept: bool, check: Callable[[], Check]) -> Claim:
    return Claim(where, says, check(), _READING) if kept else Claim(where, says, "no number", _NOT_KEPT)
