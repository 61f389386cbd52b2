"""Chooses tokens, and tells how likely they were. A row's token depends on that row alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from longspan.core.steps import Sampling, TokenLogprobs
from longspan.runtime.sampling.filtering import weights
from longspan.runtime.sampling.penalties import Draw, TokenCounts, adjusted

__all__ = ["Draw", "TokenCounts", "sample", "token_logprobs", "uniform"]


_CPU_NUMBERS = 2**18
"""Two copies in float64 fit a core's second-level cache; memory would take four times as long."""
_GPU_NUMBERS = 2**26
"""Bounds the memory of temporary copies: 512 MiB in float64."""

T = TypeVar("T")


def in_tiles(items: Sequence[T], logits: Tensor) -> Iterator[Sequence[T]]:
    """Cuts `items`, of which each stands for a row of `logits [rows, vocab]`, in slices of as many rows as suit its
    device.

    No result may depend on where the cuts are.
    """
    size = max(1, (_CPU_NUMBERS if logits.device.type == "cpu" else _GPU_NUMBERS) // logits.shape[-1])
    for start in range(0, len(items), size):
        yield items[start : start + size]


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns the random number in [0, 1) of one position of one of a request's outputs."""
    return uniforms([(seed, choice, position)])[0]


def uniforms(keys: Iterable[tuple[int, int, int]]) -> list[float]:
    """Returns `uniform` of each (seed, choice, position).

    These are `Generator(Philox(key=(seed, choice), counter=position)).random()`. A new generator for each would gather
    entropy that nobody needs, so that one is wound to each key in turn.
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


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns for each row of `logits [rows, vocab]` (float32) its token's log-probability and rank, and the `num_top`
    best.

    Log-probabilities are float32. A rank is 1 plus the number of strictly larger logits. Of equal logits the lower
    token id counts as better. Rows do not depend on each other. At no time more than one tile of rows is copied.
    """
    rows = range(len(tokens))
    return [found for tile in in_tiles(rows, logits) for found in _of_tile(logits, tile, tokens, num_top)]


def _of_tile(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    part = logits[rows[0] : rows[-1] + 1]
    chosen = torch.tensor([tokens[row] for row in rows], device=part.device)[:, None]
    logprobs = part.log_softmax(dim=-1)
    ranks = (part > part.gather(-1, chosen)).sum(dim=-1) + 1
    most = max(num_top[row] for row in rows)
    top_ids = _best(part, most)
    top_logprobs: list[list[float]] = logprobs.gather(-1, top_ids).tolist()
    columns = (logprobs.gather(-1, chosen)[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs)
    return [
        TokenLogprobs(
            logprob=logprob, rank=rank, top_ids=tuple(ids[: num_top[row]]), top_logprobs=tuple(values[: num_top[row]])
        )
        for row, logprob, rank, ids, values in zip(rows, *columns, strict=True)
    ]


def _best(logits: Tensor, count: int) -> Tensor:
    """Ids `[rows, count]` of the largest logits, best first, of equals the lowest id first.

    `topk` alone leaves open which of equals it takes, so it is given numbers of which no two are equal: the bits of a
    logit, turned so that integers order as the floats did, then the id counted from the vocabulary's end.
    """
    vocab = logits.shape[-1]
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    from_end = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered << 32).bitwise_or_(from_end)
    return vocab - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


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
    """Maps row to token, for the rows that are not greedy and have a distribution."""
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
    """Returns each row's token at its random number; the size of the vocabulary where there is no distribution."""
    reached = weights(logits, [draw.sampling for draw in draws]).cumsum(dim=-1)
    quantiles = uniforms((draw.sampling.seed, draw.sampling.choice, draw.position) for draw in draws)
    wanted = reached.new_tensor(quantiles)[:, None] * reached[:, -1:]
    tokens: list[int] = torch.searchsorted(reached, wanted, right=True)[:, 0].tolist()
    return tokens
