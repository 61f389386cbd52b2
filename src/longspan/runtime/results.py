"""The results of a step that its sampling rank reports: tokens, logprobs of prompts, and requests with NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan

import torch
from torch import Tensor

from longspan.core.steps import Sampled, Scored, TokenLogprobs
from longspan.model.trunk import Output
from longspan.runtime.batch import Packed, PromptRows, RankRequest, RankRequests
from longspan.runtime.sampling import token_logprobs

Results = tuple[tuple[Sampled, ...], tuple[Scored, ...], tuple[int, ...]]
"""Sampled tokens, scored prompts, and the ids of requests with non-finite numbers."""
_LOGITS_TILE = 256
"""Prompt tokens whose logits are computed at once. The logits of 8K tokens would need more memory than most models."""


def results_of(packed: Packed, output: Output, tokens: Sequence[int], requests: RankRequests) -> Results:
    """Return the results of a step from its sampled tokens. Compute the logprobs of prompts."""
    sampled = tuple(_sampled(packed, output.result, tokens, [requests[id_] for id_ in packed.request_ids]))
    scored = tuple(_score(prompt, output, requests[prompt.request_id]) for prompt in packed.prompts)
    nan_ids = (scores.request_id for scores in scored if any(isnan(entry.logprob) for entry in scores.logprobs))
    return sampled, scored, (*_non_finite(packed, output, tokens), *nan_ids)


def _sampled(
    packed: Packed, logits: Tensor, tokens: Sequence[int], requests: Sequence[RankRequest]
) -> Iterator[Sampled]:
    """Yield the sampled tokens, with the logits and logprobs that their requests ask for."""
    logprobs = _logprobs(logits, tokens, requests)
    for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        data = logits[row].cpu().numpy().tobytes() if request.sampling.output_logits else b""
        yield Sampled(
            request_id=packed.request_ids[row],
            token=token,
            logits=data,
            logprobs=logprobs.get(row),
            error=request.error,
        )


def _non_finite(packed: Packed, output: Output, tokens: Sequence[int]) -> tuple[int, ...]:
    """List the requests with final hidden states or logits `[n, vocab]` that are NaN or infinite.

    The residual stream carries NaN or infinity from any layer to the token's final hidden state and its logits.
    `sample` prefers NaN and infinity, so checking the sampled token's logit is enough. A logit of -inf excludes a
    token: it is sampled only if all logits are -inf.
    """
    finite: dict[int, bool] = {}
    if tokens:
        logits = output.result
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        finite.update(zip(packed.request_ids, chosen.isfinite().tolist(), strict=True))
    chunks = [(i, rows) for i, rows in packed.rows if rows.stop - rows.start > 1 or i not in finite]
    if chunks:
        # The sum needs one pass, and is finite only if all numbers are finite.
        assert output.last_hidden is not None, "such a step is computed layer by layer"
        are_finite = output.last_hidden.sum(dim=-1, dtype=torch.float32).isfinite()
        all_finite = torch.stack([are_finite[rows].all() for _, rows in chunks]).tolist()
        for (request_id, _), is_finite in zip(chunks, all_finite, strict=True):
            finite[request_id] = finite.get(request_id, True) and is_finite
    return tuple(request_id for request_id, is_finite in finite.items() if not is_finite)


def _score(prompt: PromptRows, output: Output, request: RankRequest) -> Scored:
    """Return the logprobs of prompt tokens. Compute their logits one tile of tokens at a time."""
    num_top = request.sampling.prompt_logprobs or 0
    logprobs: list[TokenLogprobs] = []
    for start in range(0, len(prompt.rows), _LOGITS_TILE):
        targets = prompt.targets[start : start + _LOGITS_TILE]
        logits = output.logits(prompt.rows[start : start + _LOGITS_TILE])
        logprobs += token_logprobs(logits, targets, [num_top] * len(targets))
    return Scored(request_id=prompt.request_id, positions=prompt.positions, logprobs=tuple(logprobs))


def _logprobs(logits: Tensor, tokens: Sequence[int], requests: Sequence[RankRequest]) -> dict[int, TokenLogprobs]:
    requested = enumerate(request.sampling.logprobs for request in requests)
    num_top = {row: number for row, number in requested if number is not None}
    if not num_top:
        return {}
    logprobs = token_logprobs(logits[list(num_top)], [tokens[row] for row in num_top], list(num_top.values()))
    return dict(zip(num_top, logprobs, strict=True))
