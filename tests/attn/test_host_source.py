"""A member with some keys in its host pool has the same results as with all keys on its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_cuda import LateCuda
from torch import Tensor

from longspan.attn import hosted
from longspan.attn.backends import nothing_seen
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.check import random_sinks
from longspan.attn.comm import ALONE
from longspan.attn.exchanges import Call
from longspan.attn.exchanges.local import local
from longspan.attn.hosted import DeviceStaging, HostPieces, HostSource, HostStaging, Staging
from longspan.attn.member import MemberPart, MemberParts, QueryBatch
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.blocks import BlockRef
from longspan.core.exchange import LOCAL
from longspan.core.owners import Owners
from longspan.core.runs import Run

BLOCK, DEVICE, HOST = 4, 0, 9


def stagings() -> list[Staging]:
    """Blocks read in place, and copied as late and as early as a device may copy them."""
    cudas: list[Any] = [LateCuda(is_early=is_early) for is_early in (False, True)]
    return [HostStaging(), *(DeviceStaging(torch.device("cpu"), cuda) for cuda in cudas)]


def pools(
    num_tokens: int, on_host: set[int], spec: AttnSpec
) -> tuple[list[BlockRef], PagedKv, PagedKv, Tensor, Tensor]:
    """Puts keys and values `[kv_heads, tokens, head_dim]` into blocks here and there, out of order in both pools."""
    k, v = torch.randn(2, spec.num_kv_heads, num_tokens, spec.head_dim)
    num_blocks = -(-num_tokens // BLOCK)
    found = [
        PagedKv(keys=keys, values=values)
        for keys, values in torch.randn(2, 2, num_blocks, spec.num_kv_heads, BLOCK, spec.head_dim)
    ]
    table = []
    for index in range(num_blocks):
        block = (index * 7 + 3) % num_blocks if num_blocks % 7 else num_blocks - 1 - index
        kv, tokens = found[index in on_host], slice(index * BLOCK, min(num_tokens, (index + 1) * BLOCK))
        length = tokens.stop - tokens.start
        kv.keys[block, :, :length], kv.values[block, :, :length] = k[:, tokens], v[:, tokens]
        table.append(BlockRef(HOST if index in on_host else DEVICE, block))
    return table, found[0], found[1], k, v


def attend(requests: list[tuple[int, int, set[int]]], spec: AttnSpec, staging: Staging) -> tuple[Tensor, Tensor]:
    """Returns the outputs of `local`, and those of all keys at once, of requests with (cached, new) tokens."""
    torch.manual_seed(1)
    backend, row = TorchCpu(), 0
    own, there, wanted, queries, device_kv, host_kv = [], [], [], [], [], []
    for cached, new, on_host in requests:
        table, device, host, k, v = pools(cached + new, on_host, spec)
        q, runs = torch.randn(spec.num_heads, new, spec.head_dim), (Run(cached, cached + new),)
        rows = slice(row, row + new)
        first = sum(len(kv.keys) for kv in device_kv)
        for pool, parts in ((DEVICE, own), (HOST, there)):
            owners = Owners(table=table, group=(pool,), block_size=BLOCK)
            blocks = [first + block for block in owners.blocks(pool)]
            parts.append(MemberPart(rows=rows, q_runs=(runs,), kv_runs=owners.held(cached + new), blocks=blocks))
        position, key = torch.arange(cached, cached + new)[:, None], torch.arange(cached + new)[None]
        hidden = key > position
        if spec.window is not None:
            hidden |= position - key >= spec.window
        if spec.chunk is not None:
            hidden |= position // spec.chunk != key // spec.chunk
        groups = spec.num_heads // spec.num_kv_heads
        scores = (q.double() @ k.repeat_interleave(groups, 0).double().transpose(1, 2)) * spec.scale
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.has_sinks:
            scores = torch.cat([scores, random_sinks(spec).double()[:, None, None].expand(-1, new, 1)], dim=-1)
        weights = scores.softmax(-1)[..., : cached + new]
        wanted.append(weights @ v.repeat_interleave(groups, 0).double())
        queries.append(q)
        device_kv.append(device)
        host_kv.append(host)
        row += new

    def joined(kvs: list[PagedKv]) -> PagedKv:
        return PagedKv(keys=torch.cat([kv.keys for kv in kvs]), values=torch.cat([kv.values for kv in kvs]))

    q = torch.cat(queries, dim=1)
    parts, pieces = MemberParts(there, backend), HostPieces(staging)
    source = HostSource(parts=parts, member=0, kv=joined(host_kv), pieces=pieces)
    source.prefetch(spec.visibility)
    call = Call(
        exchange=LOCAL,
        group=ALONE,
        parts=MemberParts(own, backend),
        q=q,
        k=q,
        v=q,
        kv=joined(device_kv),
        spec=spec,
        out=torch.full_like(q, torch.nan),
        host=source,
        sinks=random_sinks(spec) if spec.has_sinks else None,
    )
    local(call)
    return call.out, torch.cat(wanted, dim=1)


REQUESTS = [(40, 1, {0, 1, 2, 5}), (61, 1, set()), (37, 6, set(range(8))), (3, 1, set()), (90, 20, {1, 3, 4, 5, 6, 20})]


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (7, None), (30, None), (None, 7), (None, 30), (None, 100)])
@pytest.mark.parametrize(("kv_heads", "has_sinks"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("staging", stagings(), ids=["in place", "late", "early"])
@pytest.mark.usefixtures("one_thread")
def test_both_sources_together_are_exact(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    chunk: int | None,
    kv_heads: int,
    has_sinks: bool,
    staging: Staging,
) -> None:
    """Pieces of two blocks, so that most requests have several pieces. The second step uses the same buffers."""
    monkeypatch.setattr(hosted, "PIECE_TOKENS", 2 * BLOCK)
    sizes = {"num_heads": 4, "num_kv_heads": kv_heads, "head_dim": 8, "scale": 0.3}
    spec = AttnSpec(**sizes, window=window, softcap=None, chunk=chunk, has_sinks=has_sinks)
    for requests in (REQUESTS[2:], REQUESTS):
        out, wanted = attend(requests, spec, staging)
        assert (out - wanted).abs().max() < 1e-5


class TimedBackend(TorchCpu):
    """Attention takes `attend_s` on the device of a `LateCuda`."""

    def __init__(self, cuda: LateCuda, attend_s: float) -> None:
        super().__init__()
        self._cuda, self._attend_s = cuda, attend_s

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        self._cuda.computation.clock_s += self._attend_s
        return super().attend(*args, **kwargs)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(("attend_s", "ratio"), [(3.0, 1.15), (1.125, 1.15), (0.5, 2.2)])
@pytest.mark.usefixtures("one_thread")
def test_copies_are_hidden_by_attention_over_all_parts_and_layers(
    monkeypatch: pytest.MonkeyPatch, attend_s: float, ratio: float, num_parts: int
) -> None:
    """A piece is copied in one second. A prompt on the host takes 1.15 times the attention, or as long as the bus."""
    monkeypatch.setattr(hosted, "PIECE_TOKENS", 2 * BLOCK)
    spec = AttnSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, window=None, softcap=None)
    num_layers, num_blocks = 8, 12 // num_parts
    cuda: Any = LateCuda(is_early=True, copy_s=0.5)  # keys and values
    backend, pieces = TimedBackend(cuda, attend_s), HostPieces(DeviceStaging(torch.device("cpu"), cuda))
    layers = [PagedKv(keys=keys, values=keys) for keys in torch.randn(num_layers, 12, 2, BLOCK, 8)]
    start = num_blocks * BLOCK
    parts = [
        MemberPart(
            rows=slice(4 * number, 4 * number + 4),
            q_runs=((Run(start, start + 4),),),
            kv_runs=((Run(0, start),),),
            blocks=range(num_blocks * number, num_blocks * (number + 1)),
        )
        for number in range(num_parts)
    ]
    hosts = [HostSource(parts=MemberParts(parts, TorchCpu()), member=0, kv=kv, pieces=pieces) for kv in layers]
    q = torch.randn(4, 4 * num_parts, 8)
    hosts[0].prefetch(spec.visibility)
    waits = []
    for layer, source in enumerate(hosts):
        batch = QueryBatch(0, tuple(range(num_parts)), q)
        source.merge(backend, [batch], [None], [nothing_seen(q)], spec)
        if layer + 1 < num_layers:
            hosts[layer + 1].prefetch(spec.visibility)
            waits.append(cuda.copying.clock_s - 2 < cuda.computation.clock_s)
    assert all(waits), "the copies of the next layer begin before the attention of this layer is over"
    assert cuda.num_copies == 2 * 6 * num_layers, "each key crosses the bus once per layer, a piece by one copy"
    assert 1 <= cuda.computation.clock_s / (6 * num_layers * attend_s) <= ratio


@pytest.mark.parametrize(("heads", "num_copies"), [(range(4), 2), (range(1, 3), 4)], ids=["all", "of a shard"])
def test_adjacent_blocks_of_all_heads_are_one_copy(heads: range, num_copies: int) -> None:
    keys, values = torch.randn(2, 9, 4, BLOCK, 8)
    kv, blocks = PagedKv(keys=keys, values=values).heads(heads), [5, 6, 7, 1]
    cuda: Any = LateCuda(is_early=True)
    staging = DeviceStaging(torch.device("cpu"), cuda)
    staging.begin(0, kv, blocks)
    staged, numbers = staging.end(0)
    assert torch.equal(staged.keys[list(numbers)], kv.keys[blocks])
    assert torch.equal(staged.values[list(numbers)], kv.values[blocks])
    assert cuda.num_copies == 2 * num_copies
