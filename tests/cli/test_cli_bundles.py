"""Options that verbs share: every parameter has a flag in every verb, and a verb's defaults are its own."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Annotated, get_args, get_type_hints

import pytest
import typer
from fake_llm import run
from typer.testing import CliRunner

from longspan.cli.bundles import bundled
from longspan.cli.chat import chat
from longspan.cli.generate import generate
from longspan.cli.options import SamplingOptions
from longspan.cli.scheduling import SchedulingOptions
from longspan.cli.serve import serve
from longspan.cli.simulate import simulate
from longspan.core.sampling import SamplingParams
from longspan.policy.group_parts import SharingOptions


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large it is.

    Attributes:
        label: what is written
            on it.
    """

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
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Of the thing." in shown
    assert "What is written on it." in shown, "the docstring describes what is not annotated"


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


def test_verbs_that_schedule_have_the_same_options() -> None:
    """With the same defaults, but that a step of a simulated device is larger."""
    names = [field.name for field in fields(SchedulingOptions)]
    defaults = {
        verb: {name: inspect.signature(verb).parameters[name].default for name in names}
        for verb in (generate, serve, simulate)
    }
    assert defaults[generate] == defaults[serve]
    assert defaults[serve].items() - defaults[simulate].items() == {("max_num_batched_tokens", 2048)}


@pytest.mark.parametrize("verb", ["generate", "serve", "simulate", "estimate"])
def test_help_lists_the_exchanges_that_policies_have(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run(verb, "--help") == 0
    shown = re.search(r"--exchange\s+<(\S+)>", re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out))
    assert shown is not None
    assert tuple(shown[1].split("|")) == get_args(get_type_hints(SharingOptions)["exchange"])


@pytest.mark.parametrize(("flag", "value"), [("--exchange", "ring"), ("--layout", "zig")])
def test_an_unknown_exchange_or_layout_is_refused_with_the_choices(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--prompt", "x", flag, value) == 2
    assert f"'{value}' is not one of 'auto'" in capsys.readouterr().err


def test_flags_of_a_policy_count_in_a_simulation_as_in_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    scene = ("--hardware", "a100-sxm-80g", "--gpus-per-host", "2", "--rate", "1", "--num-requests", "2")
    chain = ("--policy", "context", "--exchange", "chain")
    refused = []
    for given in (("--layout", "striped"), ("-o", "layout=striped")):
        assert run("simulate", "llama-3-8b", *scene, *chain, *given) == 2
        refused.append(capsys.readouterr().err)
    assert refused[0] == refused[1]
    assert "but layout striped given: use contiguous" in refused[0]
