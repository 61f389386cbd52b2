"""Changes of logits before a token is chosen: bias, banned tokens, penalties, grammar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor

from longspan.core.steps import Sampling
from longspan.model.files import ModelFiles
from longspan.text.grammar_check import LIMITS, one_line
from longspan.text.tokenizer import grammar_vocabulary, load_tokenizer

_log = logging.getLogger("longspan.worker")


class Vocabulary:
    """A model's vocabulary, read from its tokenizer's files when the first grammar needs it."""

    def __init__(self, files: ModelFiles, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._files, self._vocab_size, self._eos_token_ids = files, vocab_size, eos_token_ids

    @cached_property
    def tokens(self) -> LLTokenizer:
        """Maps every token to its bytes."""
        _log.info("structured outputs: reading the vocabulary")
        tokenizer = load_tokenizer(self._files)
        return grammar_vocabulary(tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)

    @cached_property
    def has_logits(self) -> npt.NDArray[np.uint32]:
        """Bits `[1, words]` are set for the token ids that the model gives logits for."""
        num_words = -(-self.tokens.vocab_size // 32)
        return _bits(np.arange(num_words * 32) < self._vocab_size)

    @cached_property
    def ends(self) -> npt.NDArray[np.uint32]:
        """Bits `[1, words]` are set for the end-of-sequence tokens."""
        return _bits(np.isin(np.arange(self.has_logits.size * 32), self.tokens.eos_tokens))


class GrammarMatcher:
    """The state of one request's grammar.

    Tokens are kept until somebody asks what may come next, so that ranks that sample none of a request's tokens do no
    work for it. End-of-sequence tokens are allowed where the grammar may end (or names one); once it has ended, nothing
    else is.

    Attributes:
        error: why the grammar cannot go on; empty while it can. That is final.
    """

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        self.error = ""
        self._grammar, self._vocabulary = grammar, vocabulary
        self._new: list[int] = []
        self._ended = False

    def add(self, tokens: Sequence[int]) -> None:
        """Advances by more tokens of the output."""
        self._new.extend(tokens)

    def allowed(self, banned: Sequence[int] = ()) -> Tensor | None:
        """Returns bits of the tokens that may come next, uint8 `[bytes]`: token t is bit `t % 8` of byte `t // 8`.

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
        ends = [index for index, token in enumerate(self._new) if token in self._vocabulary.tokens.eos_tokens]
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
    """Sets the logits `[all rows, vocab]` of some rows to -inf, in place, but for `allowed` tokens."""
    bits = torch.stack(list(allowed)).to(logits.device)
    of_byte = torch.arange(8, dtype=torch.uint8, device=logits.device)
    kept = ((bits[:, :, None] >> of_byte) & 1).flatten(1)[:, : logits.shape[-1]].bool()
    indices = torch.tensor(list(rows), device=logits.device)
    logits[indices] = logits[indices].masked_fill(~kept, -torch.inf)


class TokenCounts:
    """The tokens that a request's penalties look at, on one rank: those of its prompt, and its output's with counts.

    Attributes:
        tokens: the distinct ones of prompt and output, int64 `[seen]` on the device of the logits.
        counts: how often each of them is in the output, int64 `[seen]`.
    """

    def __init__(self, vocab_size: int, prompt: Sequence[int], device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.counts = torch.empty(0, dtype=torch.int64, device=device)
        self._see(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Count more tokens of the output."""
        if not tokens:
            return
        self._see(tokens)
        indices = torch.tensor([self._index[token] for token in tokens], device=self.counts.device)
        self.counts.index_add_(0, indices, torch.ones_like(indices))

    def _see(self, tokens: Sequence[int]) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._index]
        if not new:
            return
        assert min(new) >= 0 and max(new) < self._vocab_size, f"tokens {min(new)} to {max(new)}, {self._vocab_size=}"
        self._index.update(zip(new, range(len(self._index), len(self._index) + len(new)), strict=True))
        self.tokens = torch.cat((self.tokens, torch.tensor(new, device=self.tokens.device)))
        self.counts = torch.cat((self.counts, self.counts.new_zeros(len(new))))


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The request and position that one row of logits is sampled for.

    Attributes:
        sampling: of the row's request.
        position: of the token to be sampled; random numbers are keyed by it.
        below_minimum: whether `sampling.banned` tokens are out of the question.
        history: of the row's request; None unless `sampling.penalised`.
        allowed: of the row's request, bits of the tokens that its grammar allows, see `GrammarMatcher`; None for all.
    """

    sampling: Sampling
    position: int
    below_minimum: bool = False
    history: TokenCounts | None = None
    allowed: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.history is not None or not self.sampling.penalised, "penalties need the request's history"

    @property
    def banned(self) -> tuple[int, ...]:
        """These tokens must not be chosen here; a grammar has taken them into account."""
        return self.sampling.banned if self.below_minimum and self.allowed is None else ()


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Returns `logits [rows, vocab]` after bias, ban, penalties and grammar; a copy, unless no row asks for any of
    them.
    """
    biased = [(row, draw.sampling.logit_bias) for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    banned = [(row, draw.banned) for row, draw in enumerate(draws) if draw.banned]
    penalised = [(row, draw) for row, draw in enumerate(draws) if draw.sampling.penalised]
    constrained = [(row, draw.allowed) for row, draw in enumerate(draws) if draw.allowed is not None]
    if not (biased or banned or penalised or constrained):
        return logits
    vocab = logits.shape[-1]
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if biased:
        indices = [row * vocab + token for row, pairs in biased for token, _ in pairs]
        values = [bias for _, pairs in biased for _, bias in pairs]
        flat.index_add_(0, torch.tensor(indices, device=flat.device), flat.new_tensor(values))
    if banned:
        indices = [row * vocab + token for row, tokens in banned for token in tokens]
        flat.index_fill_(0, torch.tensor(indices, device=flat.device), -torch.inf)
    if penalised:
        _penalise(flat, vocab, penalised)
    if constrained:
        forbid(logits, [row for row, _ in constrained], [allowed for _, allowed in constrained])
    return logits


def _penalise(flat: Tensor, vocab: int, penalised: Sequence[tuple[int, Draw]]) -> None:
    """Applies as vLLM does the repetition penalty on all tokens seen; then frequency and presence on those of the
    output.
    """
    histories = [draw.history for _, draw in penalised if draw.history is not None]
    sizes = torch.tensor([len(history.tokens) for history in histories], device=flat.device)
    total = sum(len(history.tokens) for history in histories)

    def per_token(values: Tensor) -> Tensor:
        return values.repeat_interleave(sizes, output_size=total)

    wishes = [draw.sampling for _, draw in penalised]
    repetition = per_token(flat.new_tensor([wish.repetition_penalty for wish in wishes]))
    frequency = per_token(flat.new_tensor([wish.frequency_penalty for wish in wishes]))
    presence = per_token(flat.new_tensor([wish.presence_penalty for wish in wishes]))
    first = torch.tensor([row * vocab for row, _ in penalised], device=flat.device)
    indices = per_token(first) + torch.cat([history.tokens for history in histories])
    counts = torch.cat([history.counts for history in histories])
    values = flat[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[indices] = values - frequency * counts - presence * (counts > 0)
