"""The machine's ceilings are measured beside the contestants: products and reading, and how much longspan reaches."""

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
    """Processes that measure the machine; a context manager, at whose end none of them is left.

    Attributes:
        samples: by what was measured, one for each call of `measure`.
        failures: why it cannot be measured, if so.
    """

    def __init__(self) -> None:
        cores = [*map(str, sorted(os.sched_getaffinity(0)))]
        self.samples: dict[str, list[float]] = {}
        self.failures: dict[str, str] = {}
        self._all, *self._single = (_probe(core) for core in (None, cores[0], cores[-1]))

    def measure(self) -> None:
        """Takes some seconds in which nobody else should compute."""
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
    """Writes down the ceilings, and what those named in `ttfts_s` reach of them for a prompt of so many tokens, which
    takes so many operations.
    """
    found = {name: statistics.median(values) for name, values in samples.items()}
    if len(found) < len((PEAK, ONE_CORE, TWO_CORES, READ)):
        return []
    scaling = found[TWO_CORES] / found[ONE_CORE]
    machine = (
        f"machine: {found[PEAK] / 1e12:.2f} bfloat16 TFLOPS on all cores, {found[ONE_CORE] / 1e12:.2f} on one, "
        f"{scaling:.2f} times as many by two processes on two; reads {found[READ] / 1e9:.1f} GB/s"
    )
    reached = [
        f"{name}: {flops / 1e12:.2f} TFLOP of TTFT {num_tokens:,} at {flops / seconds / 1e12:.2f} TFLOPS, "
        f"{100 * flops / seconds / found[PEAK]:.0f} % of the peak"
        for name, seconds in ttfts_s.items()
    ]
    return [machine, *reached, *_gain_line(ttfts_s, scaling)]


def _gain_line(ttfts_s: Mapping[str, float], scaling: float) -> Iterator[str]:
    """Compares one core with two instances where these have two."""
    if {"longspan-1core", "longspan-2"} <= ttfts_s.keys() and len(os.sched_getaffinity(0)) == 2:
        gain = ttfts_s["longspan-1core"] / ttfts_s["longspan-2"]
        yield (
            f"2 instances are {gain:.2f} times as fast as one on one core, "
            f"{100 * gain / scaling:.0f} % of what two processes gain on this machine"
        )
