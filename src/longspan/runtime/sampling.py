"""Token sampling and logprobs for rows of logits. The token of a row depends on that row only, never on the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.core.steps import Sampling, TokenLogprobs

if TYPE_CHECKING:
    from longspan.runtime.logit_changes import TokenCounts

_CPU_NUMBERS = 2**18
"""Logits per tile: two float64 copies fit a core's L2 cache. A tile in main memory takes four times as long."""
_GPU_NUMBERS = 2**26
"""Logits per tile: bounds temporary copies to 512 MiB in float64."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The inputs of sampling one row of logits, besides the logits.

    Attributes:
        sampling: of the row's request.
        position: of the sampled token. Random numbers are keyed by it.
        banned: tokens that must not be sampled here. Ignored with a grammar, whose `allowed` excludes them.
        history: token counts of the row's request. None unless `sampling.penalised`.
        allowed: bit mask of the tokens that the request's grammar allows, see `GrammarMatcher`. None for all.
    """

    sampling: Sampling
    position: int
    banned: Sequence[int] = ()
    history: TokenCounts | None = None
    allowed: Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether bias, ban, penalties or a grammar change the logits."""
        return bool(self.sampling.logit_bias or self.banned or self.history is not None or self.allowed is not None)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample one token per row of `logits [rows, vocab]` (float32, not modified), as specified by the row's `Draw`.

    Bias, ban, penalties and grammar are applied first. Temperature 0 takes the largest logit, and the lowest token id
    of equal logits. Otherwise temperature, min_p, top_k and top_p give a distribution, and the token at a random
    quantile in vocabulary order is taken. Without a distribution (no token allowed, non-finite logits) the largest
    logit is taken.
    """
    logits = _changed(logits, draws)
    drawn: dict[int, int] = {}
    if any(draw.sampling.temperature > 0 for draw in draws):
        from longspan.runtime.random_tokens import random_tokens  # noqa: PLC0415 - not for greedy requests

        drawn = random_tokens(logits, draws)
    greedy = [row for row in range(len(draws)) if row not in drawn]
    if greedy:
        chosen = logits[greedy] if drawn else logits
        drawn.update(zip(greedy, chosen.argmax(dim=-1).tolist(), strict=True))
    return [drawn[row] for row in range(len(draws))]


def sample_on_device(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the tokens of `sample`, `[rows]` int64 on the device of the logits."""
    logits = _changed(logits, draws)
    tokens = logits.argmax(dim=-1)
    if any(draw.sampling.temperature > 0 for draw in draws):
        from longspan.runtime.random_tokens import drawn_tokens  # noqa: PLC0415 - not for greedy requests

        for at, drawn in drawn_tokens(logits, draws):
            tokens[at] = torch.where(drawn < logits.shape[-1], drawn, tokens[at])
    return tokens


def _changed(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    if not any(draw.changes_logits for draw in draws):
        return logits
    from longspan.runtime.logit_changes import adjusted  # noqa: PLC0415 - few requests change logits

    return adjusted(logits, draws)


def tiles(rows: Sequence[int], logits: Tensor) -> Iterator[Sequence[int]]:
    """Split rows of `logits [rows, vocab]` into tiles that suit the device. No result may depend on the tiles."""
    size = max(1, (_CPU_NUMBERS if logits.device.type == "cpu" else _GPU_NUMBERS) // logits.shape[-1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# ---------------------------------------------------------------- logprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the logprob and rank of each row's token, and the row's `num_top` most likely tokens.

    `logits [rows, vocab]` and logprobs are float32. A rank is 1 plus the number of strictly larger logits. Of equal
    logits, the lower token id comes first. Rows do not depend on each other. At most one tile of rows is copied.
    """
    all_tiles = tiles(range(len(tokens)), logits)
    return [logprobs for tile in all_tiles for logprobs in _of_tile(logits, tile, tokens, num_top)]


def _of_tile(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    part = logits[rows[0] : rows[-1] + 1]
    chosen = torch.tensor([tokens[row] for row in rows], device=part.device)[:, None]
    logprobs = part.log_softmax(dim=-1)
    ranks = (part > part.gather(-1, chosen)).sum(dim=-1) + 1
    top_ids = _top_ids(part, max(num_top[row] for row in rows))
    top_logprobs: list[list[float]] = logprobs.gather(-1, top_ids).tolist()
    columns = (logprobs.gather(-1, chosen)[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs)
    return [
        TokenLogprobs(
            logprob=logprob, rank=rank, top_ids=tuple(ids[: num_top[row]]), top_logprobs=tuple(values[: num_top[row]])
        )
        for row, logprob, rank, ids, values in zip(rows, *columns, strict=True)
    ]


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids `[rows, count]` of the largest logits, descending. Of equal logits, the lowest id comes first.

    `topk` does not define the order of equal values, so it gets distinct keys. The high bits are the logit's bits,
    mapped so that integers order like floats. The low bits are the id, counted from the vocabulary's end.
    """
    vocab = logits.shape[-1]
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    from_end = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered << 32).bitwise_or_(from_end)
    return vocab - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
