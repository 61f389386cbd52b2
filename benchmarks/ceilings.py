"""Measures the machine's limits (matrix products, memory reads) between contestants, and longspan's share of them."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from contestants.child import Child, ContestantError
from contestants.roster import Entry

_LIMIT_S = 60.0
PEAK, ONE_CORE, TWO_CORES, READ = "FLOPS, all cores", "FLOPS, one core", "FLOPS, two processes", "bytes read per s"


class Machine:
    """Processes that measure the machine. Leaving this context manager kills them.

    Attributes:
        samples: by quantity, such as `PEAK`, one for each call of `measure`.
        failures: the error of a failed measurement, under the key `machine`.
    """

    def __init__(self) -> None:
        cores = [*map(str, sorted(os.sched_getaffinity(0)))]
        self.samples: dict[str, list[float]] = {}
        self.failures: dict[str, str] = {}
        self._all, *self._single = (_probe(core) for core in (None, cores[0], cores[-1]))

    def measure(self) -> None:
        """Measure each quantity once. This takes some seconds, in which other processes should be idle."""
        try:
            self._sample(PEAK, "product", [self._all])
            self._sample(READ, "read", [self._all])
            self._sample(ONE_CORE, "product", self._single[:1])
            self._sample(TWO_CORES, "product", self._single)
        except ContestantError as error:
            self.failures["machine"] = str(error)

    def _sample(self, name: str, work: str, probes: Sequence[Child]) -> None:
        for probe in probes:
            probe.send({"work": work})
        rates = [probe.receive(_LIMIT_S)["per_s"] for probe in probes]
        self.samples.setdefault(name, []).append(sum(rates))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for probe in (self._all, *self._single):
            probe.kill()


def _probe(core: str | None) -> Child:
    return Child(Entry(name="machine", module="machine_probe", python=Path(sys.executable), core=core), {})


def report(
    samples: Mapping[str, Sequence[float]], ttfts_s: Mapping[str, float], num_tokens: int, flops: float
) -> list[str]:
    """Return lines with the machine's limits, and the share of the peak that each TTFT corresponds to.

    `flops` is the number of operations of a prompt of `num_tokens`.
    """
    medians = {name: statistics.median(values) for name, values in samples.items()}
    if len(medians) < len((PEAK, ONE_CORE, TWO_CORES, READ)):
        return []
    scaling = medians[TWO_CORES] / medians[ONE_CORE]
    machine = (
        f"machine: {medians[PEAK] / 1e12:.2f} bfloat16 TFLOPS on all cores, {medians[ONE_CORE] / 1e12:.2f} on one, "
        f"{scaling:.2f} times as many by two processes on two; reads {medians[READ] / 1e9:.1f} GB/s"
    )
    reached = [
        f"{name}: {flops / 1e12:.2f} TFLOP of TTFT {num_tokens:,} at {flops / seconds / 1e12:.2f} TFLOPS, "
        f"{100 * flops / seconds / medians[PEAK]:.0f} % of the peak"
        for name, seconds in ttfts_s.items()
    ]
    return [machine, *reached, *_gain_line(ttfts_s, scaling)]


def _gain_line(ttfts_s: Mapping[str, float], scaling: float) -> Iterator[str]:
    """Compare one instance on one core with two instances, on a machine with two cores."""
    if {"longspan-1core", "longspan-2"} <= ttfts_s.keys() and len(os.sched_getaffinity(0)) == 2:
        gain = ttfts_s["longspan-1core"] / ttfts_s["longspan-2"]
        yield (
            f"2 instances are {gain:.2f} times as fast as one on one core, "
            f"{100 * gain / scaling:.0f} % of the gain of two processes on this machine"
        )
