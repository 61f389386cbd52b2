"""What a share becomes once its blocks are fixed: the part that ranks are told."""

from __future__ import annotations

from itertools import compress

from longspan.core.protocols import Share
from longspan.core.request import Request
from longspan.core.steps import UNKNOWN, Part, Sample


def make_part(share: Share, eos_token_ids: tuple[int, ...]) -> Part:
    """The part of a share. Its request, whose table has the new blocks, counts the span as scheduled, and as told what
    the part says.
    """
    request = share.request
    assert share.start == request.num_scheduled, "spans of a request follow each other"
    if share.group != request.group and not set(share.group) <= set(request.group):
        assert request.rotation is None, "homes that rotate do so in one group"
        request.sent_blocks = request.sent_output = 0  # members that are new to it must hear everything
    tokens = request.tokens(share.start, share.stop)
    request.group, request.rotation, request.keeper = share.group, share.rotation, share.keeper
    unknown_on = request.sampler if tokens[-1] == UNKNOWN else None
    first_block, request.sent_blocks = request.sent_blocks, len(request.table)
    first_output, new_output = _new_output(request) if request.keeps_history else (0, ())
    request.num_scheduled = share.stop
    return Part(
        request_id=request.id,
        start=share.start,
        stop=share.stop,
        tokens=tokens,
        group=share.group,
        runs=share.runs,
        exchange=share.exchange,
        first_block=first_block,
        blocks=tuple(request.table[first_block:]),
        sample=_sample(share) if share.stop == request.num_tokens else None,
        unknown_on=unknown_on,
        sampling=request.sampling(eos_token_ids) if first_block == 0 else None,
        first_output=first_output,
        new_output=new_output,
        targets=request.prompt[share.start + 1 : share.stop + 1] if request.scores_prompt else (),
        rope_length=request.rope_length,
        rotation=request.rotation,
    )


def _sample(share: Share) -> Sample:
    request, position = share.request, share.stop
    for instance, runs in compress(zip(share.group, share.runs, strict=True), share.runs):
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
