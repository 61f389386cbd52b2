"""`longspan serve`: every flag from the command line, a variable or a file, errors, and keys."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_llm import run
from rich.console import Console
from tiny_models import make_tiny

from longspan.cli.app import app
from longspan.serve import run as server_run
from longspan.serve.errors import EngineLostError

pytestmark = pytest.mark.usefixtures("fake_llm")  # it puts signal handlers back
OPTIONS = {
    argument.name.lstrip("-").replace("-", "_"): argument
    for argument in app["serve"].assemble_argument_collection()
    if argument.name != "--config"
}
VALUES: dict[str, str | list[str]] = {
    "model": "some/model",
    "host": "0.0.0.0",
    "port": "8123",
    "api_key": ["one", "two"],
    "served_model_name": ["first", "second"],
    "root_path": "/api",
    "max_num_queued_reqs": "7",
    "max_num_queued_tokens": "7000",
    "engine_timeout": "20.5",
    "max_worker_restarts": "3",
    "request_timeout": "12.5",
    "body_timeout": "2.5",
    "max_total_body_bytes": "2000000",
    "h11_max_incomplete_event_size": "4096",
    "stream_keep_alive": "3.5",
    "timeout_keep_alive": "65",
    "allowed_origins": ["https://one.example", "https://two.example"],
    "reader_timeout": "4.5",
    "shutdown_timeout": "1.5",
    "metrics_prefix": "vllm:",
    "enable_auto_tool_choice": "false",
    "tool_call_parser": "mistral",
    "reasoning_parser": "qwen3",
    "chat_template": __file__,  # any text
    "record": "requests.jsonl.gz",
    "otlp_traces_endpoint": "http://localhost:4317",
    "seed": "5",
    "parallel": "2",
    "prefill_parallel": "2",
    "decode_parallel": "tp2",
    "transfer_backends": "3",
    "instances": "3",
    "tp": "2",
    "pp": "1",
    "host_kv_gib": "1.5",
    "disk_kv_gib": "2.5",
    "disk_kv_dir": "some/kv",
    "executor": "ray",
    "ray_address": "10.0.0.1:6379",
    "topology": "racks.toml",
    "threads_per_rank": "3",
    "device": "cuda",
    "dtype": "bfloat16",
    "attention_backend": "torch",
    "quantization": "int8",
    "enforce_eager": "true",
    "load_format": "dummy",
    "skip_tokenizer_init": "true",
    "trust_remote_code": "true",
    "policy": "context",
    "tune_idle": "true",
    "exchange": "alltoall",
    "layout": "striped",
    "fractions": "0.6,0.4",
    "csa": str(Path(__file__).parents[1] / "support" / "csa.yaml"),
    "max_accuracy_loss": "2.5",
    "target_ttft": "20.5",
    "target_tbt": "0.05",
    "policy_option": ["threshold=2000", "other=1"],
    "log_level": "debug",
    "log_format": "json",
    "access_log": "false",
    "max_model_len": "4096",
    "block_size": "16",
    "max_num_batched_tokens": "512",
    "max_num_seqs": "4",
    "kv_cache_memory_bytes": "1000000",
    "num_gpu_blocks_override": "77",
    "enable_prefix_caching": "false",
    "async_scheduling": "false",
    "step_timeout": "33.5",
    "trace": "run.json",
    "report": "run.html",
    "max_body_bytes": "5000",
    "max_nesting": "5",
    "max_elements": "5001",
    "max_tokenize_length": "5002",
    "max_prompts": "6",
    "max_messages": "7",
    "max_n": "8",
    "max_choices": "80",
    "max_logprobs": "9",
    "max_stop_strings": "10",
    "max_stop_length": "11",
    "max_stop_token_ids": "12",
    "max_logit_bias": "13",
}
NEEDED = {
    "prefill_parallel": ("--decode-parallel", "1"),
    "decode_parallel": ("--prefill-parallel", "1"),
    "transfer_backends": ("--prefill-parallel", "1", "--decode-parallel", "1"),
    "tune_idle": ("--policy", "runahead", "--parallel", "2"),
}
"""Flags that need other flags."""
APART = (*NEEDED, "parallel", "instances", "tp", "pp", "csa", "target_ttft")
"""Options that exclude options in `VALUES`."""
Started = tuple[Any, Any]


@pytest.mark.parametrize(
    ("host", "key", "words"),
    [
        ("127.0.0.1", None, None),
        ("localhost", None, None),
        ("::1", None, None),
        ("0.0.0.0", None, "there is no --api-key: any client that reaches 0.0.0.0 port 8000 can send requests"),
        ("127.0.0.1", "", "LONGSPAN_API_KEY is empty, so there is no key: any client that reaches 127.0.0.1"),
        ("0.0.0.0", "", "LONGSPAN_API_KEY is empty"),
        ("0.0.0.0", "sesame", None),
    ],
)
def test_a_server_that_is_open_says_so(
    host: str,
    key: str | None,
    words: str | None,
    started: list[Started],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if key is not None:
        monkeypatch.setenv("LONGSPAN_API_KEY", key)
    assert run("serve", "--host", host) == 0
    assert len(started) == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (words is None) == (not said)
    assert words is None or said[0].startswith(words)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The arguments of started servers: engine setup and settings."""
    calls: list[Started] = []

    async def serve(setup: Any, settings: Any) -> int:
        calls.append((setup, settings))
        return 0

    monkeypatch.setattr(server_run, "serve", serve)
    for name in [name for name in os.environ if name.startswith("LONGSPAN_") and name != "LONGSPAN_CACHE"]:
        monkeypatch.delenv(name)
    return calls


