"""Token sampling and logprobs for rows of logits. The token of a row depends on that row only, never on the batch."""

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
"""Logits per tile: two float64 copies fit a core's L2 cache. A tile in main memory takes four times as long."""
_GPU_NUMBERS = 2**26
"""Logits per tile: bounds temporary copies to 512 MiB in float64."""

_PREFIX = 2048
"""Number of largest logits that top_p sorts first. The whole row is sorted only if their weight is too small."""

Weigh = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The inputs of sampling one row of logits, besides the logits.

    Attributes:
        sampling: of the row's request.
        position: of the sampled token. Random numbers are keyed by it.
        banned: tokens that must not be sampled here. Ignored with a grammar, whose `allowed` excludes them.
        history: token counts of the row's request. None unless `sampling.penalised`.
        allowed: bit mask of the tokens that the request's grammar allows, see `GrammarMatcher`. None for all.
    """

    sampling: Sampling
    position: int
    banned: Sequence[int] = ()
    history: TokenCounts | None = None
    allowed: Tensor | None = None


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample one token per row of `logits [rows, vocab]` (float32, not modified), as specified by the row's `Draw`.

    Bias, ban, penalties and grammar are applied first. Temperature 0 takes the largest logit, and the lowest token id
    of equal logits. Otherwise temperature, min_p, top_k and top_p give a distribution, and the token at a random
    quantile in vocabulary order is taken. Without a distribution (no token allowed, non-finite logits) the largest
    logit is taken.
    """
    logits = adjusted(logits, draws)
    drawn = _drawn(logits, draws)
    greedy = [row for row in range(len(draws)) if row not in drawn]
    if greedy:
        chosen = logits[greedy] if drawn else logits
        drawn.update(zip(greedy, chosen.argmax(dim=-1).tolist(), strict=True))
    return [drawn[row] for row in range(len(draws))]


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> dict[int, int]:
    """Sample the rows that are not greedy and have a distribution. Returns tokens by row."""
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    # Group rows with the same filters, so that a tile with top_k or top_p contains few rows without.
    params = [draw.sampling for draw in draws]
    random.sort(key=lambda row: (params[row].top_p < 1, params[row].top_k > 0, params[row].min_p > 0))
    tokens: dict[int, int] = {}
    for rows in _tiles(random, logits):
        cumulative = weights(logits[list(rows)], [params[row] for row in rows]).cumsum(dim=-1)
        numbers = uniforms((params[row].seed, params[row].choice, draws[row].position) for row in rows)
        targets = cumulative.new_tensor(numbers)[:, None] * cumulative[:, -1:]
        tokens.update(zip(rows, torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist(), strict=True))
    vocab = logits.shape[-1]  # an index of `vocab` means that the row has no distribution
    return {row: token for row, token in tokens.items() if token < vocab}


def weights(logits: Tensor, params: Sequence[Sampling]) -> Tensor:
    """Return float64 weights `[rows, vocab]` of `logits [rows, vocab]` (float32), 0 for excluded tokens.

    A weight is the token's probability relative to the row's most likely token, times a power of two, rounded to an
    integer. The power is such that the weights of a row sum to at most 2**53, so sums are exact in any order. Batch,
    device and the sorted prefix therefore do not change them. Tokens about 2**37 times less likely than the most
    likely one (vocabulary of 49,152) get weight 0.

    Filters compare logits with the last kept logit, not ranks, so exact ties are kept or excluded together.

    `params` are those of the rows. None may have temperature 0. A row whose largest logit is not finite gets NaN.
    """
    vocab = logits.shape[-1]
    weigh = _weigher(logits, params)
    kept = weigh(logits)
    top_k = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    if any(top_k):
        kept.mul_(logits >= _last_of_top_k(logits, top_k))
    top_p = [p.top_p if p.top_p < 1 else 0.0 for p in params]
    if any(top_p):
        needed = kept.new_tensor(top_p)[:, None] * kept.sum(dim=-1, keepdim=True)
        kept.mul_(logits >= _last_of_top_p(logits, needed, weigh))
    return kept


