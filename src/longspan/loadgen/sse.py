"""Server-sent events, from bytes cut anywhere."""

from __future__ import annotations

_CR, _LF = b"\r", b"\n"


class SSEParser:
    """Takes pieces of a response as they arrive and returns the data of the events that they complete.

    Lines end in LF, CR or CRLF, an empty line ends an event, and its `data` lines are joined by LF; comments and all
    other fields are passed over (https://html.spec.whatwg.org/multipage/server-sent-events.html). An event that the
    end of the stream cuts off is none.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the start of a line whose end has not come
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in `piece`."""
        events: list[bytes] = []
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(_LF)  # the second half of a CRLF
        for line in piece.splitlines(keepends=True):  # of bytes: at LF, CR and CRLF only
            self._line += line
            if line.endswith((_CR, _LF)):
                self._end_line(bytes(self._line.rstrip(b"\r\n")), events)
                self._line.clear()
        self._after_cr = piece.endswith(_CR) or (self._after_cr and not piece)
        return events

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(_LF.join(self._data))
                self._data = []
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
