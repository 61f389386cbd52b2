"""Options that verbs share: every parameter has a flag in every verb, and a verb's defaults are its own."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from fake_llm import run
from typer.testing import CliRunner

from longspan.cli.bundles import bundled
from longspan.cli.chat import chat
from longspan.cli.generate import generate
from longspan.cli.options import SamplingOptions
from longspan.core.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option(help="Of the thing.")] = 3
    label: str | None = None


@bundled()
def paint(color: str, *, size: Size = Size(width=7)) -> None:
    typer.echo(f"{color} {size.width} {size.label}")


def test_fields_become_options_and_come_back_as_one_object() -> None:
    app = typer.Typer()
    app.command()(paint)
    assert CliRunner().invoke(app, ["red"]).output == "red 7 None\n"
    assert CliRunner().invoke(app, ["red", "--label", "big", "--width", "1"]).output == "red 1 big\n"
    assert "Of the thing." in CliRunner().invoke(app, ["--help"]).output


def test_two_options_of_one_name_are_our_mistake() -> None:
    with pytest.raises(ValueError, match="duplicate parameter name: 'width'"):

        @bundled()
        def _(width: int, *, size: Size = Size()) -> None: ...


def test_every_sampling_parameter_is_an_option() -> None:
    """Except the logits, which are too many to print; the form of an output has an option per kind."""
    forms = {"json_schema", "regex", "choice", "grammar"}
    parameters = {field.name for field in fields(SamplingParams)} - {"output_logits", "structured_outputs"} | forms
    assert parameters == {field.name for field in fields(SamplingOptions)}
    for verb in (generate, chat):
        assert parameters <= set(inspect.signature(verb).parameters)


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_help_shows_every_option(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(verb, "--help") == 0
    shown = set(re.findall(r"--([a-z-]+)", re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)))
    assert {field.name.replace("_", "-") for field in fields(SamplingOptions)} <= shown
    assert {"parallel", "instances", "policy", "max-model-len", "no-enable-prefix-caching"} <= shown


def test_an_answer_in_a_chat_may_fill_the_context() -> None:
    defaults = {verb: inspect.signature(verb).parameters["max_tokens"].default for verb in (generate, chat)}
    assert defaults == {generate: 128, chat: None}
