"""The readers of outputs of one model: reasoning first, then content and calls."""

from __future__ import annotations

from longspan.core.request import FinishReason
from longspan.text.call_formats.base import OutputReader, Pieces
from longspan.text.reasoning import ReasoningReader


class SectionReader:
    """Separates the reasoning of an output, and passes the content to a reader of calls, if there is one."""

    def __init__(self, reasoning: ReasoningReader | None, calls: OutputReader | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def has_called(self) -> bool:
        """Whether the output has calls and all of them are complete."""
        return self._calls is not None and self._calls.has_called

    def add(
        self, text: str, *, finish_reason: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> Pieces:
        """Add the next piece of the output. The last piece has the reasons of the output's end."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.add(text, ended=finish_reason is not None)
        if self._calls is None:
            return Pieces(reasoning, text)
        return self._calls.add(text, finish_reason=finish_reason, stop_reason=stop_reason)._replace(reasoning=reasoning)
