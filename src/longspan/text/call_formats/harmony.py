"""The format of gpt-oss: messages in channels for reasoning, content and calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from longspan.core.request import FinishReason
from longspan.text.call_formats.base import (
    TEXT,
    ArgumentsReader,
    CallDelta,
    CallFormat,
    Function,
    LarkJson,
    OutputReader,
    Pieces,
    Schema,
)

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
MARKERS = ("<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_NAME = re.compile(r"[\w.\-]+")
_RECIPIENT = re.compile(rf"to=(?:functions\.)?({_NAME.pattern})")
_HEADS = ("<|channel|>", "<|start|>", _MESSAGE, "to=", " to=")
"""Beginnings of a message's header. An output that begins in another way is plain text."""


@dataclass(frozen=True, kw_only=True)
class HarmonyCalls(CallFormat):
    """A call is a message to `functions.NAME`, which ends the output."""

    def call_rules(
        self, rule: str, function: Function, parameters: Schema, literal: Callable[[str], str], lark_json: LarkJson
    ) -> list[str]:
        return [f"{rule}: {literal(function.name)} {literal(' <|constrain|>json<|message|>')} {lark_json(parameters)}"]

    def output_reader(self) -> OutputReader:
        return HarmonyReader()

    def arguments(self, parameters: Schema | None) -> ArgumentsReader:
        self._no_part(parameters)

    @property
    def opened(self) -> Sequence[str]:
        self._no_part(None)

    @property
    def head(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        self._no_part(None)

    def can_call(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def _no_part(self, _: object) -> NoReturn:
        raise AssertionError("only HarmonyReader reads these outputs")


class HarmonyReader:
    """Separates messages by their channels: analysis is reasoning, a message to a function is a call."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending = ""
        self._part = ""
        """The part that the present message belongs to, or an empty text in a header."""
        self._is_first = True
        self._is_complete = True

    @property
    def has_called(self) -> bool:
        return self.num_calls > 0 and self._is_complete

    def add(
        self, text: str, *, finish_reason: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> Pieces:
        self._pending += text
        texts, calls = {"reasoning": "", "content": ""}, dict[int, CallDelta]()
        ended = finish_reason is not None
        while self._pending:
            if not self._part:
                if not self._take_header(calls, ended=finish_reason == "stop"):
                    break
                continue
            piece, closed = self._take_body(ended=finish_reason == "stop")
            if self._part == "call":
                index = self.num_calls - 1
                if piece:
                    calls.setdefault(index, CallDelta(index=index)).arguments += piece
                self._is_complete = closed
            else:
                texts[self._part] += piece
            if not closed:
                break
            self._part = ""
        if ended and self._part == "call":  # the token that ends a call ends the output
            self._is_complete = self._is_complete or (finish_reason == "stop" and not isinstance(stop_reason, str))
        return Pieces(texts["reasoning"], texts["content"], list(calls.values()))

    def _take_header(self, calls: dict[int, CallDelta], *, ended: bool) -> bool:
        """Begin the next message, if its header is complete."""
        is_plain = self._is_first and not any(
            self._pending.startswith(head) or (head.startswith(self._pending) and not ended) for head in _HEADS
        )
        if is_plain:
            self._part, self._is_first = "content", False
            return True
        header, marker, rest = self._pending.partition(_MESSAGE)
        if not marker:
            return False
        self._is_first, self._pending = False, rest
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient:
            self._part, self._is_complete = "call", False
            calls[self.num_calls] = CallDelta(index=self.num_calls, id=uuid.uuid4().hex[:9], name=recipient[1])
            self.num_calls += 1
        else:
            self._part = "reasoning" if channel and channel[1] == "analysis" else "content"
        return True

    def _take_body(self, *, ended: bool) -> tuple[str, bool]:
        """Remove and return the next piece of the message. The second value is True if the message is complete."""
        ends = [(at, end) for end in _ENDS if (at := self._pending.find(end)) >= 0]
        if ends:
            at, end = min(ends)
            piece, self._pending = self._pending[:at], self._pending[at + len(end) :]
            return piece, True
        num_held = 0 if ended else next((n for n in range(11, 0, -1) if self._is_marker_begun(n)), 0)
        length = len(self._pending) - num_held
        piece, self._pending = self._pending[:length], self._pending[length:]
        return piece, False

    def _is_marker_begun(self, length: int) -> bool:
        tail = self._pending[-length:]
        return len(tail) == length and any(end.startswith(tail) for end in _ENDS)


VARIANTS: Mapping[str, tuple[CallFormat, ...]] = {
    "openai": (
        HarmonyCalls(
            begin=" to=functions.",
            markers=MARKERS,
            preamble=rf'''("<|channel|>" "analysis" "<|message|>" {TEXT} "<|end|>" "<|start|>" "assistant")?
                "<|channel|>" "commentary"'''.replace("\n", ""),
        ),
    ),
}
