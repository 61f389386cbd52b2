"""Bytes to events, and events to tokens with times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from fake_openai import DONE, chunk, event, usage
from hypothesis import given
from hypothesis import strategies as st

from longspan.loadgen.answer import Answer
from longspan.loadgen.results import Answered
from longspan.loadgen.sse import SSEParser

STREAM = (
    'data: {"a": "é€😀"}\n\n: ping\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\rid: 4\n\ndata:  b\r\rdata\n\n'.encode()
)
EVENTS = ['{"a": "é€😀"}'.encode(), b"two\nlines", b" b", b""]


def parsed(pieces: Sequence[bytes]) -> list[bytes]:
    parser = SSEParser()
    return [found for piece in pieces for found in parser.feed(piece)]


def test_events_do_not_depend_on_one_cut_anywhere() -> None:
    for cut in range(len(STREAM) + 1):
        assert parsed([STREAM[:cut], STREAM[cut:]]) == EVENTS


def test_events_do_not_depend_on_a_cut_after_every_byte() -> None:
    assert parsed([bytes([byte]) for byte in STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_many_cuts(cuts: list[int]) -> None:
    pieces = [STREAM[start:stop] for start, stop in itertools.pairwise(sorted([0, *cuts, len(STREAM)]))]
    assert parsed(pieces) == EVENTS


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))),
    st.sampled_from(["\n", "\r", "\r\n"]),
)
def test_whatever_is_written_is_read(texts: list[str], end: str) -> None:
    stream = "".join(f"data: {text}{end}{end}" for text in texts).encode()
    assert parsed([stream]) == [text.encode() for text in texts]


def test_an_event_is_there_with_its_last_byte() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: x\r\n\r") == [b"x"], "it need not wait for the LF"
    assert parser.feed(b"\ndata: y\n\n") == [b"y"]


def test_an_event_that_is_cut_off_is_none() -> None:
    assert parsed([b"data: x\n\ndata: y\n"]) == [b"x"]


def answered(*timed: tuple[float, bytes]) -> Answered:
    answer, parser = Answer(), SSEParser()
    for time_s, piece in timed:
        for data in parser.feed(piece):
            answer.take(data, time_s)
    return answer.answered(due_s=10.0)


def test_chunks_of_several_tokens_when_the_server_says_how_many() -> None:
    one = answered(
        (10.5, chunk("", None, 0)),  # says that it has begun
        (11.0, chunk("a", None, 1)),
        (12.0, chunk("bcd", None, 4)),
        (12.2, chunk("", None, 4)),
        (12.5, chunk("e", "stop", 5)),
        (13.0, usage(5)),
        (13.0, DONE),
    )
    assert one.num_output_tokens == 5
    assert one.ttft_s == pytest.approx(1.0)
    assert one.tbt_s == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.5])
    assert one.e2el_s == pytest.approx(2.5)
    assert one.tpot_s == pytest.approx(1.5 / 4)
    assert one.mean_tbt_s == pytest.approx(one.tpot_s)


def test_tokens_that_come_with_the_first_one_took_no_time() -> None:
    one = answered((11.0, chunk("abc", None, 3)), (12.0, chunk("d", "length", 4)), (12.0, usage(4) + DONE))
    assert one.tbt_s == pytest.approx([0.0, 0.0, 1.0])


def test_a_last_token_without_text_comes_with_the_end() -> None:
    one = answered((11.0, chunk("a", None, 1)), (12.0, chunk("", "stop", 1)), (12.0, usage(2) + DONE))
    assert one.tbt_s == pytest.approx([1.0])


def test_shares_of_chunks_when_the_server_does_not_say() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    words = [event({"choices": [{"delta": {"content": "w"}, "finish_reason": None}], "usage": None})] * 4
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    one = answered(
        (10.1, role), (11.0, words[0]), (12.0, words[1]), (13.0, words[2]), (14.0, words[3]), (14.5, end),
        (14.5, usage(8) + DONE),
    )  # fmt: skip
    assert one.ttft_s == pytest.approx(1.0)
    assert one.tbt_s == pytest.approx([1 / 2] * 2 + [1 / 2] * 2 + [1 / 3] * 3), "1 + 2 + 2 + 3 tokens"
    assert one.e2el_s == pytest.approx(4.5)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 6)), min_size=1, max_size=20).filter(
        lambda all_: any(n for _, n in all_)
    ),
    st.booleans(),
)
def test_there_is_one_time_less_than_tokens_and_they_sum_up(steps: list[tuple[float, int]], said: bool) -> None:
    """Whether the server says how many tokens a chunk has or not."""
    times = [10.0 + time for time in itertools.accumulate(gap for gap, _ in steps)]
    counts = list(itertools.accumulate(num for _, num in steps))
    chunks = [
        (time, chunk("x" if num else "", None, count if said else None))
        for time, count, (_, num) in zip(times, counts, steps, strict=True)
    ]
    one = answered(*chunks, (times[-1], chunk("", "stop", counts[-1] if said else None) + usage(counts[-1]) + DONE))
    assert len(one.tbt_s) == counts[-1] - 1
    with_tokens = [time for time, (_, num) in zip(times, steps, strict=True) if num]
    assert one.ttft_s == pytest.approx(with_tokens[0] - 10.0)
    if said:
        assert sum(one.tbt_s) == pytest.approx(with_tokens[-1] - with_tokens[0])
    assert all(time >= 0 for time in one.tbt_s)


def test_text_of_reasoning_is_text() -> None:
    def delta(**fields: str) -> bytes:
        return event({"choices": [{"delta": fields, "finish_reason": None}]})

    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}})
    one = answered((11.0, delta(reasoning_content="r")), (12.0, delta(content="c")), (12.0, end + DONE))
    assert (one.ttft_s, one.tbt_s, one.num_prompt_tokens) == (1.0, (1.0,), 0)
