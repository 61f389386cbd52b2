"""The kernels of a CUDA device against float64, and KV that is read from the host: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    BACKENDS,
    HEAD_DIMS,
    KINDS,
    LLAMA_8B,
    ROUNDING,
    SPEC,
    TOLERANCE,
    block_cases,
    compare_attention,
    layer_cases,
    level_cases,
)

from longspan.attn.backends import CudaKernel
from longspan.attn.backends.pytorch_cuda import TorchCuda
from longspan.attn.check import random_qkv, reference
from longspan.attn.hosted import DeviceStaging, HostPiece, HostPieces
from longspan.attn.paged import PagedKv
from longspan.core.runs import Run, relate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_its_definition(backend: str, kind: str, head_dim: int, dtype: torch.dtype) -> None:
    compare_attention(backend, kind, head_dim, dtype)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("cached", [0, 400])
def test_each_kernel_takes_heads_that_share_keys(kernel: CudaKernel, cached: int) -> None:
    q, k, v = random_qkv(SPEC, 300, cached + 300, torch.bfloat16, seed=2)
    q_run, k_run = Run(cached, cached + 300), Run(0, cached + 300)
    out, lse = TorchCuda(kernel).attend(q.cuda(), k.cuda(), v.cuda(), relate(q_run, k_run, None), SPEC)
    wanted, wanted_lse = reference(q, q_run.positions, k, v, k_run.positions, SPEC)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=1e-2, rtol=ROUNDING[torch.bfloat16])
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize(("cached", "length"), [(0, 2047), (2100, 1000), (900, 1024), (4096, 4095)])
def test_prompts_of_odd_lengths_are_computed_by_two_kernels(cached: int, length: int) -> None:
    """Heads of the 8B shape on Hopper: cuDNN computes most of it."""
    q, k, v = random_qkv(LLAMA_8B, length, cached + length, torch.bfloat16, seed=3)
    q_run, k_run = Run(cached, cached + length), Run(0, cached + length)
    out, lse = TorchCuda().attend(q.cuda(), k.cuda(), v.cuda(), relate(q_run, k_run, None), LLAMA_8B)
    rows = torch.randint(length, (64,), generator=torch.Generator().manual_seed(0))
    wanted, wanted_lse = reference(
        q[:, rows], [q_run.positions[row] for row in rows.tolist()], k, v, k_run.positions, LLAMA_8B
    )
    torch.testing.assert_close(out[:, rows.cuda()].cpu().double(), wanted, atol=1e-2, rtol=ROUNDING[torch.bfloat16])
    torch.testing.assert_close(lse[:, rows.cuda()].cpu().double(), wanted_lse, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 90])
def test_several_prompts_are_one_call(window: int | None) -> None:
    """Some have keys before their first query."""
    spec, lengths = replace(LLAMA_8B, window=window), ((300, 300), (17, 400), (1, 5), (1000, 1024))
    each = [random_qkv(spec, *length, torch.bfloat16, seed) for seed, length in enumerate(lengths)]
    q, k, v = (torch.cat(tensors, dim=1).cuda() for tensors in zip(*each, strict=True))
    out, lse = TorchCuda().attend_prompts(q, k, v, lengths, spec)
    start = 0
    for own, (num_queries, num_keys) in zip(each, lengths, strict=True):
        rows = slice(start, start + num_queries)
        queries = range(num_keys - num_queries, num_keys)
        wanted, wanted_lse = reference(own[0], queries, own[1], own[2], range(num_keys), spec)
        torch.testing.assert_close(out[:, rows].cpu().double(), wanted, atol=1e-2, rtol=ROUNDING[torch.bfloat16])
        torch.testing.assert_close(lse[:, rows].cpu().double(), wanted_lse, atol=1e-2, rtol=1e-5)
        start += num_queries


@pytest.mark.parametrize("case", block_cases())
def test_kernels_for_blocks_compute_their_definition(case: str) -> None:
    block_cases()[case]()


@pytest.mark.parametrize("case", layer_cases())
def test_kernels_of_layers_compute_their_definition(case: str) -> None:
    layer_cases()[case]()


@pytest.mark.parametrize("case", level_cases())
def test_products_with_quantised_weights_compute_their_definition(case: str) -> None:
    level_cases()[case]()


@pytest.mark.parametrize("sizes", [[64] * 7, [512, 100, 512, 512, 3]], ids=str)
def test_staged_pieces_are_complete_while_earlier_ones_are_read(sizes: list[int]) -> None:
    """Some of the page-locked blocks are adjacent."""
    block_size, staging = 16, DeviceStaging(torch.device("cuda"))
    keys, values = torch.randn(2, 64, 4, block_size, 64).pin_memory()
    kv, pieces = PagedKv(keys=keys, values=values), []
    for number, size in enumerate(sizes):
        blocks = [(block * 5 + number) % 64 if number % 2 else block + 7 for block in range(-(-size // block_size))]
        pieces.append(HostPiece(Run(0, size), 0, kv, blocks))
    ahead, sums = HostPieces(staging), []
    ahead.put(pieces)
    for _ in pieces:
        _, (k, v) = ahead.take(TorchCuda())
        torch.cuda._sleep(10_000_000)  # the reader begins late
        sums.append((k.double().sum() - v.double().sum()).reshape(1))
    wanted = []
    for piece in pieces:
        k, v = torch.empty(2, 4, len(piece.run), 64)
        kv.gather(piece.blocks, 0, len(piece.run), k, v)
        wanted.append(k.double().sum() - v.double().sum())
    torch.testing.assert_close(torch.cat(sums).cpu(), torch.stack(wanted))
