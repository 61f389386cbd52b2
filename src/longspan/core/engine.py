"""The engine loop: asks the policy, emits numbered steps, and turns completions into tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import get_args

from longspan.core.account import KvAccount
from longspan.core.config import EngineConfig
from longspan.core.exchange import shown_names
from longspan.core.parts import make_part, promise_token, take_part, take_scores, take_token
from longspan.core.protocols import Clock, EnginePolicy, Executor, Load
from longspan.core.queues import Running, Waiting
from longspan.core.request import FinishReason, Request, RequestMetrics, check_length
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Completion, Forward, Free, Link, MoveKV, Part, Sampled
from longspan.core.steps_in_flight import Occupancy, StepOrder
from longspan.core.transfers import Handshakes, Transfers
from longspan.core.view import ClusterView, ScheduledPart

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """Owns the requests and the KV account. One thread drives it through `step`.

    Attributes:
        num_preemptions: how often a request gave up its KV to others.
        num_prefix_queries, num_prefix_hits: tokens of prompts looked up, and found, in the prefix cache.

    Raises:
        ValueError: when `max_model_len` is more than the policy can place.
    """

    def __init__(self, *, policy: EnginePolicy, executor: Executor, clock: Clock, config: EngineConfig) -> None:
        config.check_capacity(policy)
        self.config = config
        self._running = Running(config.cluster.num_instances)
        self.account, self._transfers = self._empty()
        self.bytes_sent: Counter[tuple[str, Link]] = Counter(dict.fromkeys(product(shown_names(), get_args(Link)), 0))
        self.num_preemptions = self.num_prefix_queries = self.num_prefix_hits = 0
        self._policy, self._executor, self._clock = policy, executor, clock
        self._requests: dict[int, Request] = {}
        self._waiting = Waiting()
        self._steps = StepOrder()
        self._occupancy = Occupancy(config.most_steps_of_instances)
        self._next_step = 0
        self._next_request = 0
        self._num_admissions = 0
        self._seeds = random.Random(config.seed)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        leader: Request | None = None,
        grammar: str = "",
    ) -> Request:
        """Queues a request. For `params.n` outputs, add the first and then the others with it as their `leader`.
        `grammar` is what `params.structured_outputs` asks for, see `Sampling`.

        Raises:
            ValueError: when the prompt is empty, leaves no room for one output token, or is refused by the policy.
        """
        check_length(len(prompt), self.config.max_model_len)
        self._policy.check(len(prompt))
        assert (leader is None) == (choice == 0), "the first choice leads the others"
        room = self.config.max_model_len - len(prompt)
        request = Request(
            id=self._next_request,
            prompt=prompt,
            params=params,
            seed=leader.seed if leader else self._seeds.getrandbits(63) if params.seed is None else params.seed,
            choice=choice,
            leader=leader,
            grammar=grammar,
            block_size=self.config.block_size,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            metrics=RequestMetrics(arrival_s=self._clock.now()),
        )
        if request.scores_prompt:
            request.prompt_logprobs = [None] * len(prompt)
        self._next_request += 1
        request.pin_rope_length(self.config.rope_length(len(prompt)))
        self._requests[request.id] = request
        self._waiting.add(request)
        return request

    def _empty(self) -> tuple[KvAccount, Transfers]:
        """Makes empty pools, with no KV on its way."""
        account, backends = self.config.empty_account(), self.config.cluster.backends
        max_num_seqs = self.config.limits.max_num_seqs
        handshakes = Handshakes(account, self._running, backends=backends, max_num_seqs=max_num_seqs)
        return account, Transfers(account, handshakes, self._number)

    @property
    def has_unfinished(self) -> bool:
        """A request still runs or waits, or KV is still on its way."""
        return bool(self._requests) or self._transfers.in_flight

    def load(self) -> Load:
        """Measures how much there is to do, and how busy the instances have been."""
        waiting = self._waiting.able()
        pools = [self.account.pool(i) for i in self.config.cluster.instances]
        return Load(
            num_running=len(self._running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(request.num_known for request in waiting),
            used_blocks=[pool.num_blocks - pool.num_free for pool in pools],
            busy_s=self._occupancy.busy_s(self._clock.now()),
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request from outside (a stop string, a client gone); its blocks are freed when no step names it.

        One that has ended keeps its reason, except that a stop string found in the last token counts before its length.
        """
        if request.finish_reason is None:
            request.metrics.finished_s = self._clock.now()
            self._leave(request)
            self._transfers.give_up(request)
        if request.finish_reason is None or (request.finish_reason, reason) == ("length", "stop"):
            request.finish_reason = reason
        if not request.in_flight and request.id in self._requests:
            self._drop(request)

    def set_policy(self, policy: EnginePolicy) -> None:
        """Lets another policy decide from now on; only between requests, whose groups and layouts are the old one's.

        Raises:
            RuntimeError: when some are unfinished.
        """
        self._check_idle("the policy cannot change")
        self._policy = policy

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of finished requests.

        Raises:
            RuntimeError: when some are unfinished.
        """
        self._check_idle("KV cannot be forgotten")
        self.account, self._transfers = self._empty()

    def _check_idle(self, what: str) -> None:
        if self._requests:
            raise RuntimeError(f"{what} while {len(self._requests)} requests are unfinished")
        if self._transfers.in_flight:
            raise RuntimeError(f"{what} while KV is on its way: call step until has_unfinished is false")

    def restart(self, executor: Executor) -> None:
        """Goes on with new workers, which remember nothing: every request waits again and computes anew what it had."""
        self._executor = executor
        self.account, self._transfers = self._empty()
        for forward in self._steps.clear():
            self._end(forward)
        for request in list(self._requests.values()):
            if request.finish_reason is None:
                self._leave(request)
                request.lose_kv()
                self._waiting.add(request)
            else:
                del self._requests[request.id]

    def step(self, timeout_s: float | None = None) -> list[Request]:
        """Emits what the policy plans, takes the next completion, and returns the requests that got a token.

        Waits for it at most `timeout_s`; None waits as long as it takes.
        """
        self.emit()
        if not (self._steps or self._transfers.in_flight):
            assert not self._requests, "the policy leaves requests waiting on an idle cluster"
            return []
        if not self._steps.has_ready:
            for done in self._executor.poll(timeout_s):
                self._take(done)
        return self._complete(*self._steps.take()) if self._steps.has_ready else []

    def emit(self) -> None:
        """Emits what the policy plans, until no instance can be given another step; `step` does so first."""
        self._hand_over()
        while True:
            num_preemptions = self.num_preemptions
            if self._can_emit and (batches := self._plan()):
                self._emit_batches(batches)
            elif num_preemptions == self.num_preemptions or not self._hand_over():
                return

    def _hand_over(self) -> bool:
        """Sends KV that waits and can be sent, and tells whether a request goes on elsewhere, where all has arrived."""
        if not self._transfers.dirty:
            return False
        self._send_waiting()
        if not (arrived := self._transfers.arrived()):
            return False
        for request, target, blocks in arrived:
            self.account.hand_over(request, blocks)
            request.move_to(target)
            self._running.regroup(request)
        self._send_waiting()  # their backends are free for others
        return True

    def _send_waiting(self) -> None:
        for move in self._transfers.by_themselves():
            self._executor.submit(move)

    def _emit_batches(self, batches: Sequence[Sequence[ScheduledPart]]) -> None:
        scheduled_parts = [scheduled for batch in batches for scheduled in batch]
        for scheduled in scheduled_parts:
            if scheduled.hit is not None:
                self._admit(scheduled)
        for scheduled in scheduled_parts:
            if scheduled.block_owners:
                self.account.extend(self._requests[scheduled.request.id], scheduled.block_owners)
        if any(scheduled.target is not None for scheduled in scheduled_parts):
            self._send_waiting()  # what is cached can go before the rest is computed
        for batch in batches:
            forward = self._forward(batch)
            self._steps.send(forward)
            self._begin(forward)
            self._executor.submit(forward)

    def _forward(self, batch: Sequence[ScheduledPart]) -> Forward:
        number, rebalances = (
            self._number(),
            tuple([self._rebalance(scheduled) for scheduled in batch if scheduled.moves]),
        )
        parts = tuple([self._part(scheduled) for scheduled in batch])
        return Forward(number=number, parts=parts, rebalances=rebalances, streams=self._transfers.streams(parts))

    def _rebalance(self, scheduled: ScheduledPart) -> MoveKV:
        """Moves blocks of a request to other members, from this step on."""
        request = self._requests[scheduled.request.id]
        request.sent_blocks = request.sent_output = 0
        copies = self.account.relocate(request, scheduled.moves)
        return MoveKV(number=self._number(), request_id=request.id, copies=copies)

    def _plan(self) -> tuple[tuple[ScheduledPart, ...], ...]:
        """Returns the policy's batches, after its preemptions; a plan that only preempts is followed by another at
        once.
        """
        while True:
            self._transfers.make_room(self._occupancy.full)
            plan = self._policy.plan(self._view())
            for preempted in plan.preempted:
                request = self._requests[preempted.id]
                request.metrics.num_preemptions += 1
                self.num_preemptions += 1
                self._retract(request)
            if plan.batches or not plan.preempted:
                return plan.batches

    @property
    def _can_emit(self) -> bool:
        """A step could be planned: there are a request for it and an instance with room."""
        if self._occupancy.all_full:
            return False
        return bool(self._waiting) or not self._occupancy.full.issuperset(self._running.occupied)

    @property
    def has_ready(self) -> bool:
        """The next `step` takes a completion that is there already."""
        return self._steps.has_ready

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV and could run if there were room."""
        return len(self._waiting.able())

    def _leave(self, request: Request) -> None:
        """Takes the request out of the queues: it neither waits nor runs."""
        if request.group:
            self._running.leave(request)
        else:
            self._waiting.remove(request)

    def _view(self) -> ClusterView:
        return ClusterView(
            cluster=self.config.cluster,
            max_num_batched_tokens=self.config.limits.max_num_batched_tokens,
            max_num_seqs=self.config.limits.max_num_seqs,
            waiting=self._waiting.able(),
            running=self._running,
            kv=self.account,
            busy=frozenset(self._occupancy.busy),
            full=frozenset(self._occupancy.full),
            now_s=self._clock.now(),
            promised=self._transfers.promised,
            arrivals=self._waiting.changes,
        )

    def _admit(self, scheduled: ScheduledPart) -> None:
        request, hit = self._requests[scheduled.request.id], scheduled.hit
        assert hit is not None and hit.num_tokens == scheduled.start, "an admitted request starts behind its prefix"
        self._leave(request)
        self.account.take(request, hit)
        request.group = scheduled.group
        self._num_admissions += 1
        request.admission = self._num_admissions
        self._running.join(request)
        if request.metrics.scheduled_s is None:
            request.metrics.scheduled_s = self._clock.now()
            if request.leader is None:
                self.num_prefix_queries += request.num_prompt
                self.num_prefix_hits += min(hit.num_tokens, request.num_prompt)
        request.num_computed = request.num_scheduled = hit.num_tokens
        if scheduled.target is not None:
            self._transfers.shake(request, scheduled.target)
        if not request.metrics.num_computed_tokens:
            request.metrics.num_cached_tokens = min(hit.num_tokens, request.num_prompt)

    def _part(self, scheduled: ScheduledPart) -> Part:
        request = self._requests[scheduled.request.id]
        part = make_part(request, scheduled, self.config.eos_token_ids)
        self._running.regroup(request)
        if part.sample is not None:
            if request.target is None:
                promise_token(request, self.config)
            else:
                self._running.set_aside(request)
        return part

    def _begin(self, forward: Forward) -> None:
        instances = forward.instances
        self._occupancy.begin(instances, self._clock.now())
        for part in forward.parts:
            request = self._requests[part.request_id]
            request.num_steps += 1
            assert request.num_steps <= self.config.max_steps_in_flight, "a step more than a request may be in"
        self._running.changed(instances, [part.request_id for part in forward.parts])

    def _end(self, forward: Forward) -> None:
        instances = forward.instances
        self._occupancy.end(instances, self._clock.now())
        for part in forward.parts:
            self._requests[part.request_id].num_steps -= 1
        self._running.changed(instances, [part.request_id for part in forward.parts])

    def _take(self, done: Completion) -> None:
        """Moves are done as they come, Forwards in their order."""
        if not self._transfers.is_move(done.number):
            self._steps.complete(done)
            return
        self._count_bytes(done)
        self._transfers.moved(done.number)

    def _count_bytes(self, done: Completion) -> None:
        for what, number in done.bytes_sent.items():
            self.bytes_sent[what] += number

    def _complete(self, forward: Forward, done: Completion) -> list[Request]:
        self._end(forward)
        self._count_bytes(done)
        self._transfers.computed(forward)
        for move in forward.rebalances:
            self.account.complete_copies(self._requests[move.request_id], move.copies)
        for part in forward.parts:
            request = self._requests[part.request_id]
            take_part(request, part)
            self.account.publish(request, part.start)
            if request.finish_reason is not None and not request.in_flight:
                self._drop(request)
        for scored in done.scored:
            if self._is_live(scored.request_id):
                take_scores(self._requests[scored.request_id], scored)
        return [self._append(sampled) for sampled in done.sampled if self._is_live(sampled.request_id)]

    def _is_live(self, request_id: int) -> bool:
        """Tells whether anybody wants its tokens; what a request samples after its end is thrown away."""
        request = self._requests.get(request_id)
        return request is not None and request.finish_reason is None

    def _append(self, sampled: Sampled) -> Request:
        request = self._requests[sampled.request_id]
        reason = take_token(request, sampled, self.config, self._clock.now())
        if reason is not None:
            self.finish(request, reason)
        elif self.config.rope_length(request.num_known) != request.rope_length:
            self._retract(request)
            request.pin_rope_length(self.config.rope_length(request.num_known))
        return request

    def _retract(self, request: Request) -> None:
        """The request gives up its KV and waits again; what it computed is found again by its prefix keys."""
        assert not request.in_flight, "a step in flight names the request"
        self._transfers.give_up(request)
        self.account.release(request)
        self._executor.submit(Free(number=self._number(), request_ids=(request.id,)))
        goes_on = request.finish_reason is None
        if goes_on:
            self._leave(request)
        request.lose_kv()
        if goes_on:
            self._waiting.add(request)

    def _drop(self, request: Request) -> None:
        if request.group:
            self._retract(request)
        del self._requests[request.id]

    def _number(self) -> int:
        self._next_step += 1
        return self._next_step
