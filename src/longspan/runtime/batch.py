"""One rank's view of a Forward: its packed tokens, the slots of their KV, and the exchange of each part.

A rank keeps the state of a request from its first part until a Free step.
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

from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import on_device
from longspan.core.blocks import BlockRef
from longspan.core.exchange import Exchange
from longspan.core.owners import Owners
from longspan.core.runs import Run, num_tokens
from longspan.core.steps import UNKNOWN, Forward, Part, Sample, Sampling, Scored
from longspan.model.step import Rows
from longspan.runtime.pool import KvPool
from longspan.runtime.sampling import Draw
from longspan.runtime.unknown_tokens import UnknownToken

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend
    from longspan.attn.sparse.kept import KeptKeys
    from longspan.model.files import ModelFiles
    from longspan.model.info import ModelInfo
    from longspan.runtime.grammar import GrammarMatcher, Vocabulary
    from longspan.runtime.host_pool import HostPool
    from longspan.runtime.logit_changes import TokenCounts
    from longspan.runtime.prompt_attention import PromptAttention


@dataclass(frozen=True, kw_only=True)
class Packed(Rows):
    """The share of a Forward that concerns one rank. All tensors are on the host.

    Attributes:
        num_alone: the number of tokens before the tokens of layerwise exchanges. None without such parts.
        slots: the KV slots of all parts that store their KV before the exchange.
        channels: in the same order on every rank.
        samples: the sampling settings of the logits of each token in `keep`, for `request_ids`.
        rows: the packed rows of each request with tokens on this rank.
        unknown: tokens that this rank must receive or send before it computes.
    """

    num_alone: int | None
    slots: Slots
    channels: tuple[Channel, ...]
    samples: tuple[Sample, ...]
    request_ids: tuple[int, ...]
    rows: tuple[tuple[int, slice], ...]
    unknown: tuple[UnknownToken, ...]
    prompts: tuple[PromptRows, ...]

    @property
    def is_decode(self) -> bool:
        """Whether every token of the step is the only one of its request, and the next one is sampled after it."""
        return 0 < len(self.samples) == len(self.rows) == len(self.tokens) and not self.prompts

    def attention(self) -> list[Scored]:
        """Return the reports of `Channel.ratings`, after the step."""
        return [scored for channel in self.channels if channel.ratings for scored in channel.ratings.scored()]


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Parts with the same exchange and group, which share messages.

    Attributes:
        number: index among the exchanging channels of the whole Forward. All members use the same number.
        rank: this member's index in the group.
        slots: for exchanges that store KV after the exchange: the slots of each part's new tokens on this member.
        rope_lengths: of each part.
        hosted: the same parts with the host-resident keys of their members. None if no part has such keys.
        ratings: sums the attention of prompts for the requests that report it. None if no part has such queries.
    """

    number: int
    exchange: Exchange
    members: tuple[int, ...]
    rank: int
    parts: MemberParts
    slots: tuple[Slots, ...]
    rope_lengths: tuple[int, ...]
    hosted: MemberParts | None = None
    ratings: PromptAttention | None = None

    @property
    def num_tokens(self) -> int:
        """Number of this member's tokens, which are contiguous in the packed row."""
        return sum(num_tokens(part.q_runs[self.rank]) for part in self.parts)

    def store(self, pool: KvPool, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the new keys and values `[kv_heads, tokens, head_dim]` of this member's tokens to the pool."""
        start = 0
        for slots in self.slots:
            rows = slice(start, start + len(slots.rows))
            slots.write(pool, layer, k[:, rows], v[:, rows])
            start = rows.stop


@dataclass(frozen=True, kw_only=True)
class Slots:
    """KV slots of tokens: the token in row `rows[i]` is stored in slot `offsets[i]` of block `blocks[i]`.

    All `[tokens]` int64 on the host. The first `write` copies them to `device`, the device of the pool.
    """

    rows: Tensor
    blocks: Tensor
    offsets: Tensor
    device: torch.device

    def write(self, pool: KvPool, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the `rows` of keys and values `[kv_heads, tokens, head_dim]` to the pool."""
        rows, blocks, offsets = self.on_device
        if len(rows) == k.shape[1]:  # all rows: no selection needed
            pool.write(layer, blocks, offsets, k, v)
        elif len(rows):
            pool.write(layer, blocks, offsets, k[:, rows], v[:, rows])

    @cached_property
    def on_device(self) -> Sequence[Tensor]:
        """Rows, blocks and offsets on `device`."""
        return on_device((self.rows, self.blocks, self.offsets), self.device)


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """Prompt tokens with requested logprobs: packed token `rows[i]` predicts `targets[i]` at `positions[i]`."""

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
    """Pack the parts in which `instance` is a member, and apply them to `requests`."""
    parts = sorted(forward.parts, key=_layerwise_last)
    shares: list[OwnPart] = []
    for part in parts:
        if instance in part.group:
            first_row = shares[-1].rows.stop if shares else 0
            shares.append(_own_part(part, requests.apply(part), instance, block_size, first_row, host))
    last_rows = {share.part.request_id: share.rows.stop - 1 for share in shares}
    samples = [(share.part, share.part.sample) for share in shares if share.part.sample]
    sampled = [(part, sample) for part, sample in samples if sample.instance == instance]
    before = [share for share in shares if not share.part.exchange.stores_after]

    def tensor(numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, dtype=np.int64))

    return Packed(
        tokens=tensor([token for share in shares for token in share.tokens]),
        positions=tensor(_joined([run.positions for share in shares for run in share.runs])),
        rope_lengths=tensor(np.repeat([s.part.rope_length for s in shares], [s.num_tokens for s in shares])),
        num_alone=next((share.rows.start for share in shares if share.part.exchange.is_layerwise), None),
        slots=_slots(before, instance, block_size, device),
        channels=_channels(
            forward, shares, instance, requests, block_size=block_size, device=device, backend=backend, host=host
        ),
        keep=tensor([last_rows[part.request_id] for part, _ in sampled]),
        samples=tuple(sample for _, sample in sampled),
        request_ids=tuple(part.request_id for part, _ in sampled),
        rows=tuple((share.part.request_id, share.rows) for share in shares if share.num_tokens),
        unknown=tuple(chain.from_iterable(_unknown(p, instance, last_rows.get(p.request_id, -1)) for p in parts)),
        prompts=tuple(_prompt_rows(share) for share in shares if share.part.targets and share.num_tokens),
    )


def _layerwise_last(part: Part) -> tuple[int, str, tuple[int, ...]]:
    """Sort key: parts of layerwise exchanges come last, ordered by exchange, with its parameters, and group."""
    return (1, repr(part.exchange), part.group) if part.exchange.is_layerwise else (0, "", ())


class OwnPart(NamedTuple):
    """A part on one of its members.

    Attributes:
        runs: the member's tokens, in packed order.
        stored: pieces of (slot indices, blocks) for the new tokens that any member stores. They begin at row
            `first_stored` of the packed row, or of this member's tokens after an exchange that stores afterwards.
        hosted: the part with the host-resident keys that members attend over. None without such keys.
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
        pieces = [part.tokens[run.start - part.start : run.stop - part.start : run.step] for run in self.runs]
        return [token for piece in pieces for token in piece]


def _own_part(
    part: Part, request: RankRequest, instance: int, block_size: int, first_row: int, host: HostPool | None
) -> OwnPart:
    table = request.table
    owners = Owners(table=table, group=part.group, block_size=block_size, rotation=part.rotation)
    me = part.group.index(instance)
    own = part.runs[me]
    rows = slice(first_row, first_row + num_tokens(own))
    kv_runs, blocks = owners.held(part.stop), owners.blocks(instance)
    member = MemberPart(rows=rows, q_runs=part.runs, kv_runs=kv_runs, blocks=blocks, kept=request.kept)
    hosted = None
    if part.hosted:
        from longspan.core.hosts import shares_of_hosts  # noqa: PLC0415 - only for requests with host-resident keys

        assert host is not None and part.exchange.traits.reads_hosts, f"{part.exchange} reads no host"
        runs, on_hosts = shares_of_hosts(table, [host.pool_of(i) for i in part.group], part.hosted, block_size)
        hosted = MemberPart(rows=rows, q_runs=part.runs, kv_runs=runs, blocks=on_hosts[me])
    stored: Sequence[Run] = own
    if part.exchange.traits.keeps == "later":  # after the exchange, a member has all new tokens up to its own
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


def _slots(shares: Iterable[OwnPart], instance: int, block_size: int, device: torch.device) -> Slots:
    """Return the slots of the stored tokens whose block belongs to this instance."""
    rows: list[range] = []
    slot_ranges: list[range] = []
    refs: list[BlockRef] = []
    for share in shares:
        row = share.first_stored
        for slots, blocks in share.stored:
            shift = len(refs) * block_size
            slot_ranges.append(range(slots.start + shift, slots.stop + shift, slots.step))
            rows.append(range(row, row + len(slots)))
            refs.extend(blocks)
            row += len(slots)
    index, offsets = np.divmod(_joined(slot_ranges), block_size)
    pools, numbers = np.fromiter(chain.from_iterable(refs), np.int64, 2 * len(refs)).reshape(-1, 2)[index].T
    own = pools == instance
    selected = torch.from_numpy(np.stack([_joined(rows)[own], numbers[own], offsets[own]]))
    return Slots(rows=selected[0], blocks=selected[1], offsets=selected[2], device=device)


def _joined(ranges: Sequence[range]) -> NDArray[np.int64]:
    """Join ranges into one array. NumPy fills it, without a Python loop over elements."""
    starts = np.array([piece.start for piece in ranges], dtype=np.int64)
    steps = np.array([piece.step for piece in ranges], dtype=np.int64)
    counts = np.array([len(piece) for piece in ranges], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    return np.repeat(starts - steps * firsts, counts) + np.repeat(steps, counts) * np.arange(counts.sum())


def _unknown(part: Part, instance: int, last_row: int) -> Iterator[UnknownToken]:
    if part.tokens[-1] == UNKNOWN:
        assert part.sample is not None and part.unknown_on is not None, "only a request's last token may be unknown"
        target = part.sample.instance
        if instance in (target, part.unknown_on):
            row = last_row if instance == target else -1
            yield UnknownToken(request_id=part.request_id, source=part.unknown_on, target=target, row=row)


def _prompt_rows(own: OwnPart) -> PromptRows:
    """Return this member's rows whose next token is part of the prompt."""
    part = own.part
    scored = [position for run in own.runs for position in run.positions if position - part.start < len(part.targets)]
    return PromptRows(
        request_id=part.request_id,
        rows=tuple(range(own.rows.start, own.rows.start + len(scored))),
        positions=tuple(position + 1 for position in scored),
        targets=tuple(part.targets[position - part.start] for position in scored),
    )


def _channels(
    forward: Forward,
    shares: Sequence[OwnPart],
    instance: int,
    requests: RankRequests,
    *,
    block_size: int,
    device: torch.device,
    backend: AttentionBackend,
    host: HostPool | None,
) -> tuple[Channel, ...]:
    exchanging = dict.fromkeys((part.exchange, part.group) for part in forward.parts if len(part.group) > 1)
    numbers = {kind: number for number, kind in enumerate(exchanging)}
    by_kind: dict[tuple[Exchange, tuple[int, ...]], list[OwnPart]] = {}
    for share in shares:
        by_kind.setdefault((share.part.exchange, share.part.group), []).append(share)
    return tuple(
        Channel(
            number=numbers.get((exchange, group), 0),
            exchange=exchange,
            members=group,
            rank=group.index(instance),
            parts=MemberParts([share.member for share in alike], backend),
            slots=tuple(_slots([share], instance, block_size, device) for share in alike if exchange.stores_after),
            rope_lengths=tuple(share.part.rope_length for share in alike),
            hosted=_hosted(alike, host),
            ratings=requests.ratings([share.part for share in alike]),
        )
        for (exchange, group), alike in by_kind.items()
    )


def _without_keys(member: MemberPart) -> MemberPart:
    return replace(member, kv_runs=((),) * len(member.kv_runs), blocks=())


def _hosted(shares: Sequence[OwnPart], host: HostPool | None) -> MemberParts | None:
    if host is None or all(share.hosted is None for share in shares):
        return None
    return MemberParts([share.hosted or _without_keys(share.member) for share in shares], host.backend)


@dataclass(kw_only=True)
class RankRequest:
    """One request on one rank.

    Attributes:
        history: token counts for penalties. None without penalties.
        matcher: the state of the output grammar. None without a grammar.
        table: its blocks on all instances. `Owners` maps tokens to them.
        num_counted: number of output tokens in `history` and `matcher`.
        last_token: the token sampled last that the host has read. -1 before the first.
        on_device: the token sampled last, if the host has not read it: a tensor on the device, and the index in it.
        kept: see `MemberPart`.
    """

    sampling: Sampling
    history: TokenCounts | None
    matcher: GrammarMatcher | None
    table: list[BlockRef] = field(default_factory=list)
    num_counted: int = 0
    last_token: int = -1
    on_device: tuple[Tensor, int] | None = None
    kept: dict[int, KeptKeys] = field(default_factory=dict)

    @property
    def reads_tokens(self) -> bool:
        """Whether the host reads logits, or each token before the next is sampled."""
        sampling = self.sampling
        counts = self.history is not None or self.matcher is not None
        return counts or sampling.logprobs is not None or sampling.output_logits

    def read_token(self, token: int, tokens: Tensor) -> None:
        """Record a token that the host has read from `tokens` on the device, unless a later one was sampled."""
        if self.on_device is not None and self.on_device[0] is tokens:
            self.last_token, self.on_device = token, None

    def apply(self, part: Part) -> None:
        """Append a part's new blocks and count its new output tokens."""
        num_repeated = len(self.table) - part.first_block
        assert num_repeated == 0 or part.first_block == 0 <= num_repeated, "a part appends blocks or replaces all"
        self.table[part.first_block :] = part.blocks
        if part.new_output:
            self.count(part.new_output[self.num_counted - part.first_output :])

    def count(self, tokens: tuple[int, ...]) -> None:
        """Count output tokens. The controller may not have received them yet."""
        for counter in (self.history, self.matcher):
            if counter is not None:
                counter.add(tokens)
        self.num_counted += len(tokens)

    def draw(self, sample: Sample) -> Draw:
        """Collect all inputs of sampling its next token, except the logits."""
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
        """The error message that ends the request, or an empty string."""
        return "" if self.matcher is None else self.matcher.error


class RankRequests:
    """The requests of one rank by id. Only ranks that sample count tokens for penalties and grammars.

    Args:
        files, info: of the model. The first grammar reads its tokenizer.
    """

    def __init__(self, files: ModelFiles, info: ModelInfo, device: torch.device, *, samples: bool = True) -> None:
        self._files, self._info, self._device, self._samples = files, info, device, samples
        self._requests: dict[int, RankRequest] = {}
        self.attention: dict[int, tuple[int, int]] = {}  # spans by request, see `Sampling.attention`

    def __getitem__(self, request_id: int) -> RankRequest:
        return self._requests[request_id]

    def apply(self, part: Part) -> RankRequest:
        sampling = part.sampling
        if sampling is not None and part.request_id not in self._requests:
            penalised, constrained = (self._samples and flag for flag in (sampling.penalised, sampling.constrained))
            self._requests[part.request_id] = RankRequest(
                sampling=sampling,
                history=self._count_tokens(sampling) if penalised else None,
                matcher=self._match(sampling) if constrained else None,
            )
            if sampling.attention is not None:
                self.attention[part.request_id] = sampling.attention
        request = self._requests[part.request_id]
        request.apply(part)
        return request

    def _count_tokens(self, sampling: Sampling) -> TokenCounts:
        from longspan.runtime.logit_changes import TokenCounts  # noqa: PLC0415 - only with penalties

        return TokenCounts(self._info.vocab_size, sampling.prompt, self._device)

    def _match(self, sampling: Sampling) -> GrammarMatcher:
        from longspan.runtime.grammar import GrammarMatcher  # noqa: PLC0415 - only for structured outputs

        return GrammarMatcher(sampling.grammar, self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        from longspan.runtime.grammar import Vocabulary  # noqa: PLC0415 - only for structured outputs

        return Vocabulary(self._files, size=self._info.vocab_size, eos_token_ids=self._info.eos_token_ids)

    def ratings(self, parts: Sequence[Part]) -> PromptAttention | None:
        if not self.attention:
            return None
        from longspan.runtime.prompt_attention import ratings_of  # noqa: PLC0415 - only for requests that report it

        return ratings_of(parts, self.attention, self._device)

    def learn(self, request_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Record tokens sampled by another rank. Ignores requests that were forgotten."""
        for request_id, token in zip(request_ids, tokens, strict=True):
            if request_id in self._requests:
                self._requests[request_id].last_token = token

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop the state of requests. Ignores requests of other ranks."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self.attention.pop(request_id, None)
