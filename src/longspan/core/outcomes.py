"""What a request makes of what a step does for it: a part that is computed, a token, scores of its prompt."""

from __future__ import annotations

from longspan.core.config import EngineConfig
from longspan.core.request import FinishReason, Request
from longspan.core.steps import Part, Sampled, Scored


def promise_token(request: Request, config: EngineConfig) -> None:
    """The token being sampled can be scheduled, unless it is the last or the first with other rotary factors."""
    num_tokens = request.num_scheduled + 1
    goes_on = num_tokens - request.num_prompt < request.max_tokens
    if goes_on and config.rope_length(num_tokens) == request.rope_length:
        request.num_promised = num_tokens


def take_part(request: Request, part: Part) -> None:
    """The part is computed."""
    assert request.num_computed == part.start, "steps complete in order"
    request.num_computed = part.stop
    request.metrics.num_computed_tokens += part.stop - part.start
    kind = "decode" if part.start >= request.num_prompt else "partial_prefill" if part.start else "prefill"
    request.metrics.count(kind, part.exchange_name)


def take_token(request: Request, sampled: Sampled, config: EngineConfig, now_s: float) -> FinishReason | None:
    """Adds a token to a request's output; returns why the request ends with it, if it does."""
    params = request.params
    if sampled.error:
        request.stop_reason = sampled.error
        return "error"
    request.output.append(sampled.token)
    if params.output_logits:
        request.logits.append(sampled.logits)
    if sampled.logprobs is not None:
        request.logprobs.append(sampled.logprobs)
    _record_time(request, config.num_instances, now_s)
    if len(request.output) > params.min_tokens and sampled.token in params.stop_ids:
        request.stop_reason = sampled.token
        return "stop"
    if sampled.token in config.eos_token_ids and not params.ignore_eos:
        return "stop"
    return "length" if len(request.output) >= request.max_tokens else None


def take_scores(request: Request, scored: Scored) -> None:
    """Keeps how likely some tokens of the prompt were."""
    for position, logprobs in zip(scored.positions, scored.logprobs, strict=True):
        request.prompt_logprobs[position] = logprobs


def _record_time(request: Request, num_instances: int, now_s: float) -> None:
    metrics = request.metrics
    if metrics.last_token_s is None:
        metrics.ttft_s = now_s - metrics.arrival_s
        held = dict(zip(request.group, request.homes.counts(request.num_computed), strict=True))
        metrics.kv_tokens_per_instance = [held.get(instance, 0) for instance in range(num_instances)]
    else:
        metrics.tbt_s.append(now_s - metrics.last_token_s)
    metrics.last_token_s = now_s
