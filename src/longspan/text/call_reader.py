"""The reader of outputs with calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Literal, NamedTuple

from longspan.core.request import FinishReason
from longspan.text.call_formats.base import (
    ArgumentsReader,
    CallDelta,
    CallFormat,
    JsonScanner,
    Pieces,
    Schema,
    parse_json,
    prefixes,
)

_KEYS = ("name", "type", "id", "index", "function", "arguments", "parameters")
_OBJECT = r"(?P<object>\{)\s*\"(?:" + "|".join(_KEYS) + r")\""
_OBJECT_BEGUN = r"\{\s*(?:\"(?:" + "|".join(sorted({key[:n] for key in _KEYS for n in range(len(key) + 1)})) + r"))?\Z"
"""The beginning of an object that may be a call, and an end of a text that may be such a beginning."""
_MAX_HEAD = 1024
"""Characters of the longest beginning of a call, up to its arguments. A longer one is text.

Each piece of an output is compared with the whole beginning. More characters allow more blanks in a call.
"""


class _Patterns(NamedTuple):
    """Expressions of a call that begins after `before`.

    Attributes:
        head: up to the arguments.
        head_begun: an end of a text that may be the beginning of `head`.
        object: an object whose keys have another order. None if calls are not objects.
        object_begun: an end of a text that may be the beginning of `object`.
    """

    head: re.Pattern[str]
    head_begun: re.Pattern[str]
    object: re.Pattern[str] | None
    object_begun: re.Pattern[str] | None


@lru_cache(maxsize=32)
def _patterns(form: CallFormat, *, is_first: bool) -> _Patterns:
    before = form.opened if is_first else [form.separator]
    start, name, end = form.head
    parts = [*before, *start]
    return _Patterns(
        head=re.compile("".join([*parts, "(", *name, ")", *end])),
        head_begun=prefixes([*parts, *name, *end]),
        object=re.compile("".join(before) + _OBJECT) if form.reads_objects else None,
        object_begun=re.compile("".join(before) + _OBJECT_BEGUN) if form.reads_objects else None,
    )


class CallReader:
    """Parses one streamed output. Before the first call, everything that cannot be its beginning is text.

    Text after a call is dropped.

    Args:
        functions: the schemas of parameters by function. In a format without markers, only these are called.
        at_start: calls are at the beginning of the output or nowhere.
        marker_is_token: the first marker is a token of the vocabulary, so that no output ends inside it.

    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(
        self,
        form: CallFormat,
        functions: Mapping[str, Schema] | None = None,
        *,
        at_start: bool = False,
        marker_is_token: bool = False,
    ) -> None:
        self.num_calls = 0
        self._form, self._functions, self._marker_is_token = form, functions, marker_is_token
        self._at_start = at_start
        self._pending = ""
        self._state: Literal["text", "plain text", "arguments", "object", "after"] = "text"
        self._arguments: ArgumentsReader = JsonScanner()
        self._object = ""  # the text before an object, and its part that the scanner has passed
        self._object_start = 0

    @property
    def has_called(self) -> bool:
        """Whether the output has calls and all of them are complete."""
        return self._state == "after"

    def add(
        self, text: str, *, finish_reason: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> Pieces:
        """Add the next piece of the output. Return its text and the new parts of each call.

        The last piece has the reasons of the output's end. If the output was cut off in a call, the part of the call
        before its arguments is neither text nor a call.
        """
        self._pending += text
        content, calls = "", dict[int, CallDelta]()
        while self._pending:
            if self._state in ("text", "plain text"):
                content += self._take_text()
            if self._state == "arguments":
                if not self._take_arguments(calls):
                    break
            elif self._state == "object":
                content += self._take_object(calls)
            elif self._state == "plain text" or not self._begin_call(calls):
                break
        if self._state == "after":
            self._pending = self._pending[-_MAX_HEAD:]
        if finish_reason is not None and not self.num_calls:
            self._pending, self._object = self._object + self._pending, ""
            if not self._is_cut_call(finish_reason, stop_reason):
                content += self._pending
        return Pieces(content=content, calls=list(calls.values()))

    def _take_text(self) -> str:
        """Remove and return the pending text that cannot be the beginning of a call."""
        pending = self._pending
        end = len(pending)
        if self._state == "text":
            patterns = [pattern for pattern in _patterns(self._form, is_first=True) if pattern is not None]
            matches = (p.match(pending) if self._at_start else p.search(pending) for p in patterns)
            end = min((match.start() for match in matches if match and _is_short(match)), default=end)
            if end and self._at_start:
                self._state, end = "plain text", len(pending)
        self._pending = pending[end:]
        return pending[:end]

    def _begin_call(self, calls: dict[int, CallDelta]) -> bool:
        """Take the text up to the next call's arguments, or its object. Return False if more text is needed."""
        patterns = _patterns(self._form, is_first=self._state == "text")
        pending = self._pending
        if head := patterns.head.match(pending):
            name = self._form.name_of(head[1])
            if self._may_call(name):
                self._begin(calls, name, "")
                self._pending, self._state = pending[head.end() :], "arguments"
                self._arguments = self._form.arguments((self._functions or {}).get(name))
                return True
        elif (begun := patterns.head_begun.match(pending)) and _is_short(begun):
            return False
        if patterns.object is not None and (opened := patterns.object.match(pending)):
            start = opened.start("object")
            self._object, self._object_start, self._pending = pending[:start], start, pending[start:]
            self._state, self._arguments = "object", JsonScanner()
            return True
        return False

    def _may_call(self, name: str) -> bool:
        return bool(name) and (bool(self._form.begin) or self._functions is None or name in self._functions)

    def _begin(self, calls: dict[int, CallDelta], name: str, arguments: str) -> None:
        index = self.num_calls
        calls[index] = CallDelta(index=index, id=uuid.uuid4().hex[:9], name=name, arguments=arguments)
        self.num_calls += 1

    def _take_arguments(self, calls: dict[int, CallDelta]) -> bool:
        """Take the next part of the arguments. Return False if more text is needed."""
        index = self.num_calls - 1
        piece, self._pending = self._arguments.take(self._pending)
        if piece:
            calls.setdefault(index, CallDelta(index=index)).arguments += piece
        if self._arguments.done:
            self._state = "after"
        return self._arguments.done

    def _take_object(self, calls: dict[int, CallDelta]) -> str:
        """Take the next part of an object, whose keys have any order. Return it as text if it is not a call."""
        from longspan.text.call_formats.objects import call_in  # noqa: PLC0415 - loaded with the format

        piece, self._pending = self._arguments.take(self._pending)
        self._object += piece
        if not self._arguments.done:
            return ""
        whole, self._object = self._object, ""
        with suppress(ValueError):
            call = call_in(parse_json(whole[self._object_start :]))
            if call is not None and self._may_call(call[0]):
                self._begin(calls, *call)
                self._state = "after"
                return ""
        if self.num_calls:
            self._state = "after"
            return ""
        self._state = "plain text" if self._at_start else "text"
        return whole

    def _is_cut_call(self, finish_reason: FinishReason, stop_reason: int | str | None) -> bool:
        """Return True if the pending text at the end of an output is the beginning of a call.

        An output that the model has ended itself has no incomplete call. A marker that a stop string has cut is text.
        """
        begun = self._pending.startswith(self._form.begin) if self._form.begin else bool(self._pending.strip())
        if begun:
            return finish_reason != "stop" or stop_reason is not None
        return finish_reason != "stop" and not self._marker_is_token


def _is_short(match: re.Match[str]) -> bool:
    return match.end() - match.start() <= _MAX_HEAD
