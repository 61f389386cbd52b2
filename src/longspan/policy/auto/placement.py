"""The choice of decode instances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from longspan.core.blocks import Target
from longspan.core.view import RequestView
from longspan.policy.auto.estimates import Estimates, Numbers
from longspan.policy.auto.history import MAX_BUSY, History
from longspan.policy.auto.observation import Observation, Observer
from longspan.policy.routing import goes_on, shares_by

_MAX_TIMES = 2.0
"""A token on the usual decode instances takes at most this multiple of its seconds elsewhere."""


class DecodePlacement:
    """Chooses the instance that decodes a request, and prices prefills on instances that decode."""

    def __init__(
        self, place: Mapping[int, int], estimates: Estimates, history: History, observer: Observer, tbt_slowdown: float
    ) -> None:
        self._estimates, self._history, self._observer = estimates, history, observer
        self._place, self._instances = place, list(place)
        self._max_tbt_s = tbt_slowdown * estimates.token_s

    def token_s(self, seen: Observation, now_s: float) -> Numbers:
        """Predict the mean time between tokens on each instance, by the time that prefills leave: [num_instances]."""
        return self._estimates.step_s(seen.decodes, seen.context) / self._observer.free_fractions(now_s, seen.wait_s)

    def targets(
        self, request: RequestView, group: tuple[int, ...], seen: Observation, now_s: float
    ) -> tuple[Target, ...]:
        """Return the instance that decodes a request, or the fewest with enough blocks, or none to stay on its group.

        The cost is the seconds of its own tokens plus the added seconds of other requests'
        tokens there. An instance that prefills for a fraction of its time decodes in the rest of it. The instances with
        the most decodes are preferred, unless all of them are much slower than another one.
        """
        if not goes_on(request):
            return ()
        num_blocks, members = request.blocks_for(request.num_tokens), [self._place[i] for i in group]
        free_blocks = seen.free_blocks.copy()
        free_blocks[members] -= -(-num_blocks // len(group))
        has_space = (seen.free_slots > 0) & (free_blocks >= num_blocks)
        if len(group) == 1:
            has_space[members] = True
        if not has_space.any():
            return self._sharded(num_blocks, group, np.where(seen.free_slots > 0, free_blocks, 0).astype(int).tolist())
        by_use = np.lexsort((-np.arange(len(has_space)), -seen.decodes))
        number = self._num_decoders(seen, request, now_s)
        able = by_use[has_space[by_use]]
        decodes, context = seen.decodes[able], seen.context[able]
        seconds = self._estimates.step_s(decodes + 1, context + request.num_tokens)
        added_s = seconds + (seconds - self._estimates.step_s(decodes, context)) * decodes
        later_s = np.maximum(0.0, seen.wait_s - seen.wait_s[members].max())  # prefills there after its own
        costs = added_s / self._observer.free_fractions(now_s, later_s)[able]
        usual = costs[: int(has_space[by_use[:number]].sum())]
        if len(usual) and usual.min() <= _MAX_TIMES * costs.min():
            costs = usual
        best = self._instances[able[costs.argmin()]]
        return () if group == (best,) else (Target(best, num_blocks),)

    def _sharded(self, num_blocks: int, group: tuple[int, ...], free: Sequence[int]) -> tuple[Target, ...]:
        """Return the fewest instances whose blocks suffice together, or () if they are not fewer than the group."""
        by_free = sorted([place for place, blocks in enumerate(free) if blocks > 0], key=lambda place: -free[place])
        for number in range(2, len(group)):
            chosen = sorted(by_free[:number])
            if sum([free[place] for place in chosen]) >= num_blocks:
                shares = shares_by([free[place] for place in chosen], num_blocks)
                pairs = zip(chosen, shares, strict=True)
                return tuple([Target(self._instances[place], share) for place, share in pairs if share])
        return ()

    def _num_decoders(self, seen: Observation, request: RequestView, now_s: float) -> int:
        """Return how many instances should decode.

        As many as prefills leave, or more if tokens would be slow. Among long prompts it is as few as tokens allow, so
        that large groups are free of answers.
        """
        num_instances, step_s = len(self._instances), self._estimates.step_s
        decodes, context = 1 + float(seen.decodes.sum()), request.num_tokens + float(seen.context.sum())
        start_s = step_s(0.0, 0.0)
        needed = (step_s(decodes, context) - start_s) / max(1e-9, self._max_tbt_s - start_s)
        _, busy = self._history.rates(now_s)
        left = 0 if self._history.has_long_prompts else num_instances - max(num_instances / 2, busy / MAX_BUSY)
        return min(num_instances, max(1, math.ceil(min(needed, num_instances)), int(left)))
