"""Tokens that the controller had not seen when it sent a step: the rank that sampled one knows it, or passes it on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message
from longspan.runtime.requests import RankRequests


@dataclass(frozen=True, kw_only=True)
class UnknownToken:
    """The last token of a part, which instance `source` sampled in an earlier step and `target` computes in this one.

    Attributes:
        row: its place among the packed tokens of `target`; -1 on other ranks.
    """

    request_id: int
    source: int
    target: int
    row: int


def resolve(unknown: Sequence[UnknownToken], tokens: Tensor, requests: RankRequests, group: Group | None) -> None:
    """Puts the ids of unknown tokens into `tokens [tokens]` in place, and sends away those that other ranks compute.

    `group` is all ranks in order, None if there is only one.
    """
    rank = 0 if group is None else group.rank
    known = {one.request_id: requests[one.request_id].last_token for one in unknown if one.source == rank}
    if group is not None:
        known |= _exchange(unknown, known, group, tokens.device)
    for one in unknown:
        if one.target == rank:
            tokens[one.row] = known[one.request_id]
            requests[one.request_id].count(known[one.request_id])


def _exchange(
    unknown: Sequence[UnknownToken], known: dict[int, int], group: Group, device: torch.device
) -> dict[int, int]:
    leaving = _by_peer((one.target, one) for one in unknown if one.source == group.rank != one.target)
    coming = _by_peer((one.source, one) for one in unknown if one.target == group.rank != one.source)
    if not leaving and not coming:
        return {}
    sends = {peer: _message(len(ids), device) for peer, ids in leaving.items()}
    for peer, ids in leaving.items():
        sends[peer].tensors[0].copy_(torch.tensor([known[request_id] for request_id in ids]))
    receives = {peer: _message(len(ids), device) for peer, ids in coming.items()}
    group.start(sends=sends, receives=receives, hop=0).wait()
    return {
        request_id: token
        for peer, ids in coming.items()
        for request_id, token in zip(ids, receives[peer].tensors[0].tolist(), strict=True)
    }


def _by_peer(unknown: Iterable[tuple[int, UnknownToken]]) -> dict[int, list[int]]:
    peers: dict[int, list[int]] = {}
    for peer, one in unknown:
        peers.setdefault(peer, []).append(one.request_id)
    return peers


def _message(num_tokens: int, device: torch.device) -> Message:
    return Message([((num_tokens,), torch.int64)], device)
