"""Bodies to requests: the OpenAPI schema describes exactly the accepted bodies, and errors name a field in one line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from wire_world import read, world

from longspan.serve.apis.messages_requests import CountTokensRequest, MessagesRequest
from longspan.serve.apis.responses_requests import ResponsesRequest
from longspan.serve.chat_requests import ChatCompletionRequest, TokenizeRequest
from longspan.serve.convert import chat_request, completion_requests, read_request
from longspan.serve.errors import WireError
from longspan.serve.requests import UNSERVED, CompletionRequest, DetokenizeRequest
from longspan.serve.settings import RequestLimits

LIMITS = RequestLimits(max_n=5, max_prompts=3, max_stop_strings=2, max_stop_length=4, max_logit_bias=2, max_messages=4)
HELLO = [{"role": "user", "content": "Hello"}]
TOKEN_LISTS = st.lists(st.lists(st.integers(-1, 9), max_size=3), max_size=4)
PROMPTS: st.SearchStrategy[Any] = st.text(max_size=5) | st.lists(st.text(max_size=2), max_size=4)
PROMPTS |= (
    st.lists(st.integers(-1, 9), max_size=4) | TOKEN_LISTS | st.sampled_from([None, 5, True, {}, ["a", 1], [1, "a"]])
)
ODD = st.sampled_from([None, "", "1", True, [], {}, -1, 0, 0.5, [0], ["a", None], 2**31, "a" * 5])
"""Wrong values for any field."""

COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(max_size=3),
    "n": st.integers(-1, 7),
    "temperature": st.sampled_from([0, 0.0, 0.7, 2, 1e308, -0.1]),
    "top_p": st.sampled_from([0, 1e-9, 0.5, 1, 1.1]),
    "top_k": st.integers(-3, 3),
    "min_p": st.sampled_from([0, 0.5, 1, -0.1, 1.1]),
    "presence_penalty": st.sampled_from([-2, 2, 2.1]),
    "frequency_penalty": st.sampled_from([-2, 2, -2.1]),
    "repetition_penalty": st.sampled_from([0, 0.001, 1.5, 1000, 1001]),
    "logit_bias": st.dictionaries(
        st.sampled_from(["0", "17", "017", "-1", "a", " 1", "1234567890"]), st.floats(-101, 101)
    ),
    "seed": st.sampled_from([-2, -1, 0, 2**63 - 1, 2**63]),
    "stop": st.text(max_size=5) | st.lists(st.text(max_size=5), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 5), max_size=3),
    "min_tokens": st.integers(-1, 99),
    "ignore_eos": st.booleans(),
    "prompt_logprobs": st.integers(-1, 22),
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats", "x"]), st.booleans()),
    "add_special_tokens": st.booleans(),
    "cache_salt": st.text(max_size=2),
    "return_token_ids": st.booleans(),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_object", "schema": {"type": "array"}},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
            {"type": "json_schema", "json_schema": {"schema": {}}},
            {"type": "xml"},
        ]
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object", "x"]),
        st.sampled_from([None, True, False, "a", "", ["a"], [], {}]),
        max_size=3,
    ),
}
CONTENT = st.sampled_from(
    ["", "Hi", None, 1, [], [{"type": "text", "text": "Hi"}], [{"type": "image_url"}], [{"text": "a"}]]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "critic", "", 1])},
    optional={
        "content": CONTENT,
        "name": st.sampled_from(["a", None, 1]),
        "tool_call_id": st.sampled_from(["a", None]),
        "tool_calls": st.sampled_from(
            [None, [], [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}], [{"id": "a"}]]
        ),
    },
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = st.sampled_from(
    [
        *([], [TOOL], [{"type": "function", "function": {"name": "f", "strict": True}}], [TOOL, 1], [{"type": "web"}]),
        *([{"type": "function", "function": {"name": name}}] for name in ("", "f" * 65, None)),
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
    ]
)
CHAT = {
    "tools": TOOLS,
    "tool_choice": st.sampled_from(
        ["none", "auto", "required", "any", {"type": "function", "function": {"name": "f"}}]
    ),
    "parallel_tool_calls": st.booleans(),
    "max_tokens": st.integers(-1, 5),
    "max_completion_tokens": st.integers(-1, 5),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-1, 22),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.sampled_from([{}, {"mood": "calm"}]),
}
COMPLETION = {"max_tokens": st.integers(-1, 5), "echo": st.booleans(), "logprobs": st.integers(-1, 22)}
TOKENIZE = {
    "prompt": st.text(max_size=3),
    "messages": st.lists(MESSAGE, max_size=2),
    "return_token_strs": st.booleans(),
    "tools": TOOLS,
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
}


TOGETHER = (
    ("response_format", "structured_outputs"),
    ("logprobs", "top_logprobs"),
    ("tools", "tool_choice"),
    ("tools", "tool_choice", "structured_outputs"),
    ("add_generation_prompt", "continue_final_message"),
    ("prompt", "messages", "add_generation_prompt", "continue_final_message"),
)
"""Fields that are right or wrong together."""


def bodies(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """With few optional fields, of which one may be odd, so that many are right."""
    fields = required | optional
    groups = [group for group in TOGETHER if fields.keys() >= set(group)]
    chosen = st.lists(st.sampled_from(sorted(optional)), max_size=2, unique=True)
    chosen = st.one_of(chosen, *([st.sampled_from(groups)] if groups else []))
    right = chosen.flatmap(lambda names: st.fixed_dictionaries(required | {name: fields[name] for name in names}))
    odd = st.dictionaries(st.sampled_from(sorted(fields)), ODD, max_size=1)
    return st.builds(lambda fields, wrong: fields | wrong, right, odd) | right


def accepts(model: type[BaseModel], body: dict[str, Any]) -> bool:
    """Return whether a request is served, or refused for a reason outside the schema."""
    served = world(**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__})
    try:
        request = read(model, body, LIMITS)
        if isinstance(request, CompletionRequest):
            completion_requests(request, served)
        elif isinstance(request, ChatCompletionRequest):
            chat_request(request, served)
        else:
            for name in type(request).model_fields:
                LIMITS.check_field(name, getattr(request, name))
    except ValueError as error:
        beyond = (
            "vocabulary",
            "has no token for",
            "this model's token ids",
            "chat template",
            "of templates",
            "final message",
            "cannot be used",
            "must not exceed max_tokens",
        )
        return any(words in str(error) for words in beyond)
    return True


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (CompletionRequest, bodies({"prompt": PROMPTS}, COMMON | COMPLETION)),
        (ChatCompletionRequest, bodies({"messages": st.lists(MESSAGE, max_size=5)}, COMMON | CHAT)),
        (TokenizeRequest, bodies({}, TOKENIZE)),
        (
            DetokenizeRequest,
            bodies({"tokens": st.lists(st.integers(-1, 5), max_size=3)}, {"model": st.text(max_size=2)}),
        ),
    ],
)
@pytest.mark.parametrize("num_examples", [100, pytest.param(400, marks=pytest.mark.full)])
def test_the_schema_describes_exactly_the_accepted_requests(
    model: type[BaseModel], strategy: st.SearchStrategy[dict[str, Any]], num_examples: int
) -> None:
    schema = LIMITS.narrowed(model.model_json_schema())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)

    outcomes = set()

    @settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(strategy)
    def law(body: dict[str, Any]) -> None:
        accepted = accepts(model, body)
        outcomes.add(accepted)
        assert accepted == validator.is_valid(body)

    law()
    assert outcomes == {True, False}


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_null_is_as_if_a_field_was_not_given(model: type[BaseModel]) -> None:
    needed: dict[str, Any] = {"prompt": "a"} if model is CompletionRequest else {"messages": HELLO}
    nulls = dict.fromkeys(model.model_fields, None)
    assert read(model, nulls | needed) == read(model, needed)


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        (CompletionRequest, {"prompt": "a"}),
        (ChatCompletionRequest, {"messages": HELLO}),
        (TokenizeRequest, {"messages": HELLO}),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_unless_neutral(
    model: type[BaseModel], needed: dict[str, Any]
) -> None:
    for name, (neutral, instead) in UNSERVED.items():
        if name in model.model_fields:
            continue
        for value in (None, *neutral):
            assert read(model, {**needed, name: value}) == read(model, needed)
        with pytest.raises(WireError) as caught:
            read(model, {**needed, name: ["anything", {"else": 1}]})
        assert (caught.value.param, caught.value.status) == (name, 400)
        assert str(caught.value) == f"{name}: it is not supported: {instead}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_regex", "a+"), ("custom_logit_processor", "x"), ("return_hidden_states", True), ("lora_path", "x")],
)
def test_unsupported_fields_of_other_servers_are_refused(name: str, value: object) -> None:
    with pytest.raises(WireError, match="not supported") as caught:
        read(CompletionRequest, {"prompt": "a", name: value})
    assert caught.value.param == name


def test_fields_that_only_chats_have_are_refused_elsewhere() -> None:
    for name, wrong in (("top_logprobs", 2), ("max_completion_tokens", 5), ("chat_template_kwargs", {"a": 1})):
        with pytest.raises(WireError) as caught:
            read(CompletionRequest, {"prompt": "a", name: wrong})
        assert (caught.value.param, caught.value.status) == (name, 400)
    both = {"prompt": "a", "max_tokens": 5, "max_completion_tokens": 5}
    assert read(CompletionRequest, both).max_tokens == 5, "as some load generators send it"


def test_fields_that_change_nothing_are_ignored() -> None:
    harmless = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "best_of": 2,
        "n": 2,
        "priority": 3,
        "mirostat": 2,
        "x": {},
        "verbosity": "low",
        "reasoning_effort": "none",
        "tool_choice": "auto",
    }
    assert read(CompletionRequest, {"prompt": "a", **harmless}) == read(CompletionRequest, {"prompt": "a", "n": 2})


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="longspan")
    for _ in range(2):
        read(
            CompletionRequest, {"prompt": "a", "n": 2, "top_k": None, "verbosity": "low", "a\nline": 1, "nothing": None}
        )
    [line] = [record.getMessage() for record in caplog.records]
    assert line == r"a CompletionRequest had fields that are ignored: 'a\nline', 'verbosity'"
    read(CompletionRequest, {"prompt": "a", **{f"field {number:05}": 1 for number in range(1000)}})
    assert len(caplog.records) == 2
    assert len(caplog.records[-1].getMessage()) < 500


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt", "must be given"),
        ({"prompt": ["a", 3]}, "prompt[1]", "must be a text, but 3 given"),
        ({"prompt": [[1], [2, None]]}, "prompt[1][1]", "must be a whole number, but null given"),
        ({"prompt": "a", "n": "1"}, "n", "must be a whole number, but '1' given"),
        ({"prompt": "a", "best_of": 3}, "best_of", "use n"),
        ({"prompt": "a", "stop": 5}, "stop", "must be a text or a list, but 5 given"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop[1]", "must be a text, but 5 given"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "must not be empty"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt", "must be a text, but 7 given"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"prompt": "a", "logit_bias": {"7": 101}}, "logit_bias.7", "at most 100, but 101 given"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "has xml"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "must be given",
        ),
        (
            {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "exactly one of .* but regex and choice",
        ),
        (
            {"prompt": "a", "structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        (
            {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "cannot be combined with response_format: keep one of them",
        ),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(WireError, match=words) as caught:
        read(CompletionRequest, fields)
    assert caught.value.param == param


def test_likely_tokens_of_a_chat_need_logprobs() -> None:
    for logprobs in (None, False):
        with pytest.raises(WireError, match="it needs logprobs: set that to true") as caught:
            read(ChatCompletionRequest, {"messages": HELLO, "top_logprobs": 2, "logprobs": logprobs})
        assert caught.value.param == "top_logprobs"
    assert read(ChatCompletionRequest, {"messages": HELLO, "top_logprobs": 0}).top_logprobs == 0


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "user"}, "messages[1].content", "must be given"),
        ({"content": "a"}, "messages[1].role", "must be given"),
        ({"role": "", "content": "a"}, "messages[1].role", "must not be empty"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[1].content[0].type",
            "'text', but 'image_url' given. Only text is served.*remove this part",
        ),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio", "only text"),
    ],
)
def test_a_wrong_message_is_named(message: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(WireError, match=words) as caught:
        read(ChatCompletionRequest, {"messages": [*HELLO, message]})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}",
        b"[]",
        b"null",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="body") as caught:
        read_request(CompletionRequest, body, RequestLimits())
    assert (caught.value.status, caught.value.param) == (400, None)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(CompletionRequest.model_fields)),
    st.sampled_from(["x" * 100_000, ["y" * 100_000], {"z" * 100_000: 1}, 10**400, 1e400, {"type": "t" * 100_000}]),
)
def test_errors_repeat_little_of_the_input(name: str, value: Any) -> None:
    body = json.dumps({"prompt": "a", name: value}).replace("Infinity", "1e400").encode()
    error = refusal(body)
    if error is not None:
        assert len(str(error)) < 600
        assert len(error.param or "") <= 100
        assert not any(letter * 101 in str(error) for letter in "xyzt0")


def refusal(body: bytes) -> WireError | None:
    try:
        read_request(CompletionRequest, body, RequestLimits())
    except WireError as error:
        return error
    return None


def lists_in(schema: object, path: str = "") -> Iterator[tuple[str, bool]]:
    """The lists of a pydantic model, and whether validation stops at their first wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield path, bool(schema.get("fail_fast"))
        for key, value in schema.items():
            if key not in {"metadata", "serialization"}:
                yield from lists_in(value, f"{path}.{key}")
    elif isinstance(schema, list | tuple):
        for index, item in enumerate(schema):
            yield from lists_in(item, f"{path}[{index}]")


@pytest.mark.parametrize(
    "model",
    [
        *(CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest),
        *(ResponsesRequest, MessagesRequest, CountTokensRequest),
    ],
)
def test_each_list_of_a_request_fails_at_its_first_wrong_item(model: type[BaseModel]) -> None:
    lists = dict(lists_in(model.__pydantic_core_schema__))
    assert lists
    assert [path for path, is_fast in lists.items() if not is_fast] == []


def test_a_million_wrong_items_make_one_error() -> None:
    with pytest.raises(WireError) as caught:
        read(CompletionRequest, {"prompt": ["a", *[None] * 1_000_000]})
    assert caught.value.param == "prompt[1]"
