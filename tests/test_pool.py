"""The KV pool keeps what is written, wherever its blocks lie, and reads it in place."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.attn.spec import AttnSpec
from longspan.kv.pool import HeldKv, KvPool, bytes_per_block

LAW = settings(derandomize=True, deadline=None, max_examples=80)
CPU = torch.device("cpu")
NUM_BLOCKS = 12


def specs(num_layers: int) -> list[AttnSpec]:
    return [
        AttnSpec(num_heads=4, num_kv_heads=2, head_dim=dim, scale=1.0, window=None, softcap=None)
        for dim in (16, 24, 8)[:num_layers]
    ]


@st.composite
def held(draw: st.DrawFn) -> tuple[HeldKv, Tensor, Tensor]:
    """A request's keys and values, written in a few steps to random blocks of a pool."""
    block_size = draw(st.integers(1, 7))
    blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
    if draw(st.booleans()):
        blocks.sort()
    num_tokens = draw(st.integers(1, len(blocks) * block_size))
    pool = KvPool(specs(1), num_blocks=NUM_BLOCKS, block_size=block_size, dtype=torch.float32, device=CPU)
    k, v = torch.arange(2.0 * 2 * num_tokens * 16).view(2, 2, num_tokens, 16)
    token = torch.arange(num_tokens)
    cuts = sorted({0, num_tokens, *draw(st.lists(st.integers(0, num_tokens), max_size=3))})
    for start, stop in itertools.pairwise(cuts):
        rows = token[start:stop]
        pool.write(0, torch.tensor(blocks)[rows // block_size], rows % block_size, k[:, rows], v[:, rows])
    return pool.held(0, blocks), k, v


def stretch(data: st.DataObject, num_tokens: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, num_tokens - 1))
    return start, data.draw(st.integers(start + 1, num_tokens))


@LAW
@given(held(), st.data())
def test_gathered_is_what_was_written(source: tuple[HeldKv, Tensor, Tensor], data: st.DataObject) -> None:
    kv, k, v = source
    start, stop = stretch(data, k.shape[1])
    k_out, v_out = torch.full((2, 2, stop - start, 16), torch.nan)
    kv.gather(start, stop, k_out, v_out)
    assert torch.equal(k_out, k[:, start:stop]) and torch.equal(v_out, v[:, start:stop])


@LAW
@given(held(), st.data())
def test_pieces_are_views_and_as_few_as_can_be(source: tuple[HeldKv, Tensor, Tensor], data: st.DataObject) -> None:
    kv, k, v = source
    start, stop = stretch(data, k.shape[1])
    pieces = list(kv.pieces(start, stop))
    for found, wanted, storage in ((0, k, kv.keys), (1, v, kv.values)):
        rows = [piece[found].transpose(0, 1).flatten(1, 2) for piece in pieces]
        assert torch.equal(torch.cat(rows, dim=1), wanted[:, start:stop])
        assert all(piece[found].untyped_storage().data_ptr() == storage.data_ptr() for piece in pieces)
    assert len(pieces) == fewest(kv.blocks, start, stop, kv.block_size)


def fewest(blocks: list[int], start: int, stop: int, size: int) -> int:
    """Neighbours can be one view when their blocks are, and both are read as a whole."""
    parts = [(b, max(start, b * size), min(stop, (b + 1) * size)) for b in range(start // size, -(-stop // size))]
    joints = sum(
        blocks[b] + 1 == blocks[c] and first == b * size and end == (c + 1) * size
        for (b, first, _), (c, _, end) in itertools.pairwise(parts)
    )
    return len(parts) - joints


def test_requests_and_layers_do_not_mix() -> None:
    layers = specs(3)
    pool = KvPool(layers, num_blocks=4, block_size=3, dtype=torch.bfloat16, device=CPU)
    tables = [[2, 0], [3], [1]]
    for layer, spec in enumerate(layers):
        for number, blocks in enumerate(tables):
            token = torch.arange(3 * len(blocks))
            kv = torch.full((2, len(token), spec.head_dim), 10.0 * layer + number, dtype=torch.bfloat16)
            pool.write(layer, torch.tensor(blocks)[token // 3], token % 3, kv, -kv)
    for layer in range(3):
        for number, blocks in enumerate(tables):
            for k, v in pool.held(layer, blocks).pieces(0, 3 * len(blocks)):
                assert (k == 10 * layer + number).all() and (v == -10 * layer - number).all()


def test_memory_of_a_block() -> None:
    layers = specs(3)
    pool = KvPool(layers, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    held = [pool.held(layer, []) for layer in range(3)]
    assert sum(kv.keys.nbytes + kv.values.nbytes for kv in held) == 5 * bytes_per_block(layers, 4, torch.bfloat16)
