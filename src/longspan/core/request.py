"""A request, its counters, and its parts of steps. The engine changes it, and policies see its `RequestView`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Literal

from longspan.core.blocks import BlockRef, chain_key
from longspan.core.kv.residency import WAITING, Residency
from longspan.core.owners import Owners, Rotation
from longspan.core.runs import Run, SpanShards, coalesce
from longspan.core.sampling import SamplingParams
from longspan.core.sparse import SparseSetting
from longspan.core.steps import UNKNOWN, Part, Sample, Sampled, Sampling, Scored, TokenLogprobs
from longspan.core.view import ScheduledPart
from longspan.errors import ParameterError

FinishReason = Literal["stop", "length", "abort", "error"]

ErrorKind = Literal["structured_outputs", "non_finite", "capacity"]
"""The cause of an `error`: no token fits the grammar, NaN or infinity was computed, or the cluster is too small."""

ROOT = b""
"""Parent key of a request's first block."""


@dataclass(kw_only=True)
class RequestMetrics:
    """Times of a request, in seconds of the engine's clock, and its counts.

    Attributes:
        scheduled_s: time of the first admission. None before it.
        ttft_s: from arrival to the first output token. None before it.
        tbt_s: the times between consecutive output tokens.
        num_cached_tokens: prompt tokens whose KV was reused when the request was first admitted.
        num_computed_tokens: tokens run through the model, including recomputed tokens.
        exchanges: number of steps with each exchange, by kind: `prefill`, `partial_prefill` (with a prefix), `decode`.
        kv_tokens_per_instance: KV tokens of each instance at the end of the prompt.
        sparse_parts: for each part with sparse attention: the setting, and the runs of queries and keys per member.
    """

    arrival_s: float
    scheduled_s: float | None = None
    ttft_s: float | None = None
    tbt_s: list[float] = field(default_factory=list)
    last_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    exchanges: dict[str, dict[str, int]] = field(default_factory=dict)
    kv_tokens_per_instance: list[int] = field(default_factory=list)
    sparse_parts: list[tuple[SparseSetting, SpanShards, SpanShards]] = field(default_factory=list)

    def record_token(self, now_s: float) -> None:
        if self.last_token_s is None:
            self.ttft_s = now_s - self.arrival_s
        else:
            self.tbt_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s

    def take_part(self, part: Part, request: Request) -> None:
        self.num_computed_tokens += part.stop - part.start
        kind = "decode" if part.start >= request.num_prompt else "partial_prefill" if part.start else "prefill"
        steps, exchange = self.exchanges.setdefault(kind, {}), part.exchange.shown
        steps[exchange] = steps.get(exchange, 0) + 1
        if part.exchange.sparse is not None and not part.exchange.traits.decodes:
            queries, keys = part.runs, request.owners.held(part.stop)
            if part.exchange.is_layerwise:  # every member has all tokens
                queries, keys = ((coalesce(chain(*runs)),) for runs in (queries, keys))
            self.sparse_parts.append((part.exchange.sparse, queries, keys))


