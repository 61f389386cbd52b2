"""Triton's kernels compared with PyTorch's in Triton's interpreter. No GPU is needed.

Whether Triton interprets is decided when it is imported, so a process of its own does that, and runs `compare_...`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from engines import Row, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import Run
from test_kept import TOLERANCE, kept_by, rating_case, specs
from torch import Tensor
from unseen_slots import with_nan_in_unseen_slots

from longspan.attn import backends, paged_splits
from longspan.attn.backends import NOWHERE, backend_of, nothing_seen
from longspan.attn.backends.pytorch import AttentionBackend, TorchCpu
from longspan.attn.backends.pytorch_cuda import TorchCuda
from longspan.attn.check import random_qkv, reference
from longspan.attn.paged import PagedKv, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run as Positions
from longspan.core.runs import relate

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
TORCH = TorchCpu()


def _triton() -> TorchCuda:
    from longspan.attn.backends.triton import TritonCuda

    return TritonCuda()


def _spec(heads: tuple[int, int], head_dim: int, softcap: float | None = None) -> AttnSpec:
    return AttnSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=None,
        softcap=softcap,
    )


# ---------------------------------------------------------------- attention


def compare_attention(
    spec: AttnSpec, num_queries: int, num_keys: int, kept: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    q, k, v = random_qkv(spec, num_queries, num_keys, dtype, seed)
    v = v.contiguous()  # laid out otherwise than the keys
    indices = kept_by(spec.num_kv_heads, num_keys, num_keys, seed)[:, slice(*kept)]
    out, lse = _triton().attend_kept(q, k, v, indices, spec)
    wanted, wanted_lse = TORCH.attend_kept(q, k, v, indices, spec)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse, wanted_lse, atol=TOLERANCE[dtype], rtol=1e-6)


@settings(max_examples=60)
@given(
    spec=specs(head_dims=(16, 40, 64, 80)),
    num_queries=st.integers(1, 150),
    num_keys=st.integers(1, 200),
    data=st.data(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 9),
)
def test_attention_to_kept_keys_is_that_of_pytorch(
    assert_interpreted: Run,
    spec: AttnSpec,
    *,
    num_queries: int,
    num_keys: int,
    data: st.DataObject,
    dtype: torch.dtype,
    seed: int,
) -> None:
    start = data.draw(st.integers(0, num_keys - 1))
    kept = start, data.draw(st.integers(start + 1, num_keys))
    assert_interpreted(compare_attention, spec, num_queries, num_keys, kept, dtype, seed)


TILES = {"head_dim": (16, 72, 128, 192, 256), "dtype": tuple(TOLERANCE), "softcap": (None, 20.0)}


@pytest.mark.parametrize("row", pairwise(TILES))
def test_every_tile(assert_interpreted: Run, row: Row) -> None:
    """Head size and dtype give the tile."""
    head_dim, dtype, softcap = row.values()
    assert_interpreted(compare_attention, _spec((9, 3), head_dim, softcap), 47, 130, (1, 121), dtype, 0)


def compare_large_head() -> None:
    with (
        mock.patch.object(TorchCuda, "_kernel", TorchCpu._kernel),  # its own needs a GPU
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 5)),
    ):
        compare_attention(_spec((9, 3), 272), 5, 30, (1, 21), torch.float32, 0)


def test_heads_too_large_for_a_tile_are_for_pytorch(assert_interpreted: Run) -> None:
    assert_interpreted(compare_large_head)


def compare_empty() -> None:
    q, k, v = random_qkv(_spec((6, 2), 16), 3, 5, torch.float32, 0)
    for queries, num_kept in ((q, 0), (q[:, :0], 1)):
        indices = torch.zeros(2, num_kept, dtype=torch.int32)
        for found, wanted in zip(
            _triton().attend_kept(queries, k, v, indices, _spec((6, 2), 16)), nothing_seen(queries), strict=True
        ):
            assert torch.equal(found, wanted)


def test_no_kept_keys_or_no_queries(assert_interpreted: Run) -> None:
    assert_interpreted(compare_empty)


def compare_nan(softcap: float | None) -> None:
    spec = _spec((2, 2), 16, softcap)
    q, k, v = random_qkv(spec, 4, 4, torch.float32, 0)
    k[0, 2] = torch.nan
    everything = kept_by(2, 4, 4, seed=0)
    out, _ = _triton().attend_kept(q, k, v, everything, spec)
    assert out[0].isnan().all() and not out[1].isnan().any()
    out, _ = _triton().attend_kept(q, k, v, torch.tensor([[0, 1, 3]] * 2, dtype=torch.int32), spec)
    assert not out.isnan().any()


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_nan_is_not_hidden_where_it_is_kept(assert_interpreted: Run, softcap: float | None) -> None:
    assert_interpreted(compare_nan, softcap)


# ---------------------------------------------------------------- windows


def compare_window(spec: AttnSpec, q_run: Positions, k_run: Positions, dtype: torch.dtype, seed: int) -> None:
    """With all that has no window computed by PyTorch's kernel for CPUs."""
    q, k, v = random_qkv(spec, len(q_run), len(k_run), dtype, seed)
    v = v.contiguous()  # laid out otherwise than the keys
    relation = relate(q_run, k_run, spec.window)
    with (
        mock.patch.object(TorchCuda, "_kernel", TorchCpu._kernel),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 5)),
        mock.patch.object(AttentionBackend, "_band", side_effect=AssertionError("tiles with masks")),
    ):
        out, lse = _triton().attend(q, k, v, relation, spec)
    assert out.dtype == dtype and lse.dtype == torch.float32
    wanted, wanted_lse = reference(q, q_run.positions, k, v, k_run.positions, spec)
    torch.testing.assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=TOLERANCE[dtype], rtol=1e-6)


