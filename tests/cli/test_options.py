"""Flags from dataclasses: every option has a flag in every verb, and a verb's defaults are its own."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest
from cyclopts import App
from fake_llm import run

from longspan.args import EngineArgs
from longspan.cli.app import app
from longspan.cli.batch import batch
from longspan.cli.chat import chat
from longspan.cli.generate import FormOptions, generate
from longspan.cli.options import verb
from longspan.cli.profile import profile
from longspan.cli.serve import serve
from longspan.cli.simulate import simulate
from longspan.core.exchange import exchanges
from longspan.core.options import Option, SchedulingArgs, id_list, options_of
from longspan.core.parallel_args import ParallelArgs
from longspan.core.sampling import SamplingParams
from longspan.errors import ParameterError
from longspan.serve.settings import RequestLimits, ServerSettings
from longspan.sim.spec import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, Option("Of the [thing].", short="w", minimum=1, configures=True)] = 3
    label: str | None = None
    marks: Annotated[tuple[int, ...], Option("Where it is marked.", read=id_list, configures=True)] = ()
    is_open: Annotated[bool, Option("It has no lid.", name="open")] = False
    is_round: Annotated[bool, Option("It rolls.", name="round", configures=True)] = True

    def __post_init__(self) -> None:
        if self.width == 13:
            raise ParameterError("width", "must not be 13, since that brings bad luck", 13)


ENGINE = EngineArgs()


@verb
def paint(
    color: Annotated[str, Option("Which one.", configures=True)],
    *,
    size: Size = Size(width=7),
    engine: EngineArgs = ENGINE,
) -> None:
    del engine  # verbs with an engine read variables
    print(f"{color} {size}")


APP = App(default_command=paint, result_action="return_value", print_error=False, exit_on_error=False)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("", Size(width=7)),
        ("--width 1 --marks 3,4 --open --no-round", Size(width=1, marks=(3, 4), is_open=True, is_round=False)),
        ("-w 2", Size(width=2)),
    ],
)
def test_fields_become_flags_and_are_parsed_into_one_object(
    given: str, made: Size, capsys: pytest.CaptureFixture[str]
) -> None:
    APP(["red", *given.split()])
    assert capsys.readouterr().out == f"red {made}\n"


def test_flags_that_configure_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"COLOR": "red", "WIDTH": "5", "MARKS": "8", "ROUND": "", "OPEN": "true"}.items():
        monkeypatch.setenv(f"LONGSPAN_{name}", value)
    APP([])
    assert capsys.readouterr().out == f"red {Size(width=5, marks=(8,))}\n"


def test_help_has_the_words_of_options_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    APP(["--help"])
    shown = capsys.readouterr().out
    assert "Of the [thing]." in shown
    assert "--round" in shown and "--no-round" in shown and "--no-open" not in shown
    assert "label" not in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [("--width 13", "--width must not be 13"), ("--marks a", "--marks must be whole numbers .* but 'a' given")],
)
def test_mistakes_name_the_flag(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        APP(["red", *given.split()])


def test_two_options_of_one_name_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="two options are called width"):

        @verb
        def _(*, width: Annotated[int, Option("")] = 1, size: Size = Size()) -> None: ...


_UNPRINTED = {"output_logits", "attention_from", "structured_outputs"}


def test_every_sampling_parameter_is_an_option() -> None:
    """Except logits and attention, which are too many to print. The form of an output has an option per kind."""
    forms = {field.name for field in fields(FormOptions)}
    assert forms == {"json_schema", "regex", "choice", "grammar"}
    parameters = {field.name for field in fields(SamplingParams)} - _UNPRINTED | forms
    for command in (generate, chat):
        assert parameters <= set(inspect.signature(command).parameters)


@pytest.mark.parametrize("command", ["generate", "chat", "batch", "profile", "serve"])
def test_variables_are_of_the_engine_and_the_server_only(command: str) -> None:
    configuring = {"model", "config", "log_level", "log_format", *options_of(EngineArgs)}
    if command == "serve":
        configuring |= {*options_of(ServerSettings), *options_of(RequestLimits), "otlp_traces_endpoint", "seed"}
    arguments = app[command].assemble_argument_collection()
    assert {one.field_info.name for one in arguments if one.parameter.env_var} == configuring


def test_every_engine_argument_is_an_option() -> None:
    """Except the model and the seed, which verbs have, and options for Python only."""
    flags = {field.name for field in fields(EngineArgs)} - {"model", "seed", "record_times"}
    for command in (generate, chat, serve, batch, profile):
        assert flags <= set(inspect.signature(command).parameters)


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_help_shows_every_option(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(verb, "--help") == 0
    shown = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out))
    assert {field.name.replace("_", "-") for field in fields(FormOptions)} <= shown
    assert {"parallel", "instances", "policy", "max-model-len", "no-enable-prefix-caching"} <= shown


def test_an_answer_in_a_chat_may_fill_the_context() -> None:
    defaults = {verb: inspect.signature(verb).parameters["max_tokens"].default for verb in (generate, chat)}
    assert defaults == {generate: 128, chat: None}


def test_verbs_that_schedule_have_the_same_options() -> None:
    """With the same defaults, but that simulated policies can be several, so their default stays a text to be read."""
    names = options_of(SchedulingArgs)
    defaults = {
        verb: {name: inspect.signature(verb).parameters[name].default for name in names}
        for verb in (generate, serve, simulate)
    }
    assert defaults[generate] == defaults[serve]
    assert defaults[serve].items() - defaults[simulate].items() == {("policy", "auto")}


def test_instances_are_written_alike_for_engines_and_simulations() -> None:
    engine, simulated = options_of(EngineArgs), options_of(ClusterSpec)
    assert engine.keys() & simulated.keys() == {*options_of(ParallelArgs), "dtype"}
    own = {"parallel"}  # where no stages are possible, and the default is another one
    assert {name: engine[name] for name in options_of(ParallelArgs) if name not in own}.items() <= simulated.items()


@pytest.mark.parametrize(
    ("verb", "words", "others"),
    [("serve", "one rank", "simulated"), ("simulate", "an instance per device", "T * P ranks")],
)
def test_help_is_of_the_verb_alone(
    verb: str, words: str, others: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run(verb, "--help") == 0
    shown = capsys.readouterr().out
    assert f"[default: {words}]" in shown
    assert others not in shown


@pytest.mark.parametrize("verb", ["generate", "serve", "simulate", "estimate"])
def test_help_lists_the_exchanges_that_policies_have(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run(verb, "--help") == 0
    shown = re.search(r"--exchange CHOICE .*?\[choices: (.*?)\]", re.sub(r"[│\s]+", " ", capsys.readouterr().out))
    assert shown is not None
    assert tuple(shown[1].split(", ")) == ("auto", *(one.kind for one in exchanges()))


@pytest.mark.parametrize(("flag", "value"), [("--exchange", "ring"), ("--layout", "zig")])
def test_an_unknown_exchange_or_layout_is_refused_with_the_choices(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--prompt", "x", flag, value) == 2
    assert f'Invalid value "{value}" for {flag}. Choose from: "auto", ' in capsys.readouterr().err


def test_flags_of_a_policy_count_in_a_simulation_as_in_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    scene = ("--hardware", "a100-sxm-80g", "--gpus-per-host", "2", "--rate", "1", "--num-requests", "2")
    chain = ("--policy", "context", "--exchange", "chain")
    refused = []
    for given in (("--layout", "striped"), ("-o", "layout=striped")):
        assert run("simulate", "llama-3-8b", *scene, *chain, *given) == 2
        refused.append(capsys.readouterr().err)
    assert refused[0] == refused[1]
    assert "but layout striped given: use contiguous" in refused[0]


VERBS = ("generate", "chat", "serve", "batch", "models", "profile", "eval", "tune", "simulate", "estimate")


@pytest.mark.parametrize("name", VERBS)
def test_first_group_of_help_has_at_most_ten_flags_and_all_required_ones(name: str) -> None:
    arguments = app[name].assemble_argument_collection()
    common = [argument for argument in arguments if argument.parameter.group[0].name == "Common options"]
    assert common[0].name in ("model", "what") and len(common) <= 10
    assert {argument.name for argument in arguments if argument.required} <= {argument.name for argument in common}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "script"
    assert run("--install-completion", "--shell", shell, "--output", str(script)) == 0
    assert "max-model-len" in script.read_text() and str(script) in capsys.readouterr().out
