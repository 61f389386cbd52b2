"""The demand of a workload: lengths of requests, their cached tokens, and their rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longspan.workload.arrivals import Arrival, TokenText, Workload

_MAX_SIZES = 96
"""Requests whose times are estimated. More take longer, and change the estimates by less than 1 %."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The tokens of a request, and the class that it names. `cached` is the longest prefix of an earlier request."""

    prompt: int
    cached: int
    output: int
    slo_class: str = ""

    @property
    def new(self) -> int:
        """Prompt tokens to compute. The last token is always computed."""
        return max(1, self.prompt - self.cached)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A sample of requests in order of prompt length, and their rate.

    Attributes:
        rate: requests per second, infinite if all arrive at the start.
        shares: whether requests have common prefixes.
    """

    sizes: tuple[Size, ...]
    rate: float
    shares: bool

    @property
    def mean_prompt(self) -> float:
        return sum(size.prompt for size in self.sizes) / len(self.sizes)

    @property
    def mean_output(self) -> float:
        return sum(size.output for size in self.sizes) / len(self.sizes)

    @property
    def short_output(self) -> int:
        """The output that nine of ten requests exceed. Prompts delay its mean time between tokens the most."""
        return max(2, sorted(size.output for size in self.sizes)[len(self.sizes) // 10])

    @property
    def mean_context(self) -> float:
        """Mean tokens behind a decode step. Requests count by their outputs."""
        tokens = sum((size.prompt + size.output / 2) * size.output for size in self.sizes)
        return tokens / sum(size.output for size in self.sizes)

    def share_above(self, num_tokens: float) -> float:
        """Return the share of requests whose prompt and output have more tokens."""
        return sum(size.prompt + size.output > num_tokens for size in self.sizes) / len(self.sizes)


def demand_of(workload: Workload, rate: float) -> Demand:
    """Sample requests evenly by their prompt lengths.

    Cached tokens assume a cache of infinite size.
    """
    sizes = sorted(_sizes(workload.arrivals), key=lambda size: (size.prompt, size.new, size.output, size.slo_class))
    num = min(_MAX_SIZES, len(sizes))
    sample = tuple(sizes[(2 * index + 1) * len(sizes) // (2 * num)] for index in range(num))
    return Demand(sizes=sample, rate=rate if rate > 0 else math.inf, shares=workload.shares)


def _sizes(arrivals: Sequence[Arrival]) -> list[Size]:
    sizes: list[Size] = []
    seen: set[int] = set()
    for arrival in arrivals:
        if arrival.follows is not None:
            before = sizes[arrival.follows]
            cached = before.prompt + before.output
        else:
            cached = _cached(arrival.prompt, seen)
        prompt = len(arrival.prompt) + (0 if arrival.follows is None else cached)
        sizes.append(Size(prompt=prompt, cached=cached, output=arrival.output_len, slo_class=arrival.slo_class))
    return sizes


def _cached(prompt: Sequence[int], seen: set[int]) -> int:
    """Return the tokens of the leading texts that earlier prompts began with, and add this prompt's."""
    cached, key, hits = 0, 0, True
    for part in prompt.parts if isinstance(prompt, TokenText) else [prompt]:
        key = hash((key, part[0] if len(part) else 0, len(part)))
        hits = hits and key in seen
        cached += len(part) if hits else 0
        seen.add(key)
    return cached
