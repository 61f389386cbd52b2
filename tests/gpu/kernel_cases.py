"""Comparisons of the kernels of a CUDA device with float64: test_gpu_kernels.py runs them one by one.

`compile_kernels.py` runs those of Triton's kernels before, many at a time, so that the tests find compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from test_cuda_layers import compare_add_norm, compare_gated, compare_rotate
from test_triton import compare_gather, compare_paged, compare_store, reads_of
from test_triton_levels import compare_levels

from longspan.attn.backends import backend_of
from longspan.attn.backends.pytorch import AttentionBackend
from longspan.attn.backends.pytorch_cuda import TorchCuda
from longspan.attn.check import random_qkv, reference
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run, relate

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}
"""The error of an output that is rounded to a precision, as a share of its size."""
SPEC = AttnSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5, window=None, softcap=None)
LLAMA_8B = replace(SPEC, num_heads=32, num_kv_heads=8)
HEAD_DIMS = (16, 64, 80, 100, 128, 256)
KINDS = ("full", "diagonal", "window", "window_before", "softcap")
BACKENDS = ("as_chosen", "pytorch")


def compare_attention(name: str, kind: str, head_dim: int, dtype: torch.dtype) -> None:
    """Compares attention of a run of queries, where a backend `as_chosen` has kernels of our own."""
    backend: AttentionBackend = backend_of(torch.device("cuda")) if name == "as_chosen" else TorchCuda()
    window, softcap = (90 if "window" in kind else None), (20.0 if kind == "softcap" else None)
    spec = replace(SPEC, head_dim=head_dim, scale=head_dim**-0.5, window=window, softcap=softcap)
    q_run, k_run = Run(400, 700), Run(0, {"full": 400, "window_before": 450}.get(kind, 700))
    q, k, v = random_qkv(spec, len(q_run), len(k_run), dtype, seed=1)
    out, lse = backend.attend(q.cuda(), k.cuda(), v.cuda(), relate(q_run, k_run, window), spec)
    wanted, wanted_lse = reference(q, q_run.positions, k, v, k_run.positions, spec)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=TOLERANCE[dtype], rtol=1e-5)


def compare_blocks(spec: AttnSpec, block_size: int, dtype: torch.dtype) -> None:
    """Compares single queries that read KV in blocks, and the slots that tokens are stored in and gathered from."""
    compare_paged(spec, reads_of((3, 190), (0, 1), (17, 150)), block_size, dtype, 0, "cuda")
    compare_store(spec, 77, dtype, "cuda")
    compare_gather(spec, block_size, (3, 190), dtype, "cuda")


def block_cases() -> dict[str, Callable[[], None]]:
    """Names the comparisons of KV in blocks: heads of several sizes, and the heads and blocks of the 8B shape."""
    cases: dict[str, Callable[[], None]] = {}
    for head_dim in (16, 64, 80, 128, 256):
        for dtype in TOLERANCE:
            spec = replace(SPEC, head_dim=head_dim, scale=head_dim**-0.5)
            cases[f"blocks-{head_dim}-{dtype}"] = partial(compare_blocks, spec, 16, dtype)
    return cases | {"blocks-8b": partial(compare_blocks, LLAMA_8B, 256, torch.bfloat16)}


def layer_cases() -> dict[str, Callable[[], None]]:
    """Names the comparisons of norms, rotary embeddings, stores and gates, in the 8B shape and in odd shapes."""
    cases: dict[str, Callable[[], None]] = {}
    for dtype in TOLERANCE:
        for num_tokens, width in ((1, 4096), (32, 4096), (9, 576), (100, 14336)):
            flags = (width == 576, True, True)
            cases[f"norm-{num_tokens}x{width}-{dtype}"] = partial(
                compare_add_norm, (num_tokens, width), flags, width == 576, dtype, 0, device="cuda"
            )
            cases[f"gate-{num_tokens}x{width}-{dtype}"] = partial(
                compare_gated, num_tokens, width, "gelu_tanh" if width == 576 else "silu", dtype, 0, device="cuda"
            )
        for num_tokens, heads, dims, rotation in (
            (1, (32, 8), (128, 128), (False, False, False, True)),
            (37, (32, 8), (128, 128), (True, False, False, True)),
            (37, (6, 3), (100, 60), (True, True, False, True)),
            (300, (8, 2), (128, 64), (False, False, True, False)),
        ):
            name = f"rotate-{num_tokens}x{heads[0]}x{dims[0]}-{dtype}"
            cases[name] = partial(compare_rotate, num_tokens, heads, dims, rotation, dtype, 0, device="cuda")
    return cases


def level_cases() -> dict[str, Callable[[], None]]:
    """Names the products with quantised weights: of decodes, some in the 8B shape, and of a prompt."""
    shapes = (1, 6144, 128), (3, 40, 9), (24, 4096, 448), (64, 512, 128), (100, 512, 128)
    return {
        f"levels-{shape}-{bits}": partial(compare_levels, shape, bits, shape[1] == 40, 0, device="cuda")
        for bits in (4, 8)
        for shape in shapes
    }


def triton_cases() -> dict[str, Callable[[], None]]:
    """Names the comparisons that run Triton's kernels."""
    windows = {
        f"{kind}-{head_dim}-{dtype}": partial(compare_attention, "as_chosen", kind, head_dim, dtype)
        for kind in ("window", "window_before", "softcap")
        for head_dim in HEAD_DIMS
        for dtype in TOLERANCE
    }
    return block_cases() | layer_cases() | level_cases() | windows
