"""The format of Functionary 3.2: messages to recipients. An answer is a message to `all`, a call one to a function."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from longspan.core.request import FinishReason
from longspan.text.call_formats.base import CallDelta, CallFormat, JsonScanner, OutputReader, Pieces
from longspan.text.call_formats.named import NamedCalls

_BEGIN = ">>>"
_HEAD = re.compile(r"(?:>>>)?([\w.\-]{1,64})\n")
_HEAD_BEGUN = re.compile(r"(?:>{0,3}|(?:>>>)?[\w.\-]{1,64})\Z")
"""The line with the recipient at the beginning of an output, and a beginning of it."""
_NEXT = re.compile(r">>>([\w.\-]{1,64})\n")
_NEXT_BEGUN = re.compile(r">(?:>(?:>[\w.\-]{0,64})?)?\Z")
"""The line with the next recipient, and an end of a text that may be the beginning of it."""


@dataclass(frozen=True, kw_only=True)
class RecipientCalls(NamedCalls):
    """A call is the function's name, a line break and the arguments. Prompts end with `begin`."""

    def output_reader(self) -> OutputReader:
        return RecipientReader()


class RecipientReader:
    """Separates messages by their recipients. An output that does not begin with a recipient is content."""

    def __init__(self) -> None:
        self._pending = ""
        self._state: Literal["begin", "name", "content", "arguments", "after"] = "begin"
        self._arguments = JsonScanner()
        self._head = ""
        """The line with the recipient of a message whose first character decides whether it is a call."""
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0 and self._state == "after"

    def add(
        self,
        text: str,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,  # noqa: ARG002 - of the interface
    ) -> Pieces:
        self._pending += text
        content, calls = "", dict[int, CallDelta]()
        while self._pending:
            before = self._state, self._pending
            match self._state:
                case "begin" | "after":
                    self._take_recipient()
                case "name":
                    content += self._take_start(calls)
                case "content":
                    content += self._take_content()
                case "arguments":
                    self._take_arguments(calls)
            if before == (self._state, self._pending):
                break
        if finish_reason == "stop" and self._state in ("begin", "name", "content"):  # no call has begun
            content += self._pending or (self._head if self._state == "name" else "")
        return Pieces(content=content, calls=list(calls.values()))

    def _take_recipient(self) -> None:
        """Take the line with the recipient of the next message."""
        if self._state == "after":
            self._pending = self._pending.lstrip()
        if head := _HEAD.match(self._pending):
            self._head, self._pending = head[0], self._pending[head.end() :]
            self._state = "content" if head[1] == "all" else "name"
        elif not _HEAD_BEGUN.match(self._pending) and self._state == "begin":
            self._state = "content"

    def _take_start(self, calls: dict[int, CallDelta]) -> str:
        """Begin a call if its arguments are an object. Return the line with the recipient as text if not."""
        if self._pending.startswith("{"):
            name = self._head.removeprefix(_BEGIN).rstrip("\n")
            calls[self._num_calls] = CallDelta(index=self._num_calls, id=uuid.uuid4().hex[:9], name=name)
            self._num_calls, self._state, self._arguments = self._num_calls + 1, "arguments", JsonScanner()
            return ""
        self._state = "content"
        return self._head

    def _take_content(self) -> str:
        """Take the text up to the next recipient."""
        pending = self._pending
        if (head := _NEXT.search(pending)) and head.end() < len(pending):
            self._head, self._pending = head[0], pending[head.end() :]
            self._state = "content" if head[1] == "all" else "name"
            return pending[: head.start()]
        begun = head or _NEXT_BEGUN.search(pending)
        end = begun.start() if begun else len(pending)
        self._pending = pending[end:]
        return pending[:end]

    def _take_arguments(self, calls: dict[int, CallDelta]) -> None:
        index = self._num_calls - 1
        piece, self._pending = self._arguments.take(self._pending)
        calls.setdefault(index, CallDelta(index=index)).arguments += piece
        if self._arguments.done:
            self._state = "after"


VARIANTS: Mapping[str, tuple[CallFormat, ...]] = {
    "functionary": (
        RecipientCalls(
            begin=_BEGIN,
            markers=(),
            answer_begin="all\n",
            separator_text="\n",
            tail="",
            between=r'"\n"? ">>>"',
        ),
    ),
}
"""Functionary v3.2."""
