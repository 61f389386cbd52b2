"""Random tokens: weights of tokens by temperature, min_p, top_k and top_p, and a draw with numbers keyed by request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.attn.paged_splits import copied
from longspan.core.steps import Sampling
from longspan.runtime.sampling import Draw, tiles

_PREFIX = 2048
"""Number of largest logits that top_p sorts first. The whole row is sorted only if their weight is too small."""

Weigh = Callable[[Tensor], Tensor]


def random_tokens(logits: Tensor, draws: Sequence[Draw]) -> dict[int, int]:
    """Sample the rows that are not greedy and have a distribution. Returns tokens by row."""
    each = ((rows.tolist(), drawn.tolist()) for rows, drawn in drawn_tokens(logits, draws))
    tokens = {row: token for rows, drawn in each for row, token in zip(rows, drawn, strict=True)}
    return {row: token for row, token in tokens.items() if token < logits.shape[-1]}


def drawn_tokens(logits: Tensor, draws: Sequence[Draw]) -> Iterator[tuple[Tensor, Tensor]]:
    """Sample the rows that are not greedy. Yield rows and their tokens, both on the device of the logits.

    The size of the vocabulary as a token means that the row has no distribution.
    """
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    # Group rows with the same filters, so that a tile with top_k or top_p contains few rows without.
    params = [draw.sampling for draw in draws]
    random.sort(key=lambda row: (params[row].top_p < 1, params[row].top_k > 0, params[row].min_p > 0))
    for rows in tiles(random, logits):
        at = copied(rows, torch.int64, logits.device)
        cumulative = weights(logits[at], [params[row] for row in rows]).cumsum(dim=-1)
        numbers = uniforms((params[row].seed, params[row].choice, draws[row].position) for row in rows)
        targets = copied(numbers, torch.float64, logits.device)[:, None] * cumulative[:, -1:]
        yield at, torch.searchsorted(cumulative, targets, right=True)[:, 0]


def weights(logits: Tensor, params: Sequence[Sampling]) -> Tensor:
    """Return float64 weights `[rows, vocab]` of `logits [rows, vocab]` (float32), 0 for excluded tokens.

    A weight is the token's probability relative to the row's most likely token, times a power of two, rounded to an
    integer. The power is such that the weights of a row sum to at most 2**53, so sums are exact in any order. Batch,
    device and the sorted prefix therefore do not change them. Tokens about 2**37 times less likely than the most
    likely one (vocabulary of 49,152) get weight 0.

    Filters compare logits with the last kept logit, not ranks, so exact ties are kept or excluded together.

    Each row has its `params`. None may have temperature 0. A row whose largest logit is not finite gets NaN.
    """
    vocab = logits.shape[-1]
    weigh = _weigher(logits, params)
    kept = weigh(logits)
    top_k = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    if any(top_k):
        kept.mul_(logits >= _last_of_top_k(logits, top_k))
    top_p = [p.top_p if p.top_p < 1 else 0.0 for p in params]
    if any(top_p):
        needed = copied(top_p, torch.float64, kept.device)[:, None] * kept.sum(dim=-1, keepdim=True)
        kept.mul_(logits >= _last_of_top_p(logits, needed, weigh))
    return kept


def largest(logits: Tensor, count: int) -> Tensor:
    """Return the `count` largest logits of each row `[rows, count]`, descending."""
    if logits.device.type != "cpu":
        return logits.topk(count, dim=-1).values
    # numpy partitions and sorts with vector instructions, ten times as fast as torch, which also sorts indices.
    values, rest = logits.numpy(), logits.shape[-1] - count
    best = np.partition(values, rest, axis=-1)[:, rest:] if rest else values
    return torch.from_numpy(np.sort(best, axis=-1)[:, ::-1].copy())


def _weigher(logits: Tensor, params: Sequence[Sampling]) -> Weigh:
    """Return a function from logits `[rows, any]` of these rows to their weights, after temperature and min_p."""
    best = logits.amax(dim=-1, keepdim=True).double()
    temperature, min_p = copied([(p.temperature, p.min_p) for p in params], best.dtype, best.device).T[..., None]
    any_min_p = any(p.min_p for p in params)
    scale = 2.0 ** (53 - logits.shape[-1].bit_length())

    def weigh(logits: Tensor) -> Tensor:
        # Subtract the maximum first, so that no small temperature gives infinity.
        relative = logits.double().sub_(best).div_(temperature).exp_()
        if any_min_p:
            relative.mul_(relative >= min_p)
        return relative.mul_(scale).round_()

    return weigh


def _last_of_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Return the k-th largest logit `[rows, 1]`, or -inf where k is 0."""
    k = copied(top_k, torch.int64, logits.device)[:, None]
    last = largest(logits, max(top_k)).gather(-1, (k - 1).clamp_(min=0))
    return last.masked_fill_(k == 0, -torch.inf)


def _last_of_top_p(logits: Tensor, needed: Tensor, weigh: Weigh) -> Tensor:
    """Return the logit `[rows, 1]` at which the largest weights sum to `needed`, or -inf where `needed` is 0."""
    vocab = logits.shape[-1]
    # A look at a prefix is a read by the host, which would wait for a device.
    for count in (min(_PREFIX, vocab), vocab) if logits.device.type == "cpu" else (vocab,):
        ranked = largest(logits, count)
        ranked_weights = weigh(ranked)
        cumulative = ranked_weights.cumsum(dim=-1)
        if count == vocab or bool((cumulative[:, -1:] >= needed).all()):
            break
    num_kept = (cumulative - ranked_weights < needed).sum(dim=-1, keepdim=True)
    last = ranked.gather(-1, (num_kept - 1).clamp_(min=0))
    return last.masked_fill_(needed == 0, -torch.inf)


def uniforms(keys: Iterable[tuple[int, int, int]]) -> list[float]:
    """Return a random number in [0, 1) for each (seed, choice, position) of a request's output.

    The numbers equal `Generator(Philox(key=(seed, choice), counter=position)).random()`. One generator is reused for
    all keys, because each new generator would collect unused entropy.
    """
    philox = np.random.Philox(key=0)
    state = philox.state
    inner = state["state"]
    numbers = []
    for seed, choice, position in keys:
        inner["key"][:] = seed, choice
        inner["counter"][:] = position, 0, 0, 0
        philox.state = state
        numbers.append((int(philox.random_raw()) >> 11) * 2.0**-53)
    return numbers
