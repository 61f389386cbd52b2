"""The state of a request's output grammar on one rank, and the vocabulary that grammars read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor

from longspan.model.files import ModelError, ModelFiles
from longspan.text.grammar_check import LIMITS, first_line
from longspan.text.tokenizer import grammar_vocabulary, load_tokenizer

_log = logging.getLogger("longspan.worker")
_MAX_COMPILED = 8
"""Compiled grammars that a rank keeps. The largest take 27 MB, see `MAX_TOOL_CHARS`."""


class Vocabulary:
    """A model's vocabulary of `size` tokens, read from the tokenizer's files for the first grammar."""

    def __init__(self, files: ModelFiles, *, size: int, eos_token_ids: Sequence[int]) -> None:
        self._files, self.size, self._eos_token_ids = files, size, eos_token_ids
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The bytes of every token."""
        _log.info("structured outputs: reading the vocabulary")
        tokenizer = load_tokenizer(self._files)
        return grammar_vocabulary(tokenizer, vocab_size=self.size, eos_token_ids=self._eos_token_ids)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the begin of a grammar, which is compiled once for several requests.

        Their matchers share the lexer, and so the limit of its states.
        """
        return self._compiled(grammar).deep_copy()

    def own_matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher with a lexer of its own. Later matchers of other requests get a new lexer, too."""
        self._compiled.cache_clear()
        return self._compile(grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self.tokens, grammar, log_level=0, limits=LIMITS)

    @cached_property
    def has_logits(self) -> npt.NDArray[np.uint32]:
        """Bit mask `[1, words]` of the token ids with logits."""
        num_words = -(-self.tokens.vocab_size // 32)
        return _bits(np.arange(num_words * 32) < self.size)

    @cached_property
    def ends(self) -> npt.NDArray[np.uint32]:
        """Bit mask `[1, words]` of the end-of-sequence tokens."""
        return _bits(np.isin(np.arange(self.has_logits.size * 32), self.tokens.eos_tokens))


def _bits(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    return np.packbits(chosen, bitorder="little").view(np.uint32)[None]


class GrammarMatcher:
    """The state of one request's grammar.

    Tokens are queued until `allowed`, so a rank that samples none of a request's tokens does no work for it.
    End-of-sequence tokens are allowed where the grammar may end or names one. After its end, only they are allowed.

    Attributes:
        error: why no token can continue the output. Empty without an error. An error is final.
    """

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        self.error = ""
        self._grammar, self._vocabulary = grammar, vocabulary
        self._new: list[int] = []
        self._taken: list[int] = []
        self._ended = self._has_own = False

    def add(self, tokens: Sequence[int]) -> None:
        self._new.extend(tokens)

    def allowed(self, banned: Sequence[int] = ()) -> Tensor | None:
        """Return the bit mask of allowed next tokens, uint8 `[bytes]`: token t is bit `t % 8` of byte `t // 8`.

        Excludes `banned` tokens, unless only they are allowed. None if there is an `error`.
        """
        try:
            self._take_new()
        except ModelError as error:  # the first grammar reads the vocabulary
            self.error = str(error)
            return None
        bits = self._vocabulary.ends.copy()
        if not self._ended:
            fill_next_token_bitmask(self._matcher, bits.view(np.int32))
            if self._matcher.is_error() and not self._has_own:  # perhaps of states that other requests have added
                self._has_own, self._matcher = True, self._vocabulary.own_matcher(self._grammar)
                self._matcher.consume_tokens(self._taken)
                fill_next_token_bitmask(self._matcher, bits.view(np.int32))
        bits &= self._vocabulary.has_logits
        if self._matcher.is_error():
            self.error = first_line(self._matcher.get_error())
        elif not bits.any():
            self.error = "no token of this model continues the output in the required form"
        if self.error:
            return None
        without_banned = bits.copy()
        for token in banned:
            without_banned[0, token // 32] &= ~np.uint32(1 << token % 32)
        return torch.from_numpy((without_banned if without_banned.any() else bits)[0].view(np.uint8))

    def _take_new(self) -> None:
        ends = [index for index, token in enumerate(self._new) if token in self._vocabulary.tokens.eos_tokens]
        if not self._ended:
            taken = self._new[: ends[0]] if ends else self._new
            self._taken += taken
            self._matcher.consume_tokens(taken)
        self._ended = self._ended or bool(ends)
        self._new.clear()

    @cached_property
    def _matcher(self) -> LLMatcher:
        return self._vocabulary.matcher(self._grammar)
