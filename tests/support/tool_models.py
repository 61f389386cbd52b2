"""Tokenizers with chat templates that describe tools and write calls, each as a family of models does."""

from __future__ import annotations

from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.model.source import smollm2_folder

_DESCRIBED = "{% if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}.\n{% endif %}"
_ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}"
_ARGUMENTS = "{{ call.function.arguments | tojson }}"

TEMPLATES = {
    "hermes": _DESCRIBED
    + "{% for message in messages %}"
    + _TURN
    + "{% for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
    + '{"name": "{{ call.function.name }}", "arguments": '
    + _ARGUMENTS
    + "}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    + _ASKED,
    "llama3_json": _DESCRIBED
    + "{% for message in messages %}{% if message.tool_calls %}"
    + "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    + "{% set call = message.tool_calls[0] %}<|im_start|>assistant\n"
    + '{"name": "{{ call.function.name }}", "parameters": '
    + _ARGUMENTS
    + "}{% else %}"
    + _TURN
    + "{% endif %}<|im_end|>\n{% endfor %}"
    + _ASKED,
    "mistral": _DESCRIBED
    + "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    + "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    + '{"name": "{{ call.function.name }}", "arguments": '
    + _ARGUMENTS
    + ', "id": "{{ call.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]{% else %}'
    + _TURN
    + "{% endif %}<|im_end|>\n{% endfor %}"
    + _ASKED,
}
_MARKERS = {"<jupyter_start>": "<tool_call>", "<jupyter_text>": "</tool_call>", "<jupyter_code>": "[TOOL_CALLS]"}


def save_tokenizer(folder: Path, template: str | None, *, with_markers: bool) -> None:
    """Save SmolLM2's tokenizer with another template. `with_markers` makes the markers of calls special tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder())
    if template is not None:
        tokenizer.chat_template = TEMPLATES.get(template, template)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.json") if with_markers else ():
        text = path.read_text()
        for other, marker in _MARKERS.items():
            text = text.replace(other, marker)
        path.write_text(text)


@cache
def _tokenizer(with_markers: bool) -> PreTrainedTokenizerBase:
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), None, with_markers=with_markers)
        return AutoTokenizer.from_pretrained(folder)


@cache
def tool_tokenizer(template: str | None, *, with_markers: bool = False) -> PreTrainedTokenizerBase:
    """Return a tokenizer with another template. All share one vocabulary, which takes 30 MB."""
    tokenizer: Any = copy(_tokenizer(with_markers))
    if template is not None:
        tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tool as clients send it."""
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", **described}}
