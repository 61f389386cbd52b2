"""A tiny model with a template like Qwen3's thinks, answers and calls. A bias ends the thought soon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ThreadLLM
from jsonschema import validate
from tiny_models import make_speaking
from tool_models import save_tokenizer, tool, tool_tokenizer

from longspan.core.options import options_of
from longspan.serve.convert import ServedModel
from longspan.serve.responses import answer_each
from longspan.serve.settings import ServerSettings

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOKENIZER: Any = tool_tokenizer("qwen3", with_markers=True)
CLOSE = str(_TOKENIZER.convert_tokens_to_ids("</think>"))
BASE = {"messages": [{"role": "user", "content": "Rome?"}], "max_tokens": 150, "seed": 1, "logit_bias": {CLOSE: 8}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadLLM]:
    folder = make_speaking(tmp_path_factory.mktemp("thinking"))
    save_tokenizer(folder, "qwq", with_markers=True)
    with ThreadLLM(str(folder), max_model_len=512) as llm:
        yield llm


def message(llm: ThreadLLM, **fields: Any) -> dict[str, Any]:
    model = ServedModel(input_processor=llm.input_processor, settings=ServerSettings(model_names=("tiny",)))
    bodies = [("", "/v1/chat/completions", json.dumps({**BASE, **fields}).encode())]
    [(_, status, body)] = answer_each(llm, model, bodies, max_groups=1, max_waiting_tokens=4096)
    assert status == 200, body
    found: dict[str, Any] = body["choices"][0]["message"]
    return found


def test_calls_and_json_follow_the_reasoning(llm: ThreadLLM) -> None:
    called = message(llm, tools=[tool("weather", CITY)], tool_choice="required", parallel_tool_calls=False)
    [call] = called["tool_calls"]
    assert called["content"] is None
    validate(json.loads(call["function"]["arguments"]), CITY)
    validate(json.loads(message(llm, response_format=FORMAT)["content"]), CITY)


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    option, _ = options_of(ServerSettings)["chat_template"]
    assert option.read is not None
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    assert option.read(str(path)) == "{{ messages }}"
    with pytest.raises(ValueError, match="must be a file with a Jinja template"):
        option.read(str(tmp_path / "none.jinja"))