def seen(call: Started) -> tuple[Any, ...]:
    """Return its comparable fields. Tracers count as equal."""
    setup, settings = call
    fields = {name: value for name, value in vars_of(settings).items() if name != "tracer"}
    return setup, fields, settings.tracer is not None


def vars_of(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def arguments(name: str, value: str | list[str]) -> list[str]:
    option = OPTIONS[name]
    if name == "model":
        return [str(value)]
    if value in ("true", "false"):
        return [option.name if value == "true" else option.negatives[0]]
    return [word for one in ([value] if isinstance(value, str) else value) for word in (option.name, one)]


def by_variable(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, str | list[str]]) -> list[str]:
    for name, value in values.items():
        monkeypatch.setenv(f"LONGSPAN_{name.upper()}", value if isinstance(value, str) else json.dumps(value))
    return []


def by_file(folder: Path, values: Mapping[str, str | list[str]]) -> list[str]:
    """Write numbers and truth values in YAML's types. Keys are flags without dashes in front."""
    content = {}
    for name, value in values.items():
        typed = value if isinstance(value, list) or value.endswith(":") else yaml.safe_load(value)
        content[OPTIONS[name].name.lstrip("-")] = typed
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return ["--config", str(folder / "config.yaml")]


def test_there_is_a_value_for_every_flag() -> None:
    assert set(VALUES) == set(OPTIONS)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.cli.serve._tracer", lambda endpoint: endpoint)


