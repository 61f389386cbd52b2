"""The engine loop: asks the policy, emits numbered steps, and turns completions into tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import get_args

from longspan.core.account import KvAccount
from longspan.core.protocols import Clock, ClusterView, Executor, Limits, Policy, Share
from longspan.core.request import FinishReason, Request, RequestMetrics
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Completion, Exchange, Forward, Free, Part, Sample, Sampled


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine must know of the model and the cluster.

    Attributes:
        num_blocks: KV blocks per instance.
        max_model_len: the longest request, prompt and output together, in tokens.
        rope_switch_length: requests longer than this use other rotary factors; None for most models.
    """

    num_instances: int
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    rope_switch_length: int | None = None
    limits: Limits = field(default_factory=Limits)
    prefix_caching: bool = True
    seed: int = 0


class Engine:
    """Owns the requests and the KV account. One thread drives it through `step`.

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
        self.account = KvAccount(
            num_instances=config.num_instances,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            prefix_caching=config.prefix_caching,
        )
        self.bytes_sent: dict[str, int] = {exchange: 0 for exchange in get_args(Exchange) if exchange != "local"}
        self._policy, self._executor, self._clock = policy, executor, clock
        self._requests: dict[int, Request] = {}
        self._in_flight: dict[int, Forward] = {}
        self._next_step = 0
        self._next_request = 0
        self._num_admissions = 0
        self._seeds = random.Random(config.seed)

    def check(self, num_prompt_tokens: int) -> None:
        """Whether a prompt of this length can be served.

        Raises:
            ValueError: when it is empty or leaves no room for one output token.
        """
        if num_prompt_tokens < 1:
            raise ValueError("the prompt is empty: at least 1 token is needed")
        if num_prompt_tokens >= self.config.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, but prompt and output together can have at most "
                f"{self.config.max_model_len} here (the model's context, or less where KV memory is short): "
                "shorten the prompt"
            )

    def add(self, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        """Queues a request.

        Raises:
            ValueError: see `check`.
        """
        self.check(len(prompt))
        room = self.config.max_model_len - len(prompt)
        request = Request(
            id=self._next_request,
            prompt=prompt,
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            block_size=self.config.block_size,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            metrics=RequestMetrics(arrival_s=self._clock.now()),
        )
        self._next_request += 1
        request.pin_rope_length(self._rope_length(request))
        self._requests[request.id] = request
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still runs, waits, or has a step in flight."""
        return bool(self._requests)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request from outside (a stop string, a client gone); its blocks are freed when no step names it.

        One that has ended keeps its reason, except that a stop string found in the last token counts before its length.
        """
        if request.finish_reason is None:
            request.metrics.finished_s = self._clock.now()
        if request.finish_reason is None or (request.finish_reason, reason) == ("length", "stop"):
            request.finish_reason = reason
        if not request.in_flight and request.id in self._requests:
            self._drop(request)

    def step(self, timeout_s: float | None = None) -> list[Request]:
        """Emits what the policy plans, waits for completions, and returns the requests that got a token."""
        self._emit()
        if not self._in_flight:
            assert not self._requests, "the policy leaves requests waiting on an idle cluster"
            return []
        return [request for done in self._executor.poll(timeout_s) for request in self._complete(done)]

    def _emit(self) -> None:
        batches = self._plan()
        shares = [share for batch in batches for share in batch]
        for share in shares:
            if share.hit is not None:
                self._admit(share)
        for share in shares:
            self.account.extend(share.request, share.holders)
        for batch in batches:
            forward = Forward(number=self._number(), parts=tuple(self._part(share) for share in batch))
            self._in_flight[forward.number] = forward
            self._executor.submit(forward)

    def _plan(self) -> tuple[tuple[Share, ...], ...]:
        """The policy's batches, after its preemptions; a plan that only preempts is followed by another at once."""
        while True:
            plan = self._policy.plan(self._view())
            for request in plan.preempted:
                request.metrics.num_preemptions += 1
                self._retract(request)
            if plan.batches or not plan.preempted:
                return plan.batches

    def _view(self) -> ClusterView:
        live = [r for r in self._requests.values() if r.finish_reason is None]
        return ClusterView(
            num_instances=self.config.num_instances,
            limits=self.config.limits,
            waiting=[r for r in live if not r.group],
            running=sorted((r for r in live if r.group), key=lambda r: r.admission),
            busy=frozenset(i for forward in self._in_flight.values() for i in forward.instances),
            account=self.account,
            now_s=self._clock.now(),
        )

    def _admit(self, share: Share) -> None:
        request, hit = share.request, share.hit
        assert hit is not None and hit.num_tokens == share.start, "an admitted request starts behind its prefix"
        self.account.take(request, hit)
        request.group = share.group
        self._num_admissions += 1
        request.admission = self._num_admissions
        request.num_computed = request.num_scheduled = hit.num_tokens
        if not request.metrics.num_computed_tokens:
            request.metrics.num_cached_tokens = min(hit.num_tokens, len(request.prompt))

    def _part(self, share: Share) -> Part:
        request = share.request
        assert share.start == request.num_scheduled == request.num_computed, "spans of a request follow each other"
        first, request.sent_blocks = request.sent_blocks, len(request.table)
        request.num_scheduled = share.stop
        return Part(
            request_id=request.id,
            start=share.start,
            stop=share.stop,
            tokens=request.tokens(share.start, share.stop),
            group=share.group,
            runs=share.runs,
            exchange=share.exchange,
            first_block=first,
            blocks=tuple(request.table[first:]),
            sample=self._sample(request) if share.stop == request.num_tokens else None,
            rope_length=request.rope_length,
        )

    def _sample(self, request: Request) -> Sample:
        params, position = request.params, request.num_tokens
        below_minimum = len(request.output) < params.min_tokens
        return Sample(
            instance=request.table[(position - 1) // self.config.block_size].instance,
            position=position,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=request.seed,
            banned=self.config.eos_token_ids if below_minimum else (),
            output_logits=params.output_logits,
        )

    def _complete(self, done: Completion) -> list[Request]:
        forward = self._in_flight.pop(done.number)
        for exchange, num_bytes in done.bytes_sent.items():
            self.bytes_sent[exchange] = self.bytes_sent.get(exchange, 0) + num_bytes
        for part in forward.parts:
            request = self._requests[part.request_id]
            request.num_computed = part.stop
            request.metrics.num_computed_tokens += part.stop - part.start
            self.account.publish(request, part.start)
            if request.finish_reason is not None:
                self._drop(request)
        return [self._append(sampled) for sampled in done.sampled if sampled.request_id in self._requests]

    def _append(self, sampled: Sampled) -> Request:
        request = self._requests[sampled.request_id]
        request.output.append(sampled.token)
        if request.params.output_logits:
            request.logits.append(sampled.logits)
        self._record_time(request)
        if sampled.token in self.config.eos_token_ids and not request.params.ignore_eos:
            self.finish(request, "stop")
        elif len(request.output) >= request.max_tokens:
            self.finish(request, "length")
        elif self._rope_length(request) != request.rope_length:
            self._retract(request)
            request.pin_rope_length(self._rope_length(request))
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
        counts = [0] * self.config.num_instances
        size = self.config.block_size
        for index, ref in enumerate(request.table):
            counts[ref.instance] += max(0, min(size, request.num_computed - index * size))
        return counts

    def _rope_length(self, request: Request) -> int:
        switch = self.config.rope_switch_length
        if switch is None:
            return 0
        return switch + 1 if request.num_tokens > switch else switch

    def _retract(self, request: Request) -> None:
        """The request gives up its KV and waits again; what it computed is found again by its prefix keys."""
        assert not request.in_flight, "a step in flight names the request"
        self.account.release(request)
        self._executor.submit(Free(number=self._number(), request_ids=(request.id,)))
        request.group = ()
        request.num_computed = request.num_scheduled = request.sent_blocks = 0

    def _drop(self, request: Request) -> None:
        if request.group:
            self._retract(request)
        del self._requests[request.id]

    def _number(self) -> int:
        self._next_step += 1
        return self._next_step
