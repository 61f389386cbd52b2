"""One rank's view of a Forward: its tokens packed in a row, where their KV goes, and how each part exchanges.

A rank remembers requests from the first part it sees until it is told to forget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan.attn.backends import AttentionBackend
from longspan.attn.comm import Group, Message
from longspan.attn.member import MemberPart, MemberParts, num_tokens
from longspan.core.exchange import Exchange
from longspan.core.owners import BlockRef, Owners
from longspan.core.runs import Run
from longspan.core.steps import UNKNOWN, Forward, Part, Sample, Sampling
from longspan.runtime.pool import KvPool
from longspan.runtime.sampling import Draw, GrammarMatcher, TokenCounts, Vocabulary


@dataclass(frozen=True, kw_only=True)
class Packed:
    """All of a Forward that concerns one rank.

    Attributes:
        tokens, positions, rope_lengths: `[tokens]` int64, one packed row.
        num_alone: tokens before those of layerwise exchanges, which come last; None when there are no such parts.
        slots: where the KV of tokens goes that are stored before the exchange: of all parts whose channel has none.
        channels: in the same order on every rank.
        keep: `[n]` indices of the tokens whose logits are sampled by `samples`, for `request_ids`.
        unknown: tokens that this rank must find out or pass on before it computes.
    """

    tokens: Tensor
    positions: Tensor
    rope_lengths: Tensor
    num_alone: int | None
    slots: Slots
    channels: tuple[Channel, ...]
    keep: Tensor
    samples: tuple[Sample, ...]
    request_ids: tuple[int, ...]
    unknown: tuple[UnknownToken, ...]
    prompts: tuple[PromptRows, ...]


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Parts with the same exchange and group, which are exchanged together.

    Attributes:
        number: among the exchanging channels of the whole Forward, so that all members know it by the same number.
        rank: this member's index in the group.
        slots: of an exchange that stores after it, for each part: what this member stores of the new tokens that it has
            or gets.
        rope_lengths: of each part.
    """

    number: int
    exchange: Exchange
    members: tuple[int, ...]
    rank: int
    parts: MemberParts
    slots: tuple[Slots, ...]
    rope_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """This member's tokens, which follow each other."""
        return sum(num_tokens(part.q_runs[self.rank]) for part in self.parts)

    def store(self, pool: KvPool, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the new keys and values `[kv_heads, tokens, head_dim]` of this member's tokens to the pool."""
        start = 0
        for slots in self.slots:
            rows = slice(start, start + len(slots.rows))
            slots.write(pool, layer, k[:, rows], v[:, rows])
            start = rows.stop


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of the keys and values of some tokens: the token in row `rows[i]` to slot `offsets[i]` of `blocks[i]`.

    All `[tokens]` int64.
    """

    rows: Tensor
    blocks: Tensor
    offsets: Tensor

    def write(self, pool: KvPool, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes keys and values `[kv_heads, tokens, head_dim]`, of which `rows` go here."""
        if len(self.rows) == k.shape[1]:  # all of them
            pool.write(layer, self.blocks, self.offsets, k, v)
        elif len(self.rows):
            pool.write(layer, self.blocks, self.offsets, k[:, self.rows], v[:, self.rows])


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """Prompt tokens whose logprobs are wanted: packed token `rows[i]` predicts `targets[i]` at `positions[i]`."""

    request_id: int
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    targets: tuple[int, ...]


def pack(
    forward: Forward,
    requests: RankRequests,
    *,
    instance: int,
    block_size: int,
    device: torch.device,
    backend: AttentionBackend,
) -> Packed:
    """Packs the parts in which `instance` is a member, and brings `requests` up to date."""
    tokens: list[int] = []
    positions: list[int] = []
    rope_lengths: list[int] = []
    stored: list[tuple[int, BlockRef, int]] = []
    channels: dict[tuple[Exchange, tuple[int, ...]], list[tuple[MemberPart, Slots | None, int]]] = {}
    sampled: list[tuple[int, Sample, int]] = []
    unknown: list[UnknownToken] = []
    prompts: list[PromptRows] = []
    num_alone = None
    for part in _layerwise_last(forward.parts):
        if instance not in part.group:
            unknown.extend(_unknown(part, instance, -1))
            continue
        table = requests.apply(part).table
        owners = Owners(table=table, group=part.group, block_size=block_size, rotation=part.rotation)
        me, first = part.group.index(instance), len(tokens)
        runs = part.runs[me]
        for run in runs:
            tokens.extend(part.tokens[run.start - part.start : run.stop - part.start])
            positions.extend(run.positions)
        rope_lengths.extend([part.rope_length] * (len(tokens) - first))
        packed = MemberPart(
            rows=slice(first, len(tokens)),
            q_runs=part.runs,
            kv_runs=owners.held(part.stop),
            blocks=owners.blocks(instance),
        )
        kept = None
        if part.exchange.stores_after:
            after = _has_afterwards(part, me)
            kept = _slots(((row, *owners.slot(at)) for row, at in enumerate(after)), instance, device)
        else:
            stored.extend((row, *owners.slot(positions[row])) for row in range(first, len(tokens)))
        channels.setdefault((part.exchange, part.group), []).append((packed, kept, part.rope_length))
        if part.exchange.is_layerwise and num_alone is None:
            num_alone = first
        if part.sample is not None and part.sample.instance == instance:
            sampled.append((part.request_id, part.sample, len(tokens) - 1))
        unknown.extend(_unknown(part, instance, len(tokens) - 1))
        if part.targets and runs:
            prompts.append(_prompt_rows(part, runs, first))
    return Packed(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        rope_lengths=torch.tensor(rope_lengths, dtype=torch.int64, device=device),
        num_alone=num_alone,
        slots=_slots(stored, instance, device),
        channels=_channels(forward, channels, instance, backend),
        keep=torch.tensor([row for _, _, row in sampled], dtype=torch.int64, device=device),
        samples=tuple(wish for _, wish, _ in sampled),
        request_ids=tuple(request_id for request_id, _, _ in sampled),
        unknown=tuple(unknown),
        prompts=tuple(prompts),
    )


def _layerwise_last(parts: Sequence[Part]) -> list[Part]:
    """Puts the parts of layerwise exchanges after all others, by exchange and group."""

    def key(part: Part) -> tuple[int, str, tuple[int, ...]]:
        return (1, str(part.exchange), part.group) if part.exchange.is_layerwise else (0, "", ())

    return sorted(parts, key=key)


def _has_afterwards(part: Part, me: int) -> list[int]:
    if part.exchange.traits.keeps == "computed":
        return [position for run in part.runs[me] for position in run.positions]
    ends = (run.stop for runs in part.runs[: me + 1] for run in runs)
    return list(range(part.start, max(ends, default=part.start)))


def _slots(tokens: Iterable[tuple[int, BlockRef, int]], instance: int, device: torch.device) -> Slots:
    """Keeps the tokens (row, block, offset) whose block is this instance's."""
    own = [(row, ref.block, offset) for row, ref, offset in tokens if ref.instance == instance]
    rows, blocks, offsets = torch.tensor(own, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
    return Slots(rows=rows, blocks=blocks, offsets=offsets)


def _unknown(part: Part, instance: int, last_row: int) -> Iterator[UnknownToken]:
    if part.tokens[-1] == UNKNOWN:
        assert part.sample is not None and part.unknown_on is not None, "what is unknown is the request's last token"
        target = part.sample.instance
        if instance in (target, part.unknown_on):
            row = last_row if instance == target else -1
            yield UnknownToken(request_id=part.request_id, source=part.unknown_on, target=target, row=row)


def _prompt_rows(part: Part, runs: Sequence[Run], first_row: int) -> PromptRows:
    """Finds this member's rows whose next token is part of the prompt."""
    before = [position for run in runs for position in run.positions if position - part.start < len(part.targets)]
    return PromptRows(
        request_id=part.request_id,
        rows=tuple(range(first_row, first_row + len(before))),
        positions=tuple(position + 1 for position in before),
        targets=tuple(part.targets[position - part.start] for position in before),
    )


def _channels(
    forward: Forward,
    kinds: Mapping[tuple[Exchange, tuple[int, ...]], Sequence[tuple[MemberPart, Slots | None, int]]],
    instance: int,
    backend: AttentionBackend,
) -> tuple[Channel, ...]:
    exchanging = dict.fromkeys((part.exchange, part.group) for part in forward.parts if len(part.group) > 1)
    numbers = {kind: number for number, kind in enumerate(exchanging)}
    return tuple(
        Channel(
            number=numbers.get((exchange, group), 0),
            exchange=exchange,
            members=group,
            rank=group.index(instance),
            parts=MemberParts([part for part, _, _ in parts], backend),
            slots=tuple(slots for _, slots, _ in parts if slots is not None),
            rope_lengths=tuple(length for _, _, length in parts),
        )
        for (exchange, group), parts in kinds.items()
    )


@dataclass(kw_only=True)
class RankRequest:
    """One request on one rank.

    Attributes:
        history: the tokens that penalties count; None without penalties.
        matcher: the state of the grammar that the output must follow; None without one.
        table: its blocks, on whichever instance; `Owners` says what lies where.
        num_counted: output tokens that `history` and `matcher` contain.
        last_token: the token that this rank sampled last; -1 before the first.
    """

    sampling: Sampling
    history: TokenCounts | None
    matcher: GrammarMatcher | None
    table: list[BlockRef] = field(default_factory=list)
    num_counted: int = 0
    last_token: int = -1

    def apply(self, part: Part) -> None:
        """Takes in what a part says of blocks and output tokens."""
        known = len(self.table) - part.first_block
        assert known == 0 or part.first_block == 0 <= known, "blocks are told once, or all again"
        self.table[part.first_block :] = part.blocks
        if part.new_output:
            self.count(part.new_output[self.num_counted - part.first_output :])

    def count(self, tokens: tuple[int, ...]) -> None:
        """Counts more output tokens, which the controller may not know yet."""
        for counter in (self.history, self.matcher):
            if counter is not None:
                counter.add(tokens)
        self.num_counted += len(tokens)

    def draw(self, sample: Sample) -> Draw:
        """Gathers all that its next token depends on, besides the logits."""
        banned = self.sampling.banned if sample.below_minimum else ()
        return Draw(
            sampling=self.sampling,
            position=sample.position,
            banned=banned,
            history=self.history,
            allowed=None if self.matcher is None else self.matcher.allowed(banned),
        )

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        return "" if self.matcher is None else self.matcher.error


class RankRequests:
    """All requests of one rank by id."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._requests: dict[int, RankRequest] = {}

    def __getitem__(self, request_id: int) -> RankRequest:
        return self._requests[request_id]

    def apply(self, part: Part) -> RankRequest:
        sampling, vocabulary = part.sampling, self._vocabulary
        if sampling is not None and part.request_id not in self._requests:
            self._requests[part.request_id] = RankRequest(
                sampling=sampling,
                history=TokenCounts(vocabulary.size, sampling.prompt, self._device) if sampling.penalised else None,
                matcher=GrammarMatcher(sampling.grammar, vocabulary) if sampling.constrained else None,
            )
        request = self._requests[part.request_id]
        request.apply(part)
        return request

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drops requests; ignores those of other ranks."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)


@dataclass(frozen=True, kw_only=True)
class UnknownToken:
    """The last token of a part, which instance `source` sampled in an earlier step and `target` computes in this one.

    Attributes:
        row: its index among the packed tokens of `target`; -1 on other ranks.
    """

    request_id: int
    source: int
    target: int
    row: int


def resolve(packed: Packed, requests: RankRequests, everyone: Group) -> None:
    """Puts the ids of unknown tokens into `packed.tokens` in place, and sends away those that other instances compute.

    `everyone` is all instances in order.
    """
    me, device = everyone.rank, packed.tokens.device
    known = {one.request_id: requests[one.request_id].last_token for one in packed.unknown if one.source == me}
    leaving: dict[int, list[int]] = {}
    coming: dict[int, list[int]] = {}
    for one in packed.unknown:
        if me == one.source != one.target:
            leaving.setdefault(one.target, []).append(one.request_id)
        elif me == one.target != one.source:
            coming.setdefault(one.source, []).append(one.request_id)
    if leaving or coming:
        sends = {peer: Message([((len(ids),), torch.int64)], device) for peer, ids in leaving.items()}
        for peer, ids in leaving.items():
            sends[peer].tensors[0].copy_(torch.tensor([known[request_id] for request_id in ids]))
        receives = {peer: Message([((len(ids),), torch.int64)], device) for peer, ids in coming.items()}
        everyone.start(sends=sends, receives=receives, hop=0).wait()
        for peer, ids in coming.items():
            known.update(zip(ids, receives[peer].tensors[0].tolist(), strict=True))
    for one in packed.unknown:
        if one.target == me:
            packed.tokens[one.row] = known[one.request_id]
            requests[one.request_id].count((known[one.request_id],))
