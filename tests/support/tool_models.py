"""Tokenizers with chat templates that describe tools and write calls, each as a family of models does."""

from __future__ import annotations

from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.model.source import smollm2_folder
from longspan.text.grammar_check import LIMITS
from longspan.text.tokenizer import grammar_vocabulary

_DESCRIBED = "{% if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}.\n{% endif %}"
_ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}"
_ARGUMENTS = "{{ call.function.arguments | tojson }}"

TEMPLATES: dict[str, str] = {
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


def _written(call: str) -> str:
    """A template whose calls have this form."""
    return (
        _DESCRIBED
        + "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        + "{{ message.content }}"
        + call
        + "<|im_end|>\n{% endfor %}"
        + _ASKED
    )


_EACH = "{% for call in message.tool_calls or [] %}"
_PARAMETERS = "{% for name, value in call.function.arguments | items %}"
_VALUE = "{{ value if value is string else value | tojson }}"
TEMPLATES |= {
    "mistral-v11": _written(
        _EACH + "[TOOL_CALLS]{{ call.function.name }}[ARGS]" + _ARGUMENTS + "{% endfor %}",
    ),
    "granite": _written(
        "{% if message.tool_calls %}<|tool_call|>{{ message.tool_calls | map(attribute='function') "
        "| list | tojson }}{% endif %}"
    ),
    "functionary": _written(_EACH + "<function={{ call.function.name }}>" + _ARGUMENTS + "</function>{% endfor %}"),
    "qwen3_coder": _written(
        _EACH
        + "{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
        + _PARAMETERS
        + "{{ '<parameter=' + name + '>\n' }}"
        + _VALUE
        + "{{ '\n</parameter>\n' }}{% endfor %}"
        + "</function>\n</tool_call>{% endfor %}"
    ),
    "glm45": _written(
        _EACH
        + "{{ '\n<tool_call>' + call.function.name + '\n' }}"
        + _PARAMETERS
        + "<arg_key>{{ name }}</arg_key>{{ '\n' }}<arg_value>"
        + _VALUE
        + "</arg_value>{{ '\n' }}{% endfor %}"
        + "</tool_call>{% endfor %}"
    ),
    "openai": _DESCRIBED
    + "{% for message in messages %}<|start|>{{ message.role }}"
    + "{% for call in message.tool_calls or [] %} to=functions.{{ call.function.name }}<|channel|>commentary json"
    + "<|message|>"
    + _ARGUMENTS
    + "<|call|>{% else %}<|message|>{{ message.content }}<|end|>{% endfor %}{% endfor %}"
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis<|message|> #}",
}
TEMPLATES["functionary-text"] = TEMPLATES["functionary"].replace(
    "<function={{ call.function.name }}>" + _ARGUMENTS,
    "{{ '<function=' + call.function.name + '>' + call.function.arguments }}",
)
"""Functionary's own template joins arguments to a text, so that they must be JSON."""
TEMPLATES["functionary-v3.2"] = (
    "Respond as\n>>>${recipient}\n${content}\n"
    + _DESCRIBED
    + "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    + "{% if message.role != 'assistant' %}{{ message.content }}{% else %}"
    + "{% if message.content %}{{ '>>>all\n' + message.content }}{% endif %}"
    + _EACH
    + "{{ '>>>' + call.function.name + '\n' + call.function.arguments }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n>>>' }}{% endif %}"
)
_THINKING = TEMPLATES["hermes"].replace(
    "<|im_start|>{{ message.role }}\n{{ message.content }}",
    "<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content }}",
)
TEMPLATES |= {
    "qwen3": _THINKING.replace(
        _ASKED,
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and "
        "enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    ),
    "qwq": _THINKING.replace(
        _ASKED,
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
    ),
}
"""Qwen3's template opens no section, QwQ's opens one in each prompt."""
_MARKERS = {
    "<jupyter_start>": "<tool_call>",
    "<jupyter_text>": "</tool_call>",
    "<jupyter_code>": "[TOOL_CALLS]",
    "<empty_output>": "</think>",
}


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


@cache
def tool_vocabulary(*, with_markers: bool = True) -> LLTokenizer:
    """Return the vocabulary of these tokenizers for grammars."""
    tokenizer = tool_tokenizer(None, with_markers=with_markers)
    return grammar_vocabulary(tokenizer, vocab_size=len(tokenizer))


def grammar_accepts(grammar: str, text: str, *, with_markers: bool = True) -> bool:
    """Whether a grammar lets a model write a text, token by token, and end there."""
    matcher = LLMatcher(tool_vocabulary(with_markers=with_markers), grammar, log_level=0, limits=LIMITS)
    tokenizer: Any = tool_tokenizer(None, with_markers=with_markers)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tool as clients send it."""
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", **described}}
