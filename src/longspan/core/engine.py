"""The engine loop: take completions, notify, plan, emit, complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

from longspan.core.config import EngineConfig, device_limit
from longspan.core.intake import Intake, RequestOptions
from longspan.core.kv.check import Watch
from longspan.core.kv.manager import KvManager
from longspan.core.lifecycle import Clock, Lifecycle
from longspan.core.policy import Policy
from longspan.core.queues import Queues
from longspan.core.ranks import Ranks
from longspan.core.request import FinishReason, Request
from longspan.core.sampling import SamplingParams
from longspan.core.stats import Counts, Load
from longspan.core.steps import Content, Executor
from longspan.core.view import ClusterView, Plan

if TYPE_CHECKING:  # types alone
    from longspan.core.observer import Observer
    from longspan.core.regrouping import Change, Regrouping
    from longspan.core.transitions import Transition


class Engine:
    """Emits the steps that the policy plans. One thread drives it through `step`.

    Attributes:
        counts, transitions: preemptions, prefix hits and bytes sent, and changes of clusters, so far.
        kv: all KV blocks, and the moves between them.
        watch: checks the account of KV blocks when the engine is idle.
        regrouping: the state of changes of clusters. None before the first one.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        executor: Executor,
        clock: Clock,
        config: EngineConfig,
        saved: Sequence[Iterable[tuple[int, Content]]] = (),
        seal_disks: bool = False,
    ) -> None:
        self.config, self._clock, self.watch, self._is_checked = config, clock, Watch(), False
        self._queues = Queues(config.cluster, config.max_steps_in_flight)
        self._ranks, self._intake = Ranks(executor), Intake(config.seed)
        self.kv = KvManager(config, self._queues, self._ranks.number, saved=saved, seal_disks=seal_disks)
        self._lifecycle = Lifecycle(config, self._queues, self.kv, self._ranks, clock)
        self.counts: Counts = self._lifecycle.counts
        self.regrouping: Regrouping | None = None
        self.set_policy(policy)

    # ---------------------------------------------------------------- requests

    def check(self, num_prompt_tokens: int) -> None:
        """Raise ValueError for a prompt that is empty, too long for any output, or refused by the policy."""
        self._intake.check(num_prompt_tokens, *self._target())

    def add(self, prompt: Sequence[int], params: SamplingParams, **options: Unpack[RequestOptions]) -> Request:
        """Queue a request. While clusters change, apply the limits and settings that hold after the change.

        Raises:
            ValueError: see `check`.
        """
        policy, config = self._target()
        request = self._intake.make(prompt, params, self._clock.now(), policy, config, **options)
        self._is_checked = False
        self._lifecycle.add(request)
        return request

    def _target(self) -> tuple[Policy, EngineConfig]:
        """Return the policy and the configuration for new requests, see `Regrouping.target`."""
        present = self._policy, self.config
        return present if self.regrouping is None else self.regrouping.target(*present)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: a stop string, or a client that is gone. It is dropped when no step names it.

        A request that has ended keeps its reason. Only a stop string in its last token replaces `length`.
        """
        self._lifecycle.finish(request, reason)

    # ---------------------------------------------------------------- state

    @property
    def has_unfinished(self) -> bool:
        """Whether a request runs or waits, KV is in flight, or clusters change."""
        return bool(self._queues.requests) or self._is_moving or self.is_regrouping

    @property
    def has_ready(self) -> bool:
        """Whether the next `step` takes a completion that is there already."""
        return self._queues.steps.has_ready

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV and could run if there were free blocks."""
        return len(self._queues.waiting.runnable())

    @property
    def is_regrouping(self) -> bool:
        """Whether a change of clusters was asked for and is not complete."""
        return self.regrouping is not None and self.regrouping.state != "running"

    @property
    def transitions(self) -> list[Transition]:
        return [] if self.regrouping is None else self.regrouping.transitions

    @property
    def phase(self) -> str:
        """The phase of an engine with phases: prefill, decode or transition. Empty without phases."""
        is_fixed = self.regrouping is None and not self.config.phases
        return "" if is_fixed else self._regroup().phase(self.config)

    @property
    def _is_moving(self) -> bool:
        return self.kv.is_moving or self._is_settling

    @property
    def _is_settling(self) -> bool:
        return self.kv.is_copying or (self.regrouping is not None and self.regrouping.state == "switching")

    def observe(self, observer: Observer | None) -> None:
        self._ranks.observer = observer

    def load(self) -> Load:
        return Load.of(self._queues, self.kv, self.config.cluster, self._clock.now())

    def check_when_idle(self) -> None:
        """Check the account of KV blocks if the engine is idle, once per idle period.

        Drivers call this before they wait for work. A violation is logged and counted, and raises no error.
        """
        if not (self._is_checked or self.has_unfinished):
            self._is_checked = True
            self.watch.check(self.kv)

    # ---------------------------------------------------------------- changes

    def set_policy(self, policy: Policy) -> None:
        """Use another policy from now on. Only between requests, which have groups and layouts of the old policy."""
        self._require_idle("the policy cannot change")
        if self.is_regrouping:
            raise RuntimeError("the policy cannot change while clusters do: call step until they have")
        self._adopt(policy)

    def _adopt(self, policy: Policy) -> None:
        self._policy, self._device_limit = policy, device_limit(policy, self.config.cluster)
        self._lifecycle.adopt(policy)

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests. Raise RuntimeError if any request is unfinished."""
        self._require_idle("KV cannot be forgotten")
        self.kv.restart((), keep=False)

    def _require_idle(self, what: str) -> None:
        if requests := self._queues.requests:
            raise RuntimeError(f"{what} while {len(requests)} requests are unfinished")
        if self._is_moving:
            raise RuntimeError(f"{what} while KV moves are in flight: call step until has_unfinished is false")

    def reshard(self, change: Change) -> None:
        """Move all ranks to their places in another cluster, once no step is in flight. Requests go on there.

        KV is offloaded from devices to hosts meanwhile, up to the size of their pools. The rest is recomputed.

        Raises:
            RuntimeError: another change is under way.
        """
        self._regroup().ask(change, self._clock.now())

    def _regroup(self) -> Regrouping:
        """Return the state of changes of clusters, made at the first call."""
        if self.regrouping is None:
            from longspan.core.regrouping import Regrouping  # noqa: PLC0415 - most clusters stay

            self.regrouping = Regrouping()
        return self.regrouping

    def restart(self, executor: Executor, change: Change | None = None) -> None:
        """Replace lost workers. The new ones have the places of `change`, with a policy, or those before the loss.

        Every request waits again, and recomputes the KV that it had on devices. Contents of hosts and disks stay.
        A request that exceeds the capacity of the new cluster ends with an error.
        """
        self._ranks.restart(executor)
        self._lifecycle.lose()
        self._regroup().restart(change, self._clock.now())
        if change is not None:
            self._resume(change)

    def _drain(self) -> None:
        """Preempt requests as their steps complete. Send a Reshard once devices hold no KV in use."""
        for request in self._queues.parkable:
            self._lifecycle.retract(request)
        computes, moves = bool(self._queues.steps or self._queues.running), not self.kv.can_regroup
        reshard = self._regroup().drain(self._ranks.number, self._clock.now(), computes=computes, moves=moves)
        if reshard is not None:
            self._ranks.send(reshard)

    def _resume(self, change: Change) -> None:
        """Serve on the cluster of a change, whose ranks have their places."""
        from longspan.core.regrouping import bounded  # noqa: PLC0415 - most clusters stay

        self.config = self._lifecycle.config = change.config(self.config)
        self._queues.replace(self.config.cluster)
        self.kv.regroup(self.config.cluster)
        self._device_limit = device_limit(self._policy, self.config.cluster)
        if change.policy is not None:
            self._adopt(change.policy)
            for request in bounded(self._queues.unfinished, self.config.longest(change.policy)):
                self.finish(request, "error")
        self._regroup().resumed(self._clock.now())

    # ---------------------------------------------------------------- the loop

    def step(self, timeout_s: float | None = None) -> list[Request]:
        """Emit the steps that the policy plans, and take the next completion.

        Waits for a completion for at most `timeout_s`. None is no limit.

        Returns:
            The requests that got a token or failed.
        """
        self.emit()
        if not (self._queues.steps or self._is_moving):
            assert not self._queues.requests, "the policy leaves requests waiting on an idle cluster"
            return []
        return self._take(timeout_s)

    def _take(self, timeout_s: float | None) -> list[Request]:
        if not self.has_ready:
            self._poll(timeout_s)
        return self._lifecycle.complete(*self._queues.steps.take()) if self.has_ready else []

    def settle(self, timeout_s: float) -> bool:
        """Wait until copies between tiers and changes of places are complete, without a step. Return whether so."""
        until_s = self._clock.now() + timeout_s
        while self._is_settling and (left_s := until_s - self._clock.now()) > 0:
            self._take(left_s)  # the end of a step ends its copies to hosts
        return not self._is_settling

    def _poll(self, timeout_s: float | None) -> None:
        """Take completions: of a move at once, of a Forward in the order of steps."""
        for done in self._ranks.poll(timeout_s):
            self.counts.bytes_sent.update(done.bytes_sent)
            regrouping = self.regrouping
            if regrouping is not None and (change := regrouping.complete(done, self._clock.now())) is not None:
                self._resume(change)
            elif (moves := self.kv.moved(done)) is None:
                self._queues.steps.complete(done)
            else:
                self._lifecycle.moved(moves)

    def emit(self) -> None:
        """Emit the steps that the policy plans, until no instance can be given another step."""
        self._lifecycle.advance_transfers()
        while not self.is_regrouping:
            num_preemptions = self.counts.num_preemptions
            if self._queues.can_emit and self._emit_plan(self._plan()):
                continue
            # A plan that only preempted may have freed backends, or blocks for pending transfers.
            has_preempted = self.counts.num_preemptions > num_preemptions
            if self.is_regrouping or (has_preempted and self._lifecycle.advance_transfers()):
                continue
            if self._queues.steps or self._is_moving or not self._lifecycle.break_deadlock():
                return
        if self.regrouping is not None and self.regrouping.state == "draining":
            self._drain()

    def _plan(self) -> Plan:
        """Return the plan after its preemptions. Plan again if it only preempts, or if copies pin their blocks."""
        queues = self._queues
        while True:
            self._lifecycle.free_for_decodes()
            if (limit := self._device_limit) is not None:
                self._ranks.send(
                    *self.kv.move_host_blocks(queues.waiting.runnable(self._policy.admits(self.config.cluster)), limit)
                )
            plan = self._policy.plan(self._view())
            for parked in plan.parked:
                self._lifecycle.retract(queues.requests[parked.id])
            if plan.reshard is not None:
                assert not plan.batches, "no step is planned together with a change of clusters"
                from longspan.core.regrouping import Change  # noqa: PLC0415 - few policies change clusters

                self.reshard(Change(cluster=plan.reshard, phases=self.config.phases))
                return Plan()
            for preempted in plan.preempted:
                self._lifecycle.preempt(queues.requests[preempted.id])
            if not plan.preempted or (plan.batches and not self.kv.copies_on_devices):
                return plan

    def _view(self) -> ClusterView:
        queues, admits = self._queues, self._policy.admits(self.config.cluster)
        return ClusterView(
            cluster=self.config.cluster,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            waiting=queues.waiting.runnable(),
            startable=self.kv.startable(queues.waiting.runnable(admits)),
            running=queues.running,
            kv=self.kv.account,
            busy=frozenset(queues.occupancy.busy),
            full=frozenset(queues.occupancy.full),
            now_s=self._clock.now(),
            expected=self.kv.expected,
            queue_changes=queues.waiting.changes + self.kv.counts.num_offloaded,
            max_steps_in_flight=self.config.max_steps_in_flight,
            device_limit=self._device_limit,
        )

    def _emit_plan(self, plan: Plan) -> bool:
        """Admit requests and emit steps. Return whether there were any."""
        if not (plan.batches or plan.loads):
            return False
        parts = [scheduled for batch in plan.batches for scheduled in batch]
        self._lifecycle.admit(plan.loads, parts)
        if any(scheduled.targets for scheduled in parts):
            self._ranks.send(*self.kv.pending_transfers())  # cached blocks can be sent at once
        for batch in plan.batches:
            self._lifecycle.begin(batch, offloads=plan.offloads)
        return True