@settings(max_examples=60)
@given(
    spec=specs(head_dims=(16, 40, 64, 80)),
    window=st.integers(1, 120),
    queries=st.tuples(st.integers(0, 150), st.integers(1, 150)),
    keys=st.tuples(st.integers(0, 150), st.integers(1, 200)),
    step=st.integers(1, 2),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_windows_are_attention(
    assert_interpreted: Run,
    spec: AttnSpec,
    *,
    window: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
    step: int,
    dtype: torch.dtype,
) -> None:
    """Some keys are seen by all queries, some by none, and some queries see none."""
    q_run, k_run = (Positions(start, start + step * number, step) for start, number in (queries, keys))
    assert_interpreted(compare_window, replace(spec, window=window), q_run, k_run, dtype, window)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_windows_of_every_tile(assert_interpreted: Run, dtype: torch.dtype) -> None:
    for head_dim in (16, 72, 128, 256):
        spec = replace(_spec((6, 3), head_dim), window=50)
        assert_interpreted(compare_window, spec, Positions(90, 220), Positions(0, 200), dtype, 0)


@settings(max_examples=40)
@given(
    spec=specs(head_dims=(16, 40, 64)),
    cached=st.integers(0, 150),
    num_queries=st.integers(1, 100),
    num_keys=st.integers(1, 250),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_softcaps_without_windows_are_attention(
    assert_interpreted: Run, spec: AttnSpec, *, cached: int, num_queries: int, num_keys: int, dtype: torch.dtype
) -> None:
    """By the kernel for windows: no tile of scores is in memory."""
    spec = replace(spec, window=None, softcap=spec.softcap or 20.0)
    assert_interpreted(
        compare_softcap, spec, Positions(cached, cached + num_queries), Positions(0, num_keys), dtype, cached
    )


def compare_softcap(*arguments: Any) -> None:
    with mock.patch.object(AttentionBackend, "_fused", side_effect=AssertionError("scores in memory")):
        compare_window(*arguments)


def compare_other_windows() -> None:
    """Those of FlashAttention, of very large heads, and whose hidden scores are wanted, too, are not for the kernel."""
    spec, run = replace(_spec((2, 2), 16), window=3), Positions(0, 8)
    for change, dense, capability in (({}, False, (8, 0)), ({"head_dim": 264}, False, (7, 5)), ({}, True, (7, 5))):
        other = replace(spec, **change)
        q, k, v = random_qkv(other, 8, 8, torch.bfloat16, 0)
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
            mock.patch.object(TorchCuda, "_band", return_value=nothing_seen(q)) as pytorch,
        ):
            _triton().attend(q, k, v, relate(run, run, 3), other, dense=dense)
        assert pytorch.call_count == 1


def test_other_windows_are_for_pytorch(assert_interpreted: Run) -> None:
    assert_interpreted(compare_other_windows)


# ---------------------------------------------------------------- KV in blocks


@st.composite
def reads(draw: st.DrawFn, num_blocks: int, block_size: int) -> Reads:
    blocks = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=num_blocks, unique=True))
    start, stop = sorted(draw(st.integers(0, len(blocks) * block_size)) for _ in range(2))
    return Reads(blocks=blocks, start=start, stop=stop)


