"""The kernel and the merge against the definition of attention, for random runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from unseen_slots import with_nan_in_unseen_slots

from longspan.attn.backends import lse_with_sinks, merge, merge_each, pytorch, with_sinks
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.check import random_qkv, reference
from longspan.attn.paged import PagedKv, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run, relate

pytestmark = pytest.mark.usefixtures("one_thread")
LAW = settings(derandomize=True, deadline=None, max_examples=150)
SHORT = settings(LAW, max_examples=40)
BACKEND = TorchCpu()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@st.composite
def specs(draw: st.DrawFn, *, head_dims: tuple[int, ...] = (16, 32, 40, 64)) -> AttnSpec:
    num_kv_heads, head_dim = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from(head_dims))
    return AttnSpec(
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3))),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from((head_dim**-0.5, 0.05))),
        window=draw(st.one_of(st.none(), st.integers(1, 80))),
        softcap=draw(st.sampled_from((None, None, 2.0, 30.0))),
    )


@st.composite
def runs(draw: st.DrawFn, step: int) -> Run:
    start = draw(st.integers(0, 60))
    return Run(start, start + step * draw(st.integers(1, 60)), step)


def assert_equal(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float) -> None:
    out, lse = found
    assert torch.equal(lse.isinf(), wanted[1].isinf())
    torch.testing.assert_close(out.double(), wanted[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double(), wanted[1], atol=tolerance, rtol=1e-6)


@LAW
@given(specs(), st.data(), st.sampled_from((torch.float32, torch.bfloat16)), st.integers(1, 4), st.integers(0, 9))
def test_attend_is_attention(spec: AttnSpec, data: st.DataObject, dtype: torch.dtype, step: int, seed: int) -> None:
    q_run, k_run = data.draw(runs(step)), data.draw(runs(step))
    q, k, v = random_qkv(spec, len(q_run), len(k_run), dtype, seed)
    out, lse = BACKEND.attend(q, k, v, relate(q_run, k_run, spec.window), spec)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_equal((out, lse), reference(q, q_run.positions, k, v, k_run.positions, spec), TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [16, 24, 64, 72, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_head_dims(head_dim: int, heads: tuple[int, int]) -> None:
    for window, softcap, dtype in itertools.product((None, 30), (None, 20.0), TOLERANCE):
        spec = AttnSpec(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=window,
            softcap=softcap,
        )
        q_run, k_run = Run(50, 90), Run(0, 90)
        q, k, v = random_qkv(spec, len(q_run), len(k_run), dtype, head_dim)
        found = BACKEND.attend(q, k, v, relate(q_run, k_run, window), spec)
        assert_equal(found, reference(q, q_run.positions, k, v, k_run.positions, spec), TOLERANCE[dtype])


@SHORT
@given(specs(), st.integers(1, 700), st.integers(0, 900), st.integers(0, 600), st.integers(0, 9))
def test_tiles_of_every_size(spec: AttnSpec, num_queries: int, behind: int, ahead: int, seed: int) -> None:
    """Runs long enough for several tiles. Some keys are seen by all queries, some by none."""
    q_run, k_run = Run(behind, behind + num_queries), Run(0, behind + num_queries + ahead)
    q, k, v = random_qkv(spec, len(q_run), len(k_run), torch.float32, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytorch, "_EAGER_KEYS", 256)
        found = BACKEND.attend(q, k, v, relate(q_run, k_run, spec.window), spec)
    assert_equal(found, reference(q, q_run.positions, k, v, k_run.positions, spec), 1e-5)


@pytest.mark.parametrize("num_keys", [1024, 1025, 1535, 1536, 1537, 2600])
@pytest.mark.parametrize("num_queries", [1, 7, 16, 17])
def test_few_queries_split_long_keys(num_queries: int, num_keys: int) -> None:
    q_run, k_run = Run(num_keys, num_keys + num_queries), Run(0, num_keys)
    for softcap, window in itertools.product((None, 20.0), (None, num_keys)):
        spec = AttnSpec(num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2, window=window, softcap=softcap)
        q, k, v = random_qkv(spec, num_queries, num_keys, torch.float32, num_keys)
        found = BACKEND.attend(q, k, v, relate(q_run, k_run, window), spec)
        assert_equal(found, reference(q, q_run.positions, k, v, k_run.positions, spec), 1e-5)


def test_every_pair_of_small_runs() -> None:
    """All the corners where a tile, a diagonal or a window begins or ends."""
    starts, lengths, windows = (0, 1, 2, 4, 7), (1, 2, 3, 5), (None, 1, 2, 4)
    for start, k_start, num, num_keys, window in itertools.product(starts, starts, lengths, lengths, windows):
        spec = AttnSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, window=window, softcap=None)
        q_run, k_run = Run(start, start + num), Run(k_start, k_start + num_keys)
        q, k, v = random_qkv(spec, num, num_keys, torch.float32, num)
        relation = relate(q_run, k_run, window)
        wanted = reference(q, q_run.positions, k, v, k_run.positions, spec)
        assert_equal(BACKEND.attend(q, k, v, relation, spec), wanted, 1e-5)


@SHORT
@given(st.data(), st.integers(1, 9), st.integers(0, 9))
def test_single_queries_depend_on_no_slot_out_of_sight(data: st.DataObject, block_size: int, seed: int) -> None:
    """Queries share blocks, and some see no token. All other slots are NaN."""
    spec = replace(data.draw(specs()), window=None)
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 12, spec.num_kv_heads, block_size, spec.head_dim, generator=generator)
    reads = []
    for blocks in data.draw(st.lists(st.lists(st.integers(0, 11), min_size=1, unique=True), min_size=1, max_size=5)):
        start, stop = sorted(data.draw(st.integers(0, len(blocks) * block_size)) for _ in range(2))
        reads.append(Reads(blocks=blocks, start=start, stop=stop))
    q = torch.randn(len(reads), spec.num_heads, spec.head_dim, generator=generator).transpose(0, 1)
    kv = with_nan_in_unseen_slots(PagedKv(keys=keys, values=values), reads)
    out, lse = BACKEND.attend_paged(q, kv, BACKEND.plan(reads, kv), spec)
    for row, read in enumerate(reads):
        seen = slice(read.start, read.stop)
        k, v = (pool[list(read.blocks)].transpose(0, 1).flatten(1, 2)[:, seen] for pool in (keys, values))
        wanted = reference(q[:, row : row + 1], [1000], k, v, range(k.shape[1]), spec)
        assert_equal((out[:, row : row + 1], lse[:, row : row + 1]), wanted, 1e-5)


@st.composite
def partials(draw: st.DrawFn, num: int) -> tuple[Tensor, Tensor]:
    """Partial results of 2 heads, 3 queries, of which some see nothing."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    outs, lses = torch.randn(num, 2, 3, 4, generator=generator), 5 * torch.randn(num, 2, 3, generator=generator)
    nothing = torch.rand(num, 2, 3, generator=generator) < draw(st.sampled_from((0.0, 0.4, 1.0)))
    return outs.masked_fill(nothing[..., None], 0), lses.masked_fill(nothing, -torch.inf)


