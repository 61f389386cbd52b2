"""Seconds of a chunk by its lengths, for every SP size (Tetris §5.1, Eq. 1): as measured, or by the model's shape."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from longspan.core.exchange import Exchange, named
from longspan.cost.profile import TimeFit, fit_times
from longspan.policy.choosing import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class SpTimes:
    """T(L, C) = start_s + token_s L + cached_s C L + square_s L², for L tokens of a chunk behind C earlier ones.

    Raises:
        ValueError: for a coefficient below 0, or when tokens would take no time.
    """

    start_s: float
    token_s: float
    cached_s: float
    square_s: float

    def __post_init__(self) -> None:
        terms = self.start_s, self.token_s, self.cached_s, self.square_s
        if not all(0 <= term < math.inf for term in terms) or self.token_s + self.square_s <= 0:
            raise ValueError(f"chunks take more time the more tokens they have, but the coefficients are {terms}")

    @classmethod
    def of(cls, fit: TimeFit) -> Self:
        """Takes coefficients that were fitted to measurements."""
        return cls(start_s=fit.start_s, token_s=fit.token_s, cached_s=fit.cached_s, square_s=fit.square_s)

    def seconds(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """Predicts a chunk."""
        per_token = self.token_s + self.cached_s * cached_tokens + self.square_s * new_tokens
        return self.start_s + per_token * new_tokens

    def most_tokens(self, budget_s: float, cached_tokens: float = 0) -> float:
        """Returns the tokens that take so long: the root of the quadratic, in a form that does not cancel."""
        rest = budget_s - self.start_s
        if rest <= 0:
            return 0.0
        slope = self.token_s + self.cached_s * cached_tokens
        return 2 * rest / (slope + math.sqrt(slope * slope + 4 * self.square_s * rest))


_ONE_INSTANCE = SpTimes(start_s=0.02, token_s=1e-4, cached_s=2e-9, square_s=1e-9)
"""Of nothing in particular: for want of everything, only that longer prompts take longer."""
_HOP_S = 1e-3
"""What each further member adds to a step, for want of measurements."""


def measured_times(facts: Facts, exchanges: Collection[Exchange]) -> dict[int, SpTimes]:
    """Fits times for every number of instances measured, by the quickest of these exchanges; empty without
    a profile.

    Where none of these was measured with a number of instances, it is the quickest of all others.
    """
    prefills = facts.profile.prefills if facts.profile is not None else ()
    quickest: dict[tuple[int, bool], dict[tuple[int, int], float]] = defaultdict(dict)
    for one in prefills:
        known, lengths = quickest[one.members, named(one.exchange) in exchanges], (one.new_tokens, one.cached_tokens)
        known[lengths] = min(one.median_s, known.get(lengths, math.inf))
    found: dict[int, SpTimes] = {}
    for (members, _), seconds in sorted(quickest.items()):  # what was asked for comes last, and counts
        fit = fit_times([(*lengths, s) for lengths, s in seconds.items()])
        if fit is not None and fit.token_s + fit.square_s > 0:
            found[members] = SpTimes.of(fit)
    return found


def expected_times(facts: Facts, sizes: Collection[int]) -> dict[int, SpTimes]:
    """Predicts unmeasured times: one instance by shape and hardware, several by even shares and a start for each."""
    shape, hardware = facts.shape, facts.hardware
    alone = _ONE_INSTANCE
    if shape is not None and hardware is not None:
        weights = 12 * shape.num_layers * shape.hidden_size**2  # of a usual layer, whatever the model's is
        pair_s = 4 * shape.num_layers * shape.num_heads * shape.head_dim / hardware.flops_per_s
        alone = replace(alone, token_s=2 * weights / hardware.flops_per_s, cached_s=pair_s, square_s=pair_s / 2)
    return {
        size: SpTimes(
            start_s=alone.start_s + _HOP_S * (size - 1),
            token_s=alone.token_s / size,
            cached_s=alone.cached_s / size,
            square_s=alone.square_s / size,
        )
        for size in sizes
    }


def sp_sizes(given: str, num_instances: int, measured: Mapping[int, SpTimes]) -> tuple[int, ...]:
    """Reads the sizes of groups to choose from: those `given` (`1,2,4`), or with `auto` powers of two, so that
    groups of different sizes leave no odd instances; with measurements only sizes that were measured.

    Raises:
        ValueError: for sizes that are no ascending numbers, larger than the cluster, or not measured when others were.
    """
    if given == "auto":
        powers = [1 << bit for bit in range(num_instances.bit_length()) if 1 << bit <= num_instances]
        return tuple(size for size in powers if not measured or size in measured) or (1,)
    parts = given.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"sp_sizes are numbers of instances such as 1,2,4, but {given!r} given")
    sizes = tuple(int(part) for part in parts)
    if list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"sp_sizes ascend from at least 1, such as 1,2,4, but {given} given")
    check_sizes(sizes, num_instances, measured)
    return sizes


def named_sizes(options: Mapping[str, str]) -> set[int]:
    """Reads the sizes of groups that options name, so that these can be predicted; policies refuse wrong ones."""
    parts = [options.get("sp", ""), *options.get("sp_sizes", "").split(",")]
    return {int(part) for part in parts if part.strip().isdecimal()}


def check_sizes(
    sizes: Collection[int], num_instances: int, measured: Mapping[int, SpTimes], *, all_taken: bool = False
) -> None:
    """Checks that there are groups of these sizes, which take all instances if they must, and times of them.

    Raises:
        ValueError: when there are not.
    """
    if min(sizes) < 1:
        raise ValueError(f"sp size {min(sizes)} is less than 1 instance")
    if max(sizes) > num_instances:
        raise ValueError(f"sp size {max(sizes)} is more than the {num_instances} instances: give --parallel more")
    odd = [size for size in sizes if all_taken and num_instances % size]
    if odd:
        raise ValueError(
            f"sp({odd[0]}) does not divide {num_instances} instances into groups: choose one that does, or give "
            "--parallel another number"
        )
    missing = [size for size in sizes if measured and size not in measured]
    if missing:
        raise ValueError(
            f"the profile of this machine has no times for sp size {missing[0]}, only for "
            f"{', '.join(map(str, sorted(measured)))}: measure it with longspan profile, or leave the size out"
        )


_TOLERANCE = 0.02
"""The part of the longest wait that estimates may be old: with many prompts waiting, looking at each takes time."""


class QueueTimes:
    """Keeps the second at which each instance is free of prompts. Estimates err; `correct` puts in what was seen."""

    def __init__(self, num_instances: int) -> None:
        self._free_at_s = [0.0] * num_instances
        self._seen_at_s = 0.0

    def waits_s(self, now_s: float) -> list[float]:
        """Returns the wait for every instance, from now on."""
        return [max(0.0, free_at_s - now_s) for free_at_s in self._free_at_s]

    def book(self, group: Iterable[int], end_s: float) -> None:
        """A group is given a prompt, and busy with it or waiting for it until `end_s`."""
        for instance in group:
            self._free_at_s[instance] = end_s

    def is_old(self, now_s: float) -> bool:
        """Tells whether it is time to `correct`."""
        return now_s - self._seen_at_s >= _TOLERANCE * max(self.waits_s(now_s))

    def correct(self, now_s: float, prompts: Iterable[Sequence[tuple[float, tuple[int, ...]]]]) -> None:
        """Starts afresh from what is left to do: for each prompt, in order of their turns, its chunks' seconds and
        groups. A chunk begins when the one before is done and all of its group are.
        """
        self._seen_at_s = now_s
        free_at_s = [now_s] * len(self._free_at_s)
        for chunks in prompts:
            end_s = now_s
            for seconds, group in chunks:
                end_s = max(end_s, *(free_at_s[instance] for instance in group)) + seconds
                for instance in group:
                    free_at_s[instance] = end_s
        self._free_at_s = free_at_s
