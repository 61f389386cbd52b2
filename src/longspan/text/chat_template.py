"""Conversations to text, by the chat template that comes with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]
"""`role` and `content`, and whatever else the model's template knows."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class TemplateOptions(TypedDict, total=False):
    """Options of rendering messages; names and defaults are vLLM's.

    Keys:
        chat_template: a Jinja template instead of the model's own.
        add_generation_prompt: end with the beginning of an answer; by default True.
        continue_final_message: leave the last message open, so that it is continued; needs no generation prompt.
        chat_template_kwargs: further names that the template knows.
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, object] | None


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: TemplateOptions) -> str:
    """Renders a conversation as text, special tokens included: tokenize it without adding any.

    Raises:
        ValueError: when a message is not of a known form, or there is no template, or it refuses the messages.
    """
    if options.get("chat_template") is None and not tokenizer.chat_template:
        raise ValueError("the model comes without a chat template: give one (chat_template), or use plain prompts")
    plain = [_checked(index, message) for index, message in enumerate(messages)]
    if not plain:
        raise ValueError("the conversation has no messages: at least 1 is needed")
    try:
        rendered = tokenizer.apply_chat_template(
            plain,
            tokenize=False,
            chat_template=options.get("chat_template"),
            add_generation_prompt=options.get("add_generation_prompt", True),
            continue_final_message=options.get("continue_final_message", False),
            **(options.get("chat_template_kwargs") or {}),
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    return cast("str", rendered)


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Returns one conversation, or a list of them, as a list."""
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


def _checked(index: int, message: object) -> dict[str, object]:
    """Returns the message with its content as one text."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must have a role and a content, but {message!r:.60} given")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}: choose {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    return {**message, "content": content if isinstance(content, str) else _joined(where, content)}


def _joined(where: str, content: object) -> str:
    """Joins a content in parts, as OpenAI's API has them, to one text."""
    if not isinstance(content, Sequence):
        raise ValueError(f"{where} must have a text as content, but {content!r:.60} given")
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        wrong = next(part for part, text in zip(content, texts, strict=True) if not isinstance(text, str))
        raise ValueError(f"{where} has a part that is not text: {wrong!r:.60}")
    return "\n".join(cast("list[str]", texts))
