"""The attention that the tokens of a prompt get from tokens at its end, over all layers and heads of a rank.

After the exchange of a layer, the queries are sent to all members of the group. Each member computes their scores with
its own keys. Members then exchange the log-sum-exps of these scores, so that each weight is a softmax over all keys on
devices and on hosts. The softmax includes the sink of its head. The controller sums the weights of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from longspan.attn.backends import lse_with_sinks
from longspan.attn.comm import Group, Message
from longspan.attn.exchanges import Call
from longspan.attn.gathered import GatheredPart, by_position
from longspan.attn.member import MemberPart
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec, Visibility
from longspan.core.runs import Run, SpanShards, coalesce, num_tokens, positions
from longspan.core.steps import Part, Scored

MAX_QUERIES = 64
"""Maximum number of queries of a prompt, the last ones. Time and memory are proportional to it."""
_QUERIES_HOP, _LSE_HOP = -2, -1


class PromptAttention:
    """The sums of one channel of a step on one rank.

    Args:
        request_ids: of the parts of the channel.
        spans: by request, the positions `[start, stop)` of its queries.
    """

    def __init__(self, request_ids: Sequence[int], spans: Mapping[int, tuple[int, int]], device: torch.device) -> None:
        self._request_ids, self._spans, self._device = request_ids, spans, device
        self._sums = {id_: torch.zeros(stop, device=device) for id_, (_, stop) in spans.items()}

    def scored(self) -> Iterator[Scored]:
        """Yield the report of each request."""
        for request_id, total in self._sums.items():
            yield Scored(request_id=request_id, attention=total.cpu().numpy().tobytes())

    def add(self, call: Call) -> None:
        """Add one layer's attention. Its keys are in the pools by now. All members of the group call it."""
        for index, request_id in enumerate(self._request_ids):
            if request_id in self._spans:
                self._add_part(request_id, call, index)

    def _add_part(self, request_id: int, call: Call, index: int) -> None:
        part, parts, spec = call.parts[index], call.parts, call.spec
        rows, at = parts.once(("rated", index), lambda: self._rated(part.q_runs, request_id))
        q = _joined(call.group, call.q[:, part.rows], rows)
        k = _keys(part.blocks, part.kv_runs[call.group.rank], call.kv)
        where = parts.once(("rated keys", index), lambda: self._positions(part.kv_runs[call.group.rank]))
        if call.host is not None:
            k, where = self._with_hosted(call, index, k, where)
        hidden = hidden_keys(at, where, spec.visibility)
        lse = lse_with_sinks(_total(call.group, _lse(q, k, hidden, spec)), call.sinks)
        self._sums[request_id].index_add_(0, where, _weights(q, k, hidden, lse, spec))

    def _with_hosted(self, call: Call, index: int, k: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys that this member reads in its host's pool."""
        assert call.host is not None, "checked by the caller"
        part: MemberPart = call.host.parts[index]
        runs = part.kv_runs[call.host.member]
        hosted = _keys(part.blocks, runs, call.host.kv).to(k)
        return torch.cat([k, hosted], dim=1), torch.cat([where, self._positions(runs)])

    def add_gathered(self, parts: Sequence[GatheredPart], spec: AttnSpec) -> None:
        """Add a layer of an exchange that gathers all queries and keys of some heads on this member."""
        for request_id, part in zip(self._request_ids, parts, strict=True):
            if request_id not in self._spans or not any(part.q_runs):
                continue
            rows, at = self._rated(part.q_runs, request_id)
            q = torch.cat([queries[:, own] for queries, own in zip(part.q, rows, strict=True)], dim=1)
            k, runs = by_position(part.kv_runs, part.k), coalesce(chain.from_iterable(part.kv_runs))
            where = self._positions(runs)
            hidden = hidden_keys(at, where, spec.visibility)
            lse = lse_with_sinks(_lse(q, k, hidden, spec), part.sinks)
            weights = _weights(q, k, hidden, lse, spec)
            self._sums[request_id].index_add_(0, where, weights)

    def _rated(self, q_runs: SpanShards, request_id: int) -> tuple[list[Tensor], Tensor]:
        """Return the rows of the queries on each member, and the positions of all, in the order of members."""
        start, stop = self._spans[request_id]
        listed = [
            [(row, position) for row, position in enumerate(positions(runs)) if start <= position < stop]
            for runs in q_runs
        ]
        rows = [torch.tensor([row for row, _ in own], dtype=torch.int64, device=self._device) for own in listed]
        return rows, torch.tensor([position for own in listed for _, position in own], device=self._device)

    def _positions(self, runs: Sequence[Run]) -> Tensor:
        return torch.tensor(positions(runs), dtype=torch.int64, device=self._device)


def ratings_of(
    parts: Sequence[Part], spans: Mapping[int, tuple[int, int]], device: torch.device
) -> PromptAttention | None:
    """Return the sums for the parts of a channel. None if no part has queries of a span."""
    rated = dict[int, tuple[int, int]]()
    for part in parts:
        if part.request_id in spans:
            start, stop = spans[part.request_id]
            start = max(start, stop - MAX_QUERIES)
            if part.start < stop and part.stop > start:
                rated[part.request_id] = start, stop
    return PromptAttention([part.request_id for part in parts], rated, device) if rated else None


# ---------------------------------------------------------------- messages


def _joined(group: Group, q: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Return the queries `[heads, n, head_dim]` of all members from the own rows of each."""
    own = Message.of([q[:, rows[group.rank]].contiguous()])
    shapes = [(q.shape[0], len(of_member), q.shape[2]) for of_member in rows]
    messages = {peer: Message.empty([shapes[peer]], q) for peer in group.peers}
    group.start(sends=dict.fromkeys(group.peers, own), receives=messages, hop=_QUERIES_HOP).wait()
    messages[group.rank] = own
    return torch.cat([messages[member].tensors[0] for member in range(group.size)], dim=1)


def _total(group: Group, lse: Tensor) -> Tensor:
    """Return the log-sum-exps `[heads, n]` over the keys of all members."""
    own = Message.of([lse])
    messages = {peer: Message([(tuple(lse.shape), lse.dtype)], lse.device) for peer in group.peers}
    group.start(sends=dict.fromkeys(group.peers, own), receives=messages, hop=_LSE_HOP).wait()
    messages[group.rank] = own
    return torch.logsumexp(torch.stack([message.tensors[0] for message in messages.values()]), dim=0)


# ---------------------------------------------------------------- weights


def _keys(blocks: Sequence[int], runs: Sequence[Run], kv: PagedKv) -> Tensor:
    """Copy keys `[kv_heads, tokens, head_dim]` of a member out of a pool."""
    size, number = kv.block_size, num_tokens(runs)
    taken = kv.keys[torch.tensor(blocks[: -(-number // size)], dtype=torch.int64, device=kv.keys.device)]
    return taken.transpose(0, 1).flatten(1, 2)[:, :number]


def hidden_keys(queries: Tensor, keys: Tensor, visibility: Visibility) -> Tensor:
    """Return `[queries, keys]`: whether a query does not see a key."""
    queries, hidden = queries[:, None], keys > queries[:, None]
    if visibility.window is not None:
        hidden |= keys <= queries - visibility.window
    if visibility.chunk is not None:
        hidden |= keys < queries // visibility.chunk * visibility.chunk
    return hidden


def scores_by_kv_head(q: Tensor, k: Tensor, hidden: Tensor, spec: AttnSpec) -> Iterator[tuple[slice, Tensor]]:
    """Yield the scores `[heads, n, keys]`, float32, of the query heads of each KV head."""
    readers = len(q) // max(1, len(k))
    for kv_head, keys in enumerate(k):
        heads = slice(kv_head * readers, (kv_head + 1) * readers)
        scores = q[heads].float() @ keys.float().T * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        yield heads, scores.masked_fill_(hidden, -torch.inf)


def _lse(q: Tensor, k: Tensor, hidden: Tensor, spec: AttnSpec) -> Tensor:
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for heads, scores in scores_by_kv_head(q, k, hidden, spec):
        lse[heads] = torch.logsumexp(scores, dim=-1)
    return lse


def _weights(q: Tensor, k: Tensor, hidden: Tensor, lse: Tensor, spec: AttnSpec) -> Tensor:
    """Return the sum over heads and queries of the softmax weights of each key, `[keys]` float32."""
    total = torch.zeros(k.shape[1], device=q.device)
    for heads, scores in scores_by_kv_head(q, k, hidden, spec):
        total += (scores - lse[heads][..., None]).exp_().sum(dim=(0, 1))
    return total
