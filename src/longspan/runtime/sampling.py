"""Samples tokens, and computes how likely they were. A row's token depends on that row alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor

from longspan.core.steps import Sampling, TokenLogprobs
from longspan.model.files import ModelError, ModelFiles
from longspan.text.tokenizer import grammar_vocabulary, load_tokenizer

_log = logging.getLogger("longspan.worker")

_CPU_NUMBERS = 2**18
"""Two copies in float64 fit a core's second-level cache; memory would take four times as long."""
_GPU_NUMBERS = 2**26
"""Bounds the memory of temporary copies: 512 MiB in float64."""

_PREFIX = 2048
"""The best tokens that top_p looks at first; only if they do not suffice is the whole row sorted."""

Weigh = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The request and position that one row of logits is sampled for.

    Attributes:
        sampling: of the row's request.
        position: of the token to be sampled; random numbers are keyed by it.
        banned: tokens that must not be chosen here. A grammar has taken them into account.
        history: of the row's request; None unless `sampling.penalised`.
        allowed: bits of the tokens that the request's grammar allows, see `GrammarMatcher`; None for all.
    """

    sampling: Sampling
    position: int
    banned: Sequence[int] = ()
    history: TokenCounts | None = None
    allowed: Tensor | None = None


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Samples one token per row of `logits [rows, vocab]` (float32, left as they are), as each row's `Draw` asks.

    Bias, ban, penalties and grammar come first. Temperature 0 then takes the best token, of equals the first; otherwise
    temperature, min_p, top_k and top_p leave a distribution, and the token at a random quantile of it, in vocabulary
    order, is taken. Where they leave none (nothing allowed, or logits that are not finite) the best is taken, too.
    """
    logits = adjusted(logits, draws)
    drawn = _drawn(logits, draws)
    greedy = [row for row in range(len(draws)) if row not in drawn]
    if greedy:
        chosen = logits[greedy] if drawn else logits
        drawn.update(zip(greedy, chosen.argmax(dim=-1).tolist(), strict=True))
    return [drawn[row] for row in range(len(draws))]


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> dict[int, int]:
    """Samples the rows that are not greedy and have a distribution; returns their tokens by row."""
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    # Rows with the same filters are worked on together, so that few are sorted for their neighbours' sake.
    params = [draw.sampling for draw in draws]
    random.sort(key=lambda row: (params[row].top_p < 1, params[row].top_k > 0, params[row].min_p > 0))
    tokens: dict[int, int] = {}
    for rows in _tiles(random, logits):
        reached = weights(logits[list(rows)], [params[row] for row in rows]).cumsum(dim=-1)
        numbers = uniforms((params[row].seed, params[row].choice, draws[row].position) for row in rows)
        wanted = reached.new_tensor(numbers)[:, None] * reached[:, -1:]
        tokens.update(zip(rows, torch.searchsorted(reached, wanted, right=True)[:, 0].tolist(), strict=True))
    vocab = logits.shape[-1]  # stands for no token
    return {row: token for row, token in tokens.items() if token < vocab}


def weights(logits: Tensor, params: Sequence[Sampling]) -> Tensor:
    """Returns float64 weights `[rows, vocab]` of `logits [rows, vocab]` (float32), 0 for tokens that must not be drawn.

    A token's weight is its probability over that of the row's best token, times a power of two, rounded: a whole
    number in float64. The power is such that the weights of a row sum to at most 2**53, so that sums are exact in
    whatever order they are taken: neither a batch nor a device nor a prefix of the sorted row changes them. What is
    lost is tokens some 2**37 times (vocabulary of 49,152) less likely than the best.

    Tokens go by the logit of the last one that stays, never by rank, so that exact ties stay or go together.

    `params` are the rows' own; none may have temperature 0. A row whose largest logit is not finite gets NaN.
    """
    vocab = logits.shape[-1]
    weigh = _weigher(logits, params)
    kept = weigh(logits)
    top_k = [one.top_k if 0 < one.top_k < vocab else 0 for one in params]
    if any(top_k):
        kept.mul_(logits >= _last_of_top_k(logits, top_k))
    top_p = [one.top_p if one.top_p < 1 else 0.0 for one in params]
    if any(top_p):
        needed = kept.new_tensor(top_p)[:, None] * kept.sum(dim=-1, keepdim=True)
        kept.mul_(logits >= _last_of_top_p(logits, needed, weigh))
    return kept


