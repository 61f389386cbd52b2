"""The engine loop: asks the policy, emits numbered steps, and turns completions into tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import get_args

from longspan.core.account import KvAccount
from longspan.core.occupancy import Occupancy
from longspan.core.ordering import StepOrder
from longspan.core.protocols import Clock, ClusterView, Executor, Limits, Load, Policy, Share
from longspan.core.request import FinishReason, Request, RequestMetrics, check_length
from longspan.core.running import Running
from longspan.core.sampling import SamplingParams
from longspan.core.steps import EXCHANGE_NAMES, UNKNOWN, Completion, Forward, Free, Link, Part, Sample, Sampled, Scored
from longspan.core.waiting import Waiting


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine must know of the model and the cluster.

    Attributes:
        num_blocks: KV blocks per instance.
        max_model_len: the longest request, prompt and output together, in tokens.
        rope_switch_length: requests longer than this use other rotary factors; None for most models.
        max_steps_in_flight: steps that an instance may have been sent and not completed. With 2 it never waits for the
            controller: the next step is there before the present one ends.

    Raises:
        ValueError: for a value out of range.
    """

    num_instances: int
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    rope_switch_length: int | None = None
    limits: Limits = field(default_factory=Limits)
    prefix_caching: bool = True
    max_steps_in_flight: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_steps_in_flight not in (1, 2):
            # With 3, a token could be needed (by penalties, as a prefix key) that two steps ago was not known yet.
            raise ValueError(f"max_steps_in_flight must be 1 or 2, but {self.max_steps_in_flight} given")