@SHORT
@given(st.data(), st.integers(2, 6), st.randoms(use_true_random=False))
def test_merge_is_commutative_and_associative(data: st.DataObject, num: int, random: Random) -> None:
    outs, lses = data.draw(partials(num))
    whole = merge(outs, lses)
    order = list(range(num))
    random.shuffle(order)
    assert_equal(merge(outs[order], lses[order]), (whole[0].double(), whole[1].double()), 1e-5)
    cut = random.randrange(1, num)
    halves = [merge(outs[part], lses[part]) for part in (slice(cut), slice(cut, num))]
    nested = merge(torch.stack([out for out, _ in halves]), torch.stack([lse for _, lse in halves]))
    assert_equal(nested, (whole[0].double(), whole[1].double()), 1e-5)


def test_merge_keeps_results_without_keys_and_does_not_hide_nan() -> None:
    out, lse = merge(torch.zeros(2, 1, 1, 4), torch.full((2, 1, 1), -torch.inf))
    assert not out.any() and lse.isneginf().all()
    out, lse = merge(torch.ones(2, 1, 1, 4), torch.tensor([-torch.inf, 1.0]).view(2, 1, 1))
    assert torch.equal(out, torch.ones(1, 1, 4)) and lse.item() == 1.0
    out, lse = merge(torch.full((2, 1, 1, 4), torch.nan), torch.full((2, 1, 1), torch.nan))
    assert out.isnan().all() and lse.isnan().all()


