"""Parts of steps: made when a step is emitted, taken into their requests when it is done."""

from __future__ import annotations

from itertools import compress

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.request import FinishReason, Request
from longspan.core.steps import UNKNOWN, Part, Sample, Sampled, Scored
from longspan.core.view import ScheduledPart


def make_part(request: Request, scheduled: ScheduledPart, eos_token_ids: tuple[int, ...]) -> Part:
    """Makes the part of a scheduled part, whose new blocks the table of its `request` has. The request then counts the
    span as scheduled, and what the part says as told.
    """
    assert scheduled.start == request.num_scheduled, "spans of a request follow each other"
    if scheduled.group != request.group and not set(scheduled.group) <= set(request.group):
        assert request.rotation is None, "homes that rotate do so in one group"
        request.sent_blocks = request.sent_output = 0  # members that are new to it must hear everything
    tokens = request.tokens(scheduled.start, scheduled.stop)
    request.group, request.rotation, request.kv_owner = scheduled.group, scheduled.rotation, scheduled.kv_owner
    unknown_on = request.sampler if tokens[-1] == UNKNOWN else None
    first_block, request.sent_blocks = request.sent_blocks, len(request.table)
    first_output, new_output = _new_output(request) if request.keeps_history else (0, ())
    request.num_scheduled = scheduled.stop
    return Part(
        request_id=request.id,
        start=scheduled.start,
        stop=scheduled.stop,
        tokens=tokens,
        group=scheduled.group,
        runs=scheduled.runs,
        exchange=scheduled.exchange,
        first_block=first_block,
        blocks=tuple(request.table[first_block:]),
        sample=_sample(request, scheduled) if scheduled.stop == request.num_tokens else None,
        unknown_on=unknown_on,
        sampling=request.sampling(eos_token_ids) if first_block == 0 else None,
        first_output=first_output,
        new_output=new_output,
        targets=request.prompt[scheduled.start + 1 : scheduled.stop + 1] if request.scores_prompt else (),
        rope_length=request.rope_length,
        rotation=request.rotation,
    )


def _sample(request: Request, scheduled: ScheduledPart) -> Sample:
    position = scheduled.stop
    for instance, runs in compress(zip(scheduled.group, scheduled.runs, strict=True), scheduled.runs):
        if runs[-1].stop == position:
            request.sampler = instance
    return Sample(
        instance=request.sampler,
        position=position,
        below_minimum=position - request.num_prompt < request.params.min_tokens,
    )


def _new_output(request: Request) -> tuple[int, tuple[int, ...]]:
    first, request.sent_output = request.sent_output, len(request.output)
    return first, tuple(request.output[first:])


def promise_token(request: Request, config: EngineConfig) -> None:
    """Lets the token being sampled be scheduled, unless it is the last or the first with other rotary factors."""
    num_tokens = request.num_scheduled + 1
    goes_on = num_tokens - request.num_prompt < request.max_tokens
    if goes_on and config.rope_length(num_tokens) == request.rope_length:
        request.num_promised = num_tokens


def take_part(request: Request, part: Part) -> None:
    """Counts the tokens of a part that is computed."""
    assert request.num_computed == part.start, "steps complete in order"
    request.num_computed = part.stop
    request.metrics.num_computed_tokens += part.stop - part.start
    kind = "decode" if part.start >= request.num_prompt else "partial_prefill" if part.start else "prefill"
    request.metrics.count(kind, part.exchange.shown)


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
    _record_time(request, config.cluster, now_s)
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


def _record_time(request: Request, cluster: Cluster, now_s: float) -> None:
    metrics = request.metrics
    if metrics.last_token_s is None:
        metrics.ttft_s = now_s - metrics.arrival_s
        held = dict(zip(request.group, request.owners.counts(request.num_computed), strict=True))
        metrics.kv_tokens_per_instance = [held.get(instance, 0) for instance in cluster.instances]
    else:
        metrics.tbt_s.append(now_s - metrics.last_token_s)
    metrics.last_token_s = now_s