def largest(logits: Tensor, count: int) -> Tensor:
    """Finds the `count` largest of each row of `logits [rows, vocab]`, descending `[rows, count]`."""
    if logits.device.type != "cpu":
        return logits.topk(count, dim=-1).values
    # numpy partitions and sorts values by vector instructions, ten times as fast as torch sorts values with indices.
    values, rest = logits.numpy(), logits.shape[-1] - count
    best = np.partition(values, rest, axis=-1)[:, rest:] if rest else values
    return torch.from_numpy(np.sort(best, axis=-1)[:, ::-1].copy())


def _weigher(logits: Tensor, params: Sequence[Sampling]) -> Weigh:
    """Makes a function from logits `[rows, some]` of some rows to their weights, after temperature and min_p."""
    best = logits.amax(dim=-1, keepdim=True).double()
    temperature = best.new_tensor([one.temperature for one in params])[:, None]
    min_p = best.new_tensor([one.min_p for one in params])[:, None]
    any_min_p = any(one.min_p for one in params)
    scale = 2.0 ** (53 - logits.shape[-1].bit_length())

    def weigh(some: Tensor) -> Tensor:
        # The best is taken off first, so that no temperature, however small, makes anything infinite.
        found = some.double().sub_(best).div_(temperature).exp_()
        if any_min_p:
            found.mul_(found >= min_p)
        return found.mul_(scale).round_()

    return weigh


def _last_of_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Returns the k-th largest logit `[rows, 1]`; -inf where k is 0."""
    k = torch.tensor(top_k, device=logits.device)[:, None]
    last = largest(logits, max(top_k)).gather(-1, (k - 1).clamp_(min=0))
    return last.masked_fill_(k == 0, -torch.inf)


def _last_of_top_p(logits: Tensor, needed: Tensor, weigh: Weigh) -> Tensor:
    """Returns the logit `[rows, 1]` with which the best tokens reach the weight `needed`; -inf where that is 0."""
    vocab = logits.shape[-1]
    for count in (min(_PREFIX, vocab), vocab):
        ranked = largest(logits, count)
        found = weigh(ranked)
        reached = found.cumsum(dim=-1)
        if count == vocab or bool((reached[:, -1:] >= needed).all()):
            break
    num_kept = (reached - found < needed).sum(dim=-1, keepdim=True)
    last = ranked.gather(-1, (num_kept - 1).clamp_(min=0))
    return last.masked_fill_(needed == 0, -torch.inf)


def _tiles(rows: Sequence[int], logits: Tensor) -> Iterator[Sequence[int]]:
    """Cuts rows of `logits [rows, vocab]` in slices of as many as suit its device. No result may depend on the cuts."""
    size = max(1, (_CPU_NUMBERS if logits.device.type == "cpu" else _GPU_NUMBERS) // logits.shape[-1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def uniforms(keys: Iterable[tuple[int, int, int]]) -> list[float]:
    """Returns a random number in [0, 1) for each (seed, choice, position), a position in one of a request's outputs.

    These are `Generator(Philox(key=(seed, choice), counter=position)).random()`. A new generator for each would gather
    entropy that nobody needs, so that one is wound to each key in turn.
    """
    philox = np.random.Philox(key=0)
    state = philox.state
    inner = state["state"]
    numbers = []
    for seed, choice, position in keys:
        inner["key"][:] = seed, choice
        inner["counter"][:] = position, 0, 0, 0
        philox.state = state
        numbers.append((int(philox.random_raw()) >> 11) * 2.0**-53)
    return numbers


# ---------------------------------------------------------------- logprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns for each row of `logits [rows, vocab]` (float32) its token's log-probability and rank, and the `num_top`
    best.

    Log-probabilities are float32. A rank is 1 plus the number of strictly larger logits. Of equal logits the lower
    token id counts as better. Rows do not depend on each other. At no time more than one tile of rows is copied.
    """
    rows = range(len(tokens))
    return [found for tile in _tiles(rows, logits) for found in _of_tile(logits, tile, tokens, num_top)]


