"""Parts, and steps with a single part."""

from __future__ import annotations

from typing import Any

from longspan.core.exchange import LOCAL
from longspan.core.steps import Forward, MoveKV, Part


def part_of(group: tuple[int, ...], **changes: Any) -> Part:
    """A part of these instances, which has a token for none of them, and whatever else is said of it."""
    told: dict[str, Any] = {
        "request_id": 0,
        "start": 0,
        "stop": 1,
        "tokens": (5,),
        "runs": ((),) * len(group),
        "exchange": LOCAL,
        "first_block": 0,
        "blocks": (),
        "sample": None,
    }
    return Part(group=group, **{**told, **changes})


def forward(number: int, group: tuple[int, ...], *streams: MoveKV, **changes: Any) -> Forward:
    """A step with one such part."""
    return Forward(number=number, parts=(part_of(group, **changes),), streams=streams)
