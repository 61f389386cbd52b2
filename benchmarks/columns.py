"""Columns of the comparison: the jobs that contestants receive, and the quantities read from their answers."""

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
"""The document is submitted when every chat has this many tokens. All chats decode by then."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A prompt of `length` random tokens. See `Submission` for the other fields."""

    length: int
    new_tokens: int = 1
    after_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Load:
    """A job for every contestant: prompts of these shapes."""

    title: str
    shapes: tuple[Shape, ...]

    def submissions(self, seed: str) -> list[Submission]:
        """Draw random ids. No two prompts share a prefix, and every contestant receives the same prompts."""
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
    """One quantity that contestants are compared by.

    Attributes:
        key: its name in `--require`.
        title: its name in tables and JSON.
        load: the job. Columns of one load are read from the same answers.
        read: returns the quantity of an answer.
        form: format string of the value with its unit.
        fewer: True if lower values are better, as for times.
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
        """Return the ratio to the reference. Above 1, the value is better."""
        return reference / value if self.fewer else value / reference

    def best(self, values: dict[str, float]) -> str:
        """Return the name of the best value."""
        return (min if self.fewer else max)(values, key=values.__getitem__)


def ttft_column(length: int) -> Column:
    """Return the column for the seconds from the call to the first token."""
    title = f"TTFT {length:,}"
    load = Load(title=title, shapes=(Shape(length=length),))
    return Column(key=f"ttft-{length}", title=title, load=load, read=lambda answer: answer.seconds)


def decode_column(batch: int, length: int, new_tokens: int) -> Column:
    """Return the column for tokens per second of a batch of prompts that are decoded together."""
    title = f"tok/s, batch {batch}"
    load = Load(title=title, shapes=(Shape(length=length, new_tokens=new_tokens),) * batch)
    return Column(
        key=f"decode-{batch}",
        title=title,
        load=load,
        read=lambda answer: decode_rate([timeline.arrivals_s for timeline in answer.timelines]),
        form="{:.0f}",
        fewer=False,
    )


def mixed_columns(document_length: int) -> list[Column]:
    """Return the columns for TBT of chats during the prefill of a document, and for the document's TTFT."""
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
    """Return tokens per second, from the time when every sequence has its first token to the last token.

    If all sequences decode in the same steps, this is `(new_tokens - 1) * batch / (last - first)`.
    """
    first = max(times[0] for times in arrivals)
    last = max(times[-1] for times in arrivals)
    return sum(time > first + SAME_STEP_S for times in arrivals for time in times) / (last - first)


def disturbed_tbts_s(timelines: Sequence[Timeline]) -> Iterator[float]:
    """Yield the times between tokens of chats that overlap with the prefill of the document, the last timeline.

    All other times are left out. Among thousands of them, 16 stalls for a whole prefill would be below the P99.
    """
    *chats, document = timelines
    begin, end = document.submitted_s, document.arrivals_s[0]
    for chat in chats:
        for earlier, later in zip(chat.arrivals_s, chat.arrivals_s[1:], strict=False):
            if earlier < end and later > begin:
                yield later - earlier


def percentile_99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]
