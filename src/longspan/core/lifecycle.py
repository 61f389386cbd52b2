"""The transitions of requests: admitted, scheduled, computed, handed over, preempted, finished and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Protocol

from longspan.core.blocks import BlockRef
from longspan.core.config import EngineConfig
from longspan.core.kv.manager import KvManager
from longspan.core.policy import Policy
from longspan.core.queues import Queues
from longspan.core.ranks import Ranks
from longspan.core.request import FinishReason, Request
from longspan.core.stats import Counts
from longspan.core.steps import Completion, Forward, MoveKV, Part, Sampled
from longspan.core.view import ScheduledPart

_NON_FINITE = "the model computed NaN or infinity for positions %d to %d: check its weights and its dtype"


class Clock(Protocol):
    """Time in seconds from any origin, which never goes back."""

    def now(self) -> float: ...


class Lifecycle:
    """Moves requests from one state to the next. Queues, KV, ranks and the policy follow each transition.

    Attributes:
        config: the configuration for the present cluster.
        counts: preemptions and prefix hits so far.
    """

    def __init__(self, config: EngineConfig, queues: Queues, kv: KvManager, ranks: Ranks, clock: Clock) -> None:
        self.config = config
        self._queues, self._kv, self._ranks, self._clock = queues, kv, ranks, clock
        self._requests, self._waiting, self._running = queues.requests, queues.waiting, queues.running
        self._admissions = count(1)
        self.counts = Counts()

    def adopt(self, policy: Policy) -> None:
        """Notify another policy from now on, first of the unfinished requests."""
        self._policy = policy
        for request in self._queues.unfinished:
            policy.arrived(request)

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._waiting.add(request)
        self._policy.arrived(request)
        if self._ranks.observer is not None:
            self._ranks.observer.arrived(request)

    def admit(self, loads: Sequence[ScheduledPart], parts: Sequence[ScheduledPart]) -> None:
        """Admit the waiting requests of a plan, and allocate the blocks that the plan asks for."""
        hits = [part for part in (*loads, *parts) if part.hit is not None]
        for part in hits:
            self._queues.remove(self._requests[part.request.id])
        moves = self._kv.admit(hits, loads, parts)
        for part in hits:
            self._start(self._requests[part.request.id], waits=part.hit is not None and part.hit.waits)
        if moves:
            self._ranks.send(*moves)
        if loads:
            self.complete_loads()  # a load ends at once if its host has no free block

    def _start(self, request: Request, *, waits: bool) -> None:
        """Add an admitted request to the running requests. `waits`: its KV is not loaded yet."""
        is_resumed, counts = request.was_admitted, self.counts
        counts.num_external_queries += request.num_tokens if self.config.cluster.host_blocks else 0
        request.admission = next(self._admissions)
        self._running.add(request)
        if is_resumed:
            self._policy.resumed(request)
        else:
            request.metrics.scheduled_s = self._clock.now()
            is_query = request.leader is None and request.enable_prefix_caching
            counts.num_prefix_queries += request.num_prompt if is_query else 0
        if not waits:
            self._count_hit(request)

    def _count_hit(self, request: Request) -> None:
        """Count the cached or loaded tokens of a request that has computed nothing yet."""
        if request.metrics.num_computed_tokens:
            return
        before, num_cached = request.metrics.num_cached_tokens, min(request.num_computed, request.num_prompt)
        self.counts.num_prefix_hits += max(0, num_cached - before) if request.leader is None else 0
        request.metrics.num_cached_tokens = num_cached

    def moved(self, moves: Sequence[MoveKV]) -> None:
        """Continue after a completed move: clear blocks, send further moves, and resume loaded requests."""
        self.free()
        if moves:
            self._ranks.send(*moves)
        if self._kv.swaps is not None:
            self.complete_loads()

    def complete_loads(self) -> None:
        """Resume the requests whose loads are complete."""
        for request in self._kv.complete_loads():
            self._running.changed(request.group, (request.id,))
            self._count_hit(request)
            if request.finish_reason is not None:
                self.drop(request)

    def advance_transfers(self) -> bool:
        """Send pending KV, and hand over requests whose KV has arrived. Return whether there were any."""
        if not self._kv.transfers_changed:
            return False
        self._ranks.send(*self._kv.pending_transfers())
        if not (arrived := self._kv.complete_transfers()):
            return False
        for request in arrived:
            self._running.regroup(request)
        self._ranks.send(*self._kv.pending_transfers())  # with the freed backends
        return True

    # ---------------------------------------------------------------- steps

    def begin(self, batch: Sequence[ScheduledPart], *, offloads: bool) -> None:
        """Emit a step with these parts. `offloads`: see `Plan.offloads`."""
        number, requests, kv = self._ranks.number(), self._requests, self._kv
        moving = (part for part in batch if part.moves or (part.hit and part.hit.copies_last))
        rebalances = tuple([kv.rebalance(requests[part.request.id], part) for part in moving])
        parts = tuple([self._part(scheduled) for scheduled in batch])
        streams = kv.streams(parts, offloads=offloads)
        forward = Forward(number=number, parts=parts, rebalances=rebalances, streams=streams)
        self._queues.begin(forward, self._clock.now())
        self._ranks.send(forward)

    def _part(self, scheduled: ScheduledPart) -> Part:
        request = self._requests[scheduled.request.id]
        hosted: tuple[int, ...] = ()
        if request.hosted:
            from longspan.core.hosts import divide_among_hosts  # noqa: PLC0415 - few requests are on hosts

            hosted = divide_among_hosts(request.hosted, list(map(self.config.cluster.host_pool, scheduled.group)))
        part = request.make_part(scheduled, self.config.eos_token_ids, hosted)
        self._running.regroup(request)
        if part.sample is not None:
            if request.targets:
                self._running.pause(request)
            else:
                self._expect_token(request)
        return part

    def _expect_token(self, request: Request) -> None:
        """Allow a step for the token being sampled, unless it is the last, or the first with other rotary factors."""
        num_tokens = request.num_scheduled + 1
        continues = num_tokens - request.num_prompt < request.max_tokens
        if continues and self.config.rope_length(num_tokens) == request.rope_length:
            request.num_tokens = num_tokens

    def complete(self, forward: Forward, done: Completion) -> list[Request]:
        """Take the completion of a step. Return the requests that got a token or failed."""
        self._queues.end(forward, self._clock.now())
        if slots := self._kv.computed(forward):
            self.free(slots=slots)
        failed: list[Request] = []
        for part in forward.parts:
            request = self._requests[part.request_id]
            request.take_part(part)
            is_finite = request.id not in done.non_finite
            self._kv.publish(request, part.start, is_finite=is_finite)
            if not is_finite and request.finish_reason is None:
                self.finish(request, request.fail("non_finite", _NON_FINITE % (part.start, part.stop - 1)))
                failed.append(request)
            elif request.finish_reason is not None and not request.in_flight:
                self.drop(request)
        for arrived in () if self._kv.swaps is None else self._kv.swaps.computed(forward, done.non_finite):
            self.moved(self._kv.moved(arrived) or [])
        for scored in done.scored:
            if (live := self._queues.live(scored.request_id)) is not None:
                live.take_scores(scored)
        return [
            *failed,
            *(self._append(token) for token in done.sampled if self._queues.live(token.request_id) is not None),
        ]

    def _append(self, sampled: Sampled) -> Request:
        request, config = self._requests[sampled.request_id], self.config
        if not sampled.error:
            if not request.output:
                num_tokens = dict(zip(request.group, request.owners.counts(request.num_computed), strict=True))
                request.metrics.kv_tokens_per_instance = [num_tokens.get(i, 0) for i in config.cluster.instances]
            request.metrics.record_token(self._clock.now())
        reason = request.take_token(sampled, config.eos_token_ids)
        if reason is not None:
            self.finish(request, reason)
        elif config.rope_length(request.num_known) != request.rope_length:
            self.retract(request)
            request.pin_rope_length(config.rope_length(request.num_known))
        return request

    # ---------------------------------------------------------------- preemption and end

    def preempt(self, request: Request) -> None:
        """Free the blocks of a request for other requests, and count the preemption."""
        request.metrics.num_preemptions += 1
        self.counts.num_preemptions += 1
        self.retract(request)

    def free_for_decodes(self) -> None:
        """Free and clear blocks of transfers, before decoding requests that lack blocks get them."""
        self._kv.free_for_decodes(self._queues.occupancy.full)
        self.free()

    def break_deadlock(self) -> bool:
        """Release offloaded blocks, or preempt a request that waits for decode blocks. Return whether it could."""
        if self._waiting and self._kv.release_offloaded():
            return True
        if (blocked := self._kv.latest_blocked()) is None:
            return False
        self.preempt(blocked)
        self._ranks.send(*self._kv.pending_transfers())  # before other requests allocate the blocks
        return True

    def retract(self, request: Request) -> None:
        """Free the blocks of a request, which stay cached. The request waits again, unless it has ended."""
        assert not request.in_flight, "a step in flight names the request"
        continues = request.finish_reason is None
        if continues:
            self._policy.preempted(request)
            self._queues.remove(request)
        moves, slots = self._kv.offload_and_free(request)
        self._ranks.send(*moves)
        self.free(request.id, slots=slots)
        if continues:
            self._waiting.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. See `Engine.finish`."""
        if request.finish_reason is None:
            request.metrics.finished_s = self._clock.now()
            self._policy.ended(request)
            self._queues.remove(request)
            self._kv.end(request)
            self.free()  # before another request gets the blocks that its transfers release
            if self._ranks.observer is not None:
                self._ranks.observer.ended(request, reason)
        if request.finish_reason is None or (request.finish_reason, reason) == ("length", "stop"):
            request.finish_reason = reason
        if not request.in_flight:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Forget a request that has ended and that no step names. Do nothing if it was dropped before."""
        if request.id not in self._requests:
            return
        if request.group:
            self.retract(request)
        del self._requests[request.id]

    def free(self, *request_ids: int, slots: Iterable[tuple[BlockRef, int]] = ()) -> None:
        """Make ranks forget requests, and clear slots whose KV is not finite, see `KvManager.clearable`."""
        self._ranks.free(*request_ids, cleared=self._kv.clearable(slots))

    def lose(self) -> None:
        """Return all unfinished requests to the waiting queue. Workers are lost, but KV on hosts and disks stays."""
        requests = list(self._requests.values())
        lost = self._queues.lose_steps(self._clock.now())
        for request in lost:
            if request.group:
                self._policy.preempted(request)
            self._queues.remove(request)
        self._kv.restart(requests)
        for request in lost:
            self._waiting.add(request)
