"""Steps with a single part, for tests of what becomes of steps."""

from __future__ import annotations

from typing import Any

from longspan.core.exchange import LOCAL
from longspan.core.steps import Forward, MoveKV, Part


def forward(number: int, group: tuple[int, ...], *streams: MoveKV, **changes: Any) -> Forward:
    """A step of these instances, whose part has a token for none of them, and whatever else is said of it."""
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
    return Forward(number=number, parts=(Part(group=group, **{**told, **changes}),), streams=streams)
