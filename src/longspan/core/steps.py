"""Steps that the controller sends to ranks. A policy's `ScheduledPart` becomes a `Part` once its blocks are fixed.

Treat steps as immutable. Classes with an object per token are not `frozen`, which takes 3 times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from longspan.core.blocks import BlockRef, chain_key
from longspan.core.exchange import Exchange
from longspan.core.owners import Rotation
from longspan.core.runs import SpanShards

if TYPE_CHECKING:
    from longspan.core.cluster import Cluster

Link = Literal["same_host", "other_host"]
"""The distance between the two ends of a message."""

BytesSent = dict[tuple[str, Link], int]
"""Payload bytes by exchange (or other kind of message) and link."""

UNKNOWN = -1
"""Placeholder of a token that a step in flight samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The sampling state of a request that is the same for all its tokens. Ranks are sent it once.

    Random numbers are keyed by (seed, choice, position), so they depend on neither batch nor layout.

    Attributes:
        choice: the index of this request among the `n` outputs of its prompt.
        banned: token ids that are not sampled below `min_tokens` (end-of-sequence and stop tokens).
        prompt: the distinct token ids of the prompt, for the repetition penalty only.
        logprobs, prompt_logprobs: number of most likely tokens reported per output or prompt token. None: no report.
        output_logits: whether the logits are reported with the token.
        grammar: the grammar of the output, in llguidance's serialised form. Empty: any output.
        attention: the positions `[start, stop)` whose attention to the prompt is reported. None: no report.
    """

    seed: int
    choice: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_logits: bool = False
    grammar: str = ""
    attention: tuple[int, int] | None = None

    @property
    def penalised(self) -> bool:
        """Whether the choice of a token depends on earlier tokens beyond their logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def constrained(self) -> bool:
        return bool(self.grammar)


@dataclass(kw_only=True, slots=True)
class Sample:
    """One token to sample, at `position`, on the `instance` that computes the span's last token.

    Attributes:
        below_minimum: whether `Sampling.banned` tokens are excluded.
    """

    instance: int
    position: int
    below_minimum: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token by the model's logits, before penalties, bias and temperature.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the most likely token.
        top_ids, top_logprobs: the requested number of most likely tokens, in descending order.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(kw_only=True, slots=True)
class Part:
    """One request's share of a Forward.

    Attributes:
        start, stop: the span of computed token positions.
        group: the instances that compute it and hold its KV, in ring order.
        runs: the runs of the span, per member of `group`. Ranks do not shard.
        first_block, blocks: the request's block table is cut to `first_block` entries, then extended by `blocks`.
            `Owners` reads the table. KV is on the member that computed it, or, in a `chain`, on a later member.
        tokens: the span's token ids. The last is `UNKNOWN` if the step that samples it was still in flight.
        unknown_on: the instance that samples the unknown token, in an earlier step.
        sampling: only in the first part of a request on a rank of the group. `first_block` and `first_output` are then
            0. Members that have the request's sampling state already keep it.
        first_output, new_output: with penalties or a grammar, output tokens known since the last part, from this index.
        targets: with prompt logprobs, the token after each of the span's tokens inside the prompt.
        sample: None if the span does not reach the request's last token.
        rope_length: the length that length-dependent rotary embeddings of this request are pinned to.
        rotation: the rule that assigns single new tokens to owners. None if owners have whole blocks.
        hosted: number of host blocks that each member of `group` attends over. Empty without host blocks. Members on a
            host take the table's blocks in its pool in order: the first member the first blocks, and so on.
    """

    request_id: int
    start: int
    stop: int
    tokens: Sequence[int]
    group: tuple[int, ...]
    runs: SpanShards
    exchange: Exchange
    first_block: int
    blocks: tuple[BlockRef, ...]
    sample: Sample | None
    unknown_on: int | None = None
    sampling: Sampling | None = None
    first_output: int = 0
    new_output: tuple[int, ...] = ()
    targets: Sequence[int] = ()
    rope_length: int = 0
    rotation: Rotation | None = None
    hosted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Content:
    """The content of a cached block: the KV of `tokens` after the prefix with key `parent`.

    `parent` is a root for the first block of a prompt, and otherwise the key of the previous block.
    """

    parent: bytes
    tokens: Sequence[int]

    @cached_property
    def key(self) -> bytes:
        return chain_key(self.parent, self.tokens)


MoveWay = Literal["across", "out", "in", "save", "load"]


