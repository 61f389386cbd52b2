"""The assignment of groups to waiting requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from longspan.core.view import ClusterView, RequestView
from longspan.policy.auto.candidates import Costs, Load
from longspan.policy.auto.estimates import Flags, Numbers
from longspan.policy.auto.observation import Observation, Observer
from longspan.policy.auto.placement import DecodePlacement
from longspan.policy.auto.waiting import WaitingQueue
from longspan.policy.batching import Budget


class GroupAssignment:
    """Assigns groups to the requests of a queue.

    Args:
        instances: in the order of all arrays.
    """

    def __init__(
        self,
        instances: Sequence[int],
        queue: WaitingQueue,
        costs: Costs,
        observer: Observer,
        placement: DecodePlacement,
    ) -> None:
        self._instances, self._queue, self._costs, self._candidates = instances, queue, costs, costs.candidates
        self._estimates, self._history = costs.estimates, costs.history
        self._observer, self._placement = observer, placement
        self._place = {instance: place for place, instance in enumerate(instances)}
        self._due_s, self._num_ended = -math.inf, 0
        """When groups are chosen again, or sooner if more prefills have ended than these."""

    def assign(self, view: ClusterView) -> Observation | None:
        """Assign groups in the order of the queue until no instance is free, or a request fits on no group.

        A request may wait for a group that is busy rather than take a worse one. To the requests behind it that group
        is taken. A choice is due when a request is new, when a prefill has ended, after a few decode steps, and when
        the cluster is idle.

        Returns:
            The observation of the instances, or None if no choice was due.
        """
        if not (self._register(view) or self._is_due(view.now_s)) and view.busy:
            return None
        # While the steps in flight end, as many more are planned. A later choice would see fresher load.
        ahead_s = 2 * view.max_steps_in_flight * self._estimates.token_s
        self._due_s, self._num_ended = view.now_s + ahead_s / 2, self._observer.num_ended
        seen = self._observer.observe(view)
        self._queue.reconsider(seen, self._place)
        active = seen.active > 0
        load = Load(
            wait_s=seen.wait_s,
            token_s=self._placement.token_s(seen, view.now_s),
            decodes=np.where(active, seen.decodes, 0.0),
            later=np.where(active, 0.0, seen.decodes),
        )
        if load.wait_s.min() > ahead_s:
            return seen
        free_blocks = np.where(seen.free_slots > 0, np.maximum(0, seen.free_blocks), -math.inf)
        order = self._queue.ordered(view.now_s)
        hastes = [self._costs.haste(waiting, view.now_s) for waiting in order]
        haste, mixed = sum(hastes), self._candidates.sum(load.decodes) > 0
        for waiting, own_haste in zip(order, hastes, strict=True):
            if load.wait_s.min() > ahead_s:
                break
            haste -= own_haste
            seconds_of, blocks_of = self._by_prefix(waiting.request, mixed, view)
            costs = self._costs.of(waiting, seconds_of, haste, view.now_s, load)
            costs[self._candidates.sum(free_blocks) < blocks_of] = math.inf
            best = int(costs.argmin())
            if costs[best] == math.inf:
                break
            seconds, num_blocks = float(seconds_of[best]), int(blocks_of[best])
            places = self._candidates.places[best]
            begins_s = float(load.wait_s[places].max())
            if begins_s <= ahead_s:
                self._queue.assign(waiting, self._candidates.groups[best], seconds, num_blocks)
                free_blocks[places] -= num_blocks / len(places)
            load.wait_s[places] = begins_s + seconds
        return seen

    def _is_due(self, now_s: float) -> bool:
        """Return True if a prefill has ended since the last choice of groups, or a few decode steps have passed."""
        return now_s >= self._due_s or self._num_ended != self._observer.num_ended

    def _register(self, view: ClusterView) -> bool:
        """Move new requests that can start to the queue, and count the arrivals. Return True if there are any."""
        new = self._queue.new
        num_new = len(new)
        for request in view.startable if new else ():
            if new.pop(request.id, None) is not None:
                hit = view.kv.match(request, self._instances)
                rest = request.num_tokens - hit.num_tokens, hit.num_tokens, view.max_num_batched_tokens
                fastest_s = float(self._estimates.prefills_s(*rest)[0].min())
                single_s = self._estimates.prefill_s(1, *rest)
                self._queue.started(request, fastest_s, single_s)
                if not request.was_admitted:
                    self._history.add_prompt(request.arrival_s, single_s, fastest_s, rest[0])
        return len(new) < num_new

    def _by_prefix(self, request: RequestView, decodes: Flags, view: ClusterView) -> tuple[Numbers, Numbers]:
        """Return the prefill seconds and needed blocks of each group, behind the prefix that is cached there.

        Args:
            decodes: whether any request decodes on each group: [num_groups].
        """
        candidates, num_blocks = self._candidates, request.blocks_for(request.num_tokens)
        max_tokens = view.max_num_batched_tokens

        def predict(new_tokens: int, cached: int) -> Numbers:
            alone_s, mixed_s = map(candidates.by_size, self._estimates.prefills_s(new_tokens, cached, max_tokens))
            return np.where(decodes, mixed_s, alone_s)

        seconds = predict(request.num_tokens, 0)
        blocks = np.full(len(seconds), float(num_blocks))
        shared = view.kv.match(request, self._instances)
        holders = {ref.pool for ref in shared.refs}.intersection(self._instances)
        hits = [((i,), view.kv.match(request, (i,))) for i in holders] if len(holders) > 1 else []
        for members, hit in sorted([*hits, (tuple(holders), shared)], key=lambda found: found[1].num_tokens):
            if not hit.num_tokens:
                continue
            have = candidates.sum(np.array([i in members for i in self._place], float)) == len(members)
            if hit.num_loaded:
                from longspan.policy.loading import held_near  # noqa: PLC0415 - without other tiers nothing is loaded

                near = held_near(hit, view.cluster)
                have &= candidates.sum(np.array([i not in near for i in self._place], float)) == 0
            rest = request.num_tokens - hit.num_tokens
            seconds[have] = predict(rest, hit.num_tokens)[have]
            blocks[have] = num_blocks - hit.num_held + sum(view.kv.hit_cost(hit, set()).values())
        if view.device_limit is not None:  # only all instances together read hosts
            on_hosts = sum(map(view.kv.num_free, Budget(view, ()).hosts_of(request, self._instances)))
            blocks[candidates.sizes == len(self._instances)] -= on_hosts
        return seconds, blocks
