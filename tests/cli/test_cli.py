"""The command line: its output and exit codes, with a scripted engine."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_llm import FakeLLM, output, run

from longspan.cli import app
from longspan.core.sampling import SamplingParams
from longspan.errors import WorkerLostError

pytestmark = pytest.mark.usefixtures("fake_llm")


def test_text_streams_to_stdout_and_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "what is it") == 0
    assert capsys.readouterr() == ("The key is 42.\n", "")
    assert FakeLLM.last.closed


def test_json_is_the_last_line_and_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--token-ids", "7,8,9", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "text": "The key is 42.",
        "token_ids": [0, 1, 2, 3, 4],
        "prompt_tokens": 3,
        "finish_reason": "stop",
        "stop_reason": None,
        "ttft_s": 0.5,
        "tbt_s": [0.1, 0.3, 0.2, 0.2],
        "bytes_exchanged": {"ring_kv": 1000, "ring_q": 24, "total": 1024},
        "bytes_between_hosts": {"ring_kv": 400, "ring_q": 0, "total": 400},
        "exchange": {"prefill": {"ring_kv": 1}, "decode": {"ring_q": 4}},
        "kv_tokens_per_instance": [5, 4],
    }


def test_without_a_tokenizer_token_ids_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--token-ids", "7,8", "--skip-tokenizer-init") == 0
    assert capsys.readouterr().out == "0,1,2,3,4\n"


def test_defaults_are_the_documented_ones() -> None:
    assert run("generate", "--prompt", "x") == 0
    assert FakeLLM.last.model == "smollm2-135m"
    assert FakeLLM.last.asked[0][1] == SamplingParams(temperature=0.0, max_tokens=128, seed=0)
    assert FakeLLM.last.arguments == {
        "parallel": None,
        "instances": None,
        "tp": None,
        "pp": None,
        "prefill_parallel": None,
        "decode_parallel": None,
        "transfer_backends": None,
        "executor": "local",
        "ray_address": None,
        "topology": None,
        "threads_per_rank": None,
        "dtype": "auto",
        "device": "cpu",
        "attention_backend": "auto",
        "quantization": None,
        "enforce_eager": False,
        "policy": "auto",
        "policy_options": None,
        "exchange": "auto",
        "layout": "auto",
        "fractions": None,
        "csa": "off",
        "max_accuracy_loss": None,
        "target_ttft": None,
        "target_tbt": None,
        "record_times": False,
        "trace": None,
        "report": None,
        "seed": 0,
        "skip_tokenizer_init": False,
        "trust_remote_code": False,
        "load_format": "auto",
        "max_model_len": None,
        "block_size": 256,
        "max_num_batched_tokens": None,
        "max_num_seqs": 128,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None,
        "host_kv_gib": 0.0,
        "disk_kv_gib": 0.0,
        "disk_kv_dir": None,
        "enable_prefix_caching": True,
        "async_scheduling": True,
        "step_timeout_s": 300.0,
    }


def test_every_option_reaches_the_engine(tmp_path: Path) -> None:
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text("naïve\nprompt", encoding="utf-8")
    line = (
        "generate some/model --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --seed 11 "
        "--stop END --stop STOP --stop-token-ids 4,5 --ignore-eos --n 2 --min-p 0.1 --repetition-penalty 1.1 "
        "--presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 7=-1.5 --logit-bias 8=2 --logprobs 3 "
        "--prompt-logprobs 1 --json --instances 3 --tp 1 --threads-per-rank 2 --dtype bfloat16 --device cuda "
        "--attention-backend torch --enforce-eager --executor ray --ray-address 10.0.0.1:6379 --topology racks.toml "
        "--load-format dummy --policy csps -o threshold=100 -o other=a=b "
        '--exchange chain --layout contiguous --fractions 0.6,0.4 --csa {"levels":2} --max-accuracy-loss 2.5 '
        "--max-model-len 4096 --block-size 512 "
        "--max-num-batched-tokens 1024 --max-num-seqs 4 --kv-cache-memory-bytes 1000000 --num-gpu-blocks-override 7 "
        "--host-kv-gib 1.5 --disk-kv-gib 2.5 --disk-kv-dir some/kv --no-enable-prefix-caching "
        "--no-async-scheduling --step-timeout 33.5 --trace run.json --report run.html"
    )
    assert run(*line.split(), "--prompt-file", str(prompt_file)) == 0
    llm = FakeLLM.last
    [(prompt, params)] = llm.asked
    assert (llm.model, prompt) == ("some/model", "naïve\nprompt")
    assert params == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={7: -1.5, 8: 2.0},
        seed=11,
        n=2,
        logprobs=3,
        prompt_logprobs=1,
        stop=("END", "STOP"),
        stop_token_ids=[4, 5],
        min_tokens=2,
        max_tokens=9,
        ignore_eos=True,
    )
    assert llm.arguments == {
        "parallel": None,
        "instances": 3,
        "tp": 1,
        "pp": None,
        "prefill_parallel": None,
        "decode_parallel": None,
        "transfer_backends": None,
        "executor": "ray",
        "ray_address": "10.0.0.1:6379",
        "topology": "racks.toml",
        "threads_per_rank": 2,
        "dtype": "bfloat16",
        "device": "cuda",
        "attention_backend": "torch",
        "quantization": None,
        "enforce_eager": True,
        "policy": "csps",
        "policy_options": {"threshold": "100", "other": "a=b"},
        "exchange": "chain",
        "layout": "contiguous",
        "fractions": "0.6,0.4",
        "csa": '{"levels":2}',
        "max_accuracy_loss": 2.5,
        "target_ttft": None,
        "target_tbt": None,
        "record_times": False,
        "trace": "run.json",
        "report": "run.html",
        "seed": 11,
        "skip_tokenizer_init": False,
        "trust_remote_code": False,
        "load_format": "dummy",
        "max_model_len": 4096,
        "block_size": 512,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1000000,
        "num_gpu_blocks_override": 7,
        "host_kv_gib": 1.5,
        "disk_kv_gib": 2.5,
        "disk_kv_dir": "some/kv",
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "step_timeout_s": 33.5,
    }
    assert run("generate", "--prompt", "x", "--parallel", "4") == 0
    assert FakeLLM.last.arguments["parallel"] == "4"


@pytest.mark.parametrize("arguments", [("generate", "--prompt", "x"), ("chat",)])
def test_verbs_read_variables_and_a_file(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_in: Callable[[str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("engine.yaml").write_text(
        "model: some/model\nmax-num-seqs: 3\npolicy_option: {threshold: 2000}\nblock-size: 9"
    )
    monkeypatch.setenv("LONGSPAN_MAX_NUM_SEQS", "5")
    type_in("")
    assert run(*arguments, "--config", "engine.yaml", "--block-size", "32") == 0
    found = FakeLLM.last
    assert (found.model, found.arguments["max_num_seqs"], found.arguments["block_size"]) == ("some/model", 5, 32)
    assert found.arguments["policy_options"] == {"threshold": "2000"}


def test_options_of_one_call_have_no_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("of the file", encoding="utf-8")
    for name, value in {"PROMPT": "of the variable", "MAX_TOKENS": "1", "JSON": "true", "SEED": "7"}.items():
        monkeypatch.setenv(f"LONGSPAN_{name}", value)
    assert run("generate", "--prompt-file", str(file)) == 0
    assert FakeLLM.last.asked == [("of the file", SamplingParams(temperature=0.0, max_tokens=128, seed=0))]


def test_every_verb_that_starts_an_engine_has_a_file() -> None:
    verbs = ("generate", "ask", "chat", "serve", "batch", "models", "profile", "eval", "simulate", "estimate")
    have = [verb for verb in verbs if "--config" in app.app[verb].assemble_argument_collection()]
    assert have == ["generate", "ask", "chat", "serve", "batch", "profile", "eval"]


def test_instances_with_roles() -> None:
    flags = ("--prefill-parallel", "3", "--decode-parallel", "tp2", "--transfer-backends", "5")
    assert run("generate", "--prompt", "x", *flags) == 0
    names = ("parallel", "prefill_parallel", "decode_parallel", "transfer_backends")
    assert [FakeLLM.last.arguments[name] for name in names] == [None, "3", "tp2", 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "x", "--logprobs", "1"], "add --json"),
        (["--prompt", "x", "--stop-token-ids", "1;2"], "'1;2'"),
        (
            ["--prompt", "x", "--logit-bias", "5"],
            "--logit-bias must be of the form key=value, but '5' given",
        ),
        (["--prompt", "x", "--logit-bias", "five=1"], "'five=1'"),
        (["--prompt", "x", "--n", "0"], "--n must be"),
        (["--prompt", "x", "--token-ids", "1"], "but 2 given"),
        (["--prompt", ""], "empty"),
        (["--token-ids", ""], "empty"),
        (["--token-ids", "1,two"], "'1,two'"),
        (["--prompt-file", "no/such/file"], "no/such/file"),
        (["--prompt-file", "."], "cannot be read"),
        (["--prompt", "x", "--instances", "0"], "--instances must be at least 1, but 0 given"),
        (["--prompt", "x", "--parallel", "two"], "neither N nor [Nx][tpT][ppP]"),
        (["--prompt", "x", "--parallel", "pp2xtp2"], "neither N nor [Nx][tpT][ppP]"),
        (["--prompt", "x", "--pp", "0"], "--pp must be at least 1, but 0 given"),
        (["--prompt", "x", "--parallel", "2", "--instances", "2"], "give one of them"),
        (["--prompt", "x", "--parallel", "2", "--prefill-parallel", "1"], "--parallel and --prefill-parallel exclude"),
        (["--prompt", "x", "--tp", "2", "--decode-parallel", "1"], "--tp and --decode-parallel exclude"),
        (["--prompt", "x", "-o", "threshold"], "key=value"),
        (["--prompt", "x", "-o", "a=1", "-o", "a=2"], "twice"),
        (["--prompt", "x", "-o", "layout=striped", "--layout", "zigzag"], "give one of them"),
        (["--prompt", "x", "--top-p", "7"], "--top-p must"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens must"),
        (["--prompt", "x", "--max-tokens", "many"], "--max-tokens"),
        (["--prompt", "x", "--dtype", "int3"], "int3"),
        (["--prompt", "x", "--no-such-option"], "--no-such-option"),
        (["--prompt", "x", "a", "b"], "b"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("longspan: ")
    assert words in err


def test_without_any_prompt_a_terminal_is_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert run("generate") == 2
    assert "exactly one of --prompt, --prompt-file and --token-ids is needed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--prompt", "-"], ["--prompt-file", "-"]])
def test_the_prompt_comes_from_stdin(arguments: list[str], type_in: Callable[[str], None]) -> None:
    type_in("naïve\nprompt\n")
    assert run("generate", *arguments) == 0
    assert FakeLLM.last.asked[0][0] == "naïve\nprompt"


def test_an_empty_stdin_is_an_empty_prompt(type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    type_in("")
    assert run("generate") == 2
    assert capsys.readouterr().err == "longspan: the prompt is empty\n"


def test_several_outputs_follow_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "x", "--n", "2", "--temperature", "1") == 0
    assert capsys.readouterr().out == "The key is 42.\n\nThe key is 42.\n"


def test_json_has_all_outputs_and_logprobs_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    wishes = "--n 2 --temperature 1 --logprobs 1 --prompt-logprobs 1 --json"
    assert run("generate", "--prompt", "x", *wishes.split()) == 0
    result = json.loads(capsys.readouterr().out)
    tokens = [
        {"token_id": 7, "token": "a", "logprob": -0.5, "rank": 2},
        {"token_id": 8, "token": "b", "logprob": -0.25, "rank": 1},
    ]
    assert result["prompt_logprobs"] == [None, tokens]
    assert (result["cumulative_logprob"], result["logprobs"]) == (-2.5, [tokens] * 5)
    assert len(result["outputs"]) == 2
    for completion in result["outputs"]:
        assert completion == {name: result[name] for name in completion}


def test_a_prompt_file_that_is_not_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert run("generate", "--prompt-file", str(tmp_path / "binary")) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_a_schema_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    monkeypatch.setattr(Path, "read_text", denied)
    assert run("generate", "--prompt", "x", "--json-schema", str(schema)) == 2
    assert f"--json-schema {str(schema)!r} cannot be read (Permission denied)" in capsys.readouterr().err


def test_an_output_that_could_not_go_on_makes_the_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stuck(_: FakeLLM, prompt: str, params: SamplingParams) -> Iterator[Any]:
        last = output(prompt, params, 2)
        ended = replace(last.outputs[1], finish_reason="error", stop_reason="no token fits")
        yield replace(last, outputs=[last.outputs[0], ended], finished=True)

    monkeypatch.setattr(FakeLLM, "stream", stuck)
    assert run("generate", "--prompt", "x", "--n", "2", "--temperature", "1", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["outputs"][1]["stop_reason"] == "no token fits"
    assert err == "longspan: output 1 ended early: no token fits\n"


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (WorkerLostError(1, "killed by signal 9"), 1, "rank 1 was lost: killed by signal 9"),
        (ValueError("prompt has 9000 tokens"), 2, "prompt has 9000 tokens"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_while_streaming_shuts_down_and_sets_the_code(
    failure: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLLM, "failure", failure)
    assert run("generate", "--prompt", "x") == code
    out, err = capsys.readouterr()
    assert out == "The"
    assert words in err
    assert err.count("\n") == (1 if words else 0)
    assert FakeLLM.last.closed


def test_our_own_mistakes_keep_their_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "failure", ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        app.main(["generate", "--prompt", "x"])


@pytest.mark.parametrize("arguments", [["--version"], [], ["--help"], ["generate", "-h"], ["chat", "-h"]])
def test_information_goes_to_stdout_with_code_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    out, err = capsys.readouterr()
    assert ("longspan 0." in out) if arguments == ["--version"] else ("Usage: longspan" in out)
    assert err == ""


# A separate process whose engine streams one word a second and notes on stderr that it was shut down.
_SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
from types import SimpleNamespace
import longspan, longspan.cli.app
class Slow:
    max_model_len = 1000
    bytes_exchanged = bytes_between_hosts = {"total": 0}
    def __init__(self, *_, **__): pass
    def __enter__(self): return self
    def __exit__(self, *_): print("engine closed", file=sys.stderr, flush=True)
    def sparse_savings(self, _): return None
    def stream(self, *_):
        for count in range(1, int(sys.argv.pop()) + 1):
            time.sleep(0.05 if count < 3 else 1)
            yield SimpleNamespace(
                prompt_token_ids=[1], outputs=[SimpleNamespace(text="word " * count, token_ids=[], finish_reason=None)],
                metrics=SimpleNamespace(ttft_s=0.1, tbt_s=[0.1], kv_tokens_per_instance=[1, 2]))
longspan.LLM = Slow
longspan.cli.options.start_server = lambda: None
longspan.cli.app.main(["generate", "--prompt", "x"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_shut_the_engine_down(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == "word "
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (code, "engine closed\n")


# The command, which gets a signal while its modules are being imported.
_EARLY = """
import os, runpy, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
class Finder:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))
sys.meta_path.insert(0, Finder)
runpy.run_module("longspan", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "module"),
    [(signal.SIGINT, "longspan.cli.app"), (signal.SIGTERM, "cyclopts"), (signal.SIGHUP, "longspan.cli.serve")],
)
def test_a_signal_while_it_starts_ends_it_quietly(number: signal.Signals, module: str) -> None:
    command = [sys.executable, "-c", _EARLY, module, str(int(number))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == "word "
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "engine closed\n"
    assert process.wait(timeout=20) == 1


def test_the_table_is_shown_on_a_terminal_only_and_stdout_stays_plain() -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, "2"],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    out = process.communicate(timeout=20)[0]
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            shown += os.read(controller, 4096)
        except OSError:  # the other end is closed and all was read
            break
    os.close(controller)
    assert out == b"word word \n"
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    for label in ("tokens on instance 0", "time to first token", "median time between tokens", "bytes exchanged"):
        assert label in text


@pytest.mark.parametrize("arguments", [(), ("serve", "--num-prompts", "5"), ("--help",)])
def test_bench_says_where_to_look(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", *arguments) == 2
    assert "docs/benchmarking.md" in capsys.readouterr().err
