"""`longspan.attn` as a library: every exchange, called with tensors alone, is attention on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import run_ranks
from torch import Tensor
from transports import run_members

import longspan
from longspan import attn
from longspan.attn import check
from longspan.attn.check import Request, random_batch, random_sinks, random_spec
from longspan.attn.comm import Transport
from longspan.attn.spec import AttnSpec
from longspan.core.layouts import shard_span
from longspan.core.runs import Run, coalesce, positions

pytestmark = pytest.mark.usefixtures("one_thread")

EXCHANGES: dict[str, Callable[..., Tensor]] = {
    name: partial(getattr(attn, one.kind), dense=True) if one.dense else getattr(attn, one.kind)
    for name, one in check.EXCHANGES.items()
    if one.traits.level == "attention"
}
"""A function for each attention exchange of the registry. A new exchange without one fails here."""
ALL = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)


def in_order(request: Request) -> Request:
    """The same request, with the new keys held by the members of their queries."""
    start = min((runs[0].start for runs in request.q_runs if runs), default=request.num_tokens)
    cached = [[Run(run.start, min(run.stop, start)) for run in runs if run.start < start] for runs in request.kv_runs]
    kv_runs = tuple(coalesce([*old, *new]) for old, new in zip(cached, request.q_runs, strict=True))
    return Request(q_runs=request.q_runs, kv_runs=kv_runs, seed=request.seed)


def packed(batch: Sequence[Request], member: int, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """A member's tensors, strided as a model's are for odd seeds."""
    tensors = [request.tensors(spec) for request in batch]
    runs = [(request.q_runs, request.kv_runs, request.kv_runs) for request in batch]
    q, k, v = (
        torch.cat(
            [one[kind][:, positions(sharded[kind][member])] for one, sharded in zip(tensors, runs, strict=True)], dim=1
        )
        for kind in range(3)
    )
    if batch[0].seed % 2:
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    return q, k, v


def case(draw: random.Random, size: int, name: str) -> tuple[AttnSpec, list[Request]]:
    """A batch with cached keys, sharded unevenly."""
    batch = random_batch(draw, size, in_order=name == "chain")
    return random_spec(draw), [in_order(one) for one in batch] if name == "chain" else batch


def compare(
    exchange: Callable[..., Tensor],
    group: attn.Members,
    spec: AttnSpec,
    batch: Sequence[Request],
    *,
    dtype: torch.dtype = torch.float32,
    atol: float = 1e-5,
) -> None:
    """A member's output with that of one device."""
    out = exchange(
        group,
        *(tensor.to(dtype) for tensor in packed(batch, group.rank, spec)),
        [one.q_runs for one in batch],
        kv_runs=[one.kv_runs for one in batch],
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        chunk=spec.chunk,
        sinks=random_sinks(spec).to(dtype) if spec.has_sinks else None,
    )
    wanted = torch.cat([one.wanted(group.rank, spec) for one in batch], dim=1)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_cases_are_exact(name: str, size: int) -> None:
    """Several calls of one group, each at once after the other."""
    draw = random.Random(size)
    cases = [case(draw, size, name) for _ in range(6)]

    def member(rank: int, transport: Transport) -> None:
        with attn.Members(transport, range(size), rank) as group:
            for spec, batch in cases:
                compare(EXCHANGES[name], group, spec, batch)

    assert run_members(size, member) == [None] * size


def test_merged_results_of_separate_rows_have_the_type_of_queries() -> None:
    """Two members hold the keys of the first and the last request, whose queries the third member has."""
    away, own = ([Run(0, 30)], [], []), ([Run(0, 5)], [], [])
    far = Request(q_runs=away, kv_runs=([], [Run(0, 15)], [Run(15, 30)]), seed=2)
    batch = [far, Request(q_runs=own, kv_runs=own, seed=3), far]
    spec = AttnSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, window=None, softcap=None)

    def member(rank: int, transport: Transport) -> None:
        with attn.Members(transport, range(3), rank) as group:
            compare(attn.ring_q, group, spec, batch, dtype=torch.bfloat16, atol=2e-2)

    assert run_members(3, member) == [None] * 3


