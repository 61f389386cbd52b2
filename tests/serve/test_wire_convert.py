"""Requests to jobs: every field arrives, defaults are OpenAI's, and errors name the field."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from wire_world import read, tokenizer, world

from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.serve.chat_requests import ChatCompletionRequest, TokenizeRequest
from longspan.serve.convert import (
    ServedModel,
    chat_request,
    completion_requests,
    detokenized,
    grammar_kind,
    structured_outputs,
    tokenized,
)
from longspan.serve.errors import WireError
from longspan.serve.requests import CompletionRequest, DetokenizeRequest
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import InputProcessor

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
SERVED = world()
SAMPLING: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"17": -3.5},
    "seed": 11,
    "stop": ["\n", "End"],
    "stop_token_ids": [4],
    "min_tokens": 2,
    "max_tokens": 9,
    "ignore_eos": True,
    "prompt_logprobs": 1,
}


def completion(**fields: Any) -> SamplingParams:
    return completion_requests(read(CompletionRequest, {"prompt": "a", **fields}), SERVED)[0].params


def chat(**fields: Any) -> SamplingParams:
    return chat_request(read(ChatCompletionRequest, {"messages": HELLO, **fields}), SERVED).params


def test_every_sampling_field_arrives() -> None:
    assert completion(**SAMPLING, logprobs=2) == SamplingParams(**SAMPLING, logprobs=2)
    assert chat(**SAMPLING, logprobs=True, top_logprobs=2) == SamplingParams(**SAMPLING, logprobs=2)


def test_the_cache_salt_of_a_request_goes_to_each_of_its_prompts() -> None:
    salted: dict[str, Any] = {"prompt": ["a", "b"], "cache_salt": "tenant"}
    assert [one.cache_salt for one in completion_requests(read(CompletionRequest, salted), SERVED)] == ["tenant"] * 2
    request = read(ChatCompletionRequest, {"messages": HELLO, "cache_salt": "tenant"})
    assert chat_request(request, SERVED).cache_salt == "tenant"
    assert chat_request(read(ChatCompletionRequest, {"messages": HELLO}), SERVED).cache_salt == ""


def test_defaults_are_openais() -> None:
    assert completion() == SamplingParams(temperature=1, max_tokens=16)
    assert chat() == SamplingParams(temperature=1, max_tokens=None)
    assert chat(logprobs=True).logprobs == 0
    assert completion(seed=-1).seed is None


def test_max_completion_tokens_counts_before_the_name_it_had() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize("most", [{}, {"max_tokens": 20}, {"max_tokens": 0}])
def test_min_tokens_must_not_exceed_max_tokens(most: dict[str, int]) -> None:
    assert completion(min_tokens=16, max_tokens=16).min_tokens == 16
    with pytest.raises(WireError, match="must be at most max_tokens") as caught:
        completion(min_tokens=21, **most)
    assert caught.value.param == "min_tokens"


def test_echo_scores_the_prompt_as_the_output() -> None:
    assert completion(logprobs=3).prompt_logprobs is None
    assert completion(echo=True).prompt_logprobs is None
    assert completion(echo=True, logprobs=3).prompt_logprobs == 3
    assert completion(echo=True, logprobs=0, max_tokens=0).prompt_logprobs == 0
    assert completion(echo=True, logprobs=3, prompt_logprobs=5).prompt_logprobs == 5


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": "{}"}}, {"json": "{}"}),
        ({"structured_outputs": {"json": {}}}, {"json": {}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ("yes", "no")}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}}, {"json_object": True}),
    ],
)
def test_the_form_of_outputs(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    form = None if expected is None else StructuredOutputsParams(**expected)
    assert structured_outputs(read(CompletionRequest, {"prompt": "a", **fields})) == form
    assert structured_outputs(read(ChatCompletionRequest, {"messages": HELLO, **fields})) == form


def test_a_schema_is_checked_concurrently_with_other_grammars() -> None:
    """Which may take seconds, and must hold up no other requests."""
    for fields, kind in (({}, "json_object"), ({"schema": None}, "json_object"), ({"schema": SCHEMA}, "json_schema")):
        asked = {"prompt": "a", "response_format": {"type": "json_object", **fields}}
        assert grammar_kind(read(CompletionRequest, asked)) == kind


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
            "response_format",
        ),
    ],
)
def test_a_form_that_cannot_be_used_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(WireError, match="cannot be used") as caught:
        completion(**fields)
    assert caught.value.param == param


def test_prompts_in_every_form() -> None:
    ids = tokenizer()("Hello world")["input_ids"]
    for prompt, texts in (
        ("Hello world", ["Hello world"]),
        (["Hello world", "Hello world"], ["Hello world"] * 2),
        (ids, [None]),
        ([ids, ids, ids], [None] * 3),
    ):
        engine_requests = completion_requests(read(CompletionRequest, {"prompt": prompt}), SERVED)
        assert [engine_request.text for engine_request in engine_requests] == texts
        assert all(engine_request.token_ids == tuple(ids) for engine_request in engine_requests)


def test_a_text_that_the_tokenizer_makes_nothing_of_is_named() -> None:
    knows_nothing = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    input_processor = InputProcessor(tokenizer=knows_nothing, vocab_size=1, max_model_len=9)
    served = ServedModel(
        input_processor=input_processor, settings=ServerSettings(model_names=("m",), limits=SERVED.settings.limits)
    )
    request = read(CompletionRequest, {"prompt": ["a", "€"]})
    with pytest.raises(WireError, match="tokenizer has no tokens for this text") as caught:
        completion_requests(request, served)
    assert caught.value.param == "prompt[1]"


def test_a_conversation_is_rendered_as_transformers_does() -> None:
    talk = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Well?", "name": "Ann"},
    ]
    plain = [{"role": "system", "content": "Be\nkind."}, talk[1], {"role": "assistant", "content": ""}, talk[3]]
    expected = tokenizer().apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert list(chat_request(read(ChatCompletionRequest, {"messages": talk}), SERVED).token_ids) == expected


def with_template(template: str) -> ServedModel:
    bare = type(tokenizer()).from_pretrained(tokenizer().name_or_path)
    bare.chat_template = template
    input_processor = InputProcessor(tokenizer=bare, vocab_size=len(bare), max_model_len=512)
    return ServedModel(input_processor=input_processor, settings=ServerSettings(model_names=("tiny",)))


def rendered(template: str, **fields: Any) -> str | None:
    return chat_request(read(ChatCompletionRequest, {"messages": HELLO, **fields}), with_template(template)).text


def test_templates_see_variables_calls_and_whatever_else_a_message_has() -> None:
    assert rendered("{{ mood }}", chat_template_kwargs={"mood": "calm"}) == "calm"
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "tool_calls": [call], "thought": "Hm."},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    template = (
        "{{ messages[0].tool_calls[0].function.arguments.a }} {{ messages[0].thought }} {{ messages[1].tool_call_id }}"
    )
    assert rendered(template, messages=messages) == "1 Hm. c1"
    broken = [{"role": "assistant", "tool_calls": [{**call, "function": {"name": "add", "arguments": "{a"}}]}]
    assert rendered("{{ messages[0].tool_calls[0].function.arguments }}", messages=broken) == "{a"


def test_the_end_of_a_conversation() -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}...{% endif %}"
    assert rendered(template) == "<Hello>..."
    assert rendered(template, add_generation_prompt=False) == "<Hello>"
    assert rendered(template, continue_final_message=True) == "<Hello"


@pytest.mark.parametrize("template", ["{{ 1 + messages[0].content }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"])
def test_a_template_that_fails_is_the_requests_mistake(template: str) -> None:
    with pytest.raises(WireError, match="chat template") as caught:
        rendered(template)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "conversation", "conversations", "messages", "tools"])
def test_variables_of_templates_cannot_take_over_the_rendering(name: str) -> None:
    with pytest.raises(WireError, match=name) as caught:
        rendered("x", chat_template_kwargs={name: True})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": [49152]}, "prompt", "not in the vocabulary"),
        ({"prompt": [[1], [49152]]}, "prompt[1]", "not in the vocabulary"),
        ({"prompt": "a " * 600}, "prompt", "shorten"),
        ({"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias", "token 49152"),
        ({"prompt": "a", "stop_token_ids": [49152]}, "stop_token_ids", "token 49152"),
    ],
)
def test_unsupported_features_of_the_model_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(WireError, match=words) as caught:
        completion_requests(read(CompletionRequest, fields), SERVED)
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_explicit_max_tokens_beyond_the_context_is_refused(name: str) -> None:
    talk = {"messages": HELLO}
    room = 512 - len(chat_request(read(ChatCompletionRequest, talk), SERVED).token_ids)
    assert chat_request(read(ChatCompletionRequest, {**talk, name: room}), SERVED).params.max_tokens == room
    for most in (room + 1, 1_000_000):
        with pytest.raises(WireError, match=rf"{name} is {most}, .*max_model_len is 512") as caught:
            chat_request(read(ChatCompletionRequest, {**talk, name: most}), SERVED)
        assert (caught.value.param, caught.value.status) == (name, 400)


def test_max_tokens_beyond_the_context_of_any_prompt_is_refused() -> None:
    def ask(**fields: Any) -> list[int | None]:
        engine_requests = completion_requests(read(CompletionRequest, {"prompt": [[5], [5] * 500], **fields}), SERVED)
        return [engine_request.params.max_tokens for engine_request in engine_requests]

    assert ask(max_tokens=12) == [12, 12]
    assert ask() == [16, 16], "the engine cuts a default length"
    assert ask(max_tokens=0, echo=True) == [1, 1]
    with pytest.raises(WireError, match="prompt of 500 tokens leaves 12") as caught:
        ask(max_tokens=13)
    assert (caught.value.param, caught.value.status) == ("max_tokens", 400)


def test_a_conversation_that_is_too_long() -> None:
    with pytest.raises(WireError, match=r"^This model's maximum context length is 512 tokens, .* shorten") as caught:
        chat_request(read(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a " * 600}]}), SERVED)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


class UntouchedTokenizer:
    """Fails when it has to tokenize or render."""

    is_fast, chat_template = True, "{{ messages }}"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "four": 1}

    def __call__(self, *_: object, **__: object) -> None:
        pytest.fail("it was tokenized")

    def apply_chat_template(self, *_: object, **__: object) -> str:
        return "x" * 33


@pytest.mark.parametrize(
    ("prompt", "param"), [("x" * 33, "prompt"), (["x", "x" * 33], "prompt[1]"), ("\N{PILE OF POO}" * 33, "prompt")]
)
def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(prompt: object, param: str) -> None:
    untouched = InputProcessor(tokenizer=cast("Any", UntouchedTokenizer()), vocab_size=9, max_model_len=8)
    served = ServedModel(input_processor=untouched, settings=ServerSettings(model_names=("tiny",)))
    with pytest.raises(
        WireError, match=r"length is 8 tokens.*has 33 characters, so more than 8 tokens .max_model_len.*shorten"
    ) as caught:
        completion_requests(read(CompletionRequest, {"prompt": prompt}), served)
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize("size", [4, 9])
def test_a_conversation_that_cannot_fit_is_refused_without_being_tokenized(size: int) -> None:
    """By its rendered text, or before that by its contents."""
    untouched = InputProcessor(tokenizer=cast("Any", UntouchedTokenizer()), vocab_size=9, max_model_len=8)
    served = ServedModel(input_processor=untouched, settings=ServerSettings(model_names=("tiny",)))
    parts = [{"type": "text", "text": "x" * size}] * 3
    talk = [{"role": "user", "content": parts}, {"role": "user", "content": "x" * size}]
    with pytest.raises(WireError, match=f"{36 if size == 9 else 33} characters") as caught:
        chat_request(read(ChatCompletionRequest, {"messages": talk}), served)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def test_a_text_as_long_as_all_tokens_may_be_is_tokenized() -> None:
    longest = max(map(len, tokenizer().get_vocab()))
    text = "a " * (512 * longest // 2)
    with pytest.raises(WireError, match=r"has \d+ tokens "):
        completion_requests(read(CompletionRequest, {"prompt": text}), SERVED)
    with pytest.raises(WireError, match=f"has {len(text) + 1} characters"):
        completion_requests(read(CompletionRequest, {"prompt": text + " "}), SERVED)


def test_tokens_there_and_back() -> None:
    answer = tokenized(read(TokenizeRequest, {"prompt": "Hi <|im_end|>!", "return_token_strs": True}), SERVED)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert detokenized(read(DetokenizeRequest, {"tokens": answer["tokens"]}), SERVED) == {"prompt": "Hi <|im_end|>!"}
    talk = tokenized(read(TokenizeRequest, {"messages": HELLO}), SERVED)
    assert tuple(talk["tokens"]) == chat_request(read(ChatCompletionRequest, {"messages": HELLO}), SERVED).token_ids
    with pytest.raises(WireError, match="vocabulary"):
        detokenized(read(DetokenizeRequest, {"tokens": [49152]}), SERVED)


def test_tokenized_texts_are_bounded_too() -> None:
    served = world(max_tokenize_length=3)
    assert tokenized(read(TokenizeRequest, {"prompt": "abc"}), served)["count"]
    assert detokenized(read(DetokenizeRequest, {"tokens": [5] * 3}), served)
    for refuse, param in (
        (lambda: tokenized(read(TokenizeRequest, {"prompt": "abcd"}), served), "prompt"),
        (lambda: tokenized(read(TokenizeRequest, {"messages": HELLO}), served), "messages"),
        (lambda: detokenized(read(DetokenizeRequest, {"tokens": [5] * 4}), served), "tokens"),
    ):
        with pytest.raises(WireError, match="--max-tokenize-length") as caught:
            refuse()
        assert (caught.value.param, caught.value.status) == (param, 400)


def test_without_a_tokenizer_only_token_ids_are_served() -> None:
    bare = ServedModel(
        input_processor=InputProcessor(tokenizer=None, vocab_size=9, max_model_len=8),
        settings=ServerSettings(model_names=("tiny",)),
    )
    assert completion_requests(read(CompletionRequest, {"prompt": [1, 2]}), bare)[0].token_ids == (1, 2)
    refused = [
        lambda: completion_requests(read(CompletionRequest, {"prompt": "a"}), bare),
        lambda: chat_request(read(ChatCompletionRequest, {"messages": HELLO}), bare),
        lambda: tokenized(read(TokenizeRequest, {"prompt": "a"}), bare),
        lambda: detokenized(read(DetokenizeRequest, {"tokens": [1]}), bare),
    ]
    for convert in refused:
        with pytest.raises(WireError, match="no tokenizer"):
            convert()
