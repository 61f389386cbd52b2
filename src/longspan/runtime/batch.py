"""One rank's view of a Forward: its tokens packed in a row, where their KV goes, and how each part exchanges.

A rank remembers requests from the first part it sees until it is told to forget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.attn.backends import AttentionBackend
from longspan.attn.comm import Group, Message
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import on_device
from longspan.core.blocks import BlockRef
from longspan.core.exchange import Exchange
from longspan.core.owners import Owners
from longspan.core.runs import Run, num_tokens
from longspan.core.steps import UNKNOWN, Forward, Part, Sample, Sampling
from longspan.model.step import Rows
from longspan.runtime.pool import KvPool
from longspan.runtime.sampling import Draw, GrammarMatcher, TokenCounts, Vocabulary

if TYPE_CHECKING:
    from longspan.runtime.host_pool import HostPool


@dataclass(frozen=True, kw_only=True)
class Packed(Rows):
    """The share of a Forward that concerns one rank. All tensors are on the host.

    Attributes:
        num_alone: tokens before those of layerwise exchanges, which come last; None when there are no such parts.
        slots: where the KV of tokens goes that are stored before the exchange: of all parts whose channel has none.
        channels: in the same order on every rank.
        samples: how to sample from the logits of each token in `keep`, for `request_ids`.
        rows: the packed rows of each request that has some here.
        unknown: tokens that this rank must find out or pass on before it computes.
    """

    num_alone: int | None
    slots: Slots
    channels: tuple[Channel, ...]
    samples: tuple[Sample, ...]
    request_ids: tuple[int, ...]
    rows: tuple[tuple[int, slice], ...]
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
        hosted: the same parts with the keys that members have on their hosts; None when there are none.
    """

    number: int
    exchange: Exchange
    members: tuple[int, ...]
    rank: int
    parts: MemberParts
    slots: tuple[Slots, ...]
    rope_lengths: tuple[int, ...]
    hosted: MemberParts | None = None

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

    All `[tokens]` int64 on the host, which `write` copies to the `device` of the pool once.
    """

    rows: Tensor
    blocks: Tensor
    offsets: Tensor
    device: torch.device

    def write(self, pool: KvPool, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes keys and values `[kv_heads, tokens, head_dim]`, of which `rows` go here."""
        rows, blocks, offsets = self._on_device
        if len(rows) == k.shape[1]:  # all of them
            pool.write(layer, blocks, offsets, k, v)
        elif len(rows):
            pool.write(layer, blocks, offsets, k[:, rows], v[:, rows])

    @cached_property
    def _on_device(self) -> Sequence[Tensor]:
        return on_device((self.rows, self.blocks, self.offsets), self.device)


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
    host: HostPool | None = None,
) -> Packed:
    """Packs the parts in which `instance` is a member, and brings `requests` up to date."""
    parts = sorted(forward.parts, key=_layerwise_last)
    own: list[OwnPart] = []
    for part in parts:
        if instance in part.group:
            first_row = own[-1].rows.stop if own else 0
            own.append(_own_part(part, requests.apply(part).table, instance, block_size, first_row, host))
    last_rows = {one.part.request_id: one.rows.stop - 1 for one in own}
    sampled = [(one.part, one.part.sample) for one in own if one.part.sample and one.part.sample.instance == instance]
    before = [one for one in own if not one.part.exchange.stores_after]

    def tensor(numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, dtype=np.int64))

    return Packed(
        tokens=tensor([token for one in own for token in one.tokens]),
        positions=tensor(_numbers([run.positions for one in own for run in one.runs])),
        rope_lengths=tensor(np.repeat([one.part.rope_length for one in own], [one.num_tokens for one in own])),
        num_alone=next((one.rows.start for one in own if one.part.exchange.is_layerwise), None),
        slots=_slots(before, instance, block_size, device),
        channels=_channels(forward, own, instance, block_size=block_size, device=device, backend=backend, host=host),
        keep=tensor([last_rows[part.request_id] for part, _ in sampled]),
        samples=tuple(sample for _, sample in sampled),
        request_ids=tuple(part.request_id for part, _ in sampled),
        rows=tuple((one.part.request_id, one.rows) for one in own if one.num_tokens),
        unknown=tuple(one for part in parts for one in _unknown(part, instance, last_rows.get(part.request_id, -1))),
        prompts=tuple(_prompt_rows(one) for one in own if one.part.targets and one.num_tokens),
    )


