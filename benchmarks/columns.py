"""The columns of the comparison: what is asked of contestants, and what is read from their answers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from contestants.serving import Answer, Submission, Timeline

SAME_STEP_S = 1e-3
"""Time stamps that differ by less belong to one step: no step of the model is this short."""
CHATS, CHAT_LENGTH, CHAT_TOKENS = 16, 100, 128
DOCUMENT_AFTER = 16
"""Tokens that every chat has when the document comes: all of them decode by then."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A prompt of so many random tokens; see `Submission` for the rest."""

    length: int
    new_tokens: int = 1
    after_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Load:
    """A job for every contestant: prompts of these shapes."""

    title: str
    shapes: tuple[Shape, ...]

    def submissions(self, seed: str) -> list[Submission]:
        """Draws random ids; no two prompts begin alike, and every contestant gets the same."""
        generator = random.Random(f"{seed} {self.title}")
        return [
            Submission(
                prompt=[generator.randrange(100, 49_000) for _ in range(shape.length)],
                new_tokens=shape.new_tokens,
                after_tokens=shape.after_tokens,
            )
            for shape in self.shapes
        ]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One quantity that contestants are measured by.

    Attributes:
        key: how `--require` names it.
        title: how tables and JSON name it.
        load: what is asked; columns of one load are read from the same answers.
        read: takes the quantity from an answer.
        form: writes it with its unit.
        fewer: whether it is a time, of which less is better.
    """

    key: str
    title: str
    load: Load
    read: Callable[[Answer], float]
    form: str = "{:.2f} s"
    fewer: bool = True

    def text(self, value: float) -> str:
        return self.form.format(value)

    def ratio(self, value: float, reference: float) -> float:
        """Computes a ratio to the reference: above 1 is better."""
        return reference / value if self.fewer else value / reference

    def best(self, values: dict[str, float]) -> str:
        """Names who has the best of some values."""
        return (min if self.fewer else max)(values, key=values.__getitem__)


def ttft_column(length: int) -> Column:
    """Measures seconds from the call to the first token."""
    title = f"TTFT {length:,}"
    load = Load(title=title, shapes=(Shape(length=length),))
    return Column(key=f"ttft-{length}", title=title, load=load, read=lambda answer: answer.seconds)


def decode_column(batch: int, length: int, new_tokens: int) -> Column:
    """Measures tokens per second of a batch of prompts that are decoded together."""
    title = f"tok/s, batch {batch}"
    load = Load(title=title, shapes=(Shape(length=length, new_tokens=new_tokens),) * batch)
    return Column(
        key=f"decode-{batch}",
        title=title,
        load=load,
        read=lambda answer: decode_rate([one.arrivals_s for one in answer.timelines]),
        form="{:.0f}",
        fewer=False,
    )


def mixed_columns(document_length: int) -> list[Column]:
    """Measures chats that are decoded while a document is computed, and how long that takes."""
    chat = Shape(length=CHAT_LENGTH, new_tokens=CHAT_TOKENS)
    document = Shape(length=document_length, after_tokens=DOCUMENT_AFTER)
    load = Load(title="mixed", shapes=(*(chat,) * CHATS, document))
    return [
        Column(
            key="mixed-tbt",
            title="mixed TBT P99",
            load=load,
            read=lambda answer: 1e3 * percentile_99([*disturbed_tbts_s(answer.timelines)]),
            form="{:.0f} ms",
        ),
        Column(
            key="mixed-ttft",
            title="mixed TTFT",
            load=load,
            read=lambda answer: answer.timelines[-1].arrivals_s[0] - answer.timelines[-1].submitted_s,
        ),
    ]


def decode_rate(arrivals: Sequence[Sequence[float]]) -> float:
    """Counts the tokens that come after every sequence has its first one, per second from there to the last token.

    When all sequences go in step, this is `(new_tokens - 1) * batch / (last - first)`.
    """
    first = max(times[0] for times in arrivals)
    last = max(times[-1] for times in arrivals)
    return sum(time > first + SAME_STEP_S for times in arrivals for time in times) / (last - first)


def disturbed_tbts_s(timelines: Sequence[Timeline]) -> Iterator[float]:
    """Yields the times between tokens, of all but the last timeline, that overlap with the last one's prompt.

    Others are left out: among thousands of them, 16 chats that stall once for the whole prompt would be less than 1 %.
    """
    *chats, document = timelines
    begin, end = document.submitted_s, document.arrivals_s[0]
    for chat in chats:
        for earlier, later in zip(chat.arrivals_s, chat.arrivals_s[1:], strict=False):
            if earlier < end and later > begin:
                yield later - earlier


def percentile_99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]