@pytest.mark.usefixtures("traced")
def test_every_flag_changes_the_settings(started: list[Started]) -> None:
    for given in ([], *([*NEEDED.get(name, ()), *arguments(name, VALUES[name])] for name in OPTIONS)):
        assert run("serve", *given) == 0
    default, *changed = map(seen, started)
    assert [name for name, settings in zip(OPTIONS, changed, strict=True) if settings == default] == []


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("names", [*([name] for name in APART), [name for name in VALUES if name not in APART]])
def test_flags_variables_and_a_file_give_the_same_settings(
    names: list[str], started: list[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All options that exclude no other option are given at once. Each of them has an effect, see the test above."""
    needed, values = NEEDED.get(names[0], ()), {name: VALUES[name] for name in names}
    flags = [word for name, value in values.items() for word in arguments(name, value)]
    assert run("serve", *needed, *flags) == 0
    assert run("serve", *needed, *by_file(tmp_path, values)) == 0
    assert run("serve", *needed, *by_variable(monkeypatch, values)) == 0
    by_flags, *others = map(seen, started)
    assert others == [by_flags, by_flags]


def test_flags_count_before_variables_before_the_file(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max_num_seqs: 1\nmax-num-batched-tokens: 10\nblock_size: 32\nenable-prefix-caching: false\n")
    monkeypatch.setenv("LONGSPAN_CONFIG", str(file))
    monkeypatch.setenv("LONGSPAN_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("LONGSPAN_MAX_NUM_BATCHED_TOKENS", "20")
    assert run("serve", "--max-num-seqs", "3", "--enable-prefix-caching") == 0
    found = started[0][0].engine
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.block_size) == (3, 20, 32)
    assert (found.enable_prefix_caching, found.max_model_len) == (True, None)


KUBERNETES = {
    "LONGSPAN_SERVICE_HOST": "10.0.0.1",
    "LONGSPAN_SERVICE_PORT": "8123",
    "LONGSPAN_SERVICE_PORT_HTTP": "8123",
    "LONGSPAN_PORT": "tcp://10.0.0.1:8123",
    **{
        f"LONGSPAN_PORT_8123_{protocol.upper()}{name}": value
        for protocol in ("tcp", "udp", "sctp")
        for name, value in {
            "": f"{protocol}://10.0.0.1:8123",
            "_PROTO": protocol,
            "_PORT": "8123",
            "_ADDR": "10.0.0.1",
        }.items()
    },
}
"""Variables in containers with a Service named longspan."""


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8123", "udp://10.0.0.1:8123", "tcp://[fd00::1]:8123"])
def test_variables_of_kubernetes_change_nothing_and_one_is_logged(
    address: str, started: list[Started], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert run("serve") == 0
    for name, value in (KUBERNETES | {"LONGSPAN_PORT": address}).items():
        monkeypatch.setenv(name, value)
    assert run("serve") == 0
    assert started[0] == started[1]
    [record] = [record for record in caplog.records if "Kubernetes" in record.message]
    assert "LONGSPAN_PORT is ignored" in record.message
    assert run("serve", "--port", "8124") == 0
    assert started[2][1].port == 8124


def test_kubernetes_sets_no_other_variable_of_a_flag() -> None:
    variables = {name for option in OPTIONS.values() for name in option.parameter.env_var}
    assert variables & KUBERNETES.keys() == {"LONGSPAN_PORT"}
    assert not [name for name in variables - {"LONGSPAN_PORT"} if re.search(r"_SERVICE_|_PORT$|_PORT_\d", name)]


def test_another_port_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGSPAN_PORT", "http://10.0.0.1:8123")
    assert "LONGSPAN_PORT: must be a whole number" in failure(capsys)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("my model", ("my model",)),
        ('["my model", "a, b"]', ("my model", "a, b")),
        ('["[x"]', ("[x",)),
        ("", ("smollm2-135m",)),
    ],
)
def test_a_variable_of_a_repeatable_flag_has_one_text_or_a_list(
    text: str, names: tuple[str, ...], started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_SERVED_MODEL_NAME", text)
    assert run("serve") == 0
    assert started[0][1].model_names == names


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    "text", ["[sk-secret", '[["sk-secret"]]', '["sk-secret", null]', '["sk-secret", 1]', "[" * 100_000]
)
def test_a_variable_that_is_no_list_is_refused_but_not_repeated(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGSPAN_API_KEY", text)
    line = failure(capsys)
    assert "LONGSPAN_API_KEY" in line
    assert "secret" not in line


def test_a_file_may_say_a_repeatable_flag_once_or_as_a_mapping(started: list[Started], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "served-model-name: only\npolicy: context\no: {threshold: 2000}\nparallel: 2\nrequest-timeout: null\n"
    )
    assert run("serve", "--config", str(file)) == 0
    setup, settings, *_ = started[0]
    assert settings.model_names == ("only",)
    assert settings.request_timeout_s is None
    assert setup.engine.policy_options == {"threshold": "2000"}
    assert setup.engine.parallel == "2"


def test_defaults_bind_to_this_machine_and_bound_the_queue(started: list[Started]) -> None:
    assert run("serve") == 0
    setup, settings = started[0]
    assert (setup.engine.model, settings.model_names) == ("smollm2-135m", ("smollm2-135m",))
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert setup.max_num_queued_reqs
    assert setup.max_num_queued_tokens
    assert not setup.engine.trust_remote_code


def failure(capsys: pytest.CaptureFixture[str], *given: str, code: int = 2) -> str:
    """The one line that a mistake is answered with."""
    assert run("serve", *given) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:10]) == ("", 1, "longspan: "), err
    return err


WRONG = [
    ("port", "http", "http"),
    ("max_num_queued_reqs", "0", "0"),
    ("max_num_queued_tokens", "many", "many"),
    ("request_timeout", "0", "0"),
    ("shutdown_timeout", "-1", "-1"),
    ("h11_max_incomplete_event_size", "10", "10"),
    ("dtype", "int3", "int3"),
    ("parallel", "2x", "2x"),
    ("root_path", "api", "'api'"),
    ("metrics_prefix", "a-b", "'a-b'"),
    ("tool_call_parser", "qwen", "qwen"),
    ("reasoning_parser", "qwen", "qwen"),
    ("chat_template", "no/such/file", "no/such/file"),
    ("max_n", "0", "0"),
    ("max_body_bytes", "1.5", "1.5"),
    ("otlp_traces_endpoint", "localhost", "'localhost'"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
@pytest.mark.usefixtures("started")
def test_mistakes_name_the_flag_and_the_value_wherever_they_come_from(
    name: str,
    value: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flag = OPTIONS[name].name
    ways: list[Callable[[], list[str]]] = [
        lambda: [flag, value],
        lambda: by_file(tmp_path, {name: value}),
        lambda: by_variable(monkeypatch, {name: value}),
    ]
    for way in ways:
        line = failure(capsys, *way())
        assert flag.lstrip("-") in line
        assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-length: 5", "'max-model-length'"),
        ("config: other.yaml", "'config'"),
        ("1: 2", "1"),
        ("- port", "must map"),
        ("port: [1, 2]", "port"),
        ("port: {a: 1}", "port"),
        ("api-key: [[secret]]", "api-key"),
        ("a: [", "line 2"),
        ("api-key: secret\n  x: y: z", "line 2"),
        ("port: true", "True"),
        ("api-key: [secret, null]", "api-key must be texts or numbers"),
        ("o: {threshold: null}", "o must be texts or numbers"),
        ("served-model-name: 2026-01-02", "served-model-name must be texts or numbers"),
        ("port: " + "[" * 100_000, "cannot be read"),
    ],
)
@pytest.mark.usefixtures("started")
def test_mistakes_in_a_file_name_it_and_repeat_no_secret(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(text + "\n")
    line = failure(capsys, "--config", str(tmp_path / "c.yaml"))
    assert words in line
    assert "secret" not in line


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
@pytest.mark.usefixtures("started")
def test_a_file_that_cannot_be_read_is_named(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "c.yaml").write_bytes(content)
    assert "c.yaml" in failure(capsys, "--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak"])
@pytest.mark.usefixtures("started")
def test_a_key_that_no_client_can_send_is_refused_but_not_repeated(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failure(capsys, "--api-key", key)
    assert "--api-key" in line
    assert not key or key not in line


def test_keys_are_in_no_help_and_in_no_other_process(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "c.yaml").write_text("api-key: sk-from-file\nmax-num-seqs: 123456\n")
    monkeypatch.setenv("LONGSPAN_API_KEY", "sk-from-variable")
    assert run("serve", "--config", str(tmp_path / "c.yaml"), "--help") == 0
    shown = capsys.readouterr().out
    assert "LONGSPAN_API_KEY" in shown
    assert "sk-from" not in shown
    assert run("serve", "--config", str(tmp_path / "c.yaml")) == 0
    setup, settings, *_ = started[0]
    assert settings.api_keys == ("sk-from-variable",)
    assert "sk-" not in repr(setup) + repr(settings)
    assert "LONGSPAN_API_KEY" not in os.environ


def test_help_shows_every_flag_and_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_console", Console(width=300, color_system=None))
    assert run("serve", "--help") == 0
    shown = capsys.readouterr().out
    for name, option in OPTIONS.items():
        assert f"LONGSPAN_{name.upper()}" in shown
        assert name == "model" or option.name in shown
        assert option.parameter.help


def test_an_address_that_is_taken_is_named_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}" in failure(capsys, "--port", port)
    assert "127.0.0.1:70000" in failure(capsys, "--port", "70000")
    assert "192.0.2.1" in failure(capsys, "--host", "192.0.2.1")  # an address of documentation, so not ours


def test_refusals_by_the_engine_name_the_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It knows the parameter by its name in Python, in another process."""
    folder = make_tiny("llama", tmp_path)
    flags = ("--dtype", "float32", "--skip-tokenizer-init", "--disk-kv-gib", "1", "--port", "0")
    assert run("serve", str(folder), *flags) == 2
    assert "longspan: --disk-kv-gib 1 needs " in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_no_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(*_: object) -> int:
        raise EngineLostError("the engine core ended with code 1")

    monkeypatch.setattr(server_run, "serve", serve)
    assert "ended with code 1" in failure(capsys, code=1)


def test_tracing_without_its_packages_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "longspan.serve.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    line = failure(capsys, "--otlp-traces-endpoint", "http://localhost:4317")
    assert "pip install 'longspan[otel]'" in line
    assert "opentelemetry" in line


def test_the_setup_of_the_engine_is_plain_data(started: list[Started]) -> None:
    """It crosses a pipe as JSON."""
    import msgspec

    assert run("serve", "--parallel", "2", "-o", "threshold=5", "--policy", "context") == 0
    setup = started[0][0]
    assert msgspec.json.decode(msgspec.json.encode(setup), type=type(setup)) == setup
    assert json.loads(msgspec.json.encode(setup))["engine"]["model"] == "smollm2-135m"