@dataclass(kw_only=True, slots=True)
class MoveKV:
    """Copies whole KV blocks of one request, with all layers, to other pools.

    As a separate step, sources send blocks and targets write them into their pools while they compute. A `Completion`
    follows when all blocks have arrived. Inside a Forward, it follows the Forward's layers. If source and target
    instances are split differently, each rank of a target receives its KV heads from a rank that has them.

    Attributes:
        copies: pairs of source and target. Until the completion no step writes the sources, and no other step uses the
            targets. Ranks need not know the request: its first part may be later, and it may be freed before.
        way: `across` instances, `out` of an instance to its host pool, or `in` from its host pool. For `out` and `in`
            each rank copies its layers and heads while it computes, without messages. Ranks take no part in `save`
            (host pool to disk) and `load` (disk to host pool).
        contents: for `save` and `load`, the contents that the disk stores with the blocks.
        sources, targets: the sending and the receiving instances, ascending. Hosts are left out.
        is_local: whether no block goes to another instance.
    """

    number: int
    request_id: int
    copies: tuple[tuple[BlockRef, BlockRef], ...]
    way: MoveWay = "across"
    contents: tuple[Content, ...] = ()
    sources: tuple[int, ...] = field(init=False)
    targets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        sources = {source.instance for source, _ in self.copies} if self.way in ("across", "out") else ()
        targets = {target.instance for _, target in self.copies} if self.way in ("across", "in") else ()
        self.sources, self.targets = tuple(sorted(sources)), tuple(sorted(targets))

    @property
    def is_local(self) -> bool:
        return all(source.instance == target.instance for source, target in self.copies)


@dataclass(kw_only=True, slots=True)
class Forward:
    """One forward pass over several parts, which may differ in group and exchange.

    Attributes:
        rebalances: moves between members of a part, whose table has the targets already. A layer's KV arrives before
            its attention, while the next layer's KV is sent. They complete with the Forward. Or a copy of an admitted
            request's partial block on the same instance, before any computation.
        streams: moves of blocks that this Forward completes, to other instances or out to hosts. Sources send a layer
            as soon as its KV is computed. The executor informs targets. Each stream has its own `Completion`.
        instances: the instances that compute or pass on a token, ascending.
    """

    number: int
    parts: tuple[Part, ...]
    rebalances: tuple[MoveKV, ...] = ()
    streams: tuple[MoveKV, ...] = ()
    instances: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        members: set[int] = set()
        for part in self.parts:
            members.update(part.group)
            if part.unknown_on is not None:
                members.add(part.unknown_on)
        self.instances = tuple(sorted(members))


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """Ranks forget these requests. Its number orders it among Forwards. It has no completion.

    Attributes:
        cleared: blocks with KV that is not finite, each with its first such slot. Ranks clear the slots from there on.
    """

    number: int
    request_ids: tuple[int, ...]
    cleared: tuple[tuple[BlockRef, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshard:
    """Moves every rank to its place in another cluster: another share of the weights, an empty pool (Seesaw §4.1).

    No Forward, and no copy to or from a device, is in flight. Ranks forget all requests. Missing ranks are started.
    """

    number: int
    cluster: Cluster


Step = Forward | MoveKV | Free | Reshard


@dataclass(kw_only=True, slots=True)
class Sampled:
    """A token that a rank sampled. `logits` are float32 bytes of `[vocab]` if requested, and otherwise empty.

    A non-empty `error` is the reason why the request cannot continue. The token is then invalid.
    """

    request_id: int
    token: int
    logits: bytes = b""
    logprobs: TokenLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Logprobs of prompt tokens at `positions`, by the rank that computed the token before, or a rank's `attention`."""

    request_id: int
    positions: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    attention: bytes = b""  # to each prompt token, from `Sampling.attention`: float32, summed over layers and heads


@dataclass(kw_only=True, slots=True)
class Completion:
    """A Forward, MoveKV or Reshard that is complete on all its ranks, which have sent `bytes_sent`.

    Attributes:
        failed: the indices of failed copies of a MoveKV to or from a disk.
        non_finite: requests for which this Forward computed hidden states or logits that are NaN or infinite.
        reported_s: by rank, the time of its report on the engine's clock. Empty if the executor knows only the end.
    """

    number: int
    sampled: tuple[Sampled, ...]
    bytes_sent: BytesSent
    scored: tuple[Scored, ...] = ()
    failed: tuple[int, ...] = ()
    non_finite: tuple[int, ...] = ()
    reported_s: Mapping[int, float] = field(default_factory=dict)


class Executor(Protocol):
    """Runs steps in the order of their numbers, as far as they share ranks.

    Attributes:
        wakeup: an object that the host can wait for, such as a zmq socket. When it is readable, `poll` returns early
            with an empty list. Its owner sets it, None if there is none. Simulations ignore it.
    """

    wakeup: Any

    def submit(self, step: Step) -> None:
        """Send a step to its ranks, without waiting for them."""

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Wait for completions and return them, at most one per request. Return an empty list after `timeout_s`.

        None is no limit.

        Raises:
            WorkerLostError: a worker died or raised. No step in flight will complete.
        """

    def close(self) -> None:
        """End all workers. May be called again."""