class Engine:
    """Owns the requests and the KV account. One thread drives it through `step`.

    Attributes:
        num_preemptions: how often a request gave up its KV to others.
        num_prefix_queries, num_prefix_hits: tokens of prompts looked up, and found, in the prefix cache.

    Raises:
        ValueError: when `max_model_len` is more than the policy can place.
    """

    def __init__(self, *, policy: Policy, executor: Executor, clock: Clock, config: EngineConfig) -> None:
        capacity = policy.capacity_tokens(num_blocks=config.num_blocks, block_size=config.block_size)
        if config.max_model_len > capacity:
            raise ValueError(
                f"max_model_len {config.max_model_len} exceeds the {capacity} tokens that the KV pools hold"
            )
        self.config = config
        self.account = self._new_account()
        self.bytes_sent: Counter[tuple[str, Link]] = Counter(dict.fromkeys(product(EXCHANGE_NAMES, get_args(Link)), 0))
        self.num_preemptions = self.num_prefix_queries = self.num_prefix_hits = 0
        self._policy, self._executor, self._clock = policy, executor, clock
        self._requests: dict[int, Request] = {}
        self._waiting = Waiting()
        self._running = Running(config.num_instances)
        self._steps = StepOrder()
        self._occupancy = Occupancy(config.num_instances, most=config.max_steps_in_flight)
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
            seed=self._seed(params) if leader is None else leader.seed,
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
        request.pin_rope_length(self._rope_length(len(prompt)))
        self._requests[request.id] = request
        self._waiting.add(request)
        return request

    def _new_account(self) -> KvAccount:
        config = self.config
        return KvAccount(
            num_instances=config.num_instances,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            prefix_caching=config.prefix_caching,
        )

    def _seed(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(63) if params.seed is None else params.seed

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still runs, waits, or has a step in flight."""
        return bool(self._requests)

    def load(self) -> Load:
        """How much there is to do, and how busy the instances have been."""
        waiting = self._waiting.able()
        pools = [self.account.pool(i) for i in range(self.config.num_instances)]
        return Load(
            num_running=len(self._running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(request.num_known for request in waiting),
            used_blocks=[self.config.num_blocks - pool.num_free for pool in pools],
            busy_s=self._occupancy.busy_s(self._clock.now()),
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request from outside (a stop string, a client gone); its blocks are freed when no step names it.

        One that has ended keeps its reason, except that a stop string found in the last token counts before its length.
        """
        if request.finish_reason is None:
            request.metrics.finished_s = self._clock.now()
            self._leave(request)
        if request.finish_reason is None or (request.finish_reason, reason) == ("length", "stop"):
            request.finish_reason = reason
        if not request.in_flight and request.id in self._requests:
            self._drop(request)

    def set_policy(self, policy: Policy) -> None:
        """From now on, `policy` decides; only between requests, whose groups and layouts are the old one's.

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
        self.account = self._new_account()

    def _check_idle(self, what: str) -> None:
        if self._requests:
            raise RuntimeError(f"{what} while {len(self._requests)} requests are unfinished")

    def restart(self, executor: Executor) -> None:
        """Goes on with new workers, which remember nothing: every request waits again and computes anew what it had."""
        self._executor, self.account = executor, self._new_account()
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
        if not self._steps:
            assert not self._requests, "the policy leaves requests waiting on an idle cluster"
            return []
        if not self._steps.has_ready:
            for done in self._executor.poll(timeout_s):
                self._steps.complete(done)
        return self._complete(*self._steps.take()) if self._steps.has_ready else []

    def emit(self) -> None:
        """Emits what the policy plans, until no instance can be given another step; `step` does so first."""
        while self._can_emit and (batches := self._plan()):
            self._emit_batches(batches)

    def _emit_batches(self, batches: Sequence[Sequence[Share]]) -> None:
        shares = [share for batch in batches for share in batch]
        for share in shares:
            if share.hit is not None:
                self._admit(share)
        for share in shares:
            self.account.extend(share.request, share.holders)
        for batch in batches:
            forward = Forward(number=self._number(), parts=tuple(self._part(share) for share in batch))
            self._steps.send(forward)
            self._begin(forward)
            self._executor.submit(forward)

    def _plan(self) -> tuple[tuple[Share, ...], ...]:
        """The policy's batches, after its preemptions; a plan that only preempts is followed by another at once."""
        while True:
            plan = self._policy.plan(self._view())
            for request in plan.preempted:
                request.metrics.num_preemptions += 1
                self.num_preemptions += 1
                self._retract(request)
            if plan.batches or not plan.preempted:
                return plan.batches

    @property
    def _can_emit(self) -> bool:
        """Whether there is anybody for whom, and an instance on which, a step could be planned."""
        if self._occupancy.all_full:
            return False
        return bool(self._waiting) or not self._occupancy.full.issuperset(self._running.occupied)

    @property
    def has_ready(self) -> bool:
        """Whether the next `step` takes a completion that is there already."""
        return self._steps.has_ready

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV and could run if there were room."""
        return len(self._waiting.able())

    def _leave(self, request: Request) -> None:
        """The request neither waits nor runs."""
        if request.group:
            self._running.leave(request)
        else:
            self._waiting.remove(request)

    def _view(self) -> ClusterView:
        return ClusterView(
            num_instances=self.config.num_instances,
            limits=self.config.limits,
            waiting=self._waiting.able(),
            running=self._running,
            busy=frozenset(self._occupancy.busy),
            full=frozenset(self._occupancy.full),
            account=self.account,
            now_s=self._clock.now(),
        )

    def _admit(self, share: Share) -> None:
        request, hit = share.request, share.hit
        assert hit is not None and hit.num_tokens == share.start, "an admitted request starts behind its prefix"
        self._leave(request)
        self.account.take(request, hit)
        request.group = share.group
        self._num_admissions += 1
        request.admission = self._num_admissions
        self._running.join(request)
        if request.metrics.scheduled_s is None:
            request.metrics.scheduled_s = self._clock.now()
            if request.leader is None:
                self.num_prefix_queries += request.num_prompt
                self.num_prefix_hits += min(hit.num_tokens, request.num_prompt)
        request.num_computed = request.num_scheduled = hit.num_tokens
        if not request.metrics.num_computed_tokens:
            request.metrics.num_cached_tokens = min(hit.num_tokens, request.num_prompt)

    def _part(self, share: Share) -> Part:
        request = share.request
        assert share.start == request.num_scheduled, "spans of a request follow each other"
        if not set(share.group) <= set(request.group):
            assert request.rotation is None, "homes that rotate do so in one group"
            request.sent_blocks = request.sent_output = 0  # members that are new to it must hear everything
        tokens = request.tokens(share.start, share.stop)
        request.group, request.rotation, request.keeper = share.group, share.rotation, share.keeper
        self._running.regroup(request)
        unknown_on = request.sampler if tokens[-1] == UNKNOWN else None
        first_block, request.sent_blocks = request.sent_blocks, len(request.table)
        first_output, new_output = self._new_output(request)
        part = Part(
            request_id=request.id,
            start=share.start,
            stop=share.stop,
            tokens=tokens,
            group=share.group,
            runs=share.runs,
            exchange=share.exchange,
            first_block=first_block,
            blocks=tuple(request.table[first_block:]),
            sample=self._sample(share) if share.stop == request.num_tokens else None,
            unknown_on=unknown_on,
            sampling=request.sampling(self.config.eos_token_ids) if first_block == 0 else None,
            first_output=first_output,
            new_output=new_output,
            targets=request.prompt[share.start + 1 : share.stop + 1] if request.scores_prompt else (),
            rope_length=request.rope_length,
            rotation=request.rotation,
        )
        request.num_scheduled = share.stop
        if part.sample is not None:
            self._promise(request)
        return part

    def _promise(self, request: Request) -> None:
        """The token being sampled can be scheduled, unless it is the last or the first with other rotary factors."""
        num_tokens = request.num_scheduled + 1
        goes_on = num_tokens - request.num_prompt < request.max_tokens
        if goes_on and self._rope_length(num_tokens) == request.rope_length:
            request.num_promised = num_tokens

    def _sample(self, share: Share) -> Sample:
        request, position = share.request, share.stop
        members = zip(share.group, share.runs, strict=True)
        request.sampler = next(instance for instance, runs in members if runs and runs[-1].stop == position)
        return Sample(
            instance=request.sampler,
            position=position,
            below_minimum=position - request.num_prompt < request.params.min_tokens,
        )

    def _begin(self, forward: Forward) -> None:
        instances = forward.instances
        self._occupancy.begin(instances, self._clock.now())
        self._running.changed(instances)

    def _end(self, forward: Forward) -> None:
        instances = forward.instances
        self._occupancy.end(instances, self._clock.now())
        self._running.changed(instances)

    def _new_output(self, request: Request) -> tuple[int, tuple[int, ...]]:
        if not request.keeps_history:
            return 0, ()
        first, request.sent_output = request.sent_output, len(request.output)
        return first, tuple(request.output[first:])

    def _complete(self, forward: Forward, done: Completion) -> list[Request]:
        self._end(forward)
        self.bytes_sent.update(done.bytes_sent)
        for part in forward.parts:
            request = self._requests[part.request_id]
            assert request.num_computed == part.start, "steps complete in order"
            request.num_computed = part.stop
            request.metrics.num_computed_tokens += part.stop - part.start
            kind = "decode" if part.start >= request.num_prompt else "partial_prefill" if part.start else "prefill"
            request.metrics.count(kind, part.exchange_name)
            self.account.publish(request, part.start)
            if request.finish_reason is not None and not request.in_flight:
                self._drop(request)
        for scored in done.scored:
            self._take_scores(scored)
        return [self._append(sampled) for sampled in done.sampled if self._is_live(sampled.request_id)]

    def _is_live(self, request_id: int) -> bool:
        """Whether anybody wants its tokens; what a request samples after its end is thrown away."""
        request = self._requests.get(request_id)
        return request is not None and request.finish_reason is None

    def _take_scores(self, scored: Scored) -> None:
        if self._is_live(scored.request_id):
            request = self._requests[scored.request_id]
            for position, logprobs in zip(scored.positions, scored.logprobs, strict=True):
                request.prompt_logprobs[position] = logprobs

    def _append(self, sampled: Sampled) -> Request:
        request, params = self._requests[sampled.request_id], self._requests[sampled.request_id].params
        if sampled.error:
            request.stop_reason = sampled.error
            self.finish(request, "error")
            return request
        request.output.append(sampled.token)
        if params.output_logits:
            request.logits.append(sampled.logits)
        if sampled.logprobs is not None:
            request.logprobs.append(sampled.logprobs)
        self._record_time(request)
        if len(request.output) > params.min_tokens and sampled.token in params.stop_ids:
            request.stop_reason = sampled.token
            self.finish(request, "stop")
        elif sampled.token in self.config.eos_token_ids and not params.ignore_eos:
            self.finish(request, "stop")
        elif len(request.output) >= request.max_tokens:
            self.finish(request, "length")
        elif self._rope_length(request.num_known) != request.rope_length:
            self._retract(request)
            request.pin_rope_length(self._rope_length(request.num_known))
        return request

    def _record_time(self, request: Request) -> None:
        metrics, now = request.metrics, self._clock.now()
        if metrics.last_token_s is None:
            metrics.ttft_s = now - metrics.arrival_s
            metrics.kv_tokens_per_instance = self._kv_tokens(request)
        else:
            metrics.tbt_s.append(now - metrics.last_token_s)
        metrics.last_token_s = now

    def _kv_tokens(self, request: Request) -> list[int]:
        held = dict(zip(request.group, request.homes.counts(request.num_computed), strict=True))
        return [held.get(instance, 0) for instance in range(self.config.num_instances)]

    def _rope_length(self, num_tokens: int) -> int:
        switch = self.config.rope_switch_length
        if switch is None:
            return 0
        return switch + 1 if num_tokens > switch else switch

    def _retract(self, request: Request) -> None:
        """The request gives up its KV and waits again; what it computed is found again by its prefix keys."""
        assert not request.in_flight, "a step in flight names the request"
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