def largest(logits: Tensor, count: int) -> Tensor:
    """Return the `count` largest logits of each row `[rows, count]`, descending."""
    if logits.device.type != "cpu":
        return logits.topk(count, dim=-1).values
    # numpy partitions and sorts with vector instructions, ten times as fast as torch, which also sorts indices.
    values, rest = logits.numpy(), logits.shape[-1] - count
    best = np.partition(values, rest, axis=-1)[:, rest:] if rest else values
    return torch.from_numpy(np.sort(best, axis=-1)[:, ::-1].copy())


def _weigher(logits: Tensor, params: Sequence[Sampling]) -> Weigh:
    """Return a function from logits `[rows, any]` of these rows to their weights, after temperature and min_p."""
    best = logits.amax(dim=-1, keepdim=True).double()
    temperature = best.new_tensor([p.temperature for p in params])[:, None]
    min_p = best.new_tensor([p.min_p for p in params])[:, None]
    any_min_p = any(p.min_p for p in params)
    scale = 2.0 ** (53 - logits.shape[-1].bit_length())

    def weigh(logits: Tensor) -> Tensor:
        # Subtract the maximum first, so that no small temperature gives infinity.
        relative = logits.double().sub_(best).div_(temperature).exp_()
        if any_min_p:
            relative.mul_(relative >= min_p)
        return relative.mul_(scale).round_()

    return weigh


def _last_of_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Return the k-th largest logit `[rows, 1]`, or -inf where k is 0."""
    k = torch.tensor(top_k, device=logits.device)[:, None]
    last = largest(logits, max(top_k)).gather(-1, (k - 1).clamp_(min=0))
    return last.masked_fill_(k == 0, -torch.inf)


def _last_of_top_p(logits: Tensor, needed: Tensor, weigh: Weigh) -> Tensor:
    """Return the logit `[rows, 1]` at which the largest weights sum to `needed`, or -inf where `needed` is 0."""
    vocab = logits.shape[-1]
    for count in (min(_PREFIX, vocab), vocab):
        ranked = largest(logits, count)
        ranked_weights = weigh(ranked)
        cumulative = ranked_weights.cumsum(dim=-1)
        if count == vocab or bool((cumulative[:, -1:] >= needed).all()):
            break
    num_kept = (cumulative - ranked_weights < needed).sum(dim=-1, keepdim=True)
    last = ranked.gather(-1, (num_kept - 1).clamp_(min=0))
    return last.masked_fill_(needed == 0, -torch.inf)


def _tiles(rows: Sequence[int], logits: Tensor) -> Iterator[Sequence[int]]:
    """Split rows of `logits [rows, vocab]` into tiles that suit the device. No result may depend on the tiles."""
    size = max(1, (_CPU_NUMBERS if logits.device.type == "cpu" else _GPU_NUMBERS) // logits.shape[-1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def uniforms(keys: Iterable[tuple[int, int, int]]) -> list[float]:
    """Return a random number in [0, 1) for each (seed, choice, position) of a request's output.

    The numbers equal `Generator(Philox(key=(seed, choice), counter=position)).random()`. One generator is reused for
    all keys, because each new generator would collect unused entropy.
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
    """Return the logprob and rank of each row's token, and the row's `num_top` most likely tokens.

    `logits [rows, vocab]` and logprobs are float32. A rank is 1 plus the number of strictly larger logits. Of equal
    logits, the lower token id comes first. Rows do not depend on each other. At most one tile of rows is copied.
    """
    tiles = _tiles(range(len(tokens)), logits)
    return [logprobs for tile in tiles for logprobs in _of_tile(logits, tile, tokens, num_top)]


