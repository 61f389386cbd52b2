"""The progress of long runs in words."""

from __future__ import annotations

import pytest

from longspan.core.exchange import LOCAL, RING_Q
from longspan.cost.profile import Decode, Prefill
from longspan.profiling.plan import quick_lengths, work
from longspan.progress import MinuteLines, duration


def test_a_line_is_said_at_most_once_a_minute() -> None:
    said, clock = list[str](), iter([0.0, 30.0, 61.0, 90.0, 125.0])
    lines = MinuteLines("batch", said.append, clock=lambda: next(clock))
    for number in range(1, 5):
        lines.update(number / 10, f"{number} of 10 requests")
    assert said == [
        "batch: 2 of 10 requests in 1 min; about 4 min left",
        "batch: 4 of 10 requests in 2 min; about 3 min left",
    ]


@pytest.mark.parametrize(("seconds", "text"), {0.4: "0 s", 59: "59 s", 61: "1 min", 3700: "1 h 2 min"}.items())
def test_duration_has_whole_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_quick_profile_leaves_out_the_longest_prompts() -> None:
    assert quick_lengths(8192) == (512, 1024, 2048, 4096)
    assert len(quick_lengths(600)) == 2, "a fit needs two lengths"


def test_work_grows_with_context_and_is_shared_by_members() -> None:
    def prefill(new: int, cached: int = 0, members: int = 1) -> float:
        return work(
            Prefill(
                members=members,
                exchange=str(RING_Q if members > 1 else LOCAL),
                new_tokens=new,
                cached_tokens=cached,
                seconds=(),
            ),
            64,
        )

    assert prefill(2048) > 2 * prefill(1024) == 4 * prefill(1024, members=2)
    assert prefill(64, cached=1024) > prefill(1024), "the prefix is computed before"
    decode = Decode(members=1, exchange="local", batch=8, context_tokens=1024, seconds=())
    assert work(decode, 64) == 4 * prefill(1024), "a smaller batch has computed the other prompts"