def random_pool(
    spec: AttnSpec, num_blocks: int, block_size: int, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> PagedKv:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    keys, values = torch.randn(shape, generator=generator).to(device, dtype)
    return PagedKv(keys=keys, values=values)


def reads_of(*spans: tuple[int, int]) -> list[Reads]:
    return [Reads(blocks=list(range(11, -1, -1)), start=start, stop=stop) for start, stop in spans]


def compare_paged(
    spec: AttnSpec, all_reads: list[Reads], block_size: int, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> None:
    """Compares with the definition in float64, and each query with itself alone, to the bit."""
    kv = with_nan_in_unseen_slots(random_pool(spec, 12, block_size, dtype, seed, device), all_reads)
    shape = (len(all_reads), spec.num_heads, spec.head_dim)
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(shape, generator=generator).to(device, dtype).transpose(0, 1)
    ours = _triton()
    out, lse = ours.attend_paged(q, kv, ours.plan(all_reads, kv), spec)
    assert out.dtype == dtype and lse.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for t, read in enumerate(all_reads):
        row = slice(t, t + 1)
        seen = slice(read.start, read.stop)
        k, v = (pool[list(read.blocks)].transpose(0, 1).flatten(1, 2)[:, seen] for pool in (kv.keys, kv.values))
        wanted, wanted_lse = reference(q[:, row].cpu(), [10**6], k.cpu(), v.cpu(), range(k.shape[1]), spec)
        torch.testing.assert_close(out[:, row].cpu().double(), wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[:, row].cpu().double(), wanted_lse, atol=1e-5, rtol=1e-5)
        alone, alone_lse = ours.attend_paged(q[:, row], kv, ours.plan([read], kv), spec)
        assert torch.equal(alone, out[:, row]) and torch.equal(alone_lse, lse[:, row])


@settings(max_examples=40)
@given(
    spec=specs(head_dims=(16, 40, 64)),
    block_size=st.sampled_from((16, 48, 256, 600)),
    data=st.data(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 9),
)
def test_single_queries_read_blocks(
    assert_interpreted: Run, spec: AttnSpec, *, block_size: int, data: st.DataObject, dtype: torch.dtype, seed: int
) -> None:
    spec = replace(spec, window=None)  # hidden keys are not read
    all_reads = data.draw(st.lists(reads(12, block_size), min_size=1, max_size=4))
    assert_interpreted(compare_paged, spec, all_reads, block_size, dtype, seed)


def compare_many_splits(*arguments: Any) -> None:
    """Up to 24 splits are merged in tiles of 4."""
    with mock.patch.object(paged_splits, "_SPLIT_TOKENS", 8), mock.patch.object(_paged(), "MERGED_SPLITS", 4):
        compare_paged(*arguments)


def _paged() -> Any:
    from longspan.attn.backends import triton_paged

    return triton_paged


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_many_splits_are_merged(assert_interpreted: Run, dtype: torch.dtype) -> None:
    some = reads_of((0, 96), (3, 90), (0, 1), (5, 5), (40, 73))
    assert_interpreted(compare_many_splits, _spec((6, 3), 40), some, 8, dtype, 1)


@pytest.mark.parametrize("num_kv_heads", [8, 10])
def test_one_context_of_8k_has_programs_for_every_multiprocessor(num_kv_heads: int) -> None:
    """An H100 or H200 has 132, and a B200 148. A long context has more, up to a limit."""
    pool = torch.empty(1, num_kv_heads, 256, 16)
    kv = PagedKv(keys=pool, values=pool)
    for num_tokens in (8192, 2**15, 2**17):
        read = Reads(blocks=[0] * (num_tokens // 256), start=0, stop=num_tokens)
        num_splits = len(_triton().plan([read], kv).splits.owner)
        assert 148 < num_splits * num_kv_heads <= 128 * num_kv_heads


@pytest.mark.parametrize("heads", [(1, 1), (40, 2), (9, 3)], ids=str)
def test_any_number_of_heads_reads_blocks(assert_interpreted: Run, heads: tuple[int, int]) -> None:
    for head_dim, softcap in ((128, None), (256, 20.0), (272, None)):
        some = reads_of((3, 90), (0, 1))
        dtype = torch.bfloat16 if head_dim <= 256 else torch.float32
        assert_interpreted(compare_paged_anywhere, _spec(heads, head_dim, softcap), some, 16, dtype, 0)


def compare_paged_anywhere(*arguments: Any) -> None:
    with mock.patch.object(
        TorchCuda, "_kernel", TorchCpu._kernel
    ):  # for very large heads, whose own kernel needs a GPU
        compare_paged(*arguments)


def compare_store(spec: AttnSpec, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Of keys and values with other strides. Nothing else is written, and two more tokens are not stored."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_tokens + 2, spec.num_kv_heads, spec.head_dim)
    k = torch.randn(shape, generator=generator).to(device, dtype).transpose(0, 1)
    v = torch.randn(shape, generator=generator).transpose(0, 1).contiguous().to(device, dtype)
    slots = torch.randperm(12 * 16, generator=generator)[:num_tokens].to(device)
    blocks = torch.cat([slots // 16, torch.full((2,), NOWHERE, device=device)])
    found, wanted = (random_pool(spec, 12, 16, dtype, 3, device) for _ in range(2))
    _triton().store(found, blocks, torch.cat([slots % 16, slots.new_zeros(2)]), k, v)
    TORCH.store(wanted, slots // 16, slots % 16, k[:, :-2], v[:, :-2])
    assert torch.equal(found.keys, wanted.keys) and torch.equal(found.values, wanted.values)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 77])
def test_new_tokens_are_stored(assert_interpreted: Run, num_tokens: int, dtype: torch.dtype) -> None:
    for head_dim in (40, 64):
        assert_interpreted(compare_store, _spec((6, 3), head_dim), num_tokens, dtype)


def compare_gather(spec: AttnSpec, block_size: int, span: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Into parts of messages without writing their other parts, and also for some heads of the pool."""
    start, stop = span
    whole = random_pool(spec, 12, block_size, dtype, 5, device)
    blocks = torch.randperm(12, generator=torch.Generator().manual_seed(stop)).tolist()
    for kv in (whole, whole.heads(range(1, spec.num_kv_heads))):
        found, wanted = (
            torch.full((2, kv.keys.shape[1], stop - start + 4, spec.head_dim), 7.0, dtype=dtype, device=device)
            for _ in range(2)
        )
        for backend, (k, v) in ((_triton(), found), (TORCH, wanted)):
            backend.gather(kv, blocks, start, stop, (k[:, 2:-2], v[:, 2:-2]))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("span", [(0, 0), (0, 1), (5, 12), (16, 48), (3, 190)], ids=str)
def test_tokens_are_gathered(assert_interpreted: Run, span: tuple[int, int]) -> None:
    for block_size, head_dim, dtype in ((16, 40, torch.float32), (48, 64, torch.bfloat16)):
        assert_interpreted(compare_gather, _spec((6, 3), head_dim), block_size, span, dtype, "cpu")


# ---------------------------------------------------------------- rating


def compare_rating(spec: AttnSpec, num_queries: int, num_keys: int, dtype: torch.dtype, seed: int) -> None:
    """Compares with PyTorch's rating of the same numbers in float32: it rounds scores to bfloat16, Triton does not."""
    q, lse, seen, k, _ = rating_case(spec, num_queries, num_keys, dtype, seed)
    whole = torch.full((spec.num_heads, num_queries + 3), torch.nan)
    whole[:, 1:-2] = lse
    found = _triton().rate(q, whole[:, 1:-2], seen, k, spec)
    wanted = TORCH.rate(q.float(), lse, seen, k.float(), spec)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@settings(max_examples=60)
@given(
    specs(head_dims=(16, 40, 64, 80)),
    st.integers(0, 80),
    st.integers(1, 150),
    st.sampled_from(list(TOLERANCE)),
    st.integers(0, 9),
)
def test_keys_are_rated_as_by_pytorch(
    assert_interpreted: Run, spec: AttnSpec, num_queries: int, num_keys: int, dtype: torch.dtype, seed: int
) -> None:
    assert_interpreted(compare_rating, spec, num_queries, num_keys, dtype, seed)


@pytest.mark.parametrize("head_dim", [128, 256, 272])
def test_large_heads_are_rated(assert_interpreted: Run, head_dim: int) -> None:
    for dtype in TOLERANCE if head_dim <= 256 else (torch.float32,):
        assert_interpreted(compare_rating, _spec((9, 3), head_dim), 21, 70, dtype, 0)


# ---------------------------------------------------------------- selection and combination


def compare_selection(num_heads: tuple[int, int], dim: int, kept: tuple[int, int], dtype: torch.dtype) -> None:
    """Queries alone, and keys and values with other strides. Only the target tensors are written."""
    num_tokens = 150
    indices = kept_by(num_heads[1], num_tokens, num_tokens, seed=0)[:, slice(*kept)]
    num_kept = indices.shape[1]
    k = torch.randn(num_tokens, num_heads[0], dim).to(dtype).transpose(0, 1)
    v = torch.randn(num_heads[0], num_tokens, dim).to(dtype)
    found, wanted = [], []
    for backend, whole in ((_triton(), found), (TORCH, wanted)):
        whole.append(torch.full((num_heads[0], num_kept + 5, dim), torch.nan, dtype=dtype))
        whole.append(torch.full((num_kept + 5, num_heads[0], dim), torch.nan, dtype=dtype).transpose(0, 1))
        backend.select((k, v), indices, [room[:, 2 : num_kept + 2] for room in whole])
    alone = torch.full_like(found[0], torch.nan)
    _triton().select([k], indices, [alone[:, 2 : num_kept + 2]])
    torch.testing.assert_close([*found, alone], [*wanted, wanted[0]], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [(0, 1), (7, 71), (3, 140), (5, 5)])
def test_tokens_are_selected_as_by_pytorch(assert_interpreted: Run, kept: tuple[int, int], dtype: torch.dtype) -> None:
    assert_interpreted(compare_selection, (3, 3), 64, kept, dtype)
    assert_interpreted(compare_selection, (9, 3), 40, kept, dtype)


def compare_combination(
    num_heads: tuple[int, int], num_queries: int, count: int, share: float, dtype: torch.dtype, seed: int
) -> None:
    """Some see nothing before, in the new result, or in both."""
    generator = torch.Generator().manual_seed(seed)

    def random_partial(size: int) -> tuple[Tensor, Tensor]:
        out = torch.randn(num_heads[0], size, 24, generator=generator)
        lse = 5 * torch.randn(num_heads[0], size, generator=generator)
        nothing = torch.rand(num_heads[0], size, generator=generator) < share
        return out.masked_fill(nothing[..., None], 0), lse.masked_fill(nothing, -torch.inf)

    out, lse = random_partial(num_queries)
    some, some_lse = random_partial(count)
    rows = kept_by(num_heads[1], num_queries, num_queries, seed)
    for order in (rows, None) if count == num_queries else (rows,):
        partials = [(out, lse), (some.to(dtype), some_lse), (some.flip(1).to(dtype), some_lse.flip(1))]
        found, wanted = (torch.empty(num_queries, num_heads[0], 24).transpose(0, 1) for _ in range(2))
        found_lse = _triton().merge_into(found, partials, order)
        wanted_lse = TORCH.merge_into(wanted, partials, order)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(found_lse, wanted_lse, atol=1e-5, rtol=1e-6)


@settings(max_examples=60)
@given(
    num_heads=st.sampled_from(((1, 1), (4, 2), (9, 3))),
    num_queries=st.integers(1, 150),
    data=st.data(),
    share=st.sampled_from((0.0, 0.4, 1.0)),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
def test_results_are_combined_as_by_pytorch(
    assert_interpreted: Run,
    *,
    num_heads: tuple[int, int],
    num_queries: int,
    data: st.DataObject,
    share: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    count = data.draw(st.one_of(st.just(num_queries), st.integers(0, num_queries)))
    assert_interpreted(compare_combination, num_heads, num_queries, count, share, dtype, seed)


# ---------------------------------------------------------------- users


def test_triton_is_imported_for_cuda_devices_only() -> None:
    script = (
        "import sys, torch, longspan; from longspan.attn.backends import backend_of; backend_of(torch.device('cpu'));"
        "assert 'triton' not in sys.modules;"
        "print(type(backend_of(torch.device('cuda'))).__name__, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["TritonCuda", "True"]


def test_without_triton_pytorch_does_it_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    with caplog.at_level(logging.WARNING, "longspan"):
        assert type(backend_of(torch.device("cuda"))) is TorchCuda
    assert "Triton is not installed" in caplog.text
