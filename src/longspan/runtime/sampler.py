"""Chooses tokens. A row's token depends on that row alone: on its logits, its request and its position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.core.steps import Sampling
from longspan.runtime.logprobs import token_logprobs
from longspan.runtime.penalties import Draw, TokenCounts, adjusted
from longspan.runtime.quantiles import uniform, uniforms
from longspan.runtime.tiles import in_tiles
from longspan.runtime.truncation import weights

__all__ = ["Draw", "TokenCounts", "sample", "token_logprobs", "uniform"]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row of `logits [rows, vocab]` (float32, left as they are), as each row's `Draw` asks.

    Bias, ban, penalties and grammar come first. Temperature 0 then takes the best token, of equals the first; otherwise
    temperature, min_p, top_k and top_p leave a distribution, and the token at a random quantile of it, in vocabulary
    order, is taken. Where they leave none (nothing allowed, or logits that are not finite) the best is taken, too.
    """
    logits = adjusted(logits, draws)
    drawn = _drawn(logits, draws)
    greedy = [row for row in range(len(draws)) if row not in drawn]
    if greedy:
        chosen = logits[greedy] if drawn else logits
        drawn.update(zip(greedy, chosen.argmax(dim=-1).tolist(), strict=True))
    return [drawn[row] for row in range(len(draws))]


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> dict[int, int]:
    """Row to token, of the rows that are not greedy and have a distribution."""
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    random.sort(key=lambda row: _treatment(draws[row].sampling))
    tokens: dict[int, int] = {}
    for rows in in_tiles(random, logits):
        tokens.update(zip(rows, _draw(logits[list(rows)], [draws[row] for row in rows]), strict=True))
    vocab = logits.shape[-1]
    return {row: token for row, token in tokens.items() if token < vocab}


def _treatment(sampling: Sampling) -> tuple[bool, bool, bool]:
    """Rows alike in this are worked on together, so that few are sorted for their neighbours' sake."""
    return sampling.top_p < 1, sampling.top_k > 0, sampling.min_p > 0


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Each row's token at its random quantile; the size of the vocabulary where there is no distribution."""
    reached = weights(logits, [draw.sampling for draw in draws]).cumsum(dim=-1)
    quantiles = uniforms((draw.sampling.seed, draw.sampling.choice, draw.position) for draw in draws)
    wanted = reached.new_tensor(quantiles)[:, None] * reached[:, -1:]
    tokens: list[int] = torch.searchsorted(reached, wanted, right=True)[:, 0].tolist()
    return tokens