def _of_tile(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    part = logits[rows[0] : rows[-1] + 1]
    chosen = torch.tensor([tokens[row] for row in rows], device=part.device)[:, None]
    logprobs = part.log_softmax(dim=-1)
    ranks = (part > part.gather(-1, chosen)).sum(dim=-1) + 1
    top_ids = _best(part, max(num_top[row] for row in rows))
    top_logprobs: list[list[float]] = logprobs.gather(-1, top_ids).tolist()
    columns = (logprobs.gather(-1, chosen)[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs)
    return [
        TokenLogprobs(
            logprob=logprob, rank=rank, top_ids=tuple(ids[: num_top[row]]), top_logprobs=tuple(values[: num_top[row]])
        )
        for row, logprob, rank, ids, values in zip(rows, *columns, strict=True)
    ]


def _best(logits: Tensor, count: int) -> Tensor:
    """Finds the ids `[rows, count]` of the largest logits, best first, of equals the lowest id first.

    `topk` alone leaves open which of equals it takes, so it is given numbers of which no two are equal: the bits of a
    logit, turned so that integers order as the floats did, then the id counted from the vocabulary's end.
    """
    vocab = logits.shape[-1]
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    from_end = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered << 32).bitwise_or_(from_end)
    return vocab - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


# ---------------------------------------------------------------- bias, banned tokens, penalties, grammar


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Returns `logits [rows, vocab]` after bias, ban, penalties and grammar; a copy, unless no row asks for any."""
    biased = [(row, draw.sampling.logit_bias) for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    banned = [(row, draw.banned) for row, draw in enumerate(draws) if draw.banned and draw.allowed is None]
    penalised = [(row, draw.sampling, draw.history) for row, draw in enumerate(draws) if draw.history is not None]
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


def _penalise(flat: Tensor, vocab: int, penalised: Sequence[tuple[int, Sampling, TokenCounts]]) -> None:
    """Applies, as vLLM does, repetition penalty to tokens seen, then frequency and presence to those of the output."""
    rows, params, histories = zip(*penalised, strict=True)
    sizes = torch.tensor([len(history.tokens) for history in histories], device=flat.device)
    total = sum(len(history.tokens) for history in histories)

    def per_token(values: Tensor) -> Tensor:
        return values.repeat_interleave(sizes, output_size=total)

    repetition = per_token(flat.new_tensor([one.repetition_penalty for one in params]))
    frequency = per_token(flat.new_tensor([one.frequency_penalty for one in params]))
    presence = per_token(flat.new_tensor([one.presence_penalty for one in params]))
    first = torch.tensor([row * vocab for row in rows], device=flat.device)
    indices = per_token(first) + torch.cat([history.tokens for history in histories])
    counts = torch.cat([history.counts for history in histories])
    values = flat[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[indices] = values - frequency * counts - presence * (counts > 0)


def forbid(logits: Tensor, rows: Sequence[int], allowed: Sequence[Tensor]) -> None:
    """Sets logits `[all rows, vocab]` of some rows to -inf, in place, but for `allowed` tokens."""
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


class Vocabulary:
    """A model's vocabulary of `size` tokens, read from its tokenizer's files when the first grammar needs it."""

    def __init__(self, files: ModelFiles, *, size: int, eos_token_ids: Sequence[int]) -> None:
        self._files, self.size, self._eos_token_ids = files, size, eos_token_ids

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The bytes of every token."""
        _log.info("structured outputs: reading the vocabulary")
        tokenizer = load_tokenizer(self._files)
        return grammar_vocabulary(tokenizer, vocab_size=self.size, eos_token_ids=self._eos_token_ids)

    @cached_property
    def has_logits(self) -> npt.NDArray[np.uint32]:
        """Bits `[1, words]`, set for the token ids that the model gives logits for."""
        num_words = -(-self.tokens.vocab_size // 32)
        return _bits(np.arange(num_words * 32) < self.size)

    @cached_property
    def ends(self) -> npt.NDArray[np.uint32]:
        """Bits `[1, words]`, set for the end-of-sequence tokens."""
        return _bits(np.isin(np.arange(self.has_logits.size * 32), self.tokens.eos_tokens))


def _bits(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    return np.packbits(chosen, bitorder="little").view(np.uint32)[None]


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
        self._new.extend(tokens)

    def allowed(self, banned: Sequence[int] = ()) -> Tensor | None:
        """Returns bits of the tokens that may come next, uint8 `[bytes]`: token t is bit `t % 8` of byte `t // 8`.

        Without those in `banned`, unless nothing else is left. None when there is an `error`.
        """
        try:
            self._take_new()
        except ModelError as error:  # the vocabulary is read when it is first needed
            self.error = str(error)
            return None
        bits = self._vocabulary.ends.copy()
        if not self._ended:
            fill_next_token_bitmask(self._matcher, bits.view(np.int32))
        bits &= self._vocabulary.has_logits
        if self._matcher.is_error():
            from longspan.text.grammar_check import first_line  # noqa: PLC0415 - structured outputs alone

            self.error = first_line(self._matcher.get_error())
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
        from longspan.text.grammar_check import LIMITS  # noqa: PLC0415 - structured outputs alone

        return LLMatcher(self._vocabulary.tokens, self._grammar, log_level=0, limits=LIMITS)
