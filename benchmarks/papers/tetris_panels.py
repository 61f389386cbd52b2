"""Tetris: our numbers of its figures. Those of section 7.2 and 7.3 are of the stored run of `tetris_serving.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from panels import Panel, Series
from tetris import GROWING, SENDING, balancing, fig_2, half_backends, transfer
from tetris_serving import QUANTILES, WORKLOADS, Figures, Study, stored, stored_studies

_RUN = "python benchmarks/papers/tetris.py --serving --json benchmarks/papers/tetris_serving.json"
_MODELS = {"llama-3-8b": "8B", "llama-3-70b": "70B"}
_HISTORIES = (0.25, 0.5, 1.0, 1.5, 2.0)
_THOUSANDS = (16, 32, 64, 96, 128)


def panels() -> list[Panel]:
    """Return the panels of Figs. 2 and 8 to 14."""
    studies = {(study.model, study.workload): study for study in stored_studies()}
    return [*_decoding(), *_serving(studies), *_summary(stored()), *_ablations(studies), *_moves()]


def _decoding() -> list[Panel]:
    cells = {cell.name: cell.ours for cell in fig_2()}
    return [
        Panel(
            name=f"Fig. 2{part}",
            title=title,
            x="parallelism",
            y="times as slow as TP 8",
            ours={
                "ours": [(name.split(",")[0].split()[1], ours) for name, ours in cells.items() if f"({part})" in name]
            },
            bars=True,
        )
        for part, title in (("a", "decoding with fewer GPUs"), ("b", "decoding on 8 GPUs"))
    ]


def _serving(studies: dict[tuple[str, str], Study]) -> list[Panel]:
    """Return TTFT by rate (Fig. 8), and its distribution at the limit of the best baseline (Fig. 9)."""
    found = []
    for (model, name), workload in ((case, workload) for case in _MODELS.items() for workload in WORKLOADS):
        study = studies.get((model, workload))
        found += [
            Panel(
                name=f"Fig. 8, {name}, {workload}",
                title=f"{name}, {workload}: P99 of TTFT",
                x="requests/s",
                y="seconds",
                ours={} if study is None else _curves(study),
                log="y",
                missing="" if study else _RUN,
            ),
            Panel(
                name=f"Fig. 9, {name}, {workload}",
                title=f"{name}, {workload}: TTFT at the limit of the best baseline",
                x="seconds",
                y="% of the requests",
                ours={} if study is None else _distributions(study),
                log="x",
                missing="" if study else _RUN,
            ),
        ]
    return found


def _curves(study: Study) -> Series:
    return {
        name: [(rate, p99_s) for rate, (_, p99_s) in sorted(points.items())] for name, points in study.curves.items()
    }


def _distributions(study: Study) -> Series:
    return {name: list(zip(point.ttft_quantiles_s, QUANTILES, strict=True)) for name, point in study.at_limit.items()}


def _summary(figures: Mapping[str, Figures]) -> list[Panel]:
    """Return ratios to the best baseline, and to TTFT with chunks."""
    ratios: tuple[tuple[str, str, Callable[[Figures], Mapping[str, float]]], ...] = (
        ("Fig. 8, highest rate", "highest rate over the best baseline's", _loads),
        ("Fig. 8, TBT", "8B: P50 of TBT of LoongServe over Tetris'", lambda found: found.tbt_p50),
        ("Fig. 9, P50", "P50 of TTFT of the best baseline over Tetris'", lambda found: found.ttft_p50),
        ("Fig. 9, P99", "P99 of TTFT of the best baseline over Tetris'", lambda found: found.ttft_p99),
        ("Fig. 10", "throughput over the best baseline's", lambda found: found.throughput),
        ("Fig. 13, P50", "largest P50 of TTFT without chunks over that with them", lambda found: found.single_p50),
        ("Fig. 13, P99", "largest P99 of TTFT without chunks over that with them", lambda found: found.single_p99),
    )
    return [
        Panel(
            name=name,
            title=title,
            x="requests",
            y="ratio",
            ours={
                _MODELS[model]: list(ratio(found).items())
                for model, found in figures.items()
                if not (name == "Fig. 8, TBT" and _MODELS[model] == "70B")
            },
            bars=True,
        )
        for name, title, ratio in ratios
    ]


def _loads(found: Figures) -> dict[str, float]:
    return {
        workload: rates["tetris"] / max(rate for name, rate in rates.items() if name != "tetris")
        for workload, rates in found.max_rates.items()
    }


def _ablations(studies: dict[tuple[str, str], Study]) -> list[Panel]:
    """Return TTFT by load, with fixed improvement rates (Figs. 11 and 12) and without chunks (Fig. 13)."""
    found = []
    for model, name in _MODELS.items():
        for workload in WORKLOADS:
            study = studies.get((model, workload))
            loads = {} if study is None else study.fixed_rates
            rates = {rate for by_rate in loads.values() for rate in by_rate}
            found.append(
                Panel(
                    name=f"Fig. {11 if name == '8B' else 12}, {workload}",
                    title=f"{name}, {workload}: P50 of TTFT over that with the table",
                    x="share of the highest rate",
                    y="ratio",
                    ours={
                        f"rate {rate:g}": [(load, by_rate[rate][0]) for load, by_rate in loads.items()]
                        for rate in sorted(rates)
                    },
                    missing="" if study else _RUN,
                )
            )
    for place, percentile in enumerate(("P50", "P99")):
        found += [
            Panel(
                name=f"Fig. 13, {name}, {percentile} by load",
                title=f"{name}: {percentile} of TTFT without chunks over that with chunks",
                x="share of the highest rate",
                y="ratio",
                ours={
                    workload: [(load, ratios[place]) for load, ratios in studies[model, workload].single_chunk.items()]
                    for workload in WORKLOADS
                    if (model, workload) in studies
                },
                missing="" if studies else _RUN,
            )
            for model, name in _MODELS.items()
        ]
    return found


def _moves() -> list[Panel]:
    return [
        Panel(
            name="Figs. 14a to 14d",
            title="time added by balancing KV",
            x="earlier over new tokens",
            y="%",
            ours={name: [(times, balancing(name, times)) for times in _HISTORIES] for name in GROWING},
        ),
        Panel(
            name="Figs. 14e and 14f",
            title="time added by sending KV to a decode instance",
            x="thousand tokens",
            y="% of TTFT",
            ours={name: [(n, transfer(name, 1000 * n)) for n in _THOUSANDS] for name in SENDING},
        ),
        Panel(
            name="Figs. 14e and 14f, half the backends",
            title="further time with half the backends",
            x="prompt",
            y="% of TTFT",
            ours={"ours": list(half_backends().items())},
            bars=True,
        ),
    ]
