"""The values of a plan: its question, the simulated candidates in order, the pruned candidates, and the choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from longspan.planner.candidates import Candidate
from longspan.sim.spec import ServiceLevel


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The mean over seeds, and its confidence interval. All three are equal if there is one seed."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a plan.

    Attributes:
        hardware: names of devices, or of a measured machine.
        num_gpus: the maximum number of devices.
        workload: the name of a workload, or of a file.
        rate: requests per second. None is the rate of a trace, infinite is all requests at once.
        attainment: the fraction of requests that must meet the service level.
        prices: by name of a device, for one device and hour. Empty if no prices were given.
        is_measured: times are those of profiles.
    """

    model: str
    hardware: tuple[str, ...]
    num_gpus: int
    workload: str
    rate: float | None
    level: ServiceLevel
    attainment: float
    prices: Mapping[str, float] = field(default_factory=dict)
    is_measured: bool = False

    def cost(self, candidate: Candidate) -> float:
        """Return the price of a candidate per hour, or its devices without prices."""
        return self.prices.get(candidate.hardware, 1.0) * candidate.num_gpus

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rate": None if self.rate == math.inf else self.rate, "prices": dict(self.prices)}


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate with its simulated numbers.

    Attributes:
        price_per_hour: None without a price of its hardware.
        goodput_per_s: requests per second that meet the service level, at the given rate.
        tokens_per_s_per_gpu: tokens of prompts and outputs.
        ttft_p99_s, tbt_p99_s: P99 over requests of the time to first token, and of the mean time between tokens, to
            which the service level applies. None if a seed has no value.
        bound_ratios: P99 times relative to their bounds, by the name of the time and of the class.
        attainment: the fraction of requests that meet the service level.
        meets: whether the mean attainment is at least the given one.
        on_front: no other candidate is at least as good in GPUs or price, goodput, P99 TTFT and P99 TBT.
        command: the command line that starts it.
        lost_because: why another candidate was chosen, with a number. Empty for the winner.
        num_requests: requests of its last simulations, over all seeds. A candidate that lost early has few.
    """

    candidate: Candidate
    num_gpus: int
    price_per_hour: float | None
    goodput_per_s: Interval
    tokens_per_s_per_gpu: Interval
    ttft_p99_s: Interval | None
    tbt_p99_s: Interval | None
    bound_ratios: Mapping[str, float] = field(default_factory=dict)
    attainment: Interval
    meets: bool
    on_front: bool
    command: str
    lost_because: str
    num_requests: int

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "candidate": self.candidate.as_json()}


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A candidate that was not simulated, and the reason with a number."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelError:
    """The error of predictions for a kind of cell, in per cent of measurements, from `cost/data/errors.toml`."""

    what: str
    mean: float
    worst: str


@dataclass(frozen=True, kw_only=True)
class RecordedTime:
    """A percentile of a recorded run, and the same of its simulation on the recorded layout."""

    what: str
    recorded_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """The error of the simulation, in per cent of the recorded time."""
        return 100 * (self.simulated_s / self.recorded_s - 1)


@dataclass(frozen=True, kw_only=True)
class Current:
    """The layout that serves the workload now.

    Attributes:
        ranked: its simulated numbers, like those of the alternatives.
        times: recorded times with their simulation. Empty if the trace has none.
    """

    ranked: Ranked
    times: tuple[RecordedTime, ...]

    def as_json(self) -> dict[str, Any]:
        times = [{**asdict(time), "error_percent": time.error} for time in self.times]
        return {"ranked": self.ranked.as_json(), "times": times}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to a question, with its reasons.

    Attributes:
        ranked: all simulated candidates, best first.
        winner: the best candidate. It misses the service level if no candidate meets it.
        baseline: the best static layout with policy `chunked`. None if none was simulated.
        error: errors of the model for the winner's hardware. Empty if nothing was measured on it.
        max_rate: the highest rate that the winner serves within the service level, if it misses it at the given rate.
        num_simulated_requests: requests of all simulations that the choice needs. `max_rate` needs further ones.
        notes: sentences about the search and the choice.
        current: the layout of the question that serves the workload now, if it names one.
    """

    question: Question
    ranked: tuple[Ranked, ...]
    pruned: tuple[Pruned, ...]
    winner: Ranked | None
    baseline: Ranked | None
    error: tuple[ModelError, ...]
    max_rate: float | None = None
    num_simulated_requests: int
    notes: tuple[str, ...] = ()
    current: Current | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "question": self.question.as_json(),
            "winner": None if self.winner is None else self.winner.as_json(),
            "baseline": None if self.baseline is None else self.baseline.as_json(),
            "ranked": [ranked.as_json() for ranked in self.ranked],
            "pruned": [{"candidate": one.candidate.as_json(), "reason": one.reason} for one in self.pruned],
            "error": [asdict(error) for error in self.error],
            "max_rate": self.max_rate,
            "num_simulated_requests": self.num_simulated_requests,
            "notes": list(self.notes),
            "current": None if self.current is None else self.current.as_json(),
        }
