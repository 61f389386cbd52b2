"""Every error about a parameter names it and states a remedy: allowed values or an action."""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_llm
import pytest
import torch
from fake_llm import run
from fake_server import client_of, make_server
from refusals import REMEDY, refused

from longspan import LLM, SamplingParams
from longspan.core.request import check_length

PYTHON_NAME = re.compile(r"`|\b(max_tokens|decode_parallel|prefill_parallel|host_kv_gib)\b")
"""Names that a user of the command line does not give."""
LACKING = {
    ": file   is not UTF-8: ",
    ": file   cannot be read: ",
    ", but   cannot be read: ",
    " finds no candidate that can run",
    ":   cannot be used: ",
    ": ` ` cannot be used: ",
    ": this schema cannot be used:  2",
    ": grammar : their grammar 1",
    " contradicts a trace with arrival times",
    " is none of  , nor a file , ",
    # The remedy of these is in a variable, `but_given`.
    "is for exchange  ,  dense",
    "are for exchange  ,  weights",
    "is for exchange  , ",
}
"""Fixed words of the errors that state no remedy. An error may leave the list, and none may join it."""
ROLES = {"prefill_parallel": "2", "decode_parallel": "1"}
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"prefill_parallel": "2"}, "prefill_parallel"),
    ({"decode_parallel": "tp2"}, "decode_parallel"),
    (ROLES | {"parallel": "3"}, "parallel"),
    (ROLES | {"tp": 2}, "tp"),
    (ROLES | {"transfer_backends": 0}, "transfer_backends"),
    ({"parallel": "2xtp2", "transfer_backends": 3}, "transfer_backends"),
    *(({name: 2}, name) for name in ("parallel", "prefill_parallel", "decode_parallel")),
    *(({"parallel": spec}, "parallel") for spec in ("0", "", "-1", "tp0", "2xpp0", "1" * 5000, "9999x9")),
    (ROLES | {"decode_parallel": "0"}, "decode_parallel"),
    ({"parallel": "2", "tp": 2}, "parallel"),
    *(({name: value}, name) for name in ("instances", "tp", "pp") for value in (0, -1, 1.5, "2", True, [1], 10**9)),
    *(({name: "yes"}, name) for name in ("enforce_eager", "skip_tokenizer_init", "async_scheduling")),
    *(({name: value}, name) for name in ("block_size", "max_model_len", "max_num_seqs") for value in (0, "4k", 1.5)),
    *(({"kv_cache_memory_bytes": value}, "kv_cache_memory_bytes") for value in (0, -1, "1G")),
    *(({"host_kv_gib": value}, "host_kv_gib") for value in ("1", math.nan, None)),
    ({"quantization": "awq"}, "quantization"),
    ({"policy": "chunkd"}, "policy"),
    ({"policy": 5}, "policy"),
    ({"policy_options": "a=b"}, "policy_options"),
    ({"policy_options": {"foo": "1"}}, "policy_options"),
    ({"fractions": [0.5, 0.5]}, "fractions"),
    ({"target_tbt": "soon"}, "target_tbt"),
    ({"seed": "a"}, "seed"),
    ({"exchange": "ring_q"}, "exchange"),
    ({"device": "tpu"}, "device"),
    ({"device": "cuda"}, "device"),
    ({"dtype": "float16"}, "dtype"),
    ({"load_format": "gguf"}, "load_format"),
    ({"attention_backend": "fast"}, "attention_backend"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    *(({"step_timeout_s": seconds}, "step_timeout_s") for seconds in (0.0, -1.0, math.nan)),
]
"""Arguments that are wrong whatever the model, and the parameter that the error is about."""
OF_A_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"attention_backend": "native", "dtype": "float32"}, "attention_backend"),
    ({"parallel": "pp6"}, "pp"),
    ({"host_kv_gib": 1e-9}, "host_kv_gib"),
    ({"host_kv_gib": 1e6}, "host_kv_gib"),
    ({"host_kv_gib": 0.02, "enable_prefix_caching": False}, "host_kv_gib"),
]
UNKNOWN = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "instances",
    "gpu_memory_utilization": "kv_cache_memory_bytes",
    "swap_space": "host_kv_gib",
    "max_seq_len": "max_model_len",
    "max_num_batched_token": "max_num_batched_tokens",
}
"""Arguments that longspan lacks, and the argument that the error names."""
COMMANDS: list[tuple[str, str]] = [
    ("serve --parallel 0", "--parallel"),
    ("serve --parallel tp0", "--parallel"),
    ("serve --parallel 2 --tp 2", "--parallel|--tp"),
    ("serve --prefill-parallel 1", "--prefill-parallel|--decode-parallel"),
    ("serve --target-ttft 1 --max-accuracy-loss 1", "--target-ttft|--max-accuracy-loss"),
    ("serve --kv-cache-memory-bytes -1", "--kv-cache-memory-bytes"),
    ("serve --engine-timeout nan", "--engine-timeout"),
    ("serve --config /no/such.yaml", "--config"),
    ("serve --config .", "--config"),
    ("simulate llama-3-8b --hardware h100-sxm-80g --rate 1 -o foo=1", "--policy-option|foo"),
    ("serve -o foo", "--policy-option"),
    (
        "simulate llama-3-8b --hardware h100-sxm-80g --rate 1 --policy tetris --parallel 2 -o min_chunk=0",
        "-o min_chunk",
    ),
    ("serve --model x", "--model|argument"),
    ("serve a b", "'b'"),
    ("generate --prompt x --min-tokens 5 --max-tokens 2", "--min-tokens|--max-tokens"),
    ("generate --prompt-file /no/such", "--prompt-file"),
    ("generate --prompt-file .", "--prompt-file"),
    ("generate --token-ids a", "--token-ids"),
    ("generate --prompt x --logit-bias 5", "--logit-bias"),
    ("generate --prompt x --regex a --choice b", "--regex|--choice"),
    ("generate --prompt x --json-schema 5", "--json-schema"),
    ("generate --prompt x --tempreature 1", "--temperature"),
    ("generate --prompt x --max-new-tokens 1", "--max-tokens"),
    ("generate --prompt x --parallel auto", "--parallel|batch"),
    ("chat --chat-template /no/such", "--chat-template"),
    ("chat --n 2", "--n"),
    ("batch", "--input-file"),
    ("batch -i /no/such -o out", "--input-file"),
    ("batch -i . -o out", "--input-file"),
    ("profile --lengths 0", "--lengths"),
    ("profile --repeats 0", "--repeats"),
    ("eval --lengths ''", "--lengths"),
    ("eval --task perplexity --against /no/such", "--against"),
    ("eval --task perplexity --save /no/such/file", "--save"),
    ("tune csa x --out /no/such/file --max-minutes 1", "--out"),
    ("tune csa x --out t.json --max-minutes 1 --data /no/such", "--data"),
    ("tune csa x --out t.json --max-minutes 1 --policy chunked", "--policy"),
    ("simulate llama-3-8", "model|llama-3-8b"),
    ("simulate llama-3-8b --hardware h100", "--hardware"),
    ("simulate llama-3-8b --hardware h100-sxm-80g", "--workload|--rate"),
    ("simulate llama-3-8b --hardware h100-sxm-80g --offline --rate 2", "--rate|--offline"),
    ("simulate llama-3-8b --hardware h100-sxm-80g --rate 2 --workload /no/such.csv", "--workload"),
    ("simulate llama-3-8b --profile /no/such", "--profile"),
    ("estimate llama-3-8b --hardware h100-sxm-80g --context 0", "--context"),
    ("estimate llama-3-8b --hardware h100-sxm-80g --context 8K --cached 9K", "--context"),
    ("estimate llama-3-8b --hardware h100-sxm-80g --context 8K --link wifi", "--link"),
    ("estimate llama-3-8b --hardware h100-sxm-80g --context 8K --parallel 0", "--parallel"),
    ("estimate '' --hardware h100-sxm-80g --context 8K", "model"),
]
"""Command lines that end with status 2, and the texts that the error has: flags as the user gives them."""
BODIES: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": prompt}, "prompt") for prompt in (5, True, None, {}, "", [])),
    *(({"prompt": [prompt]}, "prompt[0]") for prompt in (None, 1.5, True, -1, [])),
    ({"messages": []}, "prompt"),
    ({"promt": "x"}, "prompt"),
    ({"prompt": [1], "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"prompt": [1], "max_tokens": 1000}, "max_tokens"),
    ({"prompt": [1], "stop": 5}, "stop"),
    ({"prompt": [1], "response_format": {}}, "response_format"),
    ({"prompt": [1], "logit_bias": [1]}, "logit_bias"),
]
"""Bodies of completions that are answered 400, and the field of the error."""
SOURCES = Path(__file__).parents[1] / "src"


@pytest.mark.parametrize(("arguments", "parameter"), ARGUMENTS, ids=str)
def test_wrong_arguments_are_refused_before_the_model_is_read(
    arguments: dict[str, Any], parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(parameter):
        LLM("no/such/model", **arguments)


@pytest.mark.parametrize(("arguments", "parameter"), OF_A_MODEL, ids=str)
def test_arguments_that_do_not_fit_the_model_are_refused(arguments: dict[str, Any], parameter: str, tiny: Path) -> None:
    with refused(parameter):
        LLM(str(tiny), skip_tokenizer_init=True, **arguments)


@pytest.mark.parametrize(("unknown", "known"), UNKNOWN.items())
def test_unknown_arguments_are_answered_with_the_known_one(unknown: str, known: str) -> None:
    with pytest.raises(TypeError, match=f"{unknown}.*: use {known}$"):
        LLM("no/such/model", **{unknown: 1})


@pytest.mark.parametrize(("unknown", "known"), UNKNOWN.items())
def test_unknown_flags_are_answered_with_the_known_one(
    unknown: str, known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown, known = (f"--{name.replace('_', '-')}" for name in (unknown, known))
    assert run("serve", "no/such/model", unknown, "1") == 2
    assert re.search(f"{unknown}: use {known}\n$", capsys.readouterr().err)


@pytest.mark.parametrize(("unknown", "known"), [("max_new_tokens", "max_tokens"), ("temp", "temperature")])
def test_unknown_sampling_parameters_are_answered_with_the_known_one(unknown: str, known: str) -> None:
    with pytest.raises(TypeError, match=f"{unknown}.*: use {known}$"):
        SamplingParams(**{unknown: 1})


@pytest.mark.parametrize(("line", "texts"), COMMANDS, ids=str)
def test_errors_of_commands_name_flags(
    line: str, texts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_llm.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(line)) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in texts.split("|")), error
    assert not PYTHON_NAME.search(error), f"a name in Python: {error}"
    assert REMEDY.search(error) or "Must be" in error or "exactly" in error, f"no remedy in: {error}"


def test_a_file_given_as_a_model_is_answered_with_its_folder(tiny: Path) -> None:
    with pytest.raises(ValueError, match=f"is a file.* give '{re.escape(str(tiny))}'"):
        LLM(str(tiny / "model.safetensors"))


def test_a_prompt_that_is_too_long_is_answered_with_a_way_to_find_a_model() -> None:
    with pytest.raises(ValueError, match=r"a model with a longer context, such as .* tokens"):
        check_length(100, 64)


@pytest.mark.parametrize(("body", "param"), BODIES, ids=str)
def test_errors_over_http_name_the_field_in_plain_words(body: dict[str, Any], param: str) -> None:
    response = client_of(make_server()).post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert not re.search("valid|Input should|Field required|`", error["message"]), error["message"]
    assert REMEDY.search(error["message"]), error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "remedy"),
    [("POST", "/v1/completion", 404, "/v1/completions"), ("GET", "/v1/completions", 405, "POST")],
)
def test_wrong_paths_and_methods_are_answered_with_the_right_one(
    method: str, path: str, status: int, remedy: str
) -> None:
    response = client_of(make_server()).request(method, path)
    assert response.status_code == status
    assert f"use {remedy}" in response.json()["error"]["message"]


def problems() -> Iterator[tuple[str, str]]:
    """Yield the place and the fixed words of each `ParameterError` whose text is written in its call."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ParameterError") and len(node.args) > 1:
                words = [part.value for part in ast.walk(node.args[1]) if isinstance(part, ast.Constant)]
                if words:
                    yield f"{path.relative_to(SOURCES)}:{node.lineno}", " ".join(map(str, words))


def test_errors_about_parameters_state_a_remedy() -> None:
    """Texts with most of their words in variables are left to the tests that raise them, see `refused`."""
    texts = {place: words for place, words in problems() if len(words.split()) > 3}
    assert len(texts) > 60
    lacking = {place: words for place, words in texts.items() if not REMEDY.search(words) and words not in LACKING}
    assert not lacking
