"""What a request changes in its logits before anything is chosen: bias, banned tokens, penalties, grammar.

All rows of a batch are worked on at once, and all but grammars touch only the tokens concerned: a batch of logits
`[rows, vocab]` is seen flat, and token t of row r is number `r * vocab + t`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.core.steps import Sampling
from longspan.runtime.guides import forbid


class TokenCounts:
    """The tokens that a request's penalties look at, on one rank: those of its prompt, and its output's with counts.

    Attributes:
        tokens: the distinct ones of prompt and output, int64 `[seen]` on the device of the logits.
        counts: how often each of them is in the output, int64 `[seen]`.
    """

    def __init__(self, vocab_size: int, prompt: Sequence[int], device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._places: dict[int, int] = {}
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.counts = torch.empty(0, dtype=torch.int64, device=device)
        self._see(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Count more tokens of the output."""
        if not tokens:
            return
        self._see(tokens)
        places = torch.tensor([self._places[token] for token in tokens], device=self.counts.device)
        self.counts.index_add_(0, places, torch.ones_like(places))

    def _see(self, tokens: Sequence[int]) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._places]
        if not new:
            return
        assert min(new) >= 0 and max(new) < self._vocab_size, f"tokens {min(new)} to {max(new)}, {self._vocab_size=}"
        self._places.update(zip(new, range(len(self._places), len(self._places) + len(new)), strict=True))
        self.tokens = torch.cat((self.tokens, torch.tensor(new, device=self.tokens.device)))
        self.counts = torch.cat((self.counts, self.counts.new_zeros(len(new))))


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one row of logits is sampled for.

    Attributes:
        sampling: of the row's request.
        position: of the token to be sampled; random numbers are keyed by it.
        below_minimum: whether `sampling.banned` tokens are out of the question.
        history: of the row's request; None unless `sampling.penalised`.
        allowed: of the row's request, bits of the tokens that its grammar allows, see `Guide`; None for all.
    """

    sampling: Sampling
    position: int
    below_minimum: bool = False
    history: TokenCounts | None = None
    allowed: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.history is not None or not self.sampling.penalised, "penalties need the request's history"

    @property
    def banned(self) -> tuple[int, ...]:
        """The tokens that must not be chosen here; a grammar has taken them into account."""
        return self.sampling.banned if self.below_minimum and self.allowed is None else ()


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`logits [rows, vocab]` after bias, ban, penalties and grammar; a copy, unless no row asks for any of them."""
    biased = [(row, draw.sampling.logit_bias) for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    banned = [(row, draw.banned) for row, draw in enumerate(draws) if draw.banned]
    penalised = [(row, draw) for row, draw in enumerate(draws) if draw.sampling.penalised]
    guided = [(row, draw.allowed) for row, draw in enumerate(draws) if draw.allowed is not None]
    if not (biased or banned or penalised or guided):
        return logits
    vocab = logits.shape[-1]
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if biased:
        places = [row * vocab + token for row, pairs in biased for token, _ in pairs]
        values = [bias for _, pairs in biased for _, bias in pairs]
        flat.index_add_(0, torch.tensor(places, device=flat.device), flat.new_tensor(values))
    if banned:
        places = [row * vocab + token for row, tokens in banned for token in tokens]
        flat.index_fill_(0, torch.tensor(places, device=flat.device), -torch.inf)
    if penalised:
        _penalise(flat, vocab, penalised)
    if guided:
        forbid(logits, [row for row, _ in guided], [allowed for _, allowed in guided])
    return logits


def _penalise(flat: Tensor, vocab: int, penalised: Sequence[tuple[int, Draw]]) -> None:
    """As vLLM: the repetition penalty on all tokens seen; then frequency and presence on those of the output."""
    histories = [draw.history for _, draw in penalised if draw.history is not None]
    sizes = torch.tensor([len(history.tokens) for history in histories], device=flat.device)
    total = sum(len(history.tokens) for history in histories)

    def per_token(values: Tensor) -> Tensor:
        return values.repeat_interleave(sizes, output_size=total)

    wishes = [draw.sampling for _, draw in penalised]
    repetition = per_token(flat.new_tensor([wish.repetition_penalty for wish in wishes]))
    frequency = per_token(flat.new_tensor([wish.frequency_penalty for wish in wishes]))
    presence = per_token(flat.new_tensor([wish.presence_penalty for wish in wishes]))
    first = torch.tensor([row * vocab for row, _ in penalised], device=flat.device)
    places = per_token(first) + torch.cat([history.tokens for history in histories])
    counts = torch.cat([history.counts for history in histories])
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[places] = values - frequency * counts - presence * (counts > 0)
