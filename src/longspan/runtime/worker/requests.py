"""A rank remembers the requests it takes part in, from the first part it sees until it is told to forget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message
from longspan.core.owners import BlockRef
from longspan.core.steps import Part, Sample, Sampling
from longspan.runtime.sampling.penalties import Draw, GrammarMatcher, TokenCounts, Vocabulary


@dataclass(kw_only=True)
class RankRequest:
    """One request on one rank.

    Attributes:
        table: its blocks, on whichever instance; `Owners` says what lies where.
        history: the tokens that penalties count; None without penalties.
        matcher: the state of the grammar that the output must follow; None without one.
        num_counted: output tokens that `history` and `matcher` contain.
        last_token: the token that this rank sampled last; -1 before the first.
    """

    sampling: Sampling
    history: TokenCounts | None
    matcher: GrammarMatcher | None
    table: list[BlockRef] = field(default_factory=list)
    num_counted: int = 0
    last_token: int = -1

    def apply(self, part: Part) -> None:
        """Takes in what a part says of blocks and output tokens."""
        known = len(self.table) - part.first_block
        assert known == 0 or part.first_block == 0 <= known, "blocks are told once, or all again"
        self.table[part.first_block :] = part.blocks
        if part.new_output:
            self._add(part.new_output[self.num_counted - part.first_output :])

    def count(self, token: int) -> None:
        """Counts an output token that the controller does not know yet."""
        self._add((token,))

    def draw(self, sample: Sample) -> Draw:
        """Gathers all that its next token depends on, besides the logits."""
        banned = self.sampling.banned if sample.below_minimum else ()
        return Draw(
            sampling=self.sampling,
            position=sample.position,
            below_minimum=sample.below_minimum,
            history=self.history,
            allowed=None if self.matcher is None else self.matcher.allowed(banned),
        )

    @property
    def error(self) -> str:
        """Says why it cannot go on; empty while it can."""
        return "" if self.matcher is None else self.matcher.error

    def _add(self, tokens: tuple[int, ...]) -> None:
        if self.history is not None:
            self.history.add(tokens)
        if self.matcher is not None:
            self.matcher.add(tokens)
        self.num_counted += len(tokens)


class RankRequests:
    """All requests of one rank by id. Without a `vocabulary`, none may have a grammar."""

    def __init__(self, *, vocab_size: int, device: torch.device, vocabulary: Vocabulary | None = None) -> None:
        self._vocab_size, self._device, self._vocabulary = vocab_size, device, vocabulary
        self._requests: dict[int, RankRequest] = {}

    def __getitem__(self, request_id: int) -> RankRequest:
        return self._requests[request_id]

    def apply(self, part: Part) -> RankRequest:
        """Brings a request up to date and returns it."""
        if part.sampling is not None and part.request_id not in self._requests:
            self._requests[part.request_id] = self._begin(part.sampling)
        request = self._requests[part.request_id]
        request.apply(part)
        return request

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drops requests; unknown ones belong to other ranks."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _begin(self, sampling: Sampling) -> RankRequest:
        history = TokenCounts(self._vocab_size, sampling.prompt, self._device) if sampling.penalised else None
        matcher = None
        if sampling.constrained:
            assert self._vocabulary is not None, "requests with a grammar are refused without a tokenizer"
            matcher = GrammarMatcher(sampling.grammar, self._vocabulary)
        return RankRequest(sampling=sampling, history=history, matcher=matcher)


@dataclass(frozen=True, kw_only=True)
class UnknownToken:
    """The last token of a part, which instance `source` sampled in an earlier step and `target` computes in this one.

    Attributes:
        row: its index among the packed tokens of `target`; -1 on other ranks.
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
