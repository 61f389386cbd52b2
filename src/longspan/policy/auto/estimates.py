"""Predicted seconds of prefills by group size, and of decode steps on one instance."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from longspan.core.exchange import Exchange
from longspan.core.group_links import links_by_size
from longspan.cost.profile import DecodeFit, PrefillTime
from longspan.policy.facts import Facts
from longspan.policy.group_times import nearest_times
from longspan.policy.tetris import expected_times, measured_times, sp_times

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
NumberT = TypeVar("NumberT", float, Numbers)

_EFFICIENCY, _MIN_EFFICIENCY = 0.9, 2 / 3
"""Wanted fraction of a step that prefills and decodes for the tokens of the prefill, and the lower bound of it for a
given `target_tbt`. The rest is the start of the step and the decodes. Longer steps delay answers as much in total.
"""
_PARTS_LEFT = 16, 8, 4
"""Some groups leave a 16th, an eighth or a quarter of all instances, at least one, to short prompts and answers."""
_MIN_TOKEN_S = 1e-5
"""Lower bound for the seconds of a decode step, for a fit that rounds to zero. No device is as quick."""
_GUESSED_DECODE = DecodeFit(mean_error=0.0, max_error=0.0, num_samples=0, start_s=0.02, request_s=1e-4, context_s=1e-7)
"""Decode-time fit used when no profile was measured."""


class Estimates:
    """Predicted seconds of prefills by group size, and of decode steps of one instance.

    Attributes:
        sizes: of groups, ascending: 1, the sizes of `sp_times`, all instances, and all but a few.
        token_s: seconds of a decode step with a single request and no context. It is the unit of all times of `auto`:
            a machine with half the speed gets the same decisions at half the rate.
        cuts_steps: whether steps that prefill and decode are bounded.
        prefills_s: predicts a prefill on groups of all sizes, without and with decodes in the same steps. It returns
            [2, num_sizes], read-only. The arguments are new tokens, cached tokens, and `max_tokens` of `prefill_s`.

    Args:
        target_s: wanted bound for a step that prefills and decodes; None for the shortest that is efficient.
    """

    def __init__(
        self, facts: Facts, exchanges: Collection[Exchange], num_instances: int, target_s: float | None
    ) -> None:
        self._times = group_times(facts, exchanges, num_instances)
        self.sizes = tuple(self._times)
        profile = nearest_times(facts)
        fits = {} if profile is None else profile.decode_fits()
        alone = next((fit for (members, _), fit in fits.items() if members == 1), None)
        self._decode = alone or _GUESSED_DECODE
        self.token_s = max(_MIN_TOKEN_S, self._decode.seconds(1, 0))
        self._target_s = target_s
        self.cuts_steps = target_s is not None or alone is not None  # a guess cuts no steps
        self.prefills_s = lru_cache(maxsize=1024)(self._prefills_s)  # a waiting prompt is priced at each choice

    def prefill_s(self, members: int, new_tokens: int, cached_tokens: int, max_tokens: int) -> float:
        """Predict a prefill in steps of at most `max_tokens` per member."""
        times = self._on(members)
        return _chunked_s(times, new_tokens, cached_tokens, max_tokens * members, times.start_s)

    def whole_prompt_s(self, num_tokens: int) -> tuple[float, float]:
        """Predict a prompt that one step computes, on one instance and on its fastest group."""
        seconds = [times.seconds(num_tokens, 0) for times in self._times.values()]
        return seconds[0], min(seconds)

    def _prefills_s(self, new_tokens: int, cached_tokens: int, max_tokens: int) -> Numbers:
        found = np.empty((2, len(self.sizes)))
        for place, (size, times) in enumerate(self._times.items()):
            start_s, whole, in_time = times.start_s, size * max_tokens, math.inf
            if self.cuts_steps:
                left_s = self._mixed_step_s(start_s, self.token_s) - start_s - self.token_s
                slope = times.token_s + times.cached_s * (cached_tokens + new_tokens / 2)
                inverse = slope + math.sqrt(slope * slope + 4 * times.square_s * left_s)
                in_time = 2 * left_s / inverse if inverse else math.inf
            found[0, place] = _chunked_s(times, new_tokens, cached_tokens, whole, start_s)
            found[1, place] = _chunked_s(times, new_tokens, cached_tokens, min(whole, in_time), start_s + self.token_s)
        found.flags.writeable = False
        return found

    def max_tokens(self, members: int, cached_tokens: int, decode_s: float) -> float:
        """Return the prefill tokens of a step that also decodes, which takes `decode_s` alone."""
        times = self._on(members)
        return times.most_tokens(self._mixed_step_s(times.start_s, decode_s) - decode_s, cached_tokens)

    def _mixed_step_s(self, start_s: float, decode_s: float) -> float:
        """Return the wanted seconds of a step that prefills and decodes."""
        if self._target_s is None:
            return (start_s + decode_s) / (1 - _EFFICIENCY)
        return max(self._target_s, (start_s + decode_s) / (1 - _MIN_EFFICIENCY))

    def step_s(self, decodes: NumberT, context: NumberT) -> NumberT:
        """Predict decode steps of instances, for requests that have `context` tokens together."""
        fit = self._decode
        return fit.start_s + fit.request_s * decodes + fit.context_s * context

    def _size(self, members: int) -> int:
        """Return the largest known size up to `members`. Running requests may have groups of any size."""
        return members if members in self._times else max(size for size in self.sizes if size <= members)

    def _on(self, members: int) -> PrefillTime:
        return self._times[self._size(members)]


def _chunked_s(times: PrefillTime, new_tokens: int, cached_tokens: int, chunk: float, start_s: float) -> float:
    """Predict a prefill in steps of at most `chunk` tokens, which take `start_s` each and the time of their tokens."""
    num_full = math.floor(new_tokens / chunk)
    rest = new_tokens - num_full * chunk
    squares = num_full * (chunk * chunk) + rest * rest  # attention of each step to its own tokens
    pairs = cached_tokens * new_tokens + (new_tokens**2 - squares) / 2
    starts_s = start_s * (num_full + (rest > 0))
    return starts_s + times.token_s * new_tokens + times.cached_s * pairs + times.square_s * squares


def group_times(facts: Facts, exchanges: Collection[Exchange], num_instances: int) -> dict[int, PrefillTime]:
    """Predict prefills on 1, all, all but a few, and the sizes of `sp_times`.

    An unmeasured size is scaled from the largest measured size over the same class of link, or from one instance.
    """
    times = sp_times(facts, exchanges, "auto", num_instances)
    measured = measured_times(facts, exchanges)
    most = {num_instances - max(1, num_instances // parts) for parts in _PARTS_LEFT}
    missing = {1, num_instances, *most} - {0, *times}
    times |= {size: found for size, found in measured.items() if size in missing}
    classes = {} if facts.cluster is None else links_by_size(facts.cluster)
    for size, expected in expected_times(facts, missing - times.keys()).items():
        alike = [other for other in measured if other == 1 or classes.get(other) == classes.get(size)]
        largest = max(alike, default=0)
        times[size] = _scaled(measured[largest], largest / size) if largest else expected
    return dict(sorted(times.items()))


def _scaled(times: PrefillTime, factor: float) -> PrefillTime:
    """Scale all terms but the start."""
    return PrefillTime(
        start_s=times.start_s,
        token_s=times.token_s * factor,
        cached_s=times.cached_s * factor,
        square_s=times.square_s * factor,
    )
