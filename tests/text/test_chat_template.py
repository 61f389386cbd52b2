"""Conversations to text: as transformers renders them, and refused with the message that is wrong."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from refusals import refused
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.core.sampling import SamplingParams
from longspan.model.files import ModelError
from longspan.model.source import smollm2_folder
from longspan.text.input_processor import InputProcessor, conversations
from longspan.text.tokenizer import tokenizer_in

HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    HELLO,
    {"role": "assistant", "content": "Hi! 😀 "},
    {"role": "user", "content": "2 + 2?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder())


def render(tokenizer: PreTrainedTokenizerBase, messages: Any, options: dict[str, Any]) -> str:
    processor = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=512)
    return processor.render_chat(messages, **options)


@pytest.mark.parametrize("messages", [[HELLO], TALK])
def test_text_and_tokens_are_those_of_transformers(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]
) -> None:
    text = render(tokenizer, messages, {})
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected


def test_a_prompt_that_is_longer_than_the_tokenizer_knows_of_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    short = AutoTokenizer.from_pretrained(smollm2_folder(), model_max_length=4)
    processor = InputProcessor(tokenizer=short, vocab_size=len(short), max_model_len=512)
    with patch.object(logging.getLogger("transformers"), "propagate", new=True):
        assert len(processor.tokenize("one two three four five six")) == 6
    assert not caplog.records


def test_options_reach_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    assert render(tokenizer, [HELLO], {"add_generation_prompt": False}).endswith("Hello<|im_end|>\n")
    template = "{{ messages[0]['content'] }} {{ mood }}"
    options = {"chat_template": template, "chat_template_kwargs": {"mood": "calm"}}
    assert render(tokenizer, [HELLO], options) == "Hello calm"  # type: ignore[arg-type]
    begun = [HELLO, {"role": "assistant", "content": "Well"}]
    open_end = render(tokenizer, begun, {"add_generation_prompt": False, "continue_final_message": True})
    assert open_end.endswith("<|im_start|>assistant\nWell")


def test_a_message_that_only_calls_tools_has_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, HELLO]
    assert render(tokenizer, asked, {}) == render(tokenizer, [HELLO, {"role": "assistant", "content": ""}, HELLO], {})
    shown = {"chat_template": "{{ messages[1].tool_calls[0].function.name }}{{ messages[1].content }}"}
    assert render(tokenizer, asked, shown) == "f"


PARTS = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
"""Shows a content only as a list of parts, as templates of older multimodal models do."""
BOTH = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{{ message['content'][0]['text'] }} in parts{% endif %}{% endfor %}"
)


def test_a_template_that_takes_parts_shows_every_content(tokenizer: PreTrainedTokenizerBase) -> None:
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    for messages in ([HELLO], in_parts):
        assert render(tokenizer, messages, {"chat_template": PARTS}) == "<user>Hello"
        assert render(tokenizer, messages, {"chat_template": BOTH}) == "Hello"
    assert render(tokenizer, TALK, {"chat_template": PARTS}).count("Hello") == 1


def test_the_template_of_a_processor_is_that_of_its_tokenizer(tmp_path: Path) -> None:
    """Older multimodal models have it in a file of their processor."""
    own = AutoTokenizer.from_pretrained(smollm2_folder())
    own.chat_template = None
    own.save_pretrained(tmp_path)
    assert not tokenizer_in(tmp_path, "m", trust_remote_code=False).chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    assert tokenizer_in(tmp_path, "m", trust_remote_code=False).chat_template == PARTS
    (tmp_path / "chat_template.jinja").write_text(BOTH)
    assert tokenizer_in(tmp_path, "m", trust_remote_code=False).chat_template == BOTH
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer of 'm' cannot be loaded"):
        tokenizer_in(tmp_path, "m", trust_remote_code=False)


@pytest.mark.parametrize(("prompt", "shown"), [(5, "5"), ([1, "a"], "[1, 'a']"), ([1.5], "[1.5]")])
def test_values_that_are_no_prompt_are_refused(tokenizer: PreTrainedTokenizerBase, prompt: Any, shown: str) -> None:
    processor = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=512)
    with pytest.raises(ValueError, match=rf"^a prompt is a text or a list of token ids, but {re.escape(shown)} given"):
        processor.process(prompt, SamplingParams())


def test_a_dict_holds_a_prompt_and_its_cache_salt(tokenizer: PreTrainedTokenizerBase) -> None:
    processor = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=512)
    for plain in ("Hello", [1, 2]):
        key = "prompt" if isinstance(plain, str) else "prompt_token_ids"
        bare: Any = {key: plain, "multi_modal_data": None}
        request = processor.process(plain, SamplingParams())
        assert processor.process(bare, SamplingParams()) == request
        assert processor.process({**bare, "cache_salt": "a"}, SamplingParams()) == replace(request, cache_salt="a")
    both = processor.process({"prompt_token_ids": np.array([1, 2]), "prompt": "Hello"}, SamplingParams())  # type: ignore[typeddict-item]
    assert (both.text, both.token_ids) == ("Hello", (1, 2))


@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [
        ({}, "neither"),
        ({"cache_salt": "a"}, "neither"),
        ({"prompt": 5}, "prompt"),
        ({"prompt_token_ids": "Hello"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "token"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
    ],
)
def test_a_dict_that_is_no_prompt_is_refused(tokenizer: PreTrainedTokenizerBase, prompt: Any, parameter: str) -> None:
    processor = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=512)
    with refused(parameter):
        processor.process(prompt, SamplingParams())


def test_without_a_tokenizer_there_are_no_stop_strings() -> None:
    processor = InputProcessor(tokenizer=None, vocab_size=9, max_model_len=512)
    assert processor.process([1, 2], SamplingParams(stop_token_ids=[3])).token_ids == (1, 2)
    with refused("stop"):
        processor.process([1, 2], SamplingParams(stop=["a"]))


def test_parts_of_a_content_are_joined(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render(tokenizer, [parts], {}) == render(tokenizer, [{"role": "user", "content": "a\nb"}], {})


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"content": "x"}], r"messages\[0\] has the role None"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\] has the role \['user'\]"),
        ([{"role": "user"}], r"messages\[0\] must have a text as content, but None given"),
        ([{"role": "user", "content": 4}], r"messages\[0\] must have a text as content, but 4 given"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\] has a part that is not text"),
        ([HELLO, "text"], r"messages\[1\] must have a role and a content, but 'text' given"),
    ],
)
def test_a_wrong_message_is_named(tokenizer: PreTrainedTokenizerBase, messages: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        render(tokenizer, messages, {})


def test_a_role_is_any_that_the_template_renders(tokenizer: PreTrainedTokenizerBase) -> None:
    talk = [HELLO, {"role": "critic", "content": " Too short. "}]
    assert "<|im_start|>critic\n Too short. " in render(tokenizer, talk, {})
    template = "{% for m in messages if m.role in ('user', 'tool') %}{{ m.content | trim }}{% endfor %}"
    with pytest.raises(ValueError, match=r"messages\[1\] has the role 'critic', which the chat template leaves out"):
        render(tokenizer, talk, {"chat_template": template})
    assert render(tokenizer, talk, {"chat_template": template.replace("tool", "critic")}) == "HelloToo short."


def critic(content: str) -> dict[str, str]:
    return {"role": "critic", "content": content}


@pytest.mark.parametrize("content", ["", "Hello", "el"])
def test_a_message_that_is_left_out_is_refused_whatever_its_content(
    tokenizer: PreTrainedTokenizerBase, content: str
) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"messages\[1\] has the role 'critic', which the chat template leaves out"):
        render(tokenizer, [HELLO, critic(content)], {"chat_template": template})
    only_first = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"messages\[2\] has the role 'critic'"):
        render(tokenizer, [critic("a"), HELLO, critic(content)], {"chat_template": only_first})


def test_a_template_may_write_a_content_in_another_way(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}{{ m.content | upper | tojson }}{{ m.content | replace(' ', '') }}{% endfor %}"
    assert render(tokenizer, [critic('say "é"')], {"chat_template": template}) == '"SAY \\"É\\""say"é"'


def test_messages_of_any_role_are_rendered_no_more_than_twice(tokenizer: PreTrainedTokenizerBase) -> None:
    """To look for each content in the whole text took seconds."""
    talk = [{"role": f"critic {index}", "content": str(index) * 9} for index in range(300)]
    with patch.object(tokenizer, "apply_chat_template", wraps=tokenizer.apply_chat_template) as applied:
        assert render(tokenizer, talk, {}).count("<|im_start|>critic") == 300
    assert sum(len(call.args[0]) == len(talk) for call in applied.call_args_list) <= 2


@pytest.mark.parametrize("template", ["{{ raise_exception('users only') }}", "{{ users only }}"])
def test_a_template_that_refuses_is_the_users_mistake(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    with pytest.raises(ValueError, match=r"template refuses these messages: .*(users only|got 'only')"):
        render(tokenizer, [HELLO], {"chat_template": template})


def test_a_model_without_a_template_says_so() -> None:
    bare = AutoTokenizer.from_pretrained(smollm2_folder())
    bare.chat_template = None
    with pytest.raises(ValueError, match="without a chat template"):
        render(bare, [HELLO], {})
    assert render(bare, [HELLO], {"chat_template": "{{ messages | length }}"}) == "1"


def test_one_conversation_or_a_list_of_them() -> None:
    assert conversations(TALK) == [TALK]
    assert conversations([TALK, [HELLO]]) == [TALK, [HELLO]]
    assert conversations([]) == []
