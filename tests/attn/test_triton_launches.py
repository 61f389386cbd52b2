"""Launches of Triton's kernels as a CUDA device would get them: grids and compilations. No GPU is needed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.attn.backends import NOWHERE
from longspan.attn.paged import PagedKv, Reads
from longspan.attn.spec import AttnSpec

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
MAX_SIZES = 2**31 - 1, 65535, 65535
"""The largest grid of a CUDA device."""
SPEC = AttnSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1, window=None, softcap=30.0)


class Launches:
    """Collects launches in place of a device.

    Attributes:
        grids: the sizes of all grids, by kernel.
        compiled: by kernel, the keys for which Triton compiles it.
    """

    def __init__(self) -> None:
        self.grids: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        self.compiled: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, kernel: Any, args: tuple[Any, ...], *, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.jit import create_function_from_signature

        assert not warmup
        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, **kwargs)
        self.grids[kernel.fn.__name__].add(grid)
        self.compiled[kernel.fn.__name__].add(f"{specialization} {options}")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    from triton.runtime.jit import JITFunction

    found = Launches()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **others: found.add(kernel, args, **others))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return found


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compute_layer(num_tokens: int, kv: PagedKv) -> None:
    from longspan.model.step import KvSlots
    from longspan.model.triton_layers import Norm, Rotation, add_norm, gated, rotate

    norm, head_norm = (Norm(weight=meta(size), epsilon=1e-5) for size in (1024, 128))
    blocks, offsets = (meta(num_tokens, dtype=torch.int64) for _ in range(2))
    add_norm(meta(num_tokens, 1024), residual=meta(num_tokens, 1024), after=norm)
    cos, sin = (meta(1, num_tokens, 128) for _ in range(2))
    slots = KvSlots(kv=kv, blocks=blocks, offsets=offsets)
    rotate(meta(num_tokens, 12 * 128), 8, 2, Rotation(cos=cos, sin=sin), norms=(head_norm, head_norm), slots=slots)
    gated(meta(num_tokens, 2 * 1024), "silu")


def attend_prompt(num_queries: int, num_keys: int, kv: PagedKv) -> None:
    """Compute softcaps with and without a window, sparse attention, and copies between blocks and tensors."""
    from longspan.attn.backends.triton import TritonCuda
    from longspan.core.runs import Run, relate

    backend = TritonCuda()
    q, k, v = meta(8, num_queries, 128), meta(2, num_keys, 128), meta(2, num_keys, 128)
    q_run, k_run = Run(num_keys - num_queries, num_keys), Run(0, num_keys)
    for window in (None, 90):
        backend.attend(q, k, v, relate(q_run, k_run, window), replace(SPEC, window=window))
    kept = meta(2, max(1, num_keys // 2), dtype=torch.int32)
    out, lse = backend.attend_kept(q, k, v, kept, SPEC)
    backend.rate(q, lse, meta(num_queries, dtype=torch.int64), k, SPEC)
    backend.merge_into(meta(*out.shape), [(out, lse), (out, lse)], meta(2, num_queries, dtype=torch.int32))
    backend.select((k, v), kept, (meta(2, kept.shape[1], 128), meta(2, kept.shape[1], 128)))
    blocks, offsets = (meta(num_queries, dtype=torch.int64) for _ in range(2))
    backend.store(kv, blocks, offsets, k[:, :num_queries], v[:, :num_queries])
    backend.gather(kv, range(-(-num_keys // 16)), 3, num_keys, (k[:, 3:], v[:, 3:]))


def decode(num_queries: int, context: int, kv: PagedKv) -> None:
    from longspan.attn.backends.triton import TritonCuda

    backend = TritonCuda()
    plan = backend.plan([Reads(blocks=range(-(-context // 16)), start=0, stop=context)] * num_queries, kv)
    backend.attend_paged(meta(num_queries, 8, 128).transpose(0, 1), kv, plan, SPEC)


def test_no_length_of_a_step_compiles_a_kernel_again(launches: Launches) -> None:
    """Lengths that are 1, odd, and multiples of 16. A request would wait for a compilation."""
    pool = meta(2, 4096, 2, 16, 128)
    kv, first = PagedKv(keys=pool[0], values=pool[1]), dict[str, set[str]]()
    for num_queries, num_keys in ((32, 4096), (1, 17), (33, 34), (100, 4099), (4000, 5000)):
        compute_layer(num_queries, kv)
        attend_prompt(num_queries, num_keys, kv)
        decode(min(num_queries, 33), num_keys, kv)
        first = first or {name: set(keys) for name, keys in launches.compiled.items()}
        assert launches.compiled == first, (num_queries, num_keys)
    assert first.keys() >= {"norm_kernel", "rotate_kernel", "gate_kernel", "band_kernel", "split_kernel", "copy_kernel"}


def test_grids_of_very_long_steps_fit(launches: Launches) -> None:
    """Of a prompt of a million tokens in one step, which several instances may share."""
    pool = meta(2, 2**16, 2, 16, 128)
    kv, length = PagedKv(keys=pool[0], values=pool[1]), 2**20
    compute_layer(length, kv)
    attend_prompt(length, length, kv)
    for name, grids in launches.grids.items():
        for grid in grids:
            assert all(size <= most for size, most in zip(grid, MAX_SIZES, strict=False)), (name, grid)
    assert NOWHERE < 0 and len(launches.grids) >= 8
