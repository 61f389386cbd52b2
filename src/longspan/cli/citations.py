"""The passages of documents that get the most attention from a question.

Every question gives much attention to the end of the prompt and to line ends. So a passage is rated by its share of the
question's attention minus its share for an empty question, whose document is cached by then. This measures where the
model looks, and does not prove an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longspan.cli.documents import Document, in_prompt
from longspan.cli.outputs import note
from longspan.core.sampling import SamplingParams

if TYPE_CHECKING:
    from longspan.cli.chat import Conversation
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

_EMPTY_QUESTION = "N/A"
_MIN_CHARS, _MAX_CHARS = 200, 500
"""A passage ends at the first line end after the minimum, or at the last blank before the maximum."""
_SHOWN_CHARS = 70
_Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Citation:
    """A passage of a file.

    Attributes:
        first_line, last_line: counted from 1.
        start, stop: the range of characters in the text of the file.
        share: the part of the attention to all passages beyond that of an empty question, from 0 to 1.
    """

    file: str
    first_line: int
    last_line: int
    start: int
    stop: int
    share: float
    text: str

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
        lines = f"{self.first_line}-{self.last_line}" if self.first_line < self.last_line else f"{self.first_line}"
        return f"{self.share:4.0%}  {self.file}:{lines}, characters {self.start}-{self.stop}: {shown}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class Cited:
    """The prompt of a question, whose answer is cited. The documents belong to the question's own turn.

    Raises:
        ValueError: the tokenizer gives no positions, or the template changes the text of the documents.
    """

    def __init__(self, llm: LLM, conversation: Conversation, documents: Sequence[Document], question: str) -> None:
        tokenizer: Any = llm.input_processor.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("the model's tokenizer gives no positions of tokens")
        self._llm, self._conversation, self._documents = llm, conversation, documents
        text, content = conversation.rendered(question), in_prompt(documents, question)
        begin = text.rfind(content)
        if begin < 0:
            raise ValueError("the chat template changes the text of the documents")
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        self.token_ids: list[int] = encoded["input_ids"]
        self._begins = np.array([first for first, _ in encoded["offset_mapping"]])
        self._first_char = begin
        self.first = int(np.searchsorted(self._begins, begin + len(content) - len(question)))

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a report of the attention from the question."""
        return replace(params, attention_from=self.first)

    def citations(self, output: RequestOutput, number: int) -> list[Citation]:
        """Return the passages with the most attention, the first with the largest share, after the answer."""
        empty = Cited(self._llm, self._conversation, self._documents, _EMPTY_QUESTION)
        if len(empty.token_ids) >= self._llm.max_model_len:
            note("no passages are cited: the prompt fills the context")
            return []
        params = empty.params(SamplingParams(temperature=0.0, max_tokens=1))
        [reference] = self._llm.generate([empty.token_ids], params, use_tqdm=False)
        assert output.prompt_attention is not None and reference.prompt_attention is not None, "they were requested"
        scores, passages = self._scores(output.prompt_attention), [*self._passages()]
        base = empty._scores(reference.prompt_attention)
        gains = np.array([scores[place].sum() - base[place].sum() for place, *_ in passages])
        total = gains[gains > 0].sum() or 1.0
        best = [index for index in np.argsort(-gains, kind="stable")[:number] if gains[index] > 0]
        return [_citation(*passages[index][1:], share=float(gains[index] / total)) for index in best]

    def _scores(self, attention: _Scores) -> _Scores:
        """Return the share of each token before the question in their attention."""
        scores = attention[: self.first]
        return scores / (scores[self._places(0, len(self._begins))].sum() or 1.0)

    def _passages(self) -> Iterator[tuple[slice, Document, int, int]]:
        """Yield each passage with its tokens: a slice of the prompt."""
        begin = self._first_char
        for document in self._documents:
            begin += len(document.head)
            for start, stop in passages_of(document.text):
                yield self._places(begin + start, begin + stop), document, start, stop
            begin += len(document.text) + len("\n\n")

    def _places(self, start: int, stop: int) -> slice:
        """Return the tokens before the question that begin at the characters `[start, stop)` of the rendered text."""
        first, last = np.searchsorted(self._begins, [max(start, self._first_char), stop])
        return slice(int(first), min(int(last), self.first))


def _citation(document: Document, start: int, stop: int, *, share: float) -> Citation:
    text = document.text[start:stop]
    first = document.text.count("\n", 0, start) + 1
    last = first + text.rstrip("\n").count("\n")
    return Citation(
        file=document.name, first_line=first, last_line=last, start=start, stop=stop, share=share, text=text
    )


def passages_of(text: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges of characters of the passages of a text, without gaps."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _MIN_CHARS - 1)
        stop = len(text) if end < 0 else end + 1
        if stop - start > _MAX_CHARS:
            blanks = [match.end() for match in re.finditer(r"\s", text[start + _MIN_CHARS : start + _MAX_CHARS])]
            stop = start + (_MIN_CHARS + blanks[-1] if blanks else _MAX_CHARS)
        yield start, stop
        start = stop
