"""A member with some keys in its host pool has the same results as with all keys on its device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longspan.attn import hosted
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.comm import ALONE
from longspan.attn.exchanges import Call
from longspan.attn.exchanges.local import local
from longspan.attn.hosted import HostSource, HostStaging, Shape, Staging
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import KeysAndValues, PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.blocks import BlockRef
from longspan.core.exchange import LOCAL
from longspan.core.owners import Owners
from longspan.core.runs import Run

BLOCK, DEVICE, HOST = 4, 0, 9


class LateStaging:
    """Copies when a piece is wanted, as late as a device may, or `early`, when it is begun."""

    def __init__(self, *, early: bool) -> None:
        self._inner, self._early = HostStaging(), early
        self._begun: dict[int, Callable[[], None]] = {}
        self.log: list[tuple[str, int]] = []

    def begin(self, buffer: int, shape: Shape, dtype: torch.dtype, fill: Callable[[KeysAndValues], None]) -> None:
        """See `Staging`."""
        self.log.append(("begin", buffer))
        assert buffer not in self._begun, "a piece that was brought is used before the next one comes there"
        self._begun[buffer] = lambda: self._inner.begin(buffer, shape, dtype, fill)
        if self._early:
            self._begun[buffer]()

    def end(self, buffer: int) -> KeysAndValues:
        """See `Staging`."""
        self.log.append(("end", buffer))
        begin = self._begun.pop(buffer)
        if not self._early:
            begin()
        return self._inner.end(buffer)


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
        groups = spec.num_heads // spec.num_kv_heads
        scores = (q.double() @ k.repeat_interleave(groups, 0).double().transpose(1, 2)) * spec.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        wanted.append(weights @ v.repeat_interleave(groups, 0).double())
        queries.append(q)
        device_kv.append(device)
        host_kv.append(host)
        row += new

    def joined(kvs: list[PagedKv]) -> PagedKv:
        return PagedKv(keys=torch.cat([kv.keys for kv in kvs]), values=torch.cat([kv.values for kv in kvs]))

    q = torch.cat(queries, dim=1)
    source = HostSource(parts=MemberParts(there, backend), member=0, kv=joined(host_kv), staging=staging)
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
    )
    local(call)
    return call.out, torch.cat(wanted, dim=1)


REQUESTS = [(40, 1, {0, 1, 2, 5}), (61, 1, set()), (37, 6, set(range(8))), (3, 1, set()), (90, 20, {1, 3, 4, 5, 6, 20})]


@pytest.mark.parametrize("window", [None, 7, 30])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_both_sources_together_are_exact(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kv_heads: int, early: bool
) -> None:
    """Pieces of two blocks, so that most requests have several pieces."""
    monkeypatch.setattr(hosted, "PIECE_TOKENS", 2 * BLOCK)
    spec = AttnSpec(num_heads=4, num_kv_heads=kv_heads, head_dim=8, scale=0.3, window=window, softcap=None)
    out, wanted = attend(REQUESTS, spec, LateStaging(early=early))
    assert (out - wanted).abs().max() < 1e-5


@pytest.mark.usefixtures("one_thread")
def test_a_piece_comes_while_the_one_before_is_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "PIECE_TOKENS", 2 * BLOCK)
    spec = AttnSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, window=None, softcap=None)
    staging = LateStaging(early=True)
    attend([(40, 6, set(range(6)))], spec, staging)
    assert staging.log == [
        *(("begin", 0), ("begin", 1), ("end", 0)),
        *(("begin", 0), ("end", 1)),
        ("end", 0),
    ]
