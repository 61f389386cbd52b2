"""Many prompts in a JSONL file, and their outputs in another."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, get_type_hints

import msgspec

from longspan.cli.prompts import STDIN, read_text
from longspan.cli.report import json_fields
from longspan.core.sampling import SamplingParams

if TYPE_CHECKING:
    from longspan.llm import LLM

_PROMPTS: dict[str, Any] = {"prompt": str, "token_ids": list[int], "messages": list[dict[str, Any]]}
# What JSON has in place of Python's types; logits would make lines of megabytes.
_IN_JSON: dict[str, Any] = {
    "stop": str | list[str] | None,
    "stop_token_ids": list[int] | None,
    "logit_bias": dict[int, float] | None,
}
_SAMPLING: dict[str, Any] = {
    field.name: _IN_JSON.get(field.name, get_type_hints(SamplingParams)[field.name])
    for field in fields(SamplingParams)
    if field.name != "output_logits"
}
_Line = msgspec.defstruct(
    "Line",
    [
        (name, kind | msgspec.UnsetType, msgspec.UNSET)
        for name, kind in ({"id": str | int | None} | _PROMPTS | _SAMPLING).items()
    ],
    forbid_unknown_fields=True,
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the input: a prompt with its parameters, or the reason why it cannot be served."""

    id: str | int
    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] | None = None
    params: SamplingParams | None = None
    error: str | None = None


def read_lines(path: Path, params: SamplingParams) -> list[Line]:
    """The lines of a file that are not empty; `-` is stdin. A line's own parameters count before `params`.

    Raises:
        ValueError: when the file cannot be read.
    """
    texts = enumerate(read_text(path, "input file").split("\n"))
    return [parse_line(text, index, params) for index, text in texts if text.strip()]


def parse_line(text: str, index: int, params: SamplingParams) -> Line:
    """The line `text`, called `index` if it has no id of its own."""
    try:
        given = msgspec.structs.asdict(msgspec.json.decode(text, type=_Line))
        given = {name: value for name, value in given.items() if value is not msgspec.UNSET}
        prompts = [name for name in _PROMPTS if name in given]
        if len(prompts) != 1:
            raise ValueError(f"exactly one of prompt, token_ids and messages is needed, but {len(prompts)} given")
        own = {name: value for name, value in given.items() if name in _SAMPLING}
        return Line(
            id=_id(given, index),
            prompt=given.get("prompt", given.get("token_ids", "")),
            messages=given.get("messages"),
            params=replace(params, **own),
        )
    except ValueError as error:  # of msgspec too
        return Line(id=_id(_decoded(text), index), error=str(error))


def answer(llm: LLM, lines: Sequence[Line], out: IO[str]) -> int:
    """Writes an output line per line, each as soon as its turn has come; returns how many could not be served."""
    checked = [_checked(llm, line) for line in lines]
    good = [(line.prompt, line.params) for line in checked if line.params is not None]
    own_terminal = out is sys.stdout and out.isatty()  # a bar would run into the lines
    outputs = llm.generate_each(
        [prompt for prompt, _ in good], [params for _, params in good], use_tqdm=not own_terminal
    )
    for line in checked:
        found = {"error": line.error} if line.params is None else json_fields(next(outputs))
        out.write(json.dumps({"id": line.id, **found}) + "\n")
        out.flush()
    return len(checked) - len(good)


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """The file to write to; `-` is stdout.

    Raises:
        ValueError: when it cannot be written.
    """
    if str(path) == STDIN:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output file {str(path)!r} cannot be written: {error.strerror}") from None
    with file:
        yield file


def check_different(source: Path, target: Path) -> None:
    """Whether the output is not the input.

    Raises:
        ValueError: when it is.
    """
    if source.exists() and target.exists() and source.samefile(target):
        raise ValueError(f"--output-file {str(target)!r} is the input file: give another one")


def _checked(llm: LLM, line: Line) -> Line:
    """The line as the engine takes it, messages as token ids; with an error if the engine would refuse it."""
    if line.params is None:
        return line
    prompt = line.prompt
    try:
        if line.messages is not None:
            prompt = llm.tokenize(llm.render_chat(line.messages), add_special_tokens=False)
        llm.check(prompt, line.params)
    except ValueError as error:
        return Line(id=line.id, error=str(error))
    return replace(line, prompt=prompt)


def _id(given: Mapping[str, Any], index: int) -> str | int:
    own = given.get("id")
    return own if isinstance(own, str | int) else index


def _decoded(text: str) -> dict[str, Any]:
    """The object in a line that is wrong; empty if it is none."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
