"""Reasoning sections of outputs, such as `<think>...</think>`: their formats, their reader, and grammars after them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longspan.text.call_formats.base import TEXT, OutputReader, literal, prefixes, quoted


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """The markers of a reasoning section.

    Attributes:
        is_implied: an output begins in the section, even if neither the prompt nor the output has `begin`.
        answer_begin: a text before each answer, after the section if there is one.
    """

    begin: str
    end: str
    is_implied: bool = False
    answer_begin: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a vocabulary may have as tokens, and that the reader has to see."""
        return (self.begin, self.end)

    def output_reader(self) -> OutputReader | None:
        """Return a reader of whole outputs, if the format structures more than reasoning."""
        return None

    def start(self, prompt: str, open_message: str | None = None) -> Literal["inside", "maybe", "closed"]:
        """Return where the output of a prompt begins. `open_message` is the message that it continues, if it does.

        An output after a closed section has none. `maybe` means that the output decides.
        """
        text = prompt.rstrip() if open_message is None else open_message
        last_begin, last_end = text.rfind(self.begin), text.rfind(self.end)
        if open_message is None:
            last_begin, last_end = text.endswith(self.begin), text.endswith(self.end)
        if last_begin > last_end:
            return "inside"
        if last_end > last_begin or open_message:
            return "closed"
        return "inside" if self.is_implied else "maybe"


class _Harmony(ReasoningFormat):
    """Sections of gpt-oss, which are messages in the channel `analysis`. Its reader separates all channels."""

    @property
    def markers(self) -> tuple[str, ...]:
        from longspan.text.call_formats.harmony import MARKERS  # noqa: PLC0415 - loaded on first use

        return MARKERS

    def output_reader(self) -> OutputReader:
        from longspan.text.call_formats.harmony import HarmonyReader  # noqa: PLC0415 - loaded on first use

        return HarmonyReader()


_THINK = ReasoningFormat(begin="<think>", end="</think>")
FORMATS: Mapping[str, ReasoningFormat | None] = {
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat(begin="<think>", end="</think>", is_implied=True),
    "glm45": _THINK,
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
    "seed_oss": ReasoningFormat(begin="<seed:think>", end="</seed:think>"),
    "openai_gptoss": _Harmony(
        begin="<|channel|>analysis<|message|>",
        end="<|end|><|start|>assistant",
        answer_begin="<|channel|>final<|message|>",
    ),
    "none": None,
}
"""Formats by the names of vLLM's parsers. `none` leaves sections in the content."""


def reasoning_format(name: str, template: object) -> ReasoningFormat | None:
    """Return the format of this name or, for `auto`, the first format whose marker a chat template contains.

    `template` is the source, or the sources by name.
    """
    if name != "auto":
        return FORMATS[name]
    source = str(template)
    for form in FORMATS.values():
        if form is not None and (form.begin if form.answer_begin else form.end) in source:
            return form
    return None


class ReasoningReader:
    """Separates one streamed output into reasoning and content. Blanks around both belong to neither.

    Args:
        start: see `ReasoningFormat.start`.
    """

    def __init__(self, form: ReasoningFormat, start: Literal["inside", "maybe", "closed"]) -> None:
        self._form = form
        self._state: Literal["maybe", "opened", "inside", "between", "content"]
        self._state = "content" if start == "closed" else "maybe"
        self._is_inside = start == "inside"
        self._pending = ""
        self._end_begun = prefixes([r"\s*", *map(re.escape, form.end)])

    def add(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Add the next piece of the output, which has `ended` with it or not. Return its reasoning and its content."""
        self._pending += text
        reasoning = ""
        if self._state == "maybe":
            self._open(ended=ended)
        if self._state == "opened":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = "inside"
        if self._state == "inside":
            reasoning = self._take_reasoning(ended=ended)
        if self._state == "between":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = "content"
        content = ""
        if self._state == "content":
            content, self._pending = self._pending, ""
        return reasoning, content

    def _open(self, *, ended: bool) -> None:
        """Decide whether the output begins in a section. A marker at its beginning is removed."""
        begin, begun = self._form.begin, self._pending.lstrip()
        if begun.startswith(begin):
            self._pending, self._state = begun[len(begin) :], "opened"
        elif ended or not begin.startswith(begun):
            self._state = "opened" if self._is_inside else "content"

    def _take_reasoning(self, *, ended: bool) -> str:
        """Remove and return the pending reasoning, but for an end that may belong to the closing marker."""
        end = self._form.end
        text, marker, rest = self._pending.partition(end)
        if marker:
            self._pending, self._state = rest, "between"
            return text.rstrip()
        match = self._end_begun.search(text)
        assert match is not None, "it matches the empty end"
        self._pending = "" if ended else text[match.start() :]
        return text[: match.start()] if not ended else text.rstrip()


def after_reasoning(grammar: str, form: ReasoningFormat, *, is_inside: bool, special: Mapping[str, int]) -> str:
    """Return the grammar of outputs that follow `grammar` after a reasoning section.

    The section may be missing, unless the output begins inside. `special` are the ids of tokens without bytes.
    """
    tokens = {text: id_ for text, id_ in special.items() if any(text in marker for marker in form.markers)}
    begin, end, answer = (literal(text, tokens) for text in (form.begin, form.end, form.answer_begin))
    ids = ",".join(str(token) for text, token in special.items() if not form.end.startswith(text))
    lazy = "" if end.startswith("<[") else "[lazy]"
    rules = [
        "%llguidance {}",
        f"start: {'section BLANKS?' if is_inside else '(opened BLANKS?)?'} {answer} @answer",
        f"opened: BLANKS? {begin} section",
        f"section: {'piece* ' if ids else ''}closing",
        f"closing{lazy}: {TEXT} {end}",
        r"BLANKS: /[ \t\r\n]{1,8}/",
    ]
    if ids:
        rules.append(f"piece: {TEXT} <[{ids}]>")
    return _around(grammar, rules)


def after_text(grammar: str, begin: str) -> str:
    """Return the grammar of outputs that are `begin` and then follow `grammar`."""
    return _around(grammar, ["%llguidance {}", f"start: {quoted(begin)} @answer"])


def _around(grammar: str, rules: Sequence[str]) -> str:
    """Return the grammar of these rules, in which `@answer` is `grammar`."""
    inner: dict[str, Any] = (
        json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    )
    first, *others = inner["grammars"]
    outer = {"lark_grammar": "\n".join(rules)}
    return json.dumps({**inner, "grammars": [outer, {**first, "name": "answer"}, *others]}, ensure_ascii=False)
