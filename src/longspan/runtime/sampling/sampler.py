"""Chooses tokens, and tells how likely they were. A row's token depends on that row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from longspan.core.steps import Sampling, TokenLogprobs
from longspan.runtime.sampling.penalties import Draw, adjusted

_CPU_NUMBERS = 2**18
"""Two copies in float64 fit a core's second-level cache; memory would take four times as long."""
_GPU_NUMBERS = 2**26
"""Bounds the memory of temporary copies: 512 MiB in float64."""

_PREFIX = 2048
"""top_p looks at so many of the best tokens first; only if they do not suffice is the whole row sorted."""

T = TypeVar("T")
Weigh = Callable[[Tensor], Tensor]


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
    numbers = uniforms((draw.sampling.seed, draw.sampling.choice, draw.position) for draw in draws)
    wanted = reached.new_tensor(numbers)[:, None] * reached[:, -1:]
    tokens: list[int] = torch.searchsorted(reached, wanted, right=True)[:, 0].tolist()
    return tokens


def weights(logits: Tensor, wishes: Sequence[Sampling]) -> Tensor:
    """Returns float64 weights `[rows, vocab]` of `logits [rows, vocab]` (float32), 0 for tokens that must not be drawn.

    A token's weight is its probability over that of the row's best token, times a power of two, rounded: a whole
    number in float64. The power is such that the weights of a row sum to at most 2**53, so that sums are exact in
    whatever order they are taken: neither a batch nor a device nor a prefix of the sorted row changes them. What is
    lost is tokens some 2**37 times (vocabulary of 49,152) less likely than the best.

    Tokens go by the logit of the last one that stays, never by rank, so that exact ties stay or go together.

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


def in_tiles(items: Sequence[T], logits: Tensor) -> Iterator[Sequence[T]]:
    """Cuts `items`, of which each stands for a row of `logits [rows, vocab]`, in slices of as many rows as suit its
    device.

    No result may depend on where the cuts are.
    """
    size = max(1, (_CPU_NUMBERS if logits.device.type == "cpu" else _GPU_NUMBERS) // logits.shape[-1])
    for start in range(0, len(items), size):
        yield items[start : start + size]


def uniforms(keys: Iterable[tuple[int, int, int]]) -> list[float]:
    """Returns a random number in [0, 1) for each (seed, choice, position), a position in one of a request's outputs.

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
