"""Numbers that are NaN, infinite or huge: each such option is refused by name, and other numbers survive the wire."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from engines import ThreadLLM
from fake_llm import run
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.cli.app import app
from longspan.core.checks import MAX_NUMBER
from longspan.core.option_values import parse_options
from longspan.core.options import options_of
from longspan.errors import ParameterError
from longspan.policy.registry import policy_class, policy_names
from longspan.serve.messages import EngineSetup
from longspan.serve.settings import ServerSettings
from longspan.sim.spec import Faults

BAD = ("nan", "inf", "-inf", "1e300")
REQUIRED = {
    "batch": ("-i", "in.jsonl", "-o", "out.jsonl"),
    "chat": (),
    "estimate": ("llama-3-8b", "--hardware", "a100-sxm-80g", "--context", "8K"),
    "eval": ("needle",),
    "generate": ("hello",),
    "profile": (),
    "serve": (),
    "simulate": ("llama-3-8b", "--hardware", "a100-sxm-80g", "--parallel", "2"),
}
SIMULATE = ("simulate", "llama-3-8b", "--hardware", "a100-sxm-80g", "--parallel", "2", "--num-requests", "4")


def float_flags(command: str) -> list[str]:
    arguments = app[command].assemble_argument_collection()
    return sorted(one.name for one in arguments if float in (one.hint, *get_args(one.hint)))


def floats_of(kind: type[Any]) -> list[str]:
    return [name for name, (_, hint) in options_of(kind).items() if float in (hint, *get_args(hint))]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("command", sorted(REQUIRED))
def test_every_flag_refuses_numbers_that_are_not_finite_or_huge(
    command: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # the console of a verb keeps the width of its first use
    for flag in float_flags(command):
        if flag == "--rate" and value == "inf":
            continue
        assert run(command, *REQUIRED[command], flag, value) == 2, flag
        message = capsys.readouterr().err
        assert flag in message, message
        assert f"{float(value):g}" in message or value in message, message


def test_engines_and_servers_have_flags_with_numbers() -> None:
    assert {"--host-kv-gib", "--target-tbt", "--max-accuracy-loss", "--step-timeout"} <= {*float_flags("serve")}
    assert "--slo-ttft" in float_flags("simulate")


@pytest.mark.parametrize("value", BAD)
def test_engines_of_python_refuse_the_same(value: str) -> None:
    for kind in (EngineArgs, ServerSettings):
        needed = {"model_names": ("m",)} if kind is ServerSettings else {}
        assert floats_of(kind)
        for name in floats_of(kind):
            with refused(name) as caught:
                kind(**needed, **{name: float(value)})
            assert f"{float(value):g}" in str(caught.value)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", sorted({*policy_names()} - {"last"}))
def test_policies_refuse_the_same(name: str, value: str) -> None:
    kind = policy_class(name).Options
    for one in fields(kind):
        if "float" in str(one.type):
            with refused(one.name):
                parse_options(name, kind, {one.name: value})


@pytest.mark.parametrize("flag", ["--host-kv-gib", "--disk-kv-gib"])
@pytest.mark.parametrize("value", ["1e14", "1e300", "inf", "nan"])
def test_pools_that_no_machine_has_are_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    host = () if flag == "--host-kv-gib" else ("--host-kv-gib", "1")
    assert run(*SIMULATE, *host, flag, value) == 2
    message = capsys.readouterr().err
    assert flag in message and f"{float(value):g}" in message, message


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.floats(0.001, MAX_NUMBER)
            for name in floats_of(EngineArgs)
            if name != "target_ttft"  # excludes max_accuracy_loss
        },
    ),
    st.floats(10, MAX_NUMBER),
)
@settings(max_examples=50, deadline=None)
def test_the_setup_of_an_engine_core_survives_the_wire(options: dict[str, float], timeout_s: float) -> None:
    setup = EngineSetup(
        engine=EngineArgs("m", **options), max_num_queued_reqs=1, max_num_queued_tokens=1, engine_timeout_s=timeout_s
    )
    assert msgspec.json.decode(msgspec.json.encode(setup), type=EngineSetup) == setup


@pytest.mark.parametrize(("slow", "named"), [({-1: 2.0}, "instance -1"), ({1: math.inf}, "inf"), ({1: -2.0}, r"-2\.0")])
def test_faults_name_the_number_that_is_wrong(slow: dict[int, float], named: str) -> None:
    with pytest.raises(ParameterError, match=f"{named} given"):
        Faults(slow=slow)


def test_an_engine_of_python_refuses_a_number_as_its_next_spec(tiny: Path) -> None:
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, block_size=16) as llm, refused("parallel"):
        llm.reshard(2)  # type: ignore[arg-type]


def test_phases_without_pools_on_hosts_are_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--policy", "seesaw", "--prefill-parallel", "pp2", "--decode-parallel", "tp2")
    assert run("generate", "no/such-model", "--prompt", "hello", *flags) == 2
    assert "--host-kv-gib" in capsys.readouterr().err


def test_an_engine_works_with_the_largest_numbers(tiny: Path) -> None:
    options = {"target_tbt": f"{MAX_NUMBER:g}"}
    given = {"parallel": "2", "block_size": 16, "num_gpu_blocks_override": 60, "step_timeout_s": MAX_NUMBER}
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, policy_options=options, **given) as llm:
        [output] = llm.generate([[3, 4]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
