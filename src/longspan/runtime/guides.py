"""Grammars at work: which tokens may come next, for each request whose output must follow one, on one rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor

from longspan.model.files import ModelFiles
from longspan.model.grammar_check import LIMITS, one_line
from longspan.model.tokenizer import load_tokenizer
from longspan.model.vocabulary import grammar_vocabulary

_log = logging.getLogger("longspan.worker")


class Vocabulary:
    """A model's vocabulary, read from its tokenizer's files when the first guide needs it."""

    def __init__(self, files: ModelFiles, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._files, self._vocab_size, self._eos_token_ids = files, vocab_size, eos_token_ids

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The bytes of every token."""
        _log.info("structured outputs: reading the vocabulary")
        tokenizer = load_tokenizer(self._files)
        return grammar_vocabulary(tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)

    @cached_property
    def has_logits(self) -> npt.NDArray[np.uint32]:
        """Bits of the token ids that the model gives logits for, `[1, words]`."""
        num_words = -(-self.tokens.vocab_size // 32)
        return _bits(np.arange(num_words * 32) < self._vocab_size)

    @cached_property
    def ends(self) -> npt.NDArray[np.uint32]:
        """Bits of the end-of-sequence tokens, `[1, words]`."""
        return _bits(np.isin(np.arange(self.has_logits.size * 32), self.tokens.eos_tokens))


class Guide:
    """The state of one request's grammar.

    Tokens are kept until somebody asks what may come next, so that ranks that sample none of a request's tokens do no
    work for it. End-of-sequence tokens are allowed where the grammar may end (or names one); once it has ended, nothing
    else is.

    Attributes:
        error: why the grammar cannot go on; empty while it can. There is no way back.
    """

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        self.error = ""
        self._grammar, self._vocabulary = grammar, vocabulary
        self._new: list[int] = []
        self._ended = False

    def add(self, tokens: Sequence[int]) -> None:
        """More tokens of the output."""
        self._new.extend(tokens)

    def allowed(self, banned: Sequence[int] = ()) -> Tensor | None:
        """Bits of the tokens that may come next, uint8 `[bytes]`: token t is bit `t % 8` of byte `t // 8`.

        Without those in `banned`, unless nothing else is left. None when there is an `error`.
        """
        self._take_new()
        bits = self._vocabulary.ends.copy()
        if not self._ended:
            fill_next_token_bitmask(self._matcher, bits.view(np.int32))
        bits &= self._vocabulary.has_logits
        if self._matcher.is_error():
            self.error = one_line(self._matcher.get_error())
        elif not bits.any():
            self.error = "no token of this model continues the output in the form that it must have"
        if self.error:
            return None
        others = bits.copy()
        for token in banned:
            others[0, token // 32] &= ~np.uint32(1 << token % 32)
        return torch.from_numpy((others if others.any() else bits)[0].view(np.uint8))

    def _take_new(self) -> None:
        ends = [place for place, token in enumerate(self._new) if token in self._vocabulary.tokens.eos_tokens]
        if not self._ended:
            self._matcher.consume_tokens(self._new[: ends[0]] if ends else self._new)
        self._ended = self._ended or bool(ends)
        self._new.clear()

    @cached_property
    def _matcher(self) -> LLMatcher:
        return LLMatcher(self._vocabulary.tokens, self._grammar, log_level=0, limits=LIMITS)


def _bits(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    return np.packbits(chosen, bitorder="little").view(np.uint32)[None]


def forbid(logits: Tensor, rows: Sequence[int], allowed: Sequence[Tensor]) -> None:
    """Sets the logits `[all rows, vocab]` of some rows to -inf, in place, but for `allowed` tokens (see `Guide`)."""
    bits = torch.stack(list(allowed)).to(logits.device)
    of_byte = torch.arange(8, dtype=torch.uint8, device=logits.device)
    kept = ((bits[:, :, None] >> of_byte) & 1).flatten(1)[:, : logits.shape[-1]].bool()
    places = torch.tensor(list(rows), device=logits.device)
    logits[places] = logits[places].masked_fill(~kept, -torch.inf)
