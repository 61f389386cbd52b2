"""Between the ranks of one instance, which have shares of the heads: all heads of some tokens become some heads of all
tokens, and back (SP-NTP inside an instance split by tensor parallelism; CSPS §3.2.1 and supplement A).

Every rank has a slice of the instance's tokens, and made queries, keys and values of all heads for them.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message
from longspan.attn.gather import gather_rows
from longspan.attn.spec import AttnSpec
from longspan.core.heads import HeadShare, cut_evenly, deal_heads


class Inside:
    """One layer of one rank. All ranks of the instance call `to_heads`, `to_tokens` and `gather`, in this order.

    Args:
        group: the ranks of the instance.
        spec: of the whole layer.
        num_tokens: of the instance.
    """

    def __init__(self, group: Group, spec: AttnSpec, num_tokens: int) -> None:
        self._group, self._spec = group, spec
        self._shares = deal_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self._slices = [slice(first, last) for first, last in cut_evenly(num_tokens, group.size)]

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of each rank."""
        return [tokens.stop - tokens.start for tokens in self._slices]

    @property
    def mine(self) -> slice:
        """This rank's tokens."""
        return self._slices[self._group.rank]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[heads of this rank's share, all tokens, head_dim]`, from those of all heads for
        its tokens.
        """
        me, ranks = self._group.rank, range(self._group.size)
        others = [rank for rank in ranks if rank != me]
        leaving = {rank: self._message(rank, q, k, v) for rank in others}
        coming = {rank: self._room(rank, me, q) for rank in others}
        pending = self._group.start(sends=leaving, receives=coming, hop=0)
        coming[me] = self._message(me, q, k, v)
        pending.wait()
        queries, keys, values = (torch.cat([coming[rank].tensors[kind] for rank in ranks], dim=1) for kind in range(3))
        return queries, keys, values

    def to_tokens(self, out: Tensor) -> Tensor:
        """Outputs `[all heads, this rank's tokens, head_dim]`, from those of its share for all tokens."""
        me, ranks = self._group.rank, range(self._group.size)
        others = [rank for rank in ranks if rank != me]
        leaving = {rank: self._results(me, rank, out) for rank in others}
        for rank, message in leaving.items():
            message.tensors[0].copy_(out[:, self._slices[rank]])
        coming = {rank: self._results(rank, me, out) for rank in others}
        self._group.start(sends=leaving, receives=coming, hop=1).wait()
        return torch.cat([out[:, self.mine] if rank == me else coming[rank].tensors[0] for rank in ranks])

    def gather(self, rows: Tensor) -> Tensor:
        """What every rank made of its tokens, `[tokens, width]`, for all of them."""
        return gather_rows(self._group, rows, self.counts, hop=2)

    def _message(self, receiver: int, q: Tensor, k: Tensor, v: Tensor) -> Message:
        message = self._room(self._group.rank, receiver, q)
        for room, made, heads in zip(message.tensors, (q, k, v), _kinds(self._shares[receiver]), strict=True):
            room.copy_(made[heads.start : heads.stop])
        return message

    def _room(self, sender: int, receiver: int, like: Tensor) -> Message:
        kinds = _kinds(self._shares[receiver])
        shapes = [(len(heads), self.counts[sender], self._spec.head_dim) for heads in kinds]
        return Message([(shape, like.dtype) for shape in shapes], like.device)

    def _results(self, sender: int, receiver: int, like: Tensor) -> Message:
        shape = (len(self._shares[sender].heads), self.counts[receiver], self._spec.head_dim)
        return Message([(shape, like.dtype)], like.device)


def _kinds(share: HeadShare) -> tuple[range, range, range]:
    """The heads of its queries, keys and values."""
    return share.heads, share.kv_heads, share.kv_heads