def _layerwise_last(part: Part) -> tuple[int, str, tuple[int, ...]]:
    """Sorts the parts of layerwise exchanges behind all others, by exchange and group."""
    return (1, str(part.exchange), part.group) if part.exchange.is_layerwise else (0, "", ())


class OwnPart(NamedTuple):
    """A part on one of its members.

    Attributes:
        runs: of its tokens, in their order in the packed row.
        stored: where those of its new tokens lie that some member stores, from row `first_stored` on: of the packed
            row, or of what this member has after an exchange that stores after it.
        hosted: the same with the keys on hosts that members attend over, if any.
    """

    part: Part
    member: MemberPart
    runs: Sequence[Run]
    stored: Sequence[tuple[range, Sequence[BlockRef]]]
    first_stored: int
    hosted: MemberPart | None

    @property
    def rows(self) -> slice:
        return self.member.rows

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.runs)

    @property
    def tokens(self) -> list[int]:
        part = self.part
        own = [part.tokens[run.start - part.start : run.stop - part.start : run.step] for run in self.runs]
        return [token for some in own for token in some]


def _own_part(
    part: Part, table: list[BlockRef], instance: int, block_size: int, first_row: int, host: HostPool | None
) -> OwnPart:
    owners = Owners(table=table, group=part.group, block_size=block_size, rotation=part.rotation)
    me = part.group.index(instance)
    own = part.runs[me]
    rows = slice(first_row, first_row + num_tokens(own))
    member = MemberPart(rows=rows, q_runs=part.runs, kv_runs=owners.held(part.stop), blocks=owners.blocks(instance))
    hosted = None
    if part.hosted:
        from longspan.core.hosts import shares_of_hosts  # noqa: PLC0415 - few requests are so long

        assert host is not None and part.exchange.traits.reads_hosts, f"{part.exchange} reads no host"
        runs, blocks = shares_of_hosts(table, [host.pool_of(i) for i in part.group], part.hosted, block_size)
        hosted = MemberPart(rows=rows, q_runs=part.runs, kv_runs=runs, blocks=blocks[me])
    stored: Sequence[Run] = own
    if part.exchange.traits.keeps == "later":  # after the exchange it has all new tokens up to its own
        ends = (run.stop for runs in part.runs[: me + 1] for run in runs)
        stored = [Run(part.start, max(ends, default=part.start))]
    return OwnPart(
        part=part,
        member=member,
        runs=own,
        stored=[slots for run in stored for slots in owners.slots(run)],
        first_stored=0 if part.exchange.stores_after else first_row,
        hosted=hosted,
    )


def _slots(parts: Iterable[OwnPart], instance: int, block_size: int, device: torch.device) -> Slots:
    """Finds the slots of those stored tokens whose block is this instance's."""
    rows: list[range] = []
    places: list[range] = []
    refs: list[BlockRef] = []
    for one in parts:
        row = one.first_stored
        for place, blocks in one.stored:
            shift = len(refs) * block_size
            places.append(range(place.start + shift, place.stop + shift, place.step))
            rows.append(range(row, row + len(place)))
            refs.extend(blocks)
            row += len(place)
    index, offsets = np.divmod(_numbers(places), block_size)
    pools, numbers = np.fromiter(chain.from_iterable(refs), np.int64, 2 * len(refs)).reshape(-1, 2)[index].T
    own = pools == instance
    found = torch.from_numpy(np.stack([_numbers(rows)[own], numbers[own], offsets[own]]))
    return Slots(rows=found[0], blocks=found[1], offsets=found[2], device=device)