def test_process_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `library_member.py`, which imports this file."""
    import library_member

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ended = run_ranks(library_member.main, tmp_path / "store", 3)
    assert [rank.returncode for rank in ended] == [0, 0, 0], ended


@ALL
def test_queries_alone_suffice(exchange: Callable[..., Tensor]) -> None:
    """Without kv_runs members hold the keys of their queries. The scale has a default, and bytes are counted."""
    runs = shard_span("contiguous", 0, 90, 3, fractions=(0.5, 0.3, 0.2))
    spec = AttnSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, window=None, softcap=None)
    request = Request(q_runs=runs, kv_runs=runs, seed=3)

    def member(rank: int, transport: Transport) -> tuple[Tensor, int]:
        with attn.Members(transport, range(3), rank, hosts=(0, 1, 2)) as group:
            q, k, v = (tensor.bfloat16() for tensor in packed([request], rank, spec))
            return exchange(group, q, k, v, [runs]), group.sent.total()

    for rank, result in enumerate(run_members(3, member)):
        assert not isinstance(result, Exception), result
        out, sent = result
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), request.wanted(rank, spec), atol=2e-2, rtol=0)
        assert sent > 0 or (exchange is attn.chain and rank == 2)


def call(exchange: Callable[..., Tensor], runs: object, shapes: Sequence[Sequence[int]], **options: object) -> Tensor:
    """Return the result of the first of two members. The other one never calls."""
    group = attn.Members(_Nobody(), range(2), 0)
    return exchange(group, *(torch.zeros(*shape) for shape in shapes), runs, **options)


class _Nobody:
    tagged = True
    sums = None

    def start(self, *_: object) -> None:
        raise AssertionError("errors are found before a message is sent")

    def complete_sends(self) -> None: ...


HALVES = shard_span("contiguous", 0, 8, 2)
SHAPES = ((4, 4, 16), (2, 4, 16), (2, 4, 16))


@pytest.mark.parametrize(
    ("runs", "shapes", "options", "words"),
    [
        (HALVES, SHAPES, {}, r"list.*\[shard_span"),
        ([], SHAPES, {}, r"list.*\[shard_span"),
        ([shard_span("zigzag", 0, 12, 3)], SHAPES, {}, r"runs\[0\] shards over 3 members, but the group has 2"),
        ([HALVES], ((4, 5, 16), *SHAPES[1:]), {}, r"q has 5 tokens, but by runs this member has 4"),
        ([HALVES], (SHAPES[0], (2, 3, 16), (2, 3, 16)), {}, r"k has 3 tokens, but by kv_runs this member has 4"),
        ([HALVES, HALVES], SHAPES, {}, r"q has 4 tokens, but by runs this member has 4 \+ 4"),
        ([HALVES], ((1, 4, 4, 16), *SHAPES[1:]), {}, r"\(1, 4, 4, 16\).*no batch"),
        ([HALVES], (SHAPES[0], SHAPES[1], (2, 4, 8)), {}, r"v \(2, 4, 8\).*one shape"),
        ([HALVES], (SHAPES[0], (3, 4, 16), (3, 4, 16)), {}, "4 query heads are no multiple of 3 KV heads"),
        ([HALVES], SHAPES, {"kv_runs": [HALVES, HALVES]}, "1 sequences, but kv_runs of 2"),
        ([HALVES], SHAPES, {"window": 0}, "window 0"),
        ([HALVES], SHAPES, {"chunk": 0}, "chunk 0"),
        ([HALVES], SHAPES, {"window": 4, "chunk": 8}, "window 4, chunk 8"),
        ([HALVES], SHAPES, {"softcap": -1.0}, "softcap -1.0"),
        ([HALVES], SHAPES, {"sinks": torch.zeros(2)}, r"sinks \(2,\) on cpu: give one for each of the 4 query heads"),
        ([shard_span("contiguous", 8, 16, 2)], SHAPES, {}, r"all keys of \[0, 16\).*cached"),
        ([((Run(0, 4),), (Run(5, 8),))], SHAPES, {}, r"\[0, 4\); \[5, 8\).*one span"),
        ([((Run(0, 4),), (Run(2, 8),))], SHAPES, {}, "each once"),
        ([HALVES], SHAPES, {"kv_runs": [((Run(0, 4),), (Run(3, 8),))]}, r"kv_runs\[0\].*each once"),
        ([((Run(4, 6), Run(0, 2)), (Run(2, 4), Run(6, 8)))], SHAPES, {}, r"member 0 must ascend.*\[4, 6\)\+\[0, 2\)"),
        ([((Run(0, 8, 2),), (Run(1, 8, 2),))], SHAPES, {}, "member 0 must ascend in steps of 1"),
    ],
)
def test_mistakes_are_reported(
    runs: object, shapes: Sequence[Sequence[int]], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        call(attn.ring_kv, runs, shapes, **options)


def test_mistakes_in_a_chain() -> None:
    with pytest.raises(ValueError, match=r"\[0, 2\)\+\[6, 8\); \[2, 6\).*shard_span\('contiguous'"):
        call(attn.chain, [shard_span("zigzag", 0, 8, 2)], SHAPES)
    with pytest.raises(ValueError, match=r"kv_runs\[0\]: members hold the new keys \[4, 8\); \[0, 4\)"):
        call(attn.chain, [HALVES], SHAPES, kv_runs=[HALVES[::-1]])


def test_unsupported_arguments_are_refused() -> None:
    group = attn.Members(_Nobody(), range(2), 0)
    q, k, v = (torch.zeros(*shape) for shape in SHAPES)
    with pytest.raises(ValueError, match=r"no_grad"):
        attn.ring_kv(group, q.requires_grad_(), k, v, [HALVES])
    with pytest.raises(ValueError, match=r"torch.float32 on cpu, torch.float64 on cpu"):
        attn.ring_kv(group, q, k.double(), v, [HALVES])
    for dtype in (torch.int64, torch.float64):
        with pytest.raises(ValueError, match=f"are {dtype} on cpu: "):
            attn.ring_kv(group, q.to(dtype), k.to(dtype), v.to(dtype), [HALVES])
    with pytest.raises(TypeError, match="windw"):
        attn.ring_kv(group, q, k, v, [HALVES], windw=3)
    with pytest.raises(ValueError, match="init_process_group"):
        attn.join()


def test_public_names() -> None:
    assert longspan.attn is attn
    assert set(attn.__all__) <= set(dir(attn))
    assert all(getattr(attn, name).__doc__ for name in set(attn.__all__) - {"SpanShards"})
    assert callable(attn.chain)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        attn.nope  # noqa: B018
