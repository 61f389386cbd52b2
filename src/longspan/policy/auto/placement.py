"""The choice of decode instances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from longspan.core.blocks import Target
from longspan.core.view import RequestView
from longspan.policy.auto.estimates import Estimates
from longspan.policy.auto.observation import Arrivals, InstanceState, Numbers, Observer
from longspan.policy.routing import goes_on, shares_by

_WEIGHT = 2.0
"""Weight of an answer's slowdown, relative to that of a first token."""
_CALM = 3.0
"""Wanted upper bound for the seconds of most decode steps, relative to a step of one request."""
_COMFORT = 0.6
"""Fraction of that bound which a step without prefills may take before more instances decode."""
_SPARE = 1.4
"""Instances left to prefills, relative to the number that they keep busy. Half of all if decodes need no more."""


class DecodePlacement:
    """Chooses the instance that decodes a request, and prices prefills on instances that decode.

    Args:
        target_s: bound for decode steps that run a prefill, too.
    """

    def __init__(
        self, instances: Sequence[int], estimates: Estimates, arrivals: Arrivals, observer: Observer, target_s: float
    ) -> None:
        self._instances, self._estimates, self._arrivals, self._observer = instances, estimates, arrivals, observer
        self._place = {instance: place for place, instance in enumerate(instances)}
        self._target_s, self._calm_s = target_s, _CALM * estimates.token_s

    def strain(self, states: Mapping[int, InstanceState]) -> Numbers:
        """Return the weight of a second of prefill on each instance for its answers: [num_instances].

        It is the number of answers, times the square of how slow tokens are there already.
        """
        decode = self._estimates.decode
        active, decodes, context = np.array(
            [(one.active, one.decodes, one.context) for one in states.values()], float
        ).T
        token_s = decode.start_s + decode.request_s * decodes + decode.context_s * context
        slow = np.minimum(1.0, token_s / self._observer.free_fractions() / self._calm_s)
        strain: Numbers = np.where(active > 0, _WEIGHT * decodes * slow**2, 0.0)
        return strain

    def targets(
        self, request: RequestView, group: tuple[int, ...], states: Mapping[int, InstanceState]
    ) -> tuple[Target, ...]:
        """Return the instance that decodes a request, or the fewest with enough blocks; none to stay on its group.

        The cost is the seconds of its own tokens plus those it adds to the tokens of other requests there. An instance
        that prefills for a fraction of its time decodes in the rest of it.
        """
        if not goes_on(request):
            return ()
        num_blocks = request.blocks_for(request.num_tokens)
        own_share = -(-num_blocks // len(group))

        def has_space(instance: int) -> bool:
            state = states[instance]
            needed = num_blocks + (own_share if instance in group else 0)
            return group == (instance,) or (state.free_slots > 0 and state.free_blocks >= needed)

        by_use = sorted([(-states[i].decodes, -place, i) for i, place in self._place.items()])
        number = self._num_decoders(states, request)
        able = [i for _, _, i in by_use[:number] if has_space(i)]
        able = able or [i for _, _, i in by_use[number:] if has_space(i)]
        if not able:
            return self._sharded(num_blocks, group, states)
        free = self._observer.free_fractions()
        best = min(able, key=lambda i: self._added_s(request, states[i]) / free[self._place[i]])
        return () if group == (best,) else (Target(best, num_blocks),)

    def _added_s(self, request: RequestView, state: InstanceState) -> float:
        """Return the seconds of a token on an instance, plus those it adds to the tokens of other requests there."""
        without_s = self._estimates.step_s(state.decodes, state.context)
        seconds = self._estimates.step_s(state.decodes + 1, state.context + request.num_tokens)
        return seconds + (seconds - without_s) * state.decodes

    def _sharded(
        self, num_blocks: int, group: tuple[int, ...], states: Mapping[int, InstanceState]
    ) -> tuple[Target, ...]:
        """Shard a request over the fewest instances with enough blocks, if they are fewer than its group."""
        own_share = -(-num_blocks // len(group))
        free = {
            i: one.free_blocks - (own_share if i in group else 0) for i, one in states.items() if one.free_slots > 0
        }
        by_free = sorted(free, key=free.__getitem__, reverse=True)
        for number in range(2, len(group)):
            chosen = [i for i in self._instances if i in by_free[:number]]
            if sum([max(0, free[i]) for i in chosen]) >= num_blocks:
                shares = shares_by([max(0, free[i]) for i in chosen], num_blocks)
                return tuple([Target(i, share) for i, share in zip(chosen, shares, strict=True) if share])
        return ()

    def _num_decoders(self, states: Mapping[int, InstanceState], request: RequestView) -> int:
        """Return how many instances should decode: those that prefills leave, or more if tokens would be slow."""
        decode, num_instances = self._estimates.decode, len(self._instances)
        decodes = 1 + sum([one.decodes for one in states.values()])
        context = request.num_tokens + sum([one.context for one in states.values()])
        spread_s = decode.request_s * decodes + decode.context_s * context
        needed = spread_s / max(1e-9, _COMFORT * min(self._calm_s, self._target_s) - decode.start_s)
        _, busy = self._arrivals.rates(self._observer.now_s)
        left = num_instances - max(num_instances / 2, _SPARE * busy)
        return min(num_instances, max(1, math.ceil(min(needed, num_instances)), int(left)))
