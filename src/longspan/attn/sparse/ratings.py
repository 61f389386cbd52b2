"""The rating of keys: by the attention that they get from a sample of queries, in the layer before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from longspan.attn.comm import Message, Pending
from longspan.attn.exchanges import Call
from longspan.attn.sparse.messages import partial_room, partials_of
from longspan.attn.sparse.part import SparsePart
from longspan.core.runs import Run, SpanShards, num_tokens, positions
from longspan.core.sparse import SAMPLES_HOP
from longspan.core.sparse_plan import sampled_rows


class Ratings:
    """Rates the keys of a member for each KV head, by the attention that they get from a sample of queries.

    That is sent as soon as a layer's attention is done, and awaited when the next needs it.
    """

    def __init__(self, call: Call, parts: Sequence[SparsePart], lses: Sequence[Tensor]) -> None:
        self._spec, self._parts, group = call.spec, parts, call.group
        self._backend = call.parts.backend
        assert call.exchange.sparse is not None, "it rates for that"
        self._setting, self._me = call.exchange.sparse, group.rank
        own = self._room(call, group.rank)
        partials = partials_of(own)
        for part, lse in zip(parts, lses, strict=True):
            rows = list(self._sampled(part, group.rank))
            q_room, lse_room = next(partials)
            lse_room.copy_(lse[:, rows])
            q_room.copy_(call.q[:, part.part.rows][:, rows])
        self._coming = {member: self._room(call, member) for member in group.peers}
        self._pending: Pending = group.start(
            sends=dict.fromkeys(group.peers, own), receives=self._coming, hop=SAMPLES_HOP
        )
        self._coming[group.rank] = own

    def of_keys(self) -> list[Tensor]:
        """Waits for the samples; returns for each part the mean attention `[kv_heads, keys]` of those that see them."""
        self._pending.wait()
        each, found = [partials_of(message) for _, message in sorted(self._coming.items())], []
        for part in self._parts:
            q, lse = (torch.cat(kind, dim=1) for kind in zip(*(next(partials) for partials in each), strict=True))
            runs = part.part.q_runs, part.part.kv_runs[self._me]
            seen, num_seeing = (one.to(q.device) for one in _visible(self._setting.samples, *runs))
            ratings = self._backend.rate(q, lse, seen, part.k, self._spec) / num_seeing
            if self._setting.rate_by == "layer":
                ratings = ratings.sum(dim=0, keepdim=True).expand_as(ratings)
            found.append(ratings)
        return found

    def _room(self, call: Call, member: int) -> Message:
        counts = [(call.spec.num_heads, len(self._sampled(part, member))) for part in self._parts]
        return partial_room(call, counts)

    def _sampled(self, part: SparsePart, member: int) -> tuple[int, ...]:
        return sampled_rows(num_tokens(part.part.q_runs[member]), self._setting.samples)


@lru_cache(maxsize=64)
def _visible(samples: int, q_runs: SpanShards, kv_runs: tuple[Run, ...]) -> tuple[Tensor, Tensor]:
    """Counts the keys that each sampled query of all members sees, and by how many each is seen, or 1."""
    own = torch.tensor(positions(kv_runs))
    asked = [positions(runs)[row] for runs in q_runs for row in sampled_rows(num_tokens(runs), samples)]
    seen = torch.searchsorted(own, torch.tensor(asked), right=True)
    unseen_by = torch.searchsorted(seen.sort().values, torch.arange(len(own)), right=True)
    return seen, (len(seen) - unseen_by).clamp_min(1)
