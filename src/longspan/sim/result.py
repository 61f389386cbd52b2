"""Results of a simulation: a record of each request, and the numbers that sum them up."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from longspan.core.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A request that was served, in seconds of the virtual clock; `index` is its index among the arrivals.

    Attributes:
        scheduled_s: when its first step was planned.
        ttft_s: from its arrival to its first token.
        tbt_s: between its tokens, `[num_output_tokens - 1]`.
    """

    index: int
    arrival_s: float
    scheduled_s: float
    ttft_s: float
    tbt_s: array[float]
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, request: Request, index: int) -> Self:
        """Takes over the times of a request that has ended."""
        metrics = request.metrics
        assert metrics.ttft_s is not None and metrics.finished_s is not None and metrics.scheduled_s is not None
        return cls(
            index=index,
            arrival_s=metrics.arrival_s,
            scheduled_s=metrics.scheduled_s,
            ttft_s=metrics.ttft_s,
            tbt_s=array("d", metrics.tbt_s),
            finished_s=metrics.finished_s,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=len(request.output),
            num_cached_tokens=metrics.num_cached_tokens,
        )

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.arrival_s


@dataclass(frozen=True, kw_only=True)
class Result:
    """A simulation that has ended, with all that was served or refused.

    Attributes:
        served: by index.
        refused: why requests were not taken, by index.
        makespan_s: from the start to the last token.
        busy_s: of each instance, how long it had a step to run.
        max_queue: most requests that waited at once after what could be started had been.
    """

    served: tuple[Served, ...]
    refused: Mapping[int, str]
    num_arrivals: int
    makespan_s: float
    busy_s: tuple[float, ...]
    max_queue: int
    num_preemptions: int

    @property
    def ttfts_s(self) -> NDArray[np.float64]:
        """Times to first token, in order of arrival."""
        return np.array([one.ttft_s for one in self.served])

    @property
    def tbts_s(self) -> NDArray[np.float64]:
        """Times between tokens, of all requests together."""
        return np.concatenate([np.frombuffer(one.tbt_s) for one in self.served if one.tbt_s] or [np.empty(0)])

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of prompts and answers together."""
        return sum(one.num_prompt_tokens + one.num_output_tokens for one in self.served)

    def summary(self) -> dict[str, float | int | None]:
        """Sums it up as `longspan simulate --json` does; a number is None where there is nothing to count.

        Throughput counts the tokens of prompts and answers. Utilisation is the part of the makespan in which an
        instance had a step to run, over all instances.
        """
        made_s = self.makespan_s
        busy = sum(self.busy_s) / len(self.busy_s)
        ttft, tbt = self.ttfts_s, self.tbts_s
        return {
            "ttft_p50_s": percentile(ttft, 50),
            "ttft_p99_s": percentile(ttft, 99),
            "tbt_p50_s": percentile(tbt, 50),
            "tbt_p99_s": percentile(tbt, 99),
            "e2e_p50_s": percentile(np.array([one.e2e_s for one in self.served]), 50),
            "throughput_tokens_per_s": self.num_tokens / made_s if made_s else None,
            "max_queue": self.max_queue,
            "utilisation": busy / made_s if made_s else None,
            "num_completed": len(self.served),
            "makespan_s": made_s,
            "num_refused": len(self.refused),
            "num_preemptions": self.num_preemptions,
            "num_prompt_tokens": sum(one.num_prompt_tokens for one in self.served),
            "num_output_tokens": sum(one.num_output_tokens for one in self.served),
            "num_cached_tokens": sum(one.num_cached_tokens for one in self.served),
        }


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    """Interpolates as numpy does; returns None for no values."""
    return float(np.percentile(values, percent)) if len(values) else None
