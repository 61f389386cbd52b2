"""Changes of logits before a token is chosen: bias, banned tokens, penalties, and masks of grammars."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.paged_splits import copied
from longspan.core.steps import Sampling
from longspan.runtime.sampling import Draw


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Apply bias, ban, penalties and grammar to a copy of `logits [rows, vocab]`."""
    biased = [(row, draw.sampling.logit_bias) for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    banned = [(row, draw.banned) for row, draw in enumerate(draws) if draw.banned and draw.allowed is None]
    penalised = [(row, draw.sampling, draw.history) for row, draw in enumerate(draws) if draw.history is not None]
    constrained = [(row, draw.allowed) for row, draw in enumerate(draws) if draw.allowed is not None]
    vocab = logits.shape[-1]
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if biased:
        indices = [row * vocab + token for row, pairs in biased for token, _ in pairs]
        values = [bias for _, pairs in biased for _, bias in pairs]
        flat.index_add_(0, copied(indices, torch.int64, flat.device), copied(values, flat.dtype, flat.device))
    if banned:
        indices = [row * vocab + token for row, tokens in banned for token in tokens]
        flat.index_fill_(0, copied(indices, torch.int64, flat.device), -torch.inf)
    if penalised:
        _penalise(flat, vocab, penalised)
    if constrained:
        forbid(logits, [row for row, _ in constrained], [allowed for _, allowed in constrained])
    return logits


def _penalise(flat: Tensor, vocab: int, penalised: Sequence[tuple[int, Sampling, TokenCounts]]) -> None:
    """Apply penalties as vLLM does: repetition to tokens of prompt and output, frequency and presence to the output."""
    rows, params, histories = zip(*penalised, strict=True)
    sizes = torch.tensor([len(history.tokens) for history in histories], device=flat.device)
    total = sum(len(history.tokens) for history in histories)

    def per_token(values: Tensor) -> Tensor:
        return values.repeat_interleave(sizes, output_size=total)

    repetition = per_token(flat.new_tensor([p.repetition_penalty for p in params]))
    frequency = per_token(flat.new_tensor([p.frequency_penalty for p in params]))
    presence = per_token(flat.new_tensor([p.presence_penalty for p in params]))
    first = torch.tensor([row * vocab for row in rows], device=flat.device)
    indices = per_token(first) + torch.cat([history.tokens for history in histories])
    counts = torch.cat([history.counts for history in histories])
    values = flat[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[indices] = values - frequency * counts - presence * (counts > 0)


def forbid(logits: Tensor, rows: Sequence[int], allowed: Sequence[Tensor]) -> None:
    """Set the logits `[all rows, vocab]` of `rows` to -inf in place, except for `allowed` tokens."""
    bits = torch.stack(list(allowed)).to(logits.device)
    of_byte = torch.arange(8, dtype=torch.uint8, device=logits.device)
    kept = ((bits[:, :, None] >> of_byte) & 1).flatten(1)[:, : logits.shape[-1]].bool()
    indices = torch.tensor(list(rows), device=logits.device)
    logits[indices] = logits[indices].masked_fill(~kept, -torch.inf)


class TokenCounts:
    """The tokens that a request's penalties apply to, on one rank.

    Attributes:
        tokens: the distinct tokens of prompt and output, int64 `[distinct]` on the device of the logits.
        counts: occurrences of each token in the output, int64 `[distinct]`.
    """

    def __init__(self, vocab_size: int, prompt: Sequence[int], device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.counts = torch.empty(0, dtype=torch.int64, device=device)
        self._add_distinct(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._add_distinct(tokens)
        indices = torch.tensor([self._index[token] for token in tokens], device=self.counts.device)
        self.counts.index_add_(0, indices, torch.ones_like(indices))

    def _add_distinct(self, tokens: Sequence[int]) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._index]
        if not new:
            return
        assert min(new) >= 0 and max(new) < self._vocab_size, f"tokens {min(new)} to {max(new)}, {self._vocab_size=}"
        self._index.update(zip(new, range(len(self._index), len(self._index) + len(new)), strict=True))
        self.tokens = torch.cat((self.tokens, torch.tensor(new, device=self.tokens.device)))
        self.counts = torch.cat((self.counts, self.counts.new_zeros(len(new))))
