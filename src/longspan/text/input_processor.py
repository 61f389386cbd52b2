"""The input processor: validates texts and conversations and converts them to engine requests of token ids."""

from __future__ import annotations

import operator
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack, cast

from jinja2 import TemplateError

from longspan.core.request import check_length, too_long
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.errors import ParameterError

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase


class TextPrompt(TypedDict):
    """A text prompt with options. Names are vLLM's.

    Keys:
        cache_salt: KV is shared only between prompts with the same salt, or between prompts without one.
    """

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids with options, see `TextPrompt`. `prompt` is the text of the token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""A text or its token ids, alone or in a dict."""
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
Message = Mapping[str, object]
"""`role` and `content`, and any further fields of the model's template."""
TEMPLATE_ERRORS = (TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors that a template, which is a program, raises for a conversation that it does not expect."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


class TemplateOptions(TypedDict, total=False):
    """Options of rendering a conversation. Names and defaults are vLLM's.

    Keys:
        tools: functions that the template describes, each in the form of OpenAI's API. Calls are returned as text.
        chat_template: a Jinja template instead of the model's own.
        add_generation_prompt: end with the beginning of an answer. True by default.
        continue_final_message: leave the last message open, so that the model continues it. Excludes a generation
            prompt.
        chat_template_kwargs: further variables of the template.
    """

    tools: Sequence[Mapping[str, object]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, object] | None


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A validated prompt with its parameters.

    Attributes:
        text: None if token ids were given.
        grammar: the grammar of the output, see `Sampling`.
        shown_token_ids: special tokens that are part of the output text.
        cache_salt: only requests with the same salt share KV. Empty without a salt.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    grammar: str = ""
    shown_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""


@dataclass(kw_only=True, eq=False)
class InputProcessor:
    """Makes engine requests for one model. Without a tokenizer, it accepts token ids only.

    Attributes:
        max_model_len: the longest request, prompt and output together, in tokens. Its owner sets it when the fleet
            changes.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_model_len: int

    def process(self, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        """Make the engine request of a prompt.

        Raises:
            ValueError: the prompt is empty, too long, or of no known form, or the parameters do not fit the model.
        """
        text, given, salt = _unwrapped(prompt)
        if given is None:
            assert text is not None, "a prompt has a text or token ids"
            if len(text) > self.max_model_len:
                self.check_chars(len(text))  # tokenizing a long text takes 100 times its memory
            return self.checked(text, self.tokenize(text) if text else (), params, cache_salt=salt)
        try:
            token_ids = [operator.index(token) for token in given]  # of any integer type
        except TypeError:
            raise ValueError(f"a prompt is a text or a list of token ids, but {given!r:.60} given") from None
        return self.checked(text, token_ids, params, cache_salt=salt)

    def process_chat(
        self, messages: Sequence[Message], params: SamplingParams, template: TemplateOptions
    ) -> EngineRequest:
        """Make the engine request of a conversation."""
        text = self.render_chat(messages, **template)
        return self.checked(text, self.tokenize(text, add_special_tokens=False), params)

    def checked(
        self,
        text: str | None,
        token_ids: Sequence[int],
        params: SamplingParams,
        grammar: str | None = None,
        *,
        cache_salt: str = "",
    ) -> EngineRequest:
        """Validate the token ids of `text` and make their engine request. `grammar` is that of `params`, if known."""
        check_length(len(token_ids), self.max_model_len)  # first, since the checks of each token take long
        wrong = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong!r} is not in the vocabulary: ids go from 0 to {self.vocab_size - 1}")
        if self.tokenizer is None and params.stop_strings:
            raise ParameterError("stop", "strings need a tokenizer, but there is none (`skip_tokenizer_init`)")
        params.check_vocab(self.vocab_size)
        if (first := params.attention_from) is not None and first >= len(token_ids):
            problem = f"must be less than the {len(token_ids)} tokens of the prompt, but {first} given"
            raise ParameterError("attention_from", problem, first)
        if grammar is None:
            grammar = "" if params.structured_outputs is None else self.grammar(params.structured_outputs)
        ids = tuple(token_ids)
        return EngineRequest(text=text, token_ids=ids, params=params, grammar=grammar, cache_salt=cache_salt)

    @property
    def max_prompt_chars(self) -> int:
        """Upper bound of the characters of a prompt: `max_model_len` times the longest name in the vocabulary.

        The bound ignores that tokenizers may drop blanks, or turn an unknown word into one token.
        """
        return self.max_model_len * self._max_token_chars

    @cached_property
    def _max_token_chars(self) -> int:
        return max(map(len, self._need_tokenizer().get_vocab()))

    def check_chars(self, num_chars: int) -> None:
        """Raise ValueError if a text is too long for any tokenization, or if there is no tokenizer."""
        if num_chars > self.max_prompt_chars:
            raise too_long(f"{num_chars} characters, so more than {self.max_model_len} tokens", self.max_model_len)

    def render_chat(self, messages: Sequence[Message], **template: Unpack[TemplateOptions]) -> str:
        """Return a conversation as text, to be tokenized without adding special tokens.

        Raises:
            ValueError: a message has no known form, or the template is missing, refuses the messages or has no tools.
        """
        tokenizer = self._need_tokenizer()
        if template.get("chat_template") is None and not tokenizer.chat_template:
            raise ValueError("the model comes without a chat template: give one (chat_template), or use plain prompts")
        if template.get("tools"):
            self.check_knows_tools(template.get("chat_template"))
        plain = [_checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
        if not plain:
            raise ValueError("the conversation has no messages: at least 1 is needed")
        self._check_roles(plain, template)
        return self._rendered(plain, template)

    def _check_roles(self, messages: Sequence[Message], template: TemplateOptions) -> None:
        """Raise ValueError for a message of an uncommon role that the template omits.

        The check renders such messages with random digits, which no template escapes, instead of their contents.
        """
        uncommon = [index for index, message in enumerate(messages) if message["role"] not in _ROLES]
        if not uncommon:
            return
        mark, marked = f"{secrets.randbelow(10**16):016d}", list(messages)
        for index in uncommon:
            marked[index] = {**messages[index], "content": f"{mark}{index:09d}"}
        rendered = set(map(int, re.findall(f"{mark}([0-9]{{9}})", self._rendered(marked, template))))
        for index in uncommon:
            if index not in rendered:
                role = messages[index]["role"]
                problem = f"messages[{index}] has the role {role!r:.60}, which the chat template leaves out"
                raise ValueError(f"{problem}: choose {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")

    def _rendered(self, messages: Sequence[Message], template: TemplateOptions) -> str:
        if self._takes_parts(template):
            messages = [{**own, "content": _parts(own["content"])} for own in messages]
        return self._applied(messages, template)

    def _takes_parts(self, template: TemplateOptions) -> bool:
        """Return True if the template shows a content only as a list of parts, as those of some multimodal models."""
        own = template.get("chat_template")
        if own not in self._forms:
            mark = f"{secrets.randbelow(10**16):016d}"

            def shows(content: object) -> bool:
                try:
                    return mark in self._applied([{"role": "user", "content": content}], {"chat_template": own})
                except (ValueError, *TEMPLATE_ERRORS):  # the conversation itself is rendered later
                    return False

            self._forms[own] = not shows(mark) and shows(_parts(mark))
        return self._forms[own]

    @cached_property
    def _forms(self) -> dict[str | None, bool]:
        """Results of `_takes_parts` by template. None is the model's own template."""
        return {}

    def _applied(self, messages: Sequence[Message], template: TemplateOptions) -> str:
        try:
            rendered = self._need_tokenizer().apply_chat_template(
                [dict(message) for message in messages],
                tools=list(template.get("tools") or ()) or None,
                tokenize=False,
                chat_template=template.get("chat_template"),
                add_generation_prompt=template.get("add_generation_prompt", True),
                continue_final_message=template.get("continue_final_message", False),
                **(template.get("chat_template_kwargs") or {}),
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return cast("str", rendered)

    def check_knows_tools(self, chat_template: str | None = None) -> None:
        """Raise ParameterError if the template describes no tools."""
        source = self._need_tokenizer().get_chat_template(chat_template, tools=[{}])
        if not re.search(r"\btools\b", source):
            problem = "cannot be used: the model's chat template describes no tools: describe them in a message"
            raise ParameterError("tools", problem)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the special tokens that the tokenizer adds at its ends."""
        encode = partial(self._need_tokenizer(), verbose=False)  # `check_length` bounds prompts, not the tokenizer
        ids: list[int] = encode(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def grammar(self, form: StructuredOutputsParams, max_chars: int | None = None) -> str:
        """Return the grammar of structured outputs, see `Sampling`. `max_chars` bounds it, `MAX_CHARS` by default.

        Raises:
            ValueError: the grammar cannot be followed, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ParameterError("structured_outputs", "need a tokenizer, but there is none (`skip_tokenizer_init`)")
        from longspan.text.structured import MAX_CHARS, compile_grammar  # noqa: PLC0415 - structured outputs alone

        return compile_grammar(form, self._vocabulary, max_chars or MAX_CHARS)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids by text of the tokens that have no bytes in a grammar."""
        vocabulary, added = self._vocabulary, self._need_tokenizer().added_tokens_decoder
        ends = vocabulary.eos_tokens
        return {str(token): id_ for id_, token in added.items() if vocabulary.is_special_token(id_) and id_ not in ends}

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from longspan.text.tokenizer import grammar_vocabulary  # noqa: PLC0415 - structured outputs alone

        return grammar_vocabulary(self._need_tokenizer(), vocab_size=self.vocab_size)

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer (`skip_tokenizer_init`): give prompts as lists of token ids")
        return self.tokenizer


def _parts(content: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": content}]


def _unwrapped(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str]:
    """Return the text, the token ids and the cache salt of a prompt. Either the text or the ids may be None."""
    if isinstance(prompt, str):
        return prompt, None, ""
    if not isinstance(prompt, Mapping):
        return None, prompt, ""
    given = {key: value for key, value in prompt.items() if value is not None}
    if unknown := sorted(map(str, given.keys() - set(_PROMPT_KEYS))):
        problem = f"a prompt has the key {unknown[0]!r:.60}, which is not supported"
        raise ValueError(f"{problem}: leave it out, and give {', '.join(_PROMPT_KEYS[:-1])} or {_PROMPT_KEYS[-1]}")
    text, salt = given.get("prompt"), given.get("cache_salt")
    ids: Any = given.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError(f"a prompt is a text or a list of token ids, but {prompt!r:.60} has neither: give prompt")
    if not isinstance(text, str | None):
        raise ParameterError("prompt", f"must be a text, but {text!r:.60} given: token ids go to prompt_token_ids")
    if isinstance(ids, str):
        raise ParameterError("prompt_token_ids", f"must be a list of token ids, but {ids!r:.60} given", ids)
    if salt is not None and not (isinstance(salt, str) and salt):
        problem = f"must be a text that is not empty, but {salt!r:.60} given: leave it out to share KV"
        raise ParameterError("cache_salt", problem, salt)
    return text, ids, salt or ""


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return one conversation, or a list of them, as a list."""
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


def _checked_message(where: str, message: object) -> dict[str, object]:
    """Return the message with its content as one text. A list of content parts has the form of OpenAI's API."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must have a role and a content, but {message!r:.60} given")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has the role {role!r:.60}: choose {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
    if isinstance(content, str):
        return dict(message)
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, Sequence):
        raise ValueError(f"{where} must have a text as content, but {content!r:.60} given")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            problem = f"{where} has a part that is not text: {part!r:.60}"
            raise ValueError(f"{problem}. longspan serves text only: remove this part, or give its text")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
