"""Top-k, top-p and min-p filtering, and the weights of the tokens that may be drawn.

A token's weight is its probability over that of the row's best token, times a power of two, rounded: a whole number in
float64. The power is such that the weights of a row sum to at most 2**53, so that sums are exact in whatever order they
are taken: neither a batch nor a device nor a prefix of the sorted row changes them. What is lost is tokens some 2**37
times (vocabulary of 49,152) less likely than the best.

Tokens go by the logit of the last one that stays, never by rank, so that exact ties stay or go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.core.steps import Sampling

_PREFIX = 2048
"""top_p looks at so many of the best tokens first; only if they do not suffice is the whole row sorted."""

Weigh = Callable[[Tensor], Tensor]


def weights(logits: Tensor, wishes: Sequence[Sampling]) -> Tensor:
    """Returns float64 weights `[rows, vocab]` of `logits [rows, vocab]` (float32), 0 for tokens that must not be drawn.

    `wishes` are the rows' own; none may have temperature 0. A row whose largest logit is not finite gets NaN.
    """
    vocab = logits.shape[-1]
    weigh = _weigher(logits, wishes)
    kept = weigh(logits)
    top_k = [wish.top_k if 0 < wish.top_k < vocab else 0 for wish in wishes]
    if any(top_k):
        kept.mul_(logits >= _last_of_top_k(logits, top_k))
    top_p = [wish.top_p if wish.top_p < 1 else 0.0 for wish in wishes]
    if any(top_p):
        needed = kept.new_tensor(top_p)[:, None] * kept.sum(dim=-1, keepdim=True)
        kept.mul_(logits >= _last_of_top_p(logits, needed, weigh))
    return kept


def largest(logits: Tensor, count: int) -> Tensor:
    """Finds the `count` largest of each row of `logits [rows, vocab]`, descending `[rows, count]`."""
    if logits.device.type != "cpu":
        return logits.topk(count, dim=-1).values
    # numpy partitions and sorts values by vector instructions, ten times as fast as torch sorts values with indices.
    values, rest = logits.numpy(), logits.shape[-1] - count
    best = np.partition(values, rest, axis=-1)[:, rest:] if rest else values
    return torch.from_numpy(np.sort(best, axis=-1)[:, ::-1].copy())


def _weigher(logits: Tensor, wishes: Sequence[Sampling]) -> Weigh:
    """Makes a function from some of the rows' logits `[rows, some]` to their weights, after temperature and min_p."""
    best = logits.amax(dim=-1, keepdim=True).double()
    temperature = best.new_tensor([wish.temperature for wish in wishes])[:, None]
    min_p = best.new_tensor([wish.min_p for wish in wishes])[:, None]
    any_min_p = any(wish.min_p for wish in wishes)
    scale = 2.0 ** (53 - logits.shape[-1].bit_length())

    def weigh(some: Tensor) -> Tensor:
        # The best is taken off first, so that no temperature, however small, makes anything infinite.
        found = some.double().sub_(best).div_(temperature).exp_()
        if any_min_p:
            found.mul_(found >= min_p)
        return found.mul_(scale).round_()

    return weigh


def _last_of_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Returns the k-th largest logit `[rows, 1]`; -inf where k is 0."""
    k = torch.tensor(top_k, device=logits.device)[:, None]
    last = largest(logits, max(top_k)).gather(-1, (k - 1).clamp_(min=0))
    return last.masked_fill_(k == 0, -torch.inf)


def _last_of_top_p(logits: Tensor, needed: Tensor, weigh: Weigh) -> Tensor:
    """Returns the logit of the token with which the best ones reach the weight `needed`, `[rows, 1]`; -inf where that
    is 0.
    """
    vocab = logits.shape[-1]
    for count in (min(_PREFIX, vocab), vocab):
        ranked = largest(logits, count)
        found = weigh(ranked)
        reached = found.cumsum(dim=-1)
        if count == vocab or bool((reached[:, -1:] >= needed).all()):
            break
    num_kept = (reached - found < needed).sum(dim=-1, keepdim=True)
    last = ranked.gather(-1, (num_kept - 1).clamp_(min=0))
    return last.masked_fill_(needed == 0, -torch.inf)
