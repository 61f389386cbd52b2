"""What a run's results say: rates, goodput, and how times are distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longspan.loadgen.results import Answered, Failure, Result, Run

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits that a good request stays within, in milliseconds; None is no limit.

    Attributes:
        ttft_ms: of the time to the first token.
        tbt_ms: of the mean of the request's times between tokens.
    """

    ttft_ms: float | None = None
    tbt_ms: float | None = None

    def __post_init__(self) -> None:
        """Checks the limits.

        Raises:
            ValueError: when one is not above 0.
        """
        for flag, value in (("--slo-ttft", self.ttft_ms), ("--slo-tbt", self.tbt_ms)):
            if value is not None and not value > 0:
                raise ValueError(f"{flag} must be above 0 ms, but {value} given")

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return (self.ttft_ms, self.tbt_ms) != (None, None)

    def met_by(self, answered: Answered) -> bool:
        """Whether an answer stays within all limits; one of a single token has no time between tokens to judge."""
        slow_start = self.ttft_ms is not None and answered.ttft_s * 1e3 > self.ttft_ms
        mean_s = answered.mean_tbt_s
        slow_tokens = self.tbt_ms is not None and mean_s is not None and mean_s * 1e3 > self.tbt_ms
        return not slow_start and not slow_tokens


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How times are distributed, in milliseconds; `percentiles` by `PERCENTILES`, as numpy interpolates them."""

    mean: float
    median: float
    std: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Spread | None:
        """Of times in seconds; None if there are none."""
        if not times_s:
            return None
        times_ms = np.asarray(times_s, dtype=np.float64) * 1e3
        return cls(
            mean=float(times_ms.mean()),
            median=float(np.median(times_ms)),
            std=float(times_ms.std()),
            percentiles=tuple(float(one) for one in np.percentile(times_ms, PERCENTILES)),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The numbers of a run. Rates are per second of its whole duration.

    Attributes:
        unfinished: requests that were not sent, or not answered, when it was interrupted.
        failures: how many failed, by kind.
        goodput: requests per second that met the limits; None if there are none. `good` is how many.
        spreads: of `ttft`, `tpot`, `itl` (times between tokens), `e2el`, and `client_queue_time`: how much later than
            due requests were sent.
    """

    completed: int
    failed: int
    unfinished: int
    failures: dict[str, int]
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    good: int | None
    max_concurrent: int
    spreads: dict[str, Spread | None]

    @property
    def goodput(self) -> float | None:
        """Good requests per second."""
        return None if self.good is None else self.per_s(self.good)

    def per_s(self, count: int) -> float:
        """A count as a rate."""
        return count / self.duration_s if self.duration_s else 0.0


def summarise(run: Run, slo: Slo) -> Summary:
    """The summary of a run."""
    answers = answers_of(run.results)
    tpots = [answered.tpot_s for answered in answers]
    spreads = {
        "ttft": [answered.ttft_s for answered in answers],
        "tpot": [tpot for tpot in tpots if tpot is not None],
        "itl": [time for answered in answers for time in answered.tbt_s],
        "e2el": [answered.e2el_s for answered in answers],
        "client_queue_time": [result.late_s for result in run.results],
    }
    return Summary(
        completed=len(answers),
        failed=len(run.results) - len(answers),
        unfinished=run.num_asked - len(run.results),
        failures=dict(Counter(failure.kind for _, failure in failures_of(run.results)).most_common()),
        duration_s=run.duration_s,
        num_input_tokens=sum(answered.num_prompt_tokens for answered in answers),
        num_output_tokens=sum(answered.num_output_tokens for answered in answers),
        good=sum(map(slo.met_by, answers)) if slo.given else None,
        max_concurrent=run.max_concurrent,
        spreads={name: Spread.of(times) for name, times in spreads.items()},
    )


def answers_of(results: Sequence[Result]) -> list[Answered]:
    """Of those that have one."""
    return [result.outcome for result in results if isinstance(result.outcome, Answered)]


def failures_of(results: Sequence[Result]) -> list[tuple[Result, Failure]]:
    """Those that failed, with the reason."""
    return [(result, result.outcome) for result in results if isinstance(result.outcome, Failure)]
