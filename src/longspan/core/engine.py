"""The engine loop: asks the policy, emits numbered steps, and turns completions into tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Protocol, get_args

from longspan.core.blocks import BlockRef
from longspan.core.config import EngineConfig
from longspan.core.exchange import shown_names
from longspan.core.kv.manager import KvManager
from longspan.core.policy import Policy
from longspan.core.queues import Queues
from longspan.core.regrouping import Change, Regrouping, bounded
from longspan.core.request import FinishReason, Request, RequestMetrics, check_length
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Completion, Content, Executor, Forward, Free, Link, MoveKV, Part, Sampled
from longspan.core.transitions import Transition
from longspan.core.view import ClusterView, Plan, ScheduledPart

_NON_FINITE = "the model computed NaN or infinity for positions %d to %d: check its weights and its dtype"


class Clock(Protocol):
    """Time in seconds from any origin, which never goes back."""

    def now(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work that the engine has to do.

    Attributes:
        num_waiting: requests that could run if there were room.
        used_blocks: KV blocks that requests hold, per instance.
        host_blocks, disk_blocks: KV blocks that have contents, or are about to, in the pools of hosts and of disks.
        busy_s: seconds since the engine was made in which each instance had a step to run.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    used_blocks: list[int]
    host_blocks: int
    disk_blocks: int
    busy_s: list[float]


class Engine:
    """Owns the requests and the KV account. One thread drives it through `step`.

    Attributes:
        num_preemptions: how often a request gave up its KV to others.
        num_prefix_queries, num_prefix_hits: tokens of prompts looked up, and found, in the prefix cache.
        num_external_queries: tokens that are looked up on hosts, too.
        kv: all blocks of KV, and what is on its way.

    Args:
        saved: what each disk has from an earlier run, by block, the least recently used first.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        executor: Executor,
        clock: Clock,
        config: EngineConfig,
        saved: Sequence[Iterable[tuple[int, Content]]] = (),
    ) -> None:
        self.config = config
        self._executor, self._clock = executor, clock
        self._queues = queues = Queues(config.cluster, config.max_steps_in_flight)
        self._requests, self._waiting, self._running = queues.requests, queues.waiting, queues.running
        self._steps, self._occupancy = queues.steps, queues.occupancy
        self._number = count(1).__next__  # numbers steps and moves
        self.kv = KvManager(config, self._running, self._number)
        for pool, contents in zip(config.cluster.disk_pools, saved, strict=False):
            self.kv.pool(pool).restore(contents)
        self.bytes_sent: Counter[tuple[str, Link]] = Counter(dict.fromkeys(product(shown_names(), get_args(Link)), 0))
        self.num_preemptions = self.num_prefix_queries = self.num_prefix_hits = self.num_external_queries = 0
        self._regrouping = Regrouping()
        self._request_ids, self._admissions = count(), count(1)
        self._seeds = random.Random(config.seed)
        self.set_policy(policy)

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that is empty, leaves no room for an output, or is refused by the policy."""
        policy, config = self._regrouping.target(self._policy, self.config)
        check_length(num_prompt_tokens, config.longest(policy))
        policy.check_prompt(num_prompt_tokens)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        leader: Request | None = None,
        grammar: str = "",
        cache_salt: str = "",
    ) -> Request:
        """Queues a request. For `params.n` outputs, add the first and then the others with it as their `leader`.
        `grammar` is what `params.structured_outputs` asks for, see `Sampling`. KV is shared with requests of the same
        `cache_salt` only. During a change of clusters, the bounds and the settings are those after the change.

        Raises:
            ValueError: see `check`.
        """
        self.check(len(prompt))
        assert (leader is None) == (choice == 0), "the first choice leads the others"
        policy, config = self._regrouping.target(self._policy, self.config)
        room = config.longest(policy) - len(prompt)
        request = Request(
            id=next(self._request_ids),
            prompt=prompt,
            params=params,
            seed=leader.seed if leader else self._seeds.getrandbits(63) if params.seed is None else params.seed,
            choice=choice,
            leader=leader,
            grammar=grammar,
            sparse=leader.sparse if leader else config.sparse(policy, len(prompt)),
            cache_salt=leader.cache_salt if leader else cache_salt,
            block_size=self.config.block_size,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            metrics=RequestMetrics(arrival_s=self._clock.now()),
        )
        request.pin_rope_length(self.config.rope_length(len(prompt)))
        self._requests[request.id] = request
        self._waiting.add(request)
        self._policy.arrived(request)
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether a request runs or waits, KV is in flight, or clusters change."""
        return bool(self._requests) or self._is_moving or self.is_regrouping

    @property
    def _is_moving(self) -> bool:
        return self.kv.is_moving or self._is_settling

    @property
    def _is_settling(self) -> bool:
        return self.kv.is_copying or self._regrouping.state == "switching"

    @property
    def is_regrouping(self) -> bool:
        """Whether a change of clusters was asked for and is not complete."""
        return not self._regrouping.is_running

    @property
    def transitions(self) -> list[Transition]:
        """The changes of clusters so far."""
        return self._regrouping.transitions

    @property
    def phase(self) -> str:
        """The phase of an engine with phases: prefill, decode or transition. Empty without phases."""
        return self._regrouping.phase(self.config)

    def load(self) -> Load:
        waiting, cluster = self._waiting.able(), self.config.cluster
        hosts, disks = ([*map(self.kv.pool, pools)] for pools in (cluster.host_pools, cluster.disk_pools))
        return Load(
            num_running=len(self._running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(request.num_known for request in waiting),
            used_blocks=[pool.num_blocks - pool.num_free for pool in map(self.kv.pool, cluster.instances)],
            host_blocks=sum(pool.num_blocks - pool.num_blank for pool in hosts),
            disk_blocks=sum(pool.num_blocks - pool.num_blank for pool in disks),
            busy_s=self._occupancy.busy_s(self._clock.now()),
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request from outside (a stop string, a client gone); its blocks are freed when no step names it.

        One that has ended keeps its reason, except that a stop string found in the last token counts before its length.
        """
        if request.finish_reason is None:
            request.metrics.finished_s = self._clock.now()
            self._policy.ended(request)
            self._queues.leave(request)
            self.kv.end(request)
        if request.finish_reason is None or (request.finish_reason, reason) == ("length", "stop"):
            request.finish_reason = reason
        if not request.in_flight and request.id in self._requests:
            self._drop(request)

    def set_policy(self, policy: Policy) -> None:
        """Lets another policy decide from now on; only between requests, since groups and layouts are the old one's."""
        self._check_idle("the policy cannot change")
        if self.is_regrouping:
            raise RuntimeError("the policy cannot change while clusters do: call step until they have")
        self._adopt(policy)

    def _adopt(self, policy: Policy) -> None:
        self._policy = policy
        for request in self._requests.values():
            if request.finish_reason is None:
                policy.arrived(request)

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of finished requests; raises RuntimeError when some are unfinished."""
        self._check_idle("KV cannot be forgotten")
        self.kv.restart((), keep=False)

    def _check_idle(self, what: str) -> None:
        if self._requests:
            raise RuntimeError(f"{what} while {len(self._requests)} requests are unfinished")
        if self._is_moving:
            raise RuntimeError(f"{what} while KV is on its way: call step until has_unfinished is false")

    def settle(self, timeout_s: float) -> bool:
        """Waits until hosts and disks have what is on its way there, and ranks are where they go; emits no step.

        Returns whether they are.
        """
        until_s = self._clock.now() + timeout_s
        while self._is_settling and (left_s := until_s - self._clock.now()) > 0:
            for done in self._executor.poll(left_s):
                self._take(done)
        return not self._is_settling

    def restart(self, executor: Executor, change: Change | None = None) -> None:
        """Replace lost workers. The new ones have the places of `change`, with a policy, or those before the loss.

        Every request waits again and computes anew the KV that it had on devices. Contents of hosts and disks stay.
        A request that exceeds the capacity of the new cluster ends with an error.
        """
        self._executor, everyone = executor, list(self._requests.values())
        lost = self._queues.lose_steps(self._clock.now())
        for request in lost:
            if request.group:
                self._policy.preempted(request)
            self._queues.leave(request)
        self.kv.restart(everyone)
        for request in lost:
            self._waiting.add(request)
        self._regrouping.restart(change, self._clock.now())
        if change is not None:
            self._resume(change)

    def reshard(self, change: Change) -> None:
        """Move all ranks to their places in another cluster, once no step is in flight. Requests go on there.

        KV is offloaded from devices to hosts meanwhile, up to the size of their pools. The rest is computed anew.

        Raises:
            RuntimeError: another change is under way.
        """
        self._regrouping.ask(change, self._clock.now())

    def step(self, timeout_s: float | None = None) -> list[Request]:
        """Emits what the policy plans, takes the next completion, and returns the requests that got a token or failed.

        Waits for it at most `timeout_s`; None waits as long as it takes.
        """
        self.emit()
        if not (self._steps or self._is_moving):
            assert not self._requests, "the policy leaves requests waiting on an idle cluster"
            return []
        if not self._steps.has_ready:
            for done in self._executor.poll(timeout_s):
                self._take(done)
        return self._complete(*self._steps.take()) if self._steps.has_ready else []

    def emit(self) -> None:
        """Emits what the policy plans, until no instance can be given another step."""
        self._hand_over()
        while not self.is_regrouping:
            num_preemptions = self.num_preemptions
            if self._queues.can_emit and self._emit_plan(self._plan()):
                continue
            # A plan that only preempted may have freed backends, or room for KV that waits.
            has_preempted = self.num_preemptions > num_preemptions
            if not self.is_regrouping and not ((has_preempted and self._hand_over()) or self._relents()):
                return
        if self._regrouping.state == "draining":
            self._drain()

    def _drain(self) -> None:
        """Preempt requests as their steps complete. Send a Reshard once devices hold no KV in use."""
        for request in self._queues.parkable:
            self._retract(request)
        computes, moves = bool(self._steps or self._running), not self.kv.can_regroup
        reshard = self._regrouping.drain(self._number, self._clock.now(), computes=computes, moves=moves)
        if reshard is not None:
            self._executor.submit(reshard)

    def _resume(self, change: Change) -> None:
        """Serve on the cluster of a change, whose ranks have their places."""
        self.config = change.config(self.config)
        self._queues.replace(self.config.cluster)
        self.kv.regroup(self.config.cluster)
        if change.policy is not None:
            self._adopt(change.policy)
            for request in bounded(self._queues.unfinished, self.config.longest(change.policy)):
                self.finish(request, "error")
        self._regrouping.resumed(self._clock.now())

    def _relents(self) -> bool:
        """Frees hosts of what waiting requests gave up, if nothing else could happen; or else preempts a request that
        waits for room on the instance that it goes to, where others wait for room here.
        """
        if self._steps or self._is_moving:
            return False
        if self._waiting and self.kv.relent():
            return True
        if (stuck := self.kv.stuck()) is None:
            return False
        self._preempt(stuck)
        self._send_waiting()  # before somebody else has the room
        return True

    def _preempt(self, request: Request) -> None:
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self._retract(request)

    def _hand_over(self) -> bool:
        """Sends pending KV, and hands over requests whose KV has arrived; returns whether there were any."""
        if not self.kv.has_news:
            return False
        self._send_waiting()
        if not (arrived := self.kv.hand_over()):
            return False
        for request in arrived:
            self._running.regroup(request)
        self._send_waiting()  # their backends are free for others
        return True

    def _send_waiting(self) -> None:
        self._submit(self.kv.transfers())

    def _submit(self, moves: Sequence[MoveKV]) -> None:
        for move in moves:
            self._executor.submit(move)

    def _emit_plan(self, plan: Plan) -> bool:
        """Admits requests and emits steps; returns whether there were any."""
        parts = [scheduled for batch in plan.batches for scheduled in batch]
        for scheduled in (*plan.loads, *parts):
            if scheduled.hit is not None:
                self._admit(scheduled)
        for scheduled in plan.loads:
            self._submit(self.kv.load(self._requests[scheduled.request.id], scheduled))
        for scheduled in parts:
            if scheduled.hit is not None or scheduled.block_owners:
                self.kv.extend(self._requests[scheduled.request.id], scheduled)
        if plan.loads:
            self._go_on()  # a disk may have had no room on its host
        if any(scheduled.targets for scheduled in parts):
            self._send_waiting()  # what is cached can go before the rest is computed
        for batch in plan.batches:
            forward = self._forward(batch)
            self._queues.begin(forward, self._clock.now())
            self._executor.submit(forward)
        return bool(parts or plan.loads)

    def _go_on(self) -> None:
        """Lets requests compute whose KV has been loaded."""
        for request in self.kv.loaded():
            self._running.changed(request.group, (request.id,))
            self._count_hit(request)
            if request.finish_reason is not None:
                self._drop(request)

    def _forward(self, batch: Sequence[ScheduledPart]) -> Forward:
        number, moving = self._number(), (one for one in batch if one.moves or (one.hit and one.hit.copies_last))
        rebalances = tuple([self.kv.rebalance(self._requests[one.request.id], one) for one in moving])
        parts = tuple([self._part(scheduled) for scheduled in batch])
        return Forward(number=number, parts=parts, rebalances=rebalances, streams=self.kv.streams(parts))

    def _plan(self) -> Plan:
        """Returns what the policy plans, after its preemptions; after a plan that only preempts, asks for another.

        So it does when the blocks of those who were preempted are free only after a copy.
        """
        while True:
            self.kv.make_room(self._occupancy.full)
            if self._policy.reads_hosts:
                self._submit(self.kv.spill(self._waiting.able(self._policy.admits(self.config.cluster))))
            plan = self._policy.plan(self._view())
            for parked in plan.parked:
                self._retract(self._requests[parked.id])
            if plan.reshard is not None:
                assert not plan.batches, "nothing is planned beside a change of clusters"
                self._regrouping.ask(Change(cluster=plan.reshard, turns=self.config.turns), self._clock.now())
                return Plan()
            for preempted in plan.preempted:
                self._preempt(self._requests[preempted.id])
            if not plan.preempted or (plan.batches and not self.kv.copies_on_devices):
                return plan

    @property
    def has_ready(self) -> bool:
        """Whether the next `step` takes a completion that is there already."""
        return self._steps.has_ready

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV and could run if there were room."""
        return len(self._waiting.able())

    def _view(self) -> ClusterView:
        waiting, admits = self._waiting, self._policy.admits(self.config.cluster)
        return ClusterView(
            cluster=self.config.cluster,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            waiting=waiting.able(),
            startable=self.kv.startable(waiting.able(admits)),
            running=self._running,
            kv=self.kv.view,
            busy=frozenset(self._occupancy.busy),
            full=frozenset(self._occupancy.full),
            now_s=self._clock.now(),
            expected=self.kv.expected,
            queue_changes=waiting.changes + self.kv.counts.num_offloaded,
            max_steps_in_flight=self.config.max_steps_in_flight,
            reads_hosts=self._policy.reads_hosts and bool(self.config.cluster.host_blocks),
        )

    def _admit(self, scheduled: ScheduledPart) -> None:
        request, hit = self._requests[scheduled.request.id], scheduled.hit
        assert hit is not None and hit.num_tokens == scheduled.start, "an admitted request starts behind its prefix"
        is_resumed = request.was_admitted
        self._queues.leave(request)
        self.kv.take(request, scheduled)
        self.num_external_queries += request.num_tokens if self.config.cluster.host_blocks else 0
        request.admission = next(self._admissions)
        self._running.join(request)
        if is_resumed:
            self._policy.resumed(request)
        if request.metrics.scheduled_s is None:
            request.metrics.scheduled_s = self._clock.now()
            self.num_prefix_queries += request.num_prompt if request.leader is None else 0
        if not hit.waits:
            self._count_hit(request)

    def _count_hit(self, request: Request) -> None:
        """Counts what a request had cached, or has loaded, that has computed nothing yet."""
        if request.metrics.num_computed_tokens:
            return
        before, found = request.metrics.num_cached_tokens, min(request.num_computed, request.num_prompt)
        self.num_prefix_hits += max(0, found - before) if request.leader is None else 0
        request.metrics.num_cached_tokens = found

    def _part(self, scheduled: ScheduledPart) -> Part:
        request = self._requests[scheduled.request.id]
        part = request.make_part(scheduled, self.config.eos_token_ids)
        self._running.regroup(request)
        if part.sample is not None:
            if request.targets:
                self._running.set_aside(request)
            else:
                self._promise_token(request)
        return part

    def _promise_token(self, request: Request) -> None:
        """Lets the token being sampled be scheduled, unless it is the last or the first with other rotary factors."""
        num_tokens = request.num_scheduled + 1
        goes_on = num_tokens - request.num_prompt < request.max_tokens
        if goes_on and self.config.rope_length(num_tokens) == request.rope_length:
            request.num_tokens = num_tokens

    def _take(self, done: Completion) -> None:
        """Takes a completion: of a move at once, of a Forward in the order of steps."""
        self.bytes_sent.update(done.bytes_sent)
        if (change := self._regrouping.complete(done, self._clock.now())) is not None:
            self._resume(change)
        elif (moves := self.kv.moved(done, self._requests)) is None:
            self._steps.complete(done)
        else:
            self._submit(moves)
            self._go_on()
            self._free()

    def _complete(self, forward: Forward, done: Completion) -> list[Request]:
        self._queues.end(forward, self._clock.now())
        self.kv.computed(forward)
        for move in forward.rebalances:
            self._free(slots=self.kv.account.complete_copies(self._requests[move.request_id], move.copies))
        failed: list[Request] = []
        for part in forward.parts:
            request = self._requests[part.request_id]
            request.take_part(part)
            if request.id in done.non_finite and request.non_finite_from is None:
                self.kv.account.withdraw(request, part.start)
                if request.finish_reason is None:
                    self.finish(request, request.fail("non_finite", _NON_FINITE % (part.start, part.stop - 1)))
                    failed.append(request)
            self.kv.account.publish(request, part.start)
            if request.finish_reason is not None and not request.in_flight and request.id in self._requests:
                self._drop(request)
        for scored in done.scored:
            if (live := self._queues.live(scored.request_id)) is not None:
                live.take_scores(scored)
        return [*failed, *(self._append(one) for one in done.sampled if self._queues.live(one.request_id) is not None)]

    def _append(self, sampled: Sampled) -> Request:
        request = self._requests[sampled.request_id]
        if not sampled.error:
            if not request.output:
                held = dict(zip(request.group, request.owners.counts(request.num_computed), strict=True))
                request.metrics.kv_tokens_per_instance = [held.get(i, 0) for i in self.config.cluster.instances]
            request.metrics.record_token(self._clock.now())
        reason = request.take_token(sampled, self.config.eos_token_ids)
        if reason is not None:
            self.finish(request, reason)
        elif self.config.rope_length(request.num_known) != request.rope_length:
            self._retract(request)
            request.pin_rope_length(self.config.rope_length(request.num_known))
        return request

    def _retract(self, request: Request) -> None:
        """Makes the request give up its KV and wait again; what it computed is found again by its prefix keys."""
        assert not request.in_flight, "a step in flight names the request"
        goes_on = request.finish_reason is None
        if goes_on:
            self._policy.preempted(request)
            self._queues.leave(request)
        known = (request.id,) if request.is_known else ()
        moves, slots = self.kv.give_up(request)
        self._submit(moves)
        self._free(*known, slots=slots)
        if goes_on:
            self._waiting.add(request)

    def _free(self, *request_ids: int, slots: Iterable[tuple[BlockRef, int]] = ()) -> None:
        """Lets ranks forget requests, and clear slots whose KV is not finite, see `KvManager.clearable`."""
        cleared = self.kv.clearable(slots)
        if request_ids or cleared:
            self._executor.submit(Free(number=self._number(), request_ids=request_ids, cleared=cleared))

    def _drop(self, request: Request) -> None:
        if request.group:
            self._retract(request)
        del self._requests[request.id]