def _numbers(ranges: Sequence[range]) -> NDArray[np.int64]:
    """Lists the numbers of all ranges, one after the other, at the same price for many short ones and a long one."""
    starts = np.array([one.start for one in ranges], dtype=np.int64)
    steps = np.array([one.step for one in ranges], dtype=np.int64)
    counts = np.array([len(one) for one in ranges], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    return np.repeat(starts - steps * firsts, counts) + np.repeat(steps, counts) * np.arange(counts.sum())


def _unknown(part: Part, instance: int, last_row: int) -> Iterator[UnknownToken]:
    if part.tokens[-1] == UNKNOWN:
        assert part.sample is not None and part.unknown_on is not None, "what is unknown is the request's last token"
        target = part.sample.instance
        if instance in (target, part.unknown_on):
            row = last_row if instance == target else -1
            yield UnknownToken(request_id=part.request_id, source=part.unknown_on, target=target, row=row)


def _prompt_rows(own: OwnPart) -> PromptRows:
    """Finds this member's rows whose next token is part of the prompt."""
    part = own.part
    before = [one for run in own.runs for one in run.positions if one - part.start < len(part.targets)]
    return PromptRows(
        request_id=part.request_id,
        rows=tuple(range(own.rows.start, own.rows.start + len(before))),
        positions=tuple(position + 1 for position in before),
        targets=tuple(part.targets[position - part.start] for position in before),
    )


def _channels(
    forward: Forward,
    own: Sequence[OwnPart],
    instance: int,
    *,
    block_size: int,
    device: torch.device,
    backend: AttentionBackend,
    host: HostPool | None,
) -> tuple[Channel, ...]:
    exchanging = dict.fromkeys((part.exchange, part.group) for part in forward.parts if len(part.group) > 1)
    numbers = {kind: number for number, kind in enumerate(exchanging)}
    by_kind: dict[tuple[Exchange, tuple[int, ...]], list[OwnPart]] = {}
    for one in own:
        by_kind.setdefault((one.part.exchange, one.part.group), []).append(one)
    return tuple(
        Channel(
            number=numbers.get((exchange, group), 0),
            exchange=exchange,
            members=group,
            rank=group.index(instance),
            parts=MemberParts([one.member for one in parts], backend),
            slots=tuple(_slots([one], instance, block_size, device) for one in parts if exchange.stores_after),
            rope_lengths=tuple(one.part.rope_length for one in parts),
            hosted=_hosted(parts, host),
        )
        for (exchange, group), parts in by_kind.items()
    )


def _without_keys(member: MemberPart) -> MemberPart:
    return replace(member, kv_runs=((),) * len(member.kv_runs), blocks=())


def _hosted(parts: Sequence[OwnPart], host: HostPool | None) -> MemberParts | None:
    if host is None or all(one.hosted is None for one in parts):
        return None
    return MemberParts([one.hosted or _without_keys(one.member) for one in parts], host.backend)


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
    """The requests of one rank by id. Only ranks that sample count tokens for penalties and grammars."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device, *, samples: bool = True) -> None:
        self._vocabulary, self._device, self._samples = vocabulary, device, samples
        self._requests: dict[int, RankRequest] = {}

    def __getitem__(self, request_id: int) -> RankRequest:
        return self._requests[request_id]

    def apply(self, part: Part) -> RankRequest:
        sampling, vocabulary = part.sampling, self._vocabulary
        if sampling is not None and part.request_id not in self._requests:
            penalised, constrained = (self._samples and one for one in (sampling.penalised, sampling.constrained))
            self._requests[part.request_id] = RankRequest(
                sampling=sampling,
                history=TokenCounts(vocabulary.size, sampling.prompt, self._device) if penalised else None,
                matcher=GrammarMatcher(sampling.grammar, vocabulary) if constrained else None,
            )
        request = self._requests[part.request_id]
        request.apply(part)
        return request

    def learn(self, request_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes in what another rank has sampled, of those that are not forgotten yet."""
        for request_id, token in zip(request_ids, tokens, strict=True):
            if request_id in self._requests:
                self._requests[request_id].last_token = token

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


def resolve(packed: Packed, requests: RankRequests, everyone: Group, device: torch.device) -> None:
    """Puts the ids of unknown tokens into `packed.tokens` in place, and sends away those that other instances compute.

    `everyone` is all instances in order, whose messages lie on `device`.
    """
    me = everyone.rank
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