@SHORT
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.sampled_from((-1e4, -30.0, -3.0, 0.0, 3.0, 30.0, 1e4)),
    st.booleans(),
    st.integers(0, 999),
)
def test_sinks_after_the_merge_are_a_column_of_the_softmax(
    sizes: list[int], offset: float, is_nested: bool, seed: int
) -> None:
    """Keys are cut into sets, of which some are empty. Queries of the first head see only some keys, or none."""
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(2, 3, sum(sizes), generator=generator, dtype=torch.float64)
    scores[0].masked_fill_(torch.rand(3, sum(sizes), generator=generator) < 0.5, -torch.inf)
    values = torch.randn(2, sum(sizes), 4, generator=generator, dtype=torch.float64)
    sinks = torch.randn(2, generator=generator) + offset
    lses = [torch.logsumexp(some, dim=-1) for some in scores.split(sizes, dim=-1)]
    outs = [
        torch.exp(some - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]) @ own
        for some, lse, own in zip(scores.split(sizes, dim=-1), lses, values.split(sizes, dim=1), strict=True)
    ]
    partials = [(out.float(), lse.float()) for out, lse in zip(outs, lses, strict=True)]
    if is_nested:
        out, lse = merge_each(partials)
    else:
        out, lse = merge(*(torch.stack(kind) for kind in zip(*partials, strict=True)))
    column = sinks.double()[:, None, None].expand(-1, 3, 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    torch.testing.assert_close(with_sinks(out, lse, sinks).double(), weights @ values, atol=1e-5, rtol=0)
    total = torch.logsumexp(torch.cat([scores, column], dim=-1), dim=-1)
    torch.testing.assert_close(lse_with_sinks(lse, sinks).double(), total, atol=1e-5, rtol=1e-6)
    assert lse_with_sinks(lse, None) is lse


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_nan_is_not_hidden(softcap: float | None) -> None:
    spec = AttnSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, window=None, softcap=softcap)
    q, k, v = random_qkv(spec, 4, 4, torch.float32, 0)
    k[:, 2] = torch.nan
    out, _ = BACKEND.attend(q, k, v, relate(Run(0, 4), Run(0, 4)), spec)
    assert not out[:, :2].isnan().any() and out[:, 2:].isnan().all()


@SHORT
@given(specs(), st.integers(1, 12), st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_merge_is_attention_over_the_union(spec: AttnSpec, num_queries: int, sizes: list[int]) -> None:
    num_keys = sum(sizes)
    q_run = Run(num_keys - 1, num_keys - 1 + num_queries)
    q, k, v = random_qkv(spec, num_queries, num_keys, torch.float32, num_keys)
    parts = [
        BACKEND.attend(q, k[:, start:stop], v[:, start:stop], relate(q_run, Run(start, stop), spec.window), spec)
        for start, stop in itertools.pairwise(itertools.accumulate(sizes, initial=0))
    ]
    merged = merge(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    assert_equal(merged, reference(q, q_run.positions, k, v, range(num_keys), spec), 1e-5)
