"""The KV pool keeps written values, wherever its blocks lie, and reads them in place."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.runtime.block_records import kv_record
from longspan.runtime.pool import KvPool

LAW = settings(derandomize=True, deadline=None, max_examples=80)
CPU = torch.device("cpu")
NUM_BLOCKS = 12


def specs(num_layers: int) -> list[AttnSpec]:
    return [
        AttnSpec(num_heads=4, num_kv_heads=2, head_dim=dim, scale=1.0, window=None, softcap=None)
        for dim in (16, 24, 8)[:num_layers]
    ]


@dataclass(frozen=True)
class Held:
    """A request's keys and values, and where they lie."""

    kv: PagedKv
    blocks: list[int]
    k: Tensor
    v: Tensor

    def gather(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k_out, v_out = torch.full((2, self.k.shape[0], stop - start, self.k.shape[2]), torch.nan)
        self.kv.gather(self.blocks, start, stop, k_out, v_out)
        return k_out, v_out


@st.composite
def held(draw: st.DrawFn) -> Held:
    """Written in a few steps to random blocks of a pool."""
    block_size = draw(st.integers(1, 7))
    blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
    if draw(st.booleans()):
        blocks.sort()
    num_tokens = draw(st.integers(1, len(blocks) * block_size))
    record = kv_record(specs(1), block_size, torch.float32)
    pool = KvPool(record, num_blocks=NUM_BLOCKS, block_size=block_size, dtype=torch.float32, device=CPU)
    k, v = torch.arange(2.0 * 2 * num_tokens * 16).view(2, 2, num_tokens, 16)
    token = torch.arange(num_tokens)
    cuts = sorted({0, num_tokens, *draw(st.lists(st.integers(0, num_tokens), max_size=3))})
    for start, stop in itertools.pairwise(cuts):
        rows = token[start:stop]
        pool.write(0, torch.tensor(blocks)[rows // block_size], rows % block_size, k[:, rows], v[:, rows])
    return Held(pool.layer(0), blocks, k, v)


@LAW
@given(held(), st.data())
def test_gathered_blocks_equal_written_blocks(source: Held, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, source.k.shape[1] - 1))
    stop = data.draw(st.integers(start + 1, source.k.shape[1]))
    k_out, v_out = source.gather(start, stop)
    assert torch.equal(k_out, source.k[:, start:stop]) and torch.equal(v_out, source.v[:, start:stop])


def test_requests_and_layers_do_not_mix() -> None:
    layers = specs(3)
    record = kv_record(layers, 3, torch.bfloat16)
    pool = KvPool(record, num_blocks=4, block_size=3, dtype=torch.bfloat16, device=CPU)
    tables = [[2, 0], [3], [1]]
    for layer, spec in enumerate(layers):
        for number, blocks in enumerate(tables):
            token = torch.arange(3 * len(blocks))
            kv = torch.full((2, len(token), spec.head_dim), 10.0 * layer + number, dtype=torch.bfloat16)
            pool.write(layer, torch.tensor(blocks)[token // 3], token % 3, kv, -kv)
    for layer, spec in enumerate(layers):
        for number, blocks in enumerate(tables):
            k, v = torch.empty(2, 2, 3 * len(blocks), spec.head_dim, dtype=torch.bfloat16)
            pool.layer(layer).gather(blocks, 0, 3 * len(blocks), k, v)
            assert (k == 10 * layer + number).all() and (v == -10 * layer - number).all()


def test_memory_of_a_block() -> None:
    record = kv_record(specs(3), 4, torch.bfloat16)
    pool = KvPool(record, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    num_bytes = sum(pool.layer(layer).keys.nbytes + pool.layer(layer).values.nbytes for layer in range(3))
    assert num_bytes == 5 * record.block_bytes
