"""The official `openai` client against a real server: its requests are served, and errors have its classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import ThreadLLM
from fake_server import client_of, fake_of, make_server
from openai import OpenAI
from server_client import num_ended
from server_process import KEY, MAX_MODEL_LEN, MODEL, OTHER_NAME, ServerProcess

from longspan import LLM, SamplingParams
from longspan.serve.errors import EngineLostError, QueueFullError

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]
GREEDY: Any = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def server(tetris_server: ServerProcess) -> ServerProcess:
    return tetris_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return server.client.openai()


@pytest.fixture(scope="module")
def reference(calling_model: Path) -> Iterator[LLM]:
    with ThreadLLM(str(calling_model), max_model_len=MAX_MODEL_LEN, threads_per_rank=1) as llm:
        yield llm


def test_answers_are_those_of_python(client: OpenAI, reference: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [PROMPT, "Once upon a time", "def add(a, b):"]
    expected = [output.outputs[0] for output in reference.generate(prompts, params)]
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    assert [choice.finish_reason for choice in answer.choices] == [output.finish_reason for output in expected]
    ids = [reference.tokenize(prompt) for prompt in prompts]
    assert [choice.text for choice in client.completions.create(**GREEDY, prompt=ids, max_tokens=12).choices] == [
        output.text for output in expected
    ]
    one = client.completions.create(**GREEDY, prompt=ids[0], max_tokens=12)
    assert one.choices[0].text == expected[0].text
    [chat] = reference.chat(MESSAGES, params)
    said = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_completion_tokens=12)
    assert said.choices[0].message.content == chat.outputs[0].text
    assert said.usage is not None
    assert said.usage.prompt_tokens == len(chat.prompt_token_ids)


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    options: Any = {**GREEDY, "prompt": [PROMPT, "Once upon a time"], "max_tokens": 8}
    whole = client.completions.create(**options)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert usage is None, "the usage comes last"
        usage = chunk.usage
        assert (usage is not None) == (not chunk.choices)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 16


def test_a_chat_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    options: Any = {**GREEDY, "messages": MESSAGES, "max_tokens": 16}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 8, "it comes token by token"
    assert all(chunk.usage is None for chunk in chunks)


def test_the_clients_own_stream_reader_reads_streams(client: OpenAI) -> None:
    form: Any = {"structured_outputs": {"choice": ["blue"]}}
    with client.chat.completions.stream(**GREEDY, messages=MESSAGES, extra_body=form) as stream:
        assert "content.delta" in [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == "blue"


def test_several_choices_are_drawn_and_a_seed_draws_them_again(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "n": 3, "max_tokens": 12, "temperature": 1.0}
    first = client.chat.completions.create(**options, seed=7)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    again = client.chat.completions.create(**options, seed=7)
    assert [choice.message.content for choice in again.choices] == texts
    other = client.chat.completions.create(**options, seed=8)
    assert [choice.message.content for choice in other.choices] != texts


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0, "greedy takes the most likely token"
        assert all(before.logprob >= after.logprob for before, after in pairwise(entry.top_logprobs))
    assert (
        b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == answer.choices[0].message.content
    )


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI) -> None:
    """Requests of evaluation harnesses."""
    answer = client.completions.create(**GREEDY, prompt=PROMPT, echo=True, logprobs=2, max_tokens=0)
    [choice] = answer.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    tokens, scores, offsets = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset
    assert tokens is not None
    assert scores is not None
    assert offsets is not None
    assert scores[0] is None
    assert all(score is not None and score <= 0 for score in scores[1:])
    assert [PROMPT[begin:end] for begin, end in pairwise([*offsets, len(PROMPT)])] == tokens
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_stop_strings_end_an_answer_and_are_reported(client: OpenAI) -> None:
    free = client.completions.create(**GREEDY, prompt="One, two, three,", max_tokens=12).choices[0].text
    word = free.split()[1]
    choice = client.completions.create(**GREEDY, prompt="One, two, three,", max_tokens=12, stop=[word]).choices[0]
    assert choice.text == free[: free.index(word)]
    assert choice.finish_reason == "stop"
    assert choice.to_dict()["stop_reason"] == word


def test_a_json_schema_is_followed(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=64, response_format=form)
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"name", "count"}
    assert value["name"] in ("red", "green")
    assert 0 <= value["count"] <= 9
    assert answer.choices[0].finish_reason == "stop"
    choice: Any = {"structured_outputs": {"choice": ["blue", "yellow"]}}
    said = client.chat.completions.create(**GREEDY, messages=MESSAGES, extra_body=choice)
    assert said.choices[0].message.content in ("blue", "yellow")


def test_usage_reports_cached_tokens(client: OpenAI) -> None:
    prompt = [3 + i % 997 for i in range(700)]  # more than two blocks
    first, second = (client.completions.create(**GREEDY, prompt=prompt, max_tokens=2).usage for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.prompt_tokens == second.prompt_tokens == 700
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens is not None
    assert 512 <= second.prompt_tokens_details.cached_tokens < 700
    assert second.total_tokens == 702


def test_chats_of_two_users_share_the_system_prompt(client: OpenAI, reference: LLM) -> None:
    """To the token: it is no multiple of a block."""
    system = {
        "role": "system",
        "content": "You answer in one short sentence, politely, and never name colours or days. " * 9,
    }
    asked = "Tell me what a fjord is. " * 30, "How old is the Moon?"
    chats: Any = [[system, {"role": "user", "content": ask}] for ask in asked]
    expected = reference.chat(chats, SamplingParams(temperature=0, max_tokens=8))
    both = zip(*(output.prompt_token_ids for output in expected), strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
    assert shared > 100 and shared % 16 >= 8
    answers = [client.chat.completions.create(**GREEDY, messages=chat, max_tokens=8) for chat in chats]
    assert [one.choices[0].message.content for one in answers] == [one.outputs[0].text for one in expected]
    usage = answers[1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == shared


def test_tenants_with_a_cache_salt_share_no_kv(client: OpenAI) -> None:
    def cached(**salt: str) -> int:
        said = client.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": "Of salt. " * 40}], max_completion_tokens=2, extra_body=salt
        )
        assert said.usage is not None and said.usage.prompt_tokens_details is not None
        return said.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(cache_salt="tenant 1") == 0
    assert cached(cache_salt="tenant 2") == 0
    assert cached(cache_salt="tenant 1") > 80
    assert cached() < 20, "earlier prompts may share a beginning"
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        cached(cache_salt="")


def test_models_have_all_their_names(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, OTHER_NAME]
    assert client.completions.create(model=OTHER_NAME, prompt="x", max_tokens=1).model == OTHER_NAME


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"prompt": "x", "temperature": -1}, "temperature", "-1"),
        ({"prompt": "x", "n": 0}, "n", "0"),
        ({"prompt": "x", "max_tokens": -5}, "max_tokens", "-5"),
        ({"prompt": [[1, 2], [49_152]]}, "prompt[1]", "49152"),
        ({"prompt": "word " * 4200}, "prompt", "4096"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "continuations"),
        ({"prompt": "x", "best_of": 2}, "best_of", "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "--max-logprobs"),
        ({"prompt": "x", "logit_bias": {"49152": 1}}, "logit_bias", "49152"),
    ],
)
def test_mistakes_are_bad_requests_that_name_the_field(
    client: OpenAI, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, **options})
    code = "context_length_exceeded" if words == "4096" else "400"
    assert (caught.value.param, caught.value.type, caught.value.code) == (param, "invalid_request_error", code)
    assert words in caught.value.message


def test_a_mistake_in_a_stream_is_a_bad_request_too(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}] * 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=MESSAGES, tools=tools, stream=True)
    assert caught.value.param == "tools[0].function.name"
    audio: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=audio)
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[0].content")


def test_other_errors_have_their_classes(server: ServerProcess, client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client.openai("wrong").models.list()
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert caught.value.param == "model"
    assert "gpt-5" in caught.value.message
    hurry: Any = {"extra_headers": {"x-request-timeout": "0.05"}, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(**GREEDY, prompt="x", max_tokens=900, **hurry)
    assert late.value.status_code == 504
    assert "0.05 s" in late.value.message


def test_request_ids_go_both_ways(client: OpenAI) -> None:
    answer = client.completions.create(**GREEDY, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-1"})
    assert (answer.id, answer._request_id) == ("cmpl-mine-1", "mine-1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", n=0, extra_headers={"x-request-id": "mine-2"})
    assert caught.value.request_id == "mine-2"


def test_text_and_tokens(server: ServerProcess, reference: LLM) -> None:
    ask = server.client.ask
    tokens = ask("POST", "/tokenize", {"prompt": PROMPT}).body
    assert tokens["tokens"] == reference.tokenize(PROMPT)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), MAX_MODEL_LEN)
    assert ask("POST", "/detokenize", {"tokens": tokens["tokens"]}).body == {"prompt": PROMPT}
    chat = ask("POST", "/tokenize", {"messages": MESSAGES}).body["tokens"]
    assert chat == reference.tokenize(reference.render_chat(MESSAGES), add_special_tokens=False)


def test_metrics_count_served_requests(server: ServerProcess, client: OpenAI) -> None:
    before = server.client.wait_until_idle()
    client.completions.create(**GREEDY, prompt=[[5, 6, 7], [8, 9]], max_tokens=4, extra_body={"ignore_eos": True})
    client.completions.create(model=MODEL, prompt=[5, 6, 7, 8], n=3, max_tokens=2, extra_body={"ignore_eos": True})
    after = server.client.wait_for_more('instance_busy_seconds_total{instance="0"}', before)
    moved = {name: after[name] - before[name] for name in after}
    assert moved["prompt_tokens_total"] == 3 + 2 + 4
    assert moved["generation_tokens_total"] == 2 * 4 + 3 * 2
    assert num_ended(moved, "length") == num_ended(moved) == 5
    assert moved["time_to_first_token_seconds_count"] == moved["request_prompt_tokens_count"] == 3
    assert moved["e2e_request_latency_seconds_count"] == moved["request_generation_tokens_count"] == 5
    assert moved["inter_token_latency_seconds_count"] == 2 * 3 + 3 * 1
    assert (after["num_requests_running"], after["num_requests_waiting"], after["kv_cache_usage_perc"]) == (0, 0, 0)


def test_large_headers_are_refused(server: ServerProcess) -> None:
    ask = server.client.ask
    assert ask("GET", "/v1/models", x_filler="x" * 30_000).status == 200
    for size in (70_000, 700_000):  # in one piece, or in many, of which the server does not wait for the last
        with suppress(OSError):
            assert ask("GET", "/v1/models", x_filler="x" * size).status in (400, 431)
    assert ask("GET", "/v1/models").status == 200


def test_keys_are_known_to_the_api_server_only(server: ServerProcess) -> None:
    assert len(server.family) >= 2, "an engine core and a worker"
    for process in server.family:
        assert KEY not in " ".join(process.cmdline())
        assert KEY not in "".join(process.environ().values())
    assert KEY not in server.text()


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(QueueFullError("2 wait"), 503, "queue_full"), (EngineLostError("rank 1"), 500, "500")],
)
def test_a_fault_of_the_server_is_an_internal_server_error(failure: Exception, status: int, code: str) -> None:
    """Which the client by itself tries again."""
    server = make_server()
    fake_of(server).failure, fake_of(server).num_sent = failure, 0
    options: Any = {"base_url": "http://testserver/v1", "api_key": "x", "http_client": client_of(server)}
    with pytest.raises(openai.InternalServerError) as caught:
        OpenAI(**options, max_retries=0).completions.create(model="tiny", prompt=[1, 2])
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_stream_that_breaks_off_raises() -> None:
    server = make_server()
    fake_of(server).failure, fake_of(server).num_sent = EngineLostError("rank 1 is gone"), 1
    options: Any = {"base_url": "http://testserver/v1", "api_key": "x", "http_client": client_of(server)}
    stream = OpenAI(**options, max_retries=0).completions.create(
        model="tiny", prompt=[1, 2], stream=True, extra_body={"return_token_ids": True}
    )
    assert next(stream).choices[0].to_dict()["token_ids"] == [5]
    with pytest.raises(openai.APIError, match="rank 1 is gone"):
        next(stream)
