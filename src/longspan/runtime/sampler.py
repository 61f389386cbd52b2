"""Chooses tokens. Random numbers are keyed by (seed, position), so a batch or a layout cannot change them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.core.steps import Sample


def sample(logits: Tensor, samples: Sequence[Sample]) -> list[int]:
    """One token per row of `logits [n, vocab]` (float32), as each row's `Sample` asks."""
    logits = _without_banned(logits, samples)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    random = [row for row, wish in enumerate(samples) if wish.temperature > 0]
    if random:
        drawn = _draw(logits[random], [samples[row] for row in random])
        for row, token in zip(random, drawn, strict=True):
            tokens[row] = token
    return tokens


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one position of a request."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _without_banned(logits: Tensor, samples: Sequence[Sample]) -> Tensor:
    rows = [row for row, wish in enumerate(samples) for _ in wish.banned]
    if not rows:
        return logits
    logits = logits.clone()
    logits[rows, [token for wish in samples for token in wish.banned]] = -torch.inf
    return logits


def _draw(logits: Tensor, samples: Sequence[Sample]) -> list[int]:
    """Temperature, then top-k, then top-p on what is left, then the token at the drawn quantile."""
    device = logits.device
    temperature = torch.tensor([wish.temperature for wish in samples], device=device, dtype=torch.float64)
    vocab = logits.shape[-1]
    top_k = torch.tensor([wish.top_k if wish.top_k > 0 else vocab for wish in samples], device=device)
    top_p = torch.tensor([wish.top_p for wish in samples], device=device, dtype=torch.float64)
    logits = logits.double()
    below_best = logits - logits.amax(dim=-1, keepdim=True)  # so that no temperature, however small, makes it infinite
    ranked, order = (below_best / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    ranked.masked_fill_(torch.arange(vocab, device=device) >= top_k[:, None], -torch.inf)
    probabilities = ranked.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities.masked_fill_((before >= top_p[:, None]) & (top_p < 1)[:, None], 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    quantile = torch.tensor([uniform(wish.seed, wish.position) for wish in samples], device=device, dtype=torch.float64)
    threshold = (quantile * cumulative[:, -1])[:, None]
    chosen = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=vocab - 1)
    chosen = torch.minimum(chosen, (probabilities > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    tokens: list[int] = order.gather(-1, chosen)[:, 0].tolist()
    return tokens
