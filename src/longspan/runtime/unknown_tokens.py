"""Tokens whose ids a step needs that was planned before an earlier step sampled them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from longspan.attn.comm import Group, Message

if TYPE_CHECKING:
    from longspan.runtime.batch import Packed, RankRequests


@dataclass(frozen=True, kw_only=True)
class UnknownToken:
    """The last token of a part, sampled by instance `source` in an earlier step, computed by `target` in this step.

    Attributes:
        row: its index among the packed tokens of `target`. -1 on other ranks.
    """

    request_id: int
    source: int
    target: int
    row: int


def needs_host(packed: Packed, instance: int) -> bool:
    """Return whether a step needs tokens of the step before on the host of this instance, which sends them."""
    return any(entry.source == instance != entry.target for entry in packed.unknown)


def fill_unknown_tokens(packed: Packed, requests: RankRequests, instances: Group, device: torch.device) -> None:
    """Write the ids of unknown tokens to `packed.tokens` in place. Send the ids that other instances need.

    Tokens that lie on this device are listed in `packed.sampled` instead. `instances` connects all instances in order.
    Its messages are on `device`.
    """
    me = instances.rank
    own_ids = [entry.request_id for entry in packed.unknown if entry.source == me]
    tokens = {request_id: requests[request_id].last_token for request_id in own_ids}
    sent_ids: dict[int, list[int]] = {}
    received_ids: dict[int, list[int]] = {}
    for entry in packed.unknown:
        if me == entry.source != entry.target:
            sent_ids.setdefault(entry.target, []).append(entry.request_id)
        elif me == entry.target != entry.source:
            received_ids.setdefault(entry.source, []).append(entry.request_id)
    if sent_ids or received_ids:
        sends = {peer: Message([((len(ids),), torch.int64)], device) for peer, ids in sent_ids.items()}
        for peer, ids in sent_ids.items():
            sends[peer].tensors[0].copy_(torch.tensor([tokens[request_id] for request_id in ids]))
        receives = {peer: Message([((len(ids),), torch.int64)], device) for peer, ids in received_ids.items()}
        instances.start(sends=sends, receives=receives, hop=0).wait()
        for peer, ids in received_ids.items():
            tokens.update(zip(ids, receives[peer].tensors[0].tolist(), strict=True))
    for entry in packed.unknown:
        if entry.target == me:
            request = requests[entry.request_id]
            if entry.source == me and request.on_device is not None:
                packed.sampled.append((entry.row, *request.on_device))
            else:
                packed.tokens[entry.row] = tokens[entry.request_id]
            request.count((tokens[entry.request_id],))
