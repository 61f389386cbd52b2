"""`longspan batch` on a real engine: answers fit OpenAI's types and equal `generate`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from batch_files import COMPLETIONS, answers_in, write_requests
from engines import ThreadLLM
from fake_llm import run
from forked import Forked
from openai.types import Completion
from openai.types.chat import ChatCompletion

import longspan
from longspan import LLM, SamplingParams
from longspan.cli import app, options
from longspan.serve.convert import ServedModel
from longspan.serve.responses import answer_each
from longspan.serve.settings import ServerSettings

CHAT = "/v1/chat/completions"
PROMPTS = ["Once upon a time", "The capital of France is", "1, 2, 3,"]


class Answer(NamedTuple):
    tag: int
    status: int
    body: dict[str, Any]


@pytest.fixture
def llm(speaking: LLM) -> LLM:
    return speaking


def answers(llm: LLM, *bodies: tuple[str, dict[str, Any]], most: int = 2) -> list[Answer]:
    """In the order of the requests."""
    requests = ((tag, url, json.dumps(body).encode()) for tag, (url, body) in enumerate(bodies))
    served = ServedModel(input_processor=llm.input_processor, settings=ServerSettings(model_names=("m", "n")))
    found = (
        Answer(*answer) for answer in answer_each(llm, served, requests, max_groups=most, max_waiting_tokens=2**21)
    )
    return sorted(found, key=lambda answer: answer.tag)


def test_completions_equal_generate(llm: LLM) -> None:
    bodies = [{"model": "n", "prompt": text, "temperature": 0, "max_tokens": 6} for text in PROMPTS]
    found = answers(llm, *((COMPLETIONS, body) for body in bodies))
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
    for answer, output in zip(found, expected, strict=True):
        completion = Completion.model_validate(answer.body)
        assert answer.status == 200
        assert (completion.object, completion.model) == ("text_completion", "m")
        assert [choice.text for choice in completion.choices] == [output.outputs[0].text]
        assert completion.choices[0].finish_reason == output.outputs[0].finish_reason
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == len(output.prompt_token_ids)
        assert completion.usage.completion_tokens == 6


def test_several_prompts_choices_and_logprobs(llm: LLM) -> None:
    body = {"prompt": PROMPTS[:2], "n": 2, "seed": 1, "max_tokens": 4, "logprobs": 2, "echo": True}
    [answer] = answers(llm, (COMPLETIONS, body))
    choices = answer.body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"].startswith(PROMPTS[index // 2]) for index, choice in enumerate(choices)] == [True] * 4
    for choice in choices:
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None, "nothing comes before it"
        assert all(score <= 0 for score in others)
        assert len(others) + 1 == len(choice["logprobs"]["tokens"])


def test_lines_share_kv_within_a_cache_salt_only(llm: LLM) -> None:
    llm.reset_prefix_cache()
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}]
    bodies = [{"prompt": list(range(40)), "max_tokens": 2, **salt} for salt in salts]
    found = answers(llm, *((COMPLETIONS, body) for body in bodies), most=1)
    cached = [Completion.model_validate(answer.body).usage for answer in found]
    details = [usage.prompt_tokens_details for usage in cached if usage is not None]
    assert [one.cached_tokens for one in details if one is not None] == [0, 0, 0, 39, 39]


def test_chats_equal_the_chat_method(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 1}
    [answer] = answers(llm, (CHAT, body))
    chat = ChatCompletion.model_validate(answer.body)
    [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=5))  # type: ignore[arg-type]
    assert chat.choices[0].message.content == expected.outputs[0].text
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or ()) == 5


def test_a_grammar_that_cannot_go_on_is_its_senders_mistake(llm: LLM) -> None:
    stuck = {"prompt": "x", "max_tokens": 20, "structured_outputs": {"grammar": 'start: a\na: "x" a'}}
    refused, served = answers(llm, (COMPLETIONS, stuck), (COMPLETIONS, {"prompt": PROMPTS[0], "max_tokens": 3}))
    assert (refused.status, served.status) == (400, 200)
    error = refused.body["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
    assert "could not be completed" in error["message"]


def test_an_answer_has_the_form_that_was_asked_for(llm: LLM) -> None:
    body = {"prompt": PROMPTS[1], "structured_outputs": {"choice": ["Paris", "Rome"]}}
    [answer] = answers(llm, (COMPLETIONS, body))
    assert answer.body["choices"][0]["text"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("url", "body", "status", "param", "words"),
    [
        (
            COMPLETIONS,
            {"prompt": "x", "model": "gpt"},
            404,
            "model",
            "there is no model 'gpt' here, but m, n (--served-model-name)",
        ),
        (COMPLETIONS, {"prompt": "x", "stream": True}, 400, "stream", "leave it out"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "temperature", "-1"),
        (COMPLETIONS, {"prompt": [10**6]}, 400, "prompt", "not in the vocabulary"),
        (COMPLETIONS, {}, 400, "prompt", "must be given"),
        (CHAT, {"messages": []}, 400, "messages", "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "messages", "tokens"),
    ],
)
def test_refusals_equal_those_of_a_server(
    url: str, body: dict[str, Any], status: int, param: str, words: str, llm: LLM
) -> None:
    good = (COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    first, refused, last = answers(llm, good, (url, body), good, most=1)
    assert (first.status, last.status) == (200, 200)
    assert (refused.status, refused.body["error"]["param"]) == (status, param)
    assert words in refused.body["error"]["message"]


def test_a_prompt_that_the_policy_refuses_stops_no_other_request(tiny: Path) -> None:
    short, long = ({"prompt": [5] * length, "max_tokens": 1, "return_token_ids": True} for length in (9, 100))
    with ThreadLLM(
        str(tiny), instances=2, skip_tokenizer_init=True, block_size=16, num_gpu_blocks_override=4, policy="context"
    ) as llm:
        llm.check(long["prompt"])
        llm.set_policy("chunked", {})  # a request has to fit one of two instances now
        with pytest.raises(ValueError, match=r"length is 64 tokens.*has 100 tokens"):
            llm.check(long["prompt"])
        first, refused, last = answers(llm, (COMPLETIONS, short), (COMPLETIONS, long), (COMPLETIONS, short), most=1)
    assert (first.status, refused.status, last.status) == (200, 400, 200)
    assert refused.body["error"]["param"] == "prompt"


def main_on_threads(command: list[str]) -> None:
    """The command line with engines whose workers are threads."""
    vars(longspan)["LLM"], vars(options)["start_server"] = ThreadLLM, lambda: None
    app.main(command)


@pytest.mark.usefixtures("thread_llm")
def test_killed_and_run_again_a_batch_is_whole(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First in another process, then in this one."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, [[index + 3] for index in range(10)], 80)
    command = ["batch", str(tiny), "-i", str(source), "-o", str(target), "--dtype", "float32"]
    command += ["--skip-tokenizer-init", "--max-num-seqs", "1", "--threads-per-rank", "1"]
    killed = Forked(main_on_threads, command)
    deadline = time.monotonic() + 120
    while (not target.exists() or target.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(60)
    before = target.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert 2 <= kept.count(b"\n") < 10
    assert run(*command) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1 and "requests to answer" in shown.err
    after = target.read_bytes()
    assert after.startswith(kept)
    found = answers_in(target)
    assert len(found) == 10
    assert {len(tokens) for tokens in found.values()} == {80}


SEESAW = ["--policy", "seesaw", "--prefill-parallel", "pp2", "--decode-parallel", "tp2", "--threads-per-rank", "1"]
TINY = ["--skip-tokenizer-init", "--block-size", "16", "--num-gpu-blocks-override", "30"]


@pytest.mark.usefixtures("thread_llm")
def test_stats_of_a_run_with_phases(tiny: Path, tmp_path: Path) -> None:
    """Also when a request could not be served. The host limits the number of requests."""
    lengths = [8 + 5 * index for index in range(24)]
    write_requests(tmp_path / "in.jsonl", [[5 + length] * length for length in (*lengths, 3000)], 12)
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    files += ["--json-stats", str(tmp_path / "s.json")]
    assert run("batch", str(tiny), *files, *SEESAW, *TINY, "--host-kv-gib", "0.0008", "--max-num-seqs", "3") == 2
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats.keys() == {
        "throughput_tokens_per_s",
        "requests_per_s",
        "num_transitions",
        "transition_s",
        "weight_bytes_copied",
        "swap_bytes",
        "phase_s",
        "host_kv_peak_bytes",
    }
    assert stats["num_transitions"] >= 3 and len(stats["transition_s"]) == stats["num_transitions"]
    assert stats["weight_bytes_copied"] == 0 and stats["swap_bytes"] > 0
    assert 0.0004 * 2**30 < stats["host_kv_peak_bytes"] <= 0.0008 * 2**30
    assert stats["phase_s"].keys() == {"prefill", "decode", "transition"} and min(stats["phase_s"].values()) > 0
    assert stats["phase_s"]["transition"] == pytest.approx(sum(stats["transition_s"]))
    run_s = sum(stats["phase_s"].values())
    assert stats["requests_per_s"] * run_s == pytest.approx(24)
    assert stats["throughput_tokens_per_s"] * run_s == pytest.approx(sum(lengths) + 24 * 12)