def _of_tile(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    part = logits[rows[0] : rows[-1] + 1]
    chosen = torch.tensor([tokens[row] for row in rows], device=part.device)[:, None]
    logprobs = part.log_softmax(dim=-1)
    ranks = (part > part.gather(-1, chosen)).sum(dim=-1) + 1
    top_ids = _top_ids(part, max(num_top[row] for row in rows))
    top_logprobs: list[list[float]] = logprobs.gather(-1, top_ids).tolist()
    columns = (logprobs.gather(-1, chosen)[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs)
    return [
        TokenLogprobs(
            logprob=logprob, rank=rank, top_ids=tuple(ids[: num_top[row]]), top_logprobs=tuple(values[: num_top[row]])
        )
        for row, logprob, rank, ids, values in zip(rows, *columns, strict=True)
    ]


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids `[rows, count]` of the largest logits, descending. Of equal logits, the lowest id comes first.

    `topk` does not define the order of equal values, so it gets distinct keys. The high bits are the logit's bits,
    mapped so that integers order like floats. The low bits are the id, counted from the vocabulary's end.
    """
    vocab = logits.shape[-1]
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    from_end = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered << 32).bitwise_or_(from_end)
    return vocab - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


# ---------------------------------------------------------------- bias, banned tokens, penalties, grammar


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Apply bias, ban, penalties and grammar to a copy of `logits [rows, vocab]`. No copy if no row needs any."""
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
    """Apply penalties as vLLM does: repetition to tokens of prompt and output, frequency and presence to the output."""
    rows, params, histories = zip(*penalised, strict=True)
    sizes = torch.tensor([len(history.tokens) for history in histories], device=flat.device)
    total = sum(len(history.tokens) for history in histories)

    def per_token(values: Tensor) -> Tensor:
        return values.repeat_interleave(sizes, output_size=total)

    repetition = per_token(flat.new_tensor([p.repetition_penalty for p in params]))
    frequency = per_token(flat.new_tensor([p.frequency_penalty for p in params]))
    presence = per_token(flat.new_tensor([p.presence_penalty for p in params]))
    first = torch.tensor([row * vocab for row in rows], device=flat.device)
    indices = per_token(first) + torch.cat([history.tokens for history in histories])
    counts = torch.cat([history.counts for history in histories])
    values = flat[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[indices] = values - frequency * counts - presence * (counts > 0)


def forbid(logits: Tensor, rows: Sequence[int], allowed: Sequence[Tensor]) -> None:
    """Set the logits `[all rows, vocab]` of `rows` to -inf in place, except for `allowed` tokens."""
    bits = torch.stack(list(allowed)).to(logits.device)
    of_byte = torch.arange(8, dtype=torch.uint8, device=logits.device)
    kept = ((bits[:, :, None] >> of_byte) & 1).flatten(1)[:, : logits.shape[-1]].bool()
    indices = torch.tensor(list(rows), device=logits.device)
    logits[indices] = logits[indices].masked_fill(~kept, -torch.inf)


class TokenCounts:
    """The tokens that a request's penalties apply to, on one rank.

    Attributes:
        tokens: the distinct tokens of prompt and output, int64 `[distinct]` on the device of the logits.
        counts: occurrences of each token in the output, int64 `[distinct]`.
    """

    def __init__(self, vocab_size: int, prompt: Sequence[int], device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.counts = torch.empty(0, dtype=torch.int64, device=device)
        self._add_distinct(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._add_distinct(tokens)
        indices = torch.tensor([self._index[token] for token in tokens], device=self.counts.device)
        self.counts.index_add_(0, indices, torch.ones_like(indices))

    def _add_distinct(self, tokens: Sequence[int]) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._index]
        if not new:
            return
        assert min(new) >= 0 and max(new) < self._vocab_size, f"tokens {min(new)} to {max(new)}, {self._vocab_size=}"
        self._index.update(zip(new, range(len(self._index), len(self._index) + len(new)), strict=True))
        self.tokens = torch.cat((self.tokens, torch.tensor(new, device=self.tokens.device)))
        self.counts = torch.cat((self.counts, self.counts.new_zeros(len(new))))


class Vocabulary:
    """A model's vocabulary of `size` tokens, read from the tokenizer's files for the first grammar."""

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
        self._ended = False

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
        bits &= self._vocabulary.has_logits
        if self._matcher.is_error():
            from longspan.text.grammar_check import first_line  # noqa: PLC0415 - only for structured outputs

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
            self._matcher.consume_tokens(self._new[: ends[0]] if ends else self._new)
        self._ended = self._ended or bool(ends)
        self._new.clear()

    @cached_property
    def _matcher(self) -> LLMatcher:
        from longspan.text.grammar_check import LIMITS  # noqa: PLC0415 - only for structured outputs

        return LLMatcher(self._vocabulary.tokens, self._grammar, log_level=0, limits=LIMITS)
