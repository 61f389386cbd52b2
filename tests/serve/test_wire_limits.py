"""Limits of requests, at their edges."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json
from wire_world import read, world

from longspan.errors import ParameterError
from longspan.serve.chat_requests import ChatCompletionRequest
from longspan.serve.convert import chat_request, completion_requests, num_elements, read_request
from longspan.serve.errors import WireError
from longspan.serve.requests import CompletionRequest
from longspan.serve.settings import RequestLimits


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("limit", "most", "param", "within", "beyond"),
    [
        ("max_n", 3, "n", 3, 4),
        ("max_logprobs", 3, "logprobs", 3, 4),
        ("max_logprobs", 3, "prompt_logprobs", 3, 4),
        ("max_prompts", 2, "prompt", ["a", "b"], ["a", "b", "c"]),
        ("max_prompts", 2, "prompt", [[1, 2, 3], [1]], [[1], [1], [1]]),
        ("max_stop_strings", 2, "stop", ["a", "b"], ["a", "b", "c"]),
        ("max_stop_length", 2, "stop", "ab", "abc"),
        ("max_stop_length", 2, "stop", ["a", "ab"], ["a", "abc"]),
        ("max_stop_token_ids", 2, "stop_token_ids", [1, 2], [1, 2, 3]),
        ("max_logit_bias", 1, "logit_bias", {"1": 1}, {"1": 1, "2": 1}),
    ],
)
def test_limits_at_their_edges(limit: str, most: int, param: str, within: object, beyond: object) -> None:
    served = world(**{limit: most})
    assert completion_requests(read(CompletionRequest, {"prompt": "a", param: within}), served)
    with pytest.raises(WireError, match="--" + limit.replace("_", "-")) as caught:
        completion_requests(read(CompletionRequest, {"prompt": "a", param: beyond}), served)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_the_choices_of_all_prompts_are_bounded_together() -> None:
    served = world(max_choices=6)
    assert completion_requests(read(CompletionRequest, {"prompt": ["a", "b"], "n": 3}), served)
    for body in ({"prompt": ["a", "b"], "n": 4}, {"prompt": "a", "n": 7}):
        with pytest.raises(WireError, match="--max-choices") as caught:
            completion_requests(read(CompletionRequest, body), served)
        assert (caught.value.param, caught.value.status) == ("n", 400)


def test_a_list_of_token_ids_is_one_prompt() -> None:
    assert len(completion_requests(read(CompletionRequest, {"prompt": [1, 2, 3]}), world(max_prompts=2))) == 1


def test_limits_of_chats() -> None:
    talk = [{"role": "user", "content": "a"}] * 2
    served = world(max_messages=2, max_logprobs=2)
    assert chat_request(read(ChatCompletionRequest, {"messages": talk, "logprobs": True, "top_logprobs": 2}), served)
    for wrong, param in (
        ({"messages": talk * 2}, "messages"),
        ({"messages": talk, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    ):
        with pytest.raises(WireError, match="at most 2") as caught:
            chat_request(read(ChatCompletionRequest, wrong), served)
        assert caught.value.param == param


def test_bodies_too_large_or_nested_too_deeply() -> None:
    body = b'{"prompt": "a"}'
    assert read_request(CompletionRequest, body, RequestLimits(max_body_bytes=len(body)))
    with pytest.raises(WireError, match="--max-body-bytes") as caught:
        read_request(CompletionRequest, body, RequestLimits(max_body_bytes=len(body) - 1))
    assert caught.value.status == 413
    limits = RequestLimits(max_nesting=5)
    assert read(CompletionRequest, {"prompt": "a", "ignored": nested(4)}, limits)
    with pytest.raises(WireError, match="--max-nesting"):
        read(CompletionRequest, {"prompt": "a", "ignored": nested(5)}, limits)


def counted(value: Any) -> int:
    """Strings, lists and objects."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(counted, value.values()))
    return 1 + sum(map(counted, value)) if isinstance(value, list) else int(isinstance(value, str))


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('"\\\\{[]},:a\\n\N{PILE OF POO}')),
    lambda values: st.lists(values) | st.dictionaries(st.text(st.sampled_from('"\\\\{[')), values),
)


@given(JSON, st.booleans())
def test_elements_are_counted_as_they_are_made(value: Any, ascii_only: bool) -> None:
    body, number = json.dumps([value], ensure_ascii=ascii_only).encode(), 1 + counted(value)
    assert num_elements(body, number) == num_elements(body, number - 1) == number
    for end in range(1, len(body), 3):  # a mistake hides nothing that came before it
        begin = body[:end].decode(errors="ignore").encode()
        made = counted(from_json(begin, allow_partial="trailing-strings"))
        assert num_elements(begin + b'\\"{', made - 1) >= made


@pytest.mark.parametrize("piece", [b"{}", b"[]", b'"ab"', b'{"a":1}', b"[[1],[]]"])
def test_a_body_of_many_small_things_is_refused_before_they_are_made(piece: bytes) -> None:
    for begin in (b'{"prompt":[', b'{"prompt":"a","other":['):
        body = begin + b",".join([piece] * (2_000_000 // len(piece))) + b"]}"
        tracemalloc.start()
        with pytest.raises(WireError, match="--max-elements") as caught:
            read_request(CompletionRequest, body, RequestLimits())
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (caught.value.status, caught.value.param) == (400, None)
        assert most_bytes < 3 * len(body)


def test_long_texts_and_many_token_ids_are_no_elements() -> None:
    limits = RequestLimits(max_elements=4)
    text = 'if (a["b"]) { c[0] = "\\\\"; }\n' * 10_000
    assert read(CompletionRequest, {"prompt": text}, limits).prompt == text
    assert read(CompletionRequest, {"prompt": [7] * 100_000}, limits).prompt == [7] * 100_000
    with pytest.raises(WireError, match="--max-elements"):
        read(CompletionRequest, {"prompt": text, "n": 1, "user": "me"}, limits)


def test_limits_are_positive_whole_numbers() -> None:
    for field in fields(RequestLimits):
        for wrong in (0, -1, 1.5, True, "1"):
            with pytest.raises(ParameterError, match=f"^{field.name} must be a whole number") as caught:
                RequestLimits(**{field.name: wrong})  # type: ignore[arg-type]
            assert caught.value.parameter == field.name


def test_an_openapi_document_is_narrowed_without_changing_it() -> None:
    schema = CompletionRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    before = repr(schema)
    document = {"components": {"schemas": {"CompletionRequest": schema, **schema["$defs"]}}}
    schemas = RequestLimits(max_n=7, max_prompts=5).narrowed(document)["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["n"]["anyOf"][0]["maximum"] == 7
    assert schemas["Texts"]["maxItems"] == schemas["TokenLists"]["maxItems"] == 5
    assert "maxItems" not in schemas["TokenIds"]
    assert "maxPrompts" not in repr(schemas)
    assert repr(schema) == before
