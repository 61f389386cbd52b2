"""The rating of keys: by the attention that they get from a sample of queries, in the layer before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.comm import Message, Pending
from longspan.attn.exchanges import Call
from longspan.attn.sparse.messages import SAMPLES_HOP, partial_room, partials_of
from longspan.attn.sparse.part import SparsePart
from longspan.attn.spec import AttnSpec
from longspan.core.runs import num_tokens, positions
from longspan.core.sparse_plan import sampled_rows

_TILE = 4096
"""Keys that are rated at a time."""


class Ratings:
    """Rates the keys of a member for each KV head, by the attention that they get from a sample of queries.

    That is sent as soon as a layer's attention is done, and awaited when the next needs it.
    """

    def __init__(self, call: Call, parts: Sequence[SparsePart], lses: Sequence[Tensor]) -> None:
        self._spec, self._parts, group = call.spec, parts, call.group
        assert call.exchange.sparse is not None, "it rates for that"
        self._setting, self._me = call.exchange.sparse, group.rank
        own = self._room(call, group.rank)
        partials = partials_of(own)
        for part, lse in zip(parts, lses, strict=True):
            rows = list(self._sampled(part, group.rank))
            q_room, lse_room = next(partials)
            lse_room.copy_(lse[:, rows])
            q_room.copy_(call.q[:, part.part.rows][:, rows])
        self._coming = {member: self._room(call, member) for member in group.others}
        self._pending: Pending = group.start(
            sends=dict.fromkeys(group.others, own), receives=self._coming, hop=SAMPLES_HOP
        )
        self._coming[group.rank] = own

    def of_keys(self) -> list[Tensor]:
        """Waits for the samples; returns for each part the mean attention `[kv_heads, keys]` of those that see them."""
        self._pending.wait()
        each = {member: partials_of(message) for member, message in self._coming.items()}
        found = []
        for part in self._parts:
            ratings, seen_by = torch.zeros(2, *part.k.shape[:2], device=part.k.device)
            own = torch.tensor(positions(part.part.kv_runs[self._me]), device=part.k.device)
            for member, partials in each.items():
                q, lse = next(partials)
                asked = positions(part.part.q_runs[member])
                sampled = torch.tensor([asked[row] for row in self._sampled(part, member)], device=q.device)
                sees = sampled[:, None] >= own
                if sees.any():
                    ratings += _attention_of(q, sees, part.k, lse, self._spec)
                    seen_by += sees.sum(dim=0)
            ratings /= seen_by.clamp_min(1)
            if self._setting.rate_by == "layer":
                ratings = ratings.sum(dim=0, keepdim=True).expand_as(ratings)
            found.append(ratings)
        return found

    def _room(self, call: Call, member: int) -> Message:
        counts = [(call.spec.num_heads, len(self._sampled(part, member))) for part in self._parts]
        return partial_room(call, counts)

    def _sampled(self, part: SparsePart, member: int) -> tuple[int, ...]:
        return sampled_rows(num_tokens(part.part.q_runs[member]), self._setting.samples)


def _attention_of(q: Tensor, sees: Tensor, k: Tensor, lse: Tensor, spec: AttnSpec) -> Tensor:
    """Sums the attention of queries `[heads, n, dim]`, which see the keys `[kv_heads, tokens, dim]` or not."""
    num_kv_heads, num_keys, dim = k.shape
    queries = q.reshape(num_kv_heads, -1, dim)
    lses, found = lse.reshape(num_kv_heads, -1, 1), []
    visible = sees.repeat(spec.num_heads // num_kv_heads, 1)
    for start in range(0, num_keys, _TILE):
        keys = slice(start, start + _TILE)
        scores = torch.matmul(queries, k[:, keys].transpose(1, 2)).float().mul_(spec.scale)
        if spec.softcap is not None:
            scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        found.append(scores.sub_(lses).exp_().masked_fill_(~visible[:, keys], 0.0).sum(dim=1))
    return torch.cat(found, dim=1)