@dataclass(kw_only=True, eq=False)
class Request:
    """Counters instead of states: `num_computed <= num_scheduled <= num_tokens`. See also `RequestView`.

    Attributes:
        prompt: token ids, in any immutable sequence with immutable slices.
        choice, leader: index among the `n` outputs of a prompt, and the first, which computes the prompt for all.
        keeps_history: whether ranks must know its output tokens, for penalties or a grammar.
        num_tokens: an attribute and no property, because policies read it often.
        num_steps, last_step: number of steps in flight that name it, and the number of the last step that did.
        group: empty while it waits. It can shrink, and grow without a `rotation`. New members are sent the whole state.
        copying: blocks of its table that steps in flight fill, with the source of each.
        moving: blocks of its table that moves between a device and its host fill. Steps read the source until then.
        targets: no step is scheduled between the end of the prefill and the arrival of all KV on the targets.
        sent_blocks: number of `table` entries that the ranks of `group` know.
        sent_output: number of output tokens that they know. Only counted if it `keeps_history`.
        rope_length: the length that length-dependent rotary embeddings are pinned to. Part of the prefix keys.
        grammar: the compiled grammar of the output, see `Sampling`.
        sparse: the sparse setting of its prefill. Part of the prefix keys.
        cache_salt: only requests with equal salts share KV. Empty without a salt. Part of the prefix keys.
        enable_prefix_caching: its KV may be shared with other requests, if the engine shares any.
        stop_reason: the token of `stop_token_ids` that ended it. For `error`, the message.
        error: the kind of error. None for other ends.
        non_finite_from: the first position of the first part with hidden states that are NaN or infinite. None if all
            are finite. KV from its block on is neither shared nor moved to another tier.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    block_size: int
    max_tokens: int
    metrics: RequestMetrics
    choice: int = 0
    leader: Request | None = None
    grammar: str = ""
    sparse: SparseSetting | None = None
    cache_salt: str = ""
    enable_prefix_caching: bool = True
    output: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)
    attention: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0
    num_steps: int = 0
    last_step: int = -1
    admission: int = 0
    group: tuple[int, ...] = ()
    residency: Residency = WAITING
    table: list[BlockRef] = field(default_factory=list)
    copying: dict[BlockRef, BlockRef] = field(default_factory=dict)
    moving: dict[BlockRef, BlockRef] = field(default_factory=dict)
    hosted: Counter[int] = field(default_factory=Counter)
    streamed: Counter[int] = field(default_factory=Counter)
    rotation: Rotation | None = None
    kv_owner: int | None = None
    sampler: int = 0
    targets: tuple[int, ...] = ()
    sent_blocks: int = 0
    sent_output: int = 0
    rope_length: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorKind | None = None
    non_finite_from: int | None = None
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    keeps_history: bool = field(init=False)
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt)
        self.num_tokens = self.num_known
        self.prompt_logprobs = [None] * self.num_prompt if self.scores_prompt else []
        params = self.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.keeps_history = penalties != (1.0, 0.0, 0.0) or bool(self.grammar)

    @property
    def num_known(self) -> int:
        return self.num_prompt + len(self.output)

    @property
    def arrival_s(self) -> float:
        return self.metrics.arrival_s

    @property
    def was_admitted(self) -> bool:
        return self.metrics.scheduled_s is not None

    @property
    def in_flight(self) -> bool:
        return self.num_scheduled > self.num_computed

    @property
    def must_wait(self) -> bool:
        leader = self.leader
        return leader is not None and not leader.output and leader.finish_reason is None

    @property
    def scores_prompt(self) -> bool:
        return self.params.prompt_logprobs is not None and self.leader is None and not self.output

    @property
    def max_cached(self) -> int:
        if self.scores_prompt:
            return 0
        first = self.params.attention_from
        return self.num_tokens - 1 if first is None or self.output else min(first, self.num_tokens - 1)

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Return the token ids at positions `[start, stop)`. Tokens that steps in flight sample are `UNKNOWN`."""
        num_prompt = self.num_prompt
        if stop <= num_prompt:
            return self.prompt[start:stop]
        if start < num_prompt:
            known = (*self.prompt[start:], *self.output[: stop - num_prompt])
        else:
            known = tuple(self.output[start - num_prompt : stop - num_prompt])
        missing = stop - start - len(known)
        return known + (UNKNOWN,) * missing if missing else known

    def sampling(self, eos_token_ids: tuple[int, ...]) -> Sampling:
        params = self.params
        return Sampling(
            seed=self.seed,
            choice=self.choice,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.biases,
            banned=(*eos_token_ids, *params.stop_ids) if params.min_tokens else (),
            prompt=tuple(sorted(set(self.prompt))) if params.repetition_penalty != 1.0 else (),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            output_logits=params.output_logits,
            grammar=self.grammar,
            attention=None if (first := params.attention_from) is None or self.leader else (first, self.num_prompt),
        )

    def parent_key(self, index: int) -> bytes:
        """Return the prefix key of all tokens before block `index`, which must be known."""
        if index == 0:
            return root_key(self.rope_length, self.sparse, self.cache_salt)
        while len(self._keys) < index:
            block = len(self._keys)
            tokens = self.tokens(block * self.block_size, (block + 1) * self.block_size)
            assert len(tokens) == self.block_size, "keys are made of full blocks"
            self._keys.append(chain_key(self.parent_key(block), tokens))
        return self._keys[index - 1]

    def lose_kv(self) -> None:
        """Reset to waiting, without KV. Ranks must be sent the whole state again."""
        self.move_to()
        self.table.clear()
        self.copying.clear()
        self.moving.clear()
        self.hosted.clear()
        self.streamed.clear()
        if not self.output:
            self.attention.clear()
        self.num_computed = self.num_scheduled = 0
        self.num_tokens = self.num_known

    def move_to(self, *group: int) -> None:
        """Make these instances the only owners. Their ranks must be sent the whole state."""
        self.group, self.rotation, self.kv_owner, self.targets = group, None, None, ()
        self.sent_blocks = self.sent_output = 0

    def fail(self, kind: ErrorKind, message: str) -> FinishReason:
        """Record an error. Return the reason to finish the request with."""
        self.error, self.stop_reason = kind, message
        return "error"

    def non_finite_slots(self) -> tuple[tuple[BlockRef, int], ...]:
        """Return the blocks that may hold NaN or infinity, each with the first such slot.

        A block's tokens ascend, so all later slots of it belong to the request and are not finite either.
        """
        if self.non_finite_from is None or not self.group:
            return ()
        first_slots: dict[BlockRef, int] = {}
        for places, blocks in self.owners.slots(Run(self.non_finite_from, self.num_scheduled)):
            for place in places:
                block, slot = divmod(place, self.block_size)
                first_slots.setdefault(blocks[block], slot)
        return tuple(first_slots.items())

    def pin_rope_length(self, length: int) -> None:
        self.rope_length = length
        self._keys.clear()

    @property
    def kv_owners(self) -> tuple[int, ...]:
        return self.group if self.kv_owner is None else (self.kv_owner,)

    @property
    def owners(self) -> Owners:
        return Owners(table=self.table, group=self.group, block_size=self.block_size, rotation=self.rotation)

    @property
    def num_preemptions(self) -> int:
        return self.metrics.num_preemptions

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens fill or begin, on all members if tokens rotate."""
        if self.rotation is not None:
            return self.rotation.num_blocks(num_tokens, self.block_size)
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ parts of steps

    def make_part(self, scheduled: ScheduledPart, eos_token_ids: tuple[int, ...], hosted: tuple[int, ...] = ()) -> Part:
        """Build the request's part of a step, and record its contents as sent. The table already has the new blocks.

        Args:
            hosted: see `Part.hosted`.
        """
        start, stop, group = scheduled.start, scheduled.stop, scheduled.group
        assert start == self.num_scheduled, "spans of a request follow each other"
        if group != self.group and not set(group) <= set(self.group):
            assert self.rotation is None, "a group with rotating owners does not change"
            self.sent_blocks = self.sent_output = 0  # new members are sent the whole state
        tokens = self.tokens(start, stop)
        self.group, self.rotation, self.kv_owner = group, scheduled.rotation, scheduled.kv_owner
        unknown_on = self.sampler if tokens[-1] == UNKNOWN else None
        first_block, self.sent_blocks = self.sent_blocks, len(self.table)
        first_output = 0
        new_output: tuple[int, ...] = ()
        if self.keeps_history:
            first_output, self.sent_output = self.sent_output, len(self.output)
            new_output = tuple(self.output[first_output:])
        self.num_scheduled = stop
        return Part(
            request_id=self.id,
            start=start,
            stop=stop,
            tokens=tokens,
            group=group,
            runs=scheduled.runs,
            exchange=scheduled.exchange,
            first_block=first_block,
            blocks=tuple([self.moving.get(ref, ref) for ref in self.table[first_block:]]),
            hosted=hosted,
            sample=self._place_sample(scheduled) if stop == self.num_tokens else None,
            unknown_on=unknown_on,
            sampling=self.sampling(eos_token_ids) if first_block == 0 else None,
            first_output=first_output,
            new_output=new_output,
            targets=self.prompt[start + 1 : stop + 1] if self.scores_prompt else (),
            rope_length=self.rope_length,
            rotation=self.rotation,
        )

    def _place_sample(self, scheduled: ScheduledPart) -> Sample:
        position = scheduled.stop
        for instance, runs in compress(zip(scheduled.group, scheduled.runs, strict=True), scheduled.runs):
            if runs[-1].stop == position:
                self.sampler = instance  # computes the last token
        below_minimum = position - self.num_prompt < self.params.min_tokens
        return Sample(instance=self.sampler, position=position, below_minimum=below_minimum)

    def take_part(self, part: Part) -> None:
        assert self.num_computed == part.start, "steps complete in order"
        self.num_computed = part.stop
        self.metrics.take_part(part, self)

    def take_scores(self, scored: Scored) -> None:
        for position, logprobs in zip(scored.positions, scored.logprobs, strict=True):
            self.prompt_logprobs[position] = logprobs
        if scored.attention and not self.output:
            self.attention.append(scored.attention)

    def take_token(self, sampled: Sampled, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Append a token to the output. Return the finish reason, or None if the request continues."""
        params, token = self.params, sampled.token
        if sampled.error:
            return self.fail("structured_outputs", sampled.error)
        self.output.append(token)
        self.num_tokens = max(self.num_tokens, self.num_known)
        if params.output_logits:
            self.logits.append(sampled.logits)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        if len(self.output) > params.min_tokens and token in params.stop_ids:
            self.stop_reason = token
            return "stop"
        if token in eos_token_ids and not params.ignore_eos:
            return "stop"
        return "length" if len(self.output) >= self.max_tokens else None


