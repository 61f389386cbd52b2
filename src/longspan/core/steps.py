"""Steps: what the controller tells ranks. A policy's `Share` becomes a `Part` once its blocks are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.core.runs import Deal, Run

Exchange = Literal["local", "ring_kv", "ring_q"]
"""How Q, K, V travel: `local` not at all, `ring_kv` keys and values, `ring_q` queries and partial outputs."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One KV block: number `block` in the pool of `instance`."""

    instance: int
    block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """How and where one token is sampled: the random number is keyed by (seed, position), so that neither batch nor
    layout can change it.

    Attributes:
        instance: the member that holds the span's last token and samples.
        position: of the token to be sampled.
        banned: token ids that must not be sampled (end-of-sequence below `min_tokens`).
        output_logits: whether the logits are reported with the token.
    """

    instance: int
    position: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    banned: tuple[int, ...] = ()
    output_logits: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One request's share of a Forward.

    Attributes:
        start, stop: the span of token positions computed.
        tokens: ids of the span's tokens.
        group: the instances that work on it, in ring order.
        runs: of the span, per member of `group`; ranks never re-deal.
        first_block, blocks: the request's block table is cut to `first_block` entries, then extended by `blocks`; entry
            b holds tokens `[b * block_size, (b + 1) * block_size)`.
        sample: None when the span does not reach the request's last token.
        rope_length: the length that length-dependent rotary embeddings of this request are pinned to.
    """

    request_id: int
    start: int
    stop: int
    tokens: tuple[int, ...]
    group: tuple[int, ...]
    runs: Deal
    exchange: Exchange
    first_block: int
    blocks: tuple[BlockRef, ...]
    sample: Sample | None
    rope_length: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One forward pass over several parts, which may differ in group and exchange."""

    number: int
    parts: tuple[Part, ...]

    @property
    def instances(self) -> tuple[int, ...]:
        """The instances that take part, ascending."""
        return tuple(sorted({instance for part in self.parts for instance in part.group}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """Ranks forget these requests. Its number orders it among Forwards; nobody reports its completion."""

    number: int
    request_ids: tuple[int, ...]


Step = Forward | Free


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A token that a rank sampled; `logits` are float32 bytes of `[vocab]`, empty unless asked for."""

    request_id: int
    token: int
    logits: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A Forward is done on all its ranks. `bytes_sent` counts payload bytes per exchange."""

    number: int
    sampled: tuple[Sampled, ...]
    bytes_sent: dict[str, int]


def members_with_queries(runs: Deal) -> tuple[int, ...]:
    """Indices of the members of a group that compute tokens of a deal."""
    return tuple(member for member, member_runs in enumerate(runs) if member_runs)


def held_runs(table: list[BlockRef], group: tuple[int, ...], num_tokens: int, block_size: int) -> Deal:
    """Which of a request's first `num_tokens` tokens each member of `group` holds, ascending and joined."""
    held: dict[int, list[Run]] = {instance: [] for instance in group}
    for index, ref in enumerate(table[: -(-num_tokens // block_size)]):
        runs = held[ref.instance]
        start, stop = index * block_size, min(num_tokens, (index + 1) * block_size)
        if runs and runs[-1].stop == start:
            runs[-1] = Run(runs[-1].start, stop)
        else:
            runs.append(Run(start, stop))
    return tuple(tuple(held[instance]) for instance in group)
