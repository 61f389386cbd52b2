"""The rating of keys: by the attention that they get from a sample of queries, in the layer before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from longspan.attn.comm import Message
from longspan.attn.exchanges import Call
from longspan.attn.member import empty_partials, partials_of
from longspan.attn.sparse.part import SparsePart
from longspan.core.runs import Run, SpanShards, num_tokens, positions
from longspan.core.sparse import SAMPLES_HOP
from longspan.core.sparse_plan import sampled_rows


class Ratings:
    """Rates the keys of a member for each KV head, by the attention that they get from a sample of queries.

    The sample is sent as soon as the attention of a layer is done, and awaited when the next layer needs it.
    """

    def __init__(self, call: Call, parts: Sequence[SparsePart], lses: Sequence[Tensor]) -> None:
        self._call, self._parts, group = call, parts, call.group
        assert call.exchange.sparse is not None, "ratings need a sparse setting"
        self._setting = call.exchange.sparse
        own = self._empty(group.rank)
        for part, lse, (q_out, lse_out) in zip(parts, lses, partials_of(own), strict=True):
            rows = list(self._sampled(part, group.rank))
            lse_out.copy_(lse[:, rows])
            q_out.copy_(call.q[:, part.part.rows][:, rows])
        self._messages = {peer: self._empty(peer) for peer in group.peers}
        self._pending = group.start(sends=dict.fromkeys(group.peers, own), receives=self._messages, hop=SAMPLES_HOP)
        self._messages[group.rank] = own

    def of_keys(self) -> list[Tensor]:
        """Wait for the samples. Return `[kv_heads, keys]` per part: the mean attention of queries that see a key."""
        self._pending.wait()
        samples = [partials_of(message) for _, message in sorted(self._messages.items())]
        all_ratings = []
        for part in self._parts:
            q, lse = (torch.cat(kind, dim=1) for kind in zip(*(next(partials) for partials in samples), strict=True))
            runs = part.part.q_runs, part.part.kv_runs[self._call.group.rank]
            seen, num_seeing = (counts.to(q.device) for counts in _visible(self._setting.samples, *runs))
            ratings = self._call.parts.backend.rate(q, lse, seen, part.k, self._call.spec) / num_seeing
            if self._setting.rate_by == "layer":
                ratings = ratings.sum(dim=0, keepdim=True).expand_as(ratings)
            all_ratings.append(ratings)
        return all_ratings

    def _empty(self, member: int) -> Message:
        counts = [(self._call.spec.num_heads, len(self._sampled(part, member))) for part in self._parts]
        return empty_partials(counts, self._call.spec, self._call.q)

    def _sampled(self, part: SparsePart, member: int) -> tuple[int, ...]:
        return sampled_rows(num_tokens(part.part.q_runs[member]), self._setting.samples)


@lru_cache(maxsize=64)
def _visible(samples: int, q_runs: SpanShards, kv_runs: tuple[Run, ...]) -> tuple[Tensor, Tensor]:
    """Count the keys that each sampled query sees, and the sampled queries that see each key (at least 1)."""
    keys = torch.tensor(positions(kv_runs))
    queries = [positions(runs)[row] for runs in q_runs for row in sampled_rows(num_tokens(runs), samples)]
    seen = torch.searchsorted(keys, torch.tensor(queries), right=True)
    unseen_by = torch.searchsorted(seen.sort().values, torch.arange(len(keys)), right=True)
    return seen, (len(seen) - unseen_by).clamp_min(1)
