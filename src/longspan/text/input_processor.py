"""The input processor: from texts and messages to engine requests of token ids, with every check on the way."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerBase

from longspan.core.request import check_length, too_long
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.errors import ParameterError
from longspan.text import chat_template
from longspan.text.chat_template import Message, TemplateOptions
from longspan.text.structured import compile_grammar
from longspan.text.tokenizer import grammar_vocabulary

Prompt = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt that was checked.

    Attributes:
        text: None when token ids were given.
        grammar: what the output must follow, see `Sampling`.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    grammar: str = ""


@dataclass(frozen=True, kw_only=True)
class InputProcessor:
    """Makes jobs for one model; without a tokenizer from token ids only.

    Attributes:
        max_model_len: the longest request, prompt and output together, in tokens.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_model_len: int

    def process(self, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        """Makes the engine request of a prompt.

        Raises:
            ValueError: when it is empty, too long, or not of a known form, or the parameters do not fit the model.
        """
        if isinstance(prompt, str):
            return self.checked(prompt, self.tokenize(prompt) if prompt else (), params)
        return self.checked(None, _token_ids(prompt), params)

    def process_chat(
        self, messages: Sequence[Message], params: SamplingParams, template: TemplateOptions
    ) -> EngineRequest:
        """Makes the engine request of a conversation.

        Raises:
            ValueError: see `process` and `render_chat`.
        """
        text = self.render_chat(messages, **template)
        return self.checked(text, self.tokenize(text, add_special_tokens=False), params)

    def checked(
        self, text: str | None, token_ids: Sequence[int], params: SamplingParams, grammar: str | None = None
    ) -> EngineRequest:
        """Makes the engine request of token ids that stand for `text`; `grammar` is that of `params`, if it has been
        made already.

        Raises:
            ValueError: see `process`.
        """
        check_length(
            len(token_ids), self.max_model_len
        )  # first: looking at every token takes long where there are many
        wrong = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong!r} is not in the vocabulary: ids go from 0 to {self.vocab_size - 1}")
        if self.tokenizer is None and params.stop_strings:
            raise ParameterError("stop", "strings need a tokenizer, but there is none (skip_tokenizer_init)")
        params.check_vocab(self.vocab_size)
        if grammar is None:
            grammar = "" if params.structured_outputs is None else self.grammar(params.structured_outputs)
        return EngineRequest(text=text, token_ids=tuple(token_ids), params=params, grammar=grammar)

    @cached_property
    def max_prompt_chars(self) -> int:
        """Texts with more characters are too long: no token has more of them than the longest name in the vocabulary.

        That tokenizers may drop blanks, or take an unknown word for one token, is left out of account.
        """
        return self.max_model_len * max(map(len, self._need_tokenizer().get_vocab()))

    def check_chars(self, num_chars: int) -> None:
        """Checks that a text of this length may fit, which is known without the cost of tokenizing it.

        Raises:
            ValueError: if it cannot, or there is no tokenizer.
        """
        if num_chars > self.max_prompt_chars:
            raise too_long(f"{num_chars} characters, so more than {self.max_model_len} tokens", self.max_model_len)

    def render_chat(self, messages: Sequence[Message], **template: Unpack[TemplateOptions]) -> str:
        """Returns the text that stands for a conversation; tokenize it without adding special tokens.

        Raises:
            ValueError: when there is no template, or it or a message is wrong.
        """
        return chat_template.render(self._need_tokenizer(), messages, template)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes a text, with the special tokens that the tokenizer adds at its ends."""
        ids: list[int] = self._need_tokenizer()(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def grammar(self, form: StructuredOutputsParams) -> str:
        """Returns the grammar that outputs of that form follow, see `Sampling`.

        Raises:
            ValueError: when it cannot be followed, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ParameterError("structured_outputs", "need a tokenizer, but there is none (skip_tokenizer_init)")
        return compile_grammar(form, self._vocabulary)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return grammar_vocabulary(self._need_tokenizer(), vocab_size=self.vocab_size)

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer (skip_tokenizer_init): give prompts as lists of token ids")
        return self.tokenizer


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Copies token ids of any integer type."""
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise ValueError(f"a prompt is a text or a list of token ids, but {prompt!r:.60} given") from None
