"""Random requests that are dealt to the members of a group, and what each member has of them.

For checks: every exchange takes its arguments from a `MemberCase`, and `Request.wanted`
is what it is to give.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longspan.attn.comm import Group
from longspan.attn.exchanges.alltoall import alltoall
from longspan.attn.exchanges.chain import chain
from longspan.attn.exchanges.gather_hidden import GatherHidden
from longspan.attn.exchanges.gather_kv import gather_kv
from longspan.attn.exchanges.ring_kv import ring_kv
from longspan.attn.exchanges.ring_q import ring_q
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.reference import random_qkv, reference
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Deal, Run, coalesce, deal, positions

_NOISE = 1e4
"""What slots hold that nobody may read."""
_HEADS = ((4, 4), (5, 5), (9, 3), (6, 2), (14, 2), (10, 5), (8, 1), (5, 1))
_HEAD_DIMS = (16, 32, 64, 80, 96, 128)
_MOST_TOKENS = 300


@dataclass(frozen=True, kw_only=True)
class Request:
    """A span of a request: who computes its queries, and who holds which keys of everything up to its end."""

    q_runs: Deal
    kv_runs: Deal
    seed: int

    @property
    def num_tokens(self) -> int:
        """All of them, cached ones and the span's."""
        return max((run.stop for runs in self.kv_runs for run in runs), default=0)

    def tensors(self, spec: AttnSpec) -> list[Tensor]:
        """`q, k, v` of all its tokens."""
        return random_qkv(spec, self.num_tokens, self.num_tokens, torch.float32, self.seed)

    def wanted(self, member: int, spec: AttnSpec) -> Tensor:
        """What one device computes for the queries of a member, in float64."""
        q, k, v = self.tensors(spec)
        rows = positions(self.q_runs[member])
        return reference(q[:, rows], rows, k, v, range(self.num_tokens), spec)[0]


@dataclass(frozen=True, kw_only=True)
class MemberCase:
    """What one member has of a batch: the arguments of an exchange. `k` and `v` are its new ones, packed like `q`."""

    parts: MemberParts
    q: Tensor
    k: Tensor
    v: Tensor
    kv: PagedKv


Exchange = Callable[[Group, MemberCase, AttnSpec], Tensor]
"""Returns the output."""


def _from_pool(function: Callable[[Group, MemberParts, Tensor, PagedKv, AttnSpec, Tensor], None]) -> Exchange:
    """An exchange that finds the new keys and values in the pool."""

    def run(group: Group, case: MemberCase, spec: AttnSpec) -> Tensor:
        out = torch.full_like(case.q, torch.nan)
        function(group, case.parts, case.q, case.kv, spec, out)
        return out

    return run


def _chain(group: Group, case: MemberCase, spec: AttnSpec) -> Tensor:
    out = torch.full_like(case.q, torch.nan)
    chain(group, case.parts, case.q, case.k, case.v, case.kv, spec, out)
    return out


def _gather_hidden(group: Group, case: MemberCase, spec: AttnSpec) -> Tensor:
    """In place of hidden states and projections, queries, keys and values as they are."""
    shared = GatherHidden(group, case.parts, case.kv, spec)
    hidden = torch.cat([case.q, case.k, case.v]).transpose(0, 1)
    gathered = shared.gather(hidden.flatten(1)).view(-1, *hidden.shape[1:]).transpose(0, 1)
    q, k, v = gathered.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads])
    heads, kv_heads = (slice(some.start, some.stop) for some in (shared.share.heads, shared.share.kv_heads))
    out, *stored = shared.attend(q[heads], k[kv_heads], v[kv_heads])
    assert all(torch.equal(kept, own) for kept, own in zip(stored, (case.k, case.v), strict=True))
    partial_sums = q.new_zeros(q.shape)
    partial_sums[heads] = out
    own = shared.scatter(partial_sums.transpose(0, 1).flatten(1))
    return own.view(-1, spec.num_heads, spec.head_dim).transpose(0, 1)


EXCHANGES: dict[str, Exchange] = {
    "ring_kv": _from_pool(ring_kv),
    "ring_q": _from_pool(ring_q),
    "gather_kv": _from_pool(gather_kv),
    "gather_kv, dense": _from_pool(partial(gather_kv, dense=True)),
    "alltoall": _from_pool(alltoall),
    "gather_hidden": _gather_hidden,
    "chain": _chain,
}
"""By name."""
IN_ORDER = frozenset({"chain"})
"""Those that need a span's tokens in the order of the members, and do not look for its keys and values in the pool."""


