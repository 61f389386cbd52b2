"""How likely tokens were by the model's own logits, and which were the most likely."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.core.steps import TokenLogprobs
from longspan.runtime.tiles import in_tiles


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of `logits [rows, vocab]` (float32) its token's log-probability and rank, and the `num_top` best.

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
