"""New keys and values in the blocks of a pool, by our own kernel and by PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import loaded_kernels

from longspan.attn.backends.native import NativeCpu
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.paged import PagedKv


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Iterator[None]:
    with loaded_kernels():
        yield


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 3), st.integers(1, 9), st.sampled_from((1, 8, 64)), st.integers(0, 9))
def test_every_token_lies_in_its_slot(num_tokens: int, heads: int, size: int, dim: int, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, heads, dim, generator=numbers).to(torch.bfloat16).transpose(1, 2)
    slots = torch.randperm(num_tokens + 5, generator=numbers)[:num_tokens]
    shape = (-(-(num_tokens + 5) // size), heads, size, dim)
    ours, theirs = (PagedKv(keys=torch.zeros(shape).bfloat16(), values=torch.zeros(shape).bfloat16()) for _ in "ab")
    for backend, kv in ((NativeCpu(), ours), (TorchCpu(), theirs)):
        backend.store(kv, slots // size, slots % size, k, v)
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(ours.keys[slot // size, :, slot % size], k[:, token])
