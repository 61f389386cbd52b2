"""Steps: what the controller tells ranks. A policy's `ScheduledPart` becomes a `Part` once its blocks are fixed.

Treat them as immutable. Those that are made for every token are not `frozen`, which would make them in thrice the
time.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""The locations of the two ends of a message."""

BytesSent = dict[tuple[str, Link], int]
"""Payload bytes by exchange (or what else was sent) and link."""

UNKNOWN = -1
"""Stands for a token that is yet to be sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Everything that stays the same whenever a token of one request is sampled. Ranks are sent it once and remember
    it.

    Random numbers are keyed by (seed, choice, position), so that neither batch nor layout can change them.

    Attributes:
        choice: which of the `n` outputs of a prompt this request is.
        banned: token ids that are not sampled below `min_tokens` (end-of-sequence and stop tokens).
        prompt: the distinct token ids of the prompt, for the repetition penalty only.
        logprobs, prompt_logprobs: how many of the most likely tokens are reported beside the one that was chosen, or
            stands in the prompt; None for no report.
        output_logits: whether the logits are reported with the token.
        grammar: what the output must follow, in llguidance's serialised form; empty for anything.
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
        below_minimum: whether `Sampling.banned` tokens are out of the question.
    """

    instance: int
    position: int
    below_minimum: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """The likelihood of one token by the model's own logits (before penalties, bias and temperature).

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the most likely token of all.
        top_ids, top_logprobs: the most likely tokens, best first, as many as were asked for.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(kw_only=True, slots=True)
class Part:
    """One request's share of a Forward.

    Attributes:
        start, stop: the span of token positions computed.
        group: the instances that work on it and hold its KV, in ring order.
        runs: of the span, per member of `group`; ranks never shard anew.
        first_block, blocks: the request's block table is cut to `first_block` entries, then extended by `blocks`.
            `Owners` says what lies where. KV is with the member that computed it, or, in a `chain`, a later one.
        tokens: the span's token ids. The last is `UNKNOWN` when the step that samples it was still in flight.
        unknown_on: the instance that samples that unknown token, in a step before this one.
        sampling: with the first part that a rank of the group sees of a request, None later; `first_block` and
            `first_output` are then 0, and members that have the request's sampling state already keep it.
        first_output, new_output: of a request with penalties or a grammar, the output tokens that became known since
            its last part, and which one the first of them is.
        targets: when prompt logprobs are wanted, the token that follows each of the span's tokens inside the prompt.
        sample: None when the span does not reach the request's last token.
        rope_length: the length that length-dependent rotary embeddings of this request are pinned to.
        rotation: the rule that assigns single new tokens to owners; None while owners take whole blocks.
        hosted: how many blocks in the pool of its host each member of `group` attends over; empty when there are none.
            Of the table's blocks in one host's pool the first such member takes the first so many, and so on.
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
    """The content of a cached block: its first `len(tokens)` slots, after the prefix that `parent` names.

    `parent` is a root for the first block of a prompt, and else the key of the block before.
    """

    parent: bytes
    tokens: Sequence[int]

    @cached_property
    def key(self) -> bytes:
        return chain_key(self.parent, self.tokens)


MoveWay = Literal["across", "out", "in", "save", "load"]


@dataclass(kw_only=True, slots=True)
class MoveKV:
    """Copies whole KV blocks of one request to other instances, every layer of them.

    By itself it is a step: sources send what they hold, targets write it into their pools while they compute, and a
    `Completion` says when all of it is there. Inside a Forward it keeps pace with the layers of that, see there. Where
    instances are split differently, each rank of a target gets the KV heads that it has, from a rank that has them.

    Attributes:
        copies: pairs of source and target. Meanwhile nobody writes its sources, and nobody else touches its targets.
            Ranks need to know nothing of the request: its first part may come later, and it may be freed before.
        way: from instances to instances, or by itself: `out` of an instance to the pool of its host, or from there
            `in`. Each rank of that instance copies its own layers and heads while it computes; no message is sent.
            Ranks have no part in those from the pool of a host to that of its disk, `save`, and back, `load`.
        contents: of those that are saved or loaded, what the disk keeps with them.
        sources, targets: the instances that send, and those that receive, ascending. A host is none.
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
        rebalances: moves between members of a part, whose table names the targets already: a layer's KV is there before
            its attention, and that of the next layer is under way meanwhile. Done when the Forward is. Or a copy of the
            block that an admitted request begins in, on the same instance, made before anything is computed.
        streams: moves of blocks that this Forward completes, to instances outside: sources send a layer as soon as its
            KV is computed. The executor informs targets. Each has a `Completion` of its own, after the Forward's or
            before.
        instances: those that compute or pass on a token, ascending.
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
        cleared: blocks of KV that is not finite, each with the first slot that ranks set to zero, up to its end. No
            step in flight names these slots.
    """

    number: int
    request_ids: tuple[int, ...]
    cleared: tuple[tuple[BlockRef, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshard:
    """Moves every rank to its place in another cluster: another share of the weights, an empty pool (Seesaw §4.1).

    No Forward is in flight meanwhile, nor a copy to or from a device. Ranks forget all requests. If the
    cluster has more ranks than there are, further ones start.
    """

    number: int
    cluster: Cluster


Step = Forward | MoveKV | Free | Reshard


@dataclass(kw_only=True, slots=True)
class Sampled:
    """A token that a rank sampled; `logits` are float32 bytes of `[vocab]`, empty unless asked for.

    `error` says why the request cannot go on, if so; its token means nothing then.
    """

    request_id: int
    token: int
    logits: bytes = b""
    logprobs: TokenLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The likelihood of the prompt tokens at `positions`, by the rank that computed the tokens before them."""

    request_id: int
    positions: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(kw_only=True, slots=True)
class Completion:
    """A Forward, MoveKV or Reshard that is done on all its ranks, which have sent `bytes_sent`.

    Attributes:
        failed: of a MoveKV to or from a disk, the copies that could not be made, by their index.
        non_finite: requests for which this Forward computed hidden states or logits that are NaN or infinite.
    """

    number: int
    sampled: tuple[Sampled, ...]
    bytes_sent: BytesSent
    scored: tuple[Scored, ...] = ()
    failed: tuple[int, ...] = ()
    non_finite: tuple[int, ...] = ()


class Executor(Protocol):
    """Runs steps in the order of their numbers, as far as they share ranks.

    Attributes:
        wakeup: something that the host can wait for, such as a zmq socket. When it can be read, `poll` returns early,
            with nothing. Its owner sets it; None for no such thing. A virtual clock waits for nothing and ignores it.
    """

    wakeup: Any

    def submit(self, step: Step) -> None:
        """Sends a step to its ranks; does not wait for them."""

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Waits for completions and returns those that have come, at most one per request; none after `timeout_s`.

        No limit is None.

        Raises:
            WorkerLostError: when a worker died or raised; none of the steps in flight will complete.
        """

    def close(self) -> None:
        """Ends its workers, if any; nothing of them is left. May be called again."""
