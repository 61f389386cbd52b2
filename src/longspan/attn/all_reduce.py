"""The sum of a tensor over the members of a group, the same bits on all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message
from longspan.core.heads import cut_evenly


def all_reduce(group: Group, tensor: Tensor) -> Tensor:
    """Reduce-scatter, then all-gather: each member sends `2 (n - 1) / n` of the tensor.

    Every member sums its piece in float32, in the order of the members, and rounds once: the result does not depend on
    who is faster, and all members have the same.
    """
    if group.size == 2:
        return _swap(group, tensor)
    flat = tensor.reshape(-1)
    pieces = cut_evenly(flat.numel(), group.size)
    mine = slice(*pieces[group.rank])
    others = [member for member in range(group.size) if member != group.rank]
    sends = {member: _message(flat, *pieces[member]) for member in others}
    for member, message in sends.items():
        message.tensors[0].copy_(flat[slice(*pieces[member])])
    receives = {member: _message(flat, *pieces[group.rank]) for member in others}
    group.start(sends=sends, receives=receives, hop=0).wait()
    parts = [flat[mine] if member == group.rank else receives[member].tensors[0] for member in range(group.size)]
    total = torch.stack([part.float() for part in parts]).sum(dim=0).to(tensor.dtype)
    told, heard = _message(flat, *pieces[group.rank]), {member: _message(flat, *pieces[member]) for member in others}
    told.tensors[0].copy_(total)
    group.start(sends=dict.fromkeys(others, told), receives=heard, hop=1).wait()
    return torch.cat(
        [total if member == group.rank else heard[member].tensors[0] for member in range(group.size)]
    ).view(tensor.shape)


def _swap(group: Group, tensor: Tensor) -> Tensor:
    """Two members send each other all they have: no more bytes, and one hop instead of two."""
    other = 1 - group.rank
    told, heard = (Message([(tuple(tensor.shape), tensor.dtype)], tensor.device) for _ in range(2))
    told.tensors[0].copy_(tensor)
    group.start(sends={other: told}, receives={other: heard}, hop=0).wait()
    return (tensor.float() + heard.tensors[0].float()).to(tensor.dtype)


def _message(like: Tensor, start: int, stop: int) -> Message:
    return Message([((stop - start,), like.dtype)], like.device)