def root_key(rope_length: int, sparse: SparseSetting | None, cache_salt: str = "") -> bytes:
    """Return the prefix key before the first token. It has a hash of the salt, so that disks do not store the salt."""
    root = ROOT if not rope_length else b"rope%d" % rope_length
    root = root if sparse is None else root + sparse.key
    if not cache_salt:
        return root
    return root + b"salt" + hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ContextLengthError(ValueError):
    """A prompt is longer than the model's context, or than the memory for its keys and values.

    Attributes:
        code: the error code in responses of the API, as in OpenAI's.
    """

    code = "context_length_exceeded"


def check_length(num_prompt_tokens: int, max_model_len: int) -> None:
    if num_prompt_tokens < 1:
        raise ValueError("the prompt is empty: at least 1 token is needed")
    if num_prompt_tokens >= max_model_len:
        raise too_long(f"{num_prompt_tokens} tokens", max_model_len, min_context=num_prompt_tokens + 1)


def check_room(name: str, max_tokens: int, num_prompt_tokens: int, max_model_len: int) -> None:
    """Raise ValueError if prompt and output exceed the model length. `name` is the field with `max_tokens`."""
    max_output = max_model_len - num_prompt_tokens
    if max_tokens > max_output:
        problem = (
            f"is {max_tokens}, but a prompt of {num_prompt_tokens} tokens leaves {max_output} output tokens "
            f"(`max_model_len` is {max_model_len}, of prompt and output together): give at most {max_output}"
        )
        raise ParameterError(name, problem, max_tokens)


def too_long(length: str, max_model_len: int, *, min_context: int | None = None) -> ContextLengthError:
    from longspan.core.long_models import long_model  # noqa: PLC0415 - an error

    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens, of prompt and output together, but the prompt "
        f"has {length} (`max_model_len`): shorten the prompt or, if KV memory suffices, serve {long_model(min_context)}"
    )