def member_case(
    batch: Sequence[Request],
    member: int,
    spec: AttnSpec,
    *,
    block_size: int = 16,
    seed: int = 0,
    new_in_pool: bool = True,
) -> MemberCase:
    """What a member has of some requests: keys in blocks of a pool, scattered for odd seeds, among large numbers.

    Without `new_in_pool` the keys and values of the spans are such numbers, too.
    """
    counts = [-(-len(positions(request.kv_runs[member])) // block_size) for request in batch]
    shape = (sum(counts) + 3, spec.num_kv_heads, block_size, spec.head_dim)
    kv = PagedKv(keys=torch.full(shape, _NOISE), values=torch.full(shape, _NOISE))
    free = list(range(shape[0]))
    if seed % 2:
        random.Random(seed).shuffle(free)
    parts: list[MemberPart] = []
    rows: list[list[Tensor]] = [[], [], []]
    for request, count in zip(batch, counts, strict=True):
        tensors = request.tensors(spec)
        asked, held = positions(request.q_runs[member]), positions(request.kv_runs[member])
        first = sum(queries.shape[1] for queries in rows[0])
        for kind, tensor in zip(rows, tensors, strict=True):
            kind.append(tensor[:, asked])
        blocks, free = free[:count], free[count:]
        place = slice(first, first + len(asked))
        part = MemberPart(rows=place, q_runs=request.q_runs, kv_runs=request.kv_runs, blocks=blocks)
        if not new_in_pool and part.span_start is not None:
            held = [position for position in held if position < part.span_start]
        token = torch.arange(len(held))
        block = torch.tensor(blocks, dtype=torch.int64)[token // block_size]
        for pool, tensor in zip((kv.keys, kv.values), tensors[1:], strict=True):
            pool[block, :, token % block_size] = tensor[:, held].transpose(0, 1)
        parts.append(part)
    q, k, v = (torch.cat(kind, dim=1) for kind in rows)
    return MemberCase(parts=MemberParts(parts), q=q, k=k, v=v, kv=kv)


def random_spec(draw: random.Random) -> AttnSpec:
    """MHA, GQA or MQA, with and without softcap and window."""
    num_heads, num_kv_heads = draw.choice(_HEADS)
    head_dim = draw.choice(_HEAD_DIMS)
    return AttnSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=draw.choice((None, None, draw.randint(1, _MOST_TOKENS))),
        softcap=draw.choice((None, None, draw.uniform(2, 50))),
    )


def random_batch(draw: random.Random, num_members: int, *, in_order: bool) -> list[Request]:
    """1 to 4 requests of 0 to 300 new tokens, after none or up to 300 that members hold unevenly.

    With `in_order` each member's new tokens follow those of the member before; else they are dealt anyhow.
    """
    batch = []
    for _ in range(draw.randint(1, 4)):
        start = draw.choice((0, draw.randint(0, _MOST_TOKENS)))
        stop = start + draw.choice((0, 1, *(draw.randint(0, _MOST_TOKENS) for _ in range(4))))
        cached, new = _random_deal(draw, 0, start, num_members), _random_cuts(draw, start, stop, num_members)
        if not in_order:
            new = draw.choice(
                (new, deal("zigzag", start, stop, num_members), _random_deal(draw, start, stop, num_members))
            )
        kv_runs = tuple(coalesce([*old, *more]) for old, more in zip(cached, new, strict=True))
        batch.append(Request(q_runs=new, kv_runs=kv_runs, seed=draw.randrange(10**6)))
    return batch


def _random_cuts(draw: random.Random, start: int, stop: int, num_members: int) -> Deal:
    """Neighbouring runs in the order of the members, even ones or not."""
    if draw.random() < 0.5:
        return deal("contiguous", start, stop, num_members)
    bounds = [start, *sorted(draw.randint(start, stop) for _ in range(num_members - 1)), stop]
    return tuple(coalesce([Run(bounds[member], bounds[member + 1])]) for member in range(num_members))


def _random_deal(draw: random.Random, start: int, stop: int, num_members: int) -> Deal:
    """Pieces, each with anybody."""
    pieces: list[list[Run]] = [[] for _ in range(num_members)]
    for runs in _random_cuts(draw, start, stop, draw.randint(1, 6)):
        pieces[draw.randrange(num_members)] += runs
    return tuple(coalesce(dealt) for dealt in pieces)
