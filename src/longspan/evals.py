"""Evaluations of long prompts: whether a pass key is found in them, and how well their tokens are predicted.

Both measure whatever an engine does to attention, such as sharing a prompt or leaving out keys. Here prompts are made
of Python's own manual, and outputs are read; whoever has an engine gives it the one and takes the other from it.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from longspan.core.sampling import SamplingParams
from longspan.errors import ParameterError
from longspan.outputs import RequestOutput

Tokenize = Callable[[str], list[int]]
"""Gives the token ids of a text, without special tokens."""

ANSWER_TOKENS = 8
"""Room for five digits with a token each, and what stands before and behind them."""
NUM_TOP = 20
"""The most likely tokens whose probabilities are recorded, for each token of a window."""
_QUESTION = "\n\nThe secret pass key is"
_ROUNDING = 1e-6
"""The least probability of what no top token covers: sums of float32 are no more exact."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Python's manual in the tokens of a model.

    Attributes:
        begin: special tokens that every prompt begins with.
    """

    token_ids: list[int]
    begin: list[int]

    @staticmethod
    def of(tokenize: Tokenize, begin: list[int]) -> Text:
        topics = sorted(pydoc_data.topics.topics.items())
        return Text(token_ids=tokenize("\n\n".join(topic for _, topic in topics)), begin=begin)

    def window(self, num_tokens: int, index: int, num_windows: int) -> list[int]:
        """Return one of so many windows of that length, whose starts are evenly spread over the text."""
        num_starts = len(self.token_ids) - num_tokens
        if num_starts < 0:
            problem = f"need {num_tokens} tokens of text, but Python's manual has {len(self.token_ids)}: shorten them"
            raise ParameterError("lengths", problem, num_tokens)
        start = index * num_starts // num_windows
        return self.token_ids[start : start + num_tokens]


def check_lengths(lengths: Sequence[int], max_model_len: int) -> None:
    """Raise ParameterError unless all are lengths that prompt and answer together may have."""
    if not lengths:
        raise ParameterError("lengths", "must be one or more, but none given", lengths)
    longest = max(lengths)
    if longest > max_model_len:
        reason = "the model's context, or less where KV memory is short"
        problem = f"must be at most {max_model_len} ({reason}), but {longest} given: leave it out"
        raise ParameterError("lengths", problem, longest)


# ---------------------------------------------------------------- needle


@dataclass(frozen=True, kw_only=True)
class Needle:
    """A prompt in which a pass key is hidden.

    Attributes:
        length: tokens of the prompt, and of the longest answer to it.
        depth: the part of the text that stands before the key.
    """

    length: int
    depth: float
    key: str
    prompt: list[int]

    def found_in(self, answer: str) -> bool:
        return answer.lstrip().startswith(self.key)


NEEDLE_PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)


def needles(
    text: Text, tokenize: Tokenize, length: int, *, depths: Sequence[float], num_samples: int, seed: int
) -> list[Needle]:
    """Hide keys in windows of the text: at each depth, one in each of `num_samples` windows.

    A key depends on the seed, its length, its depth and its window only, not on which others there are.
    """
    question = tokenize(_QUESTION)
    hidden = []
    for depth, index in product(depths, range(num_samples)):
        key = str(random.Random(f"{seed} {length} {depth} {index}").randint(10_000, 99_999))
        needle = tokenize(f"\n\nThe secret pass key is {key}. Remember it. {key} is the pass key.\n\n")
        num_others = len(text.begin) + len(needle) + len(question) + ANSWER_TOKENS
        if length <= num_others:
            raise ParameterError("lengths", f"must be more than {num_others}, but {length} given", length)
        window = text.window(length - num_others, index, num_samples)
        cut = round(depth * len(window))
        prompt = [*text.begin, *window[:cut], *needle, *window[cut:], *question]
        hidden.append(Needle(length=length, depth=depth, key=key, prompt=prompt))
    return hidden


@dataclass(frozen=True, kw_only=True)
class NeedleResult:
    """The keys at a length and a depth: `score` is the share that was found."""

    length: int
    depth: float
    num_samples: int
    num_found: int
    score: float


def needle_results(found: Sequence[tuple[Needle, bool]]) -> list[NeedleResult]:
    """Count for each length and depth what was found, in their order."""
    cells: dict[tuple[int, float], list[bool]] = {}
    for needle, is_found in found:
        cells.setdefault((needle.length, needle.depth), []).append(is_found)
    return [
        NeedleResult(
            length=length, depth=depth, num_samples=len(cell), num_found=sum(cell), score=sum(cell) / len(cell)
        )
        for (length, depth), cell in cells.items()
    ]


# ---------------------------------------------------------------- perplexity


@dataclass(frozen=True, kw_only=True)
class ScoredWindow:
    """A window of the text, and how likely a model took its tokens to be.

    Attributes:
        length: tokens of the window, and of the answer that is computed with it.
        logprobs: log-probabilities by token id, of each token but the first: of itself, then of the most likely ones.
    """

    length: int
    token_ids: list[int]
    logprobs: list[dict[int, float]]

    def negative_log_likelihoods(self) -> Iterator[float]:
        for token, logprobs in zip(self.token_ids[1:], self.logprobs, strict=True):
            yield -logprobs[token]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The names of what was measured."""

    model: str
    parallel: str
    policy: str


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The windows that one run has scored, for others to be compared with."""

    subject: Subject
    windows: list[ScoredWindow]


def perplexity_params(*, num_top: int) -> SamplingParams:
    """Return parameters that report log-probabilities of the prompt, and so many of the most likely tokens with each.

    The one token of the answer is not looked at.
    """
    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_top)


def perplexity_prompts(text: Text, length: int, *, num_samples: int) -> list[list[int]]:
    """Cut windows of the text that have, with special tokens and the one token of the answer, that length."""
    num_others = len(text.begin) + 1
    if length < num_others + 2:
        raise ParameterError("lengths", f"must be at least {num_others + 2}, but {length} given", length)
    return [[*text.begin, *text.window(length - num_others, index, num_samples)] for index in range(num_samples)]


def scored(length: int, output: RequestOutput) -> ScoredWindow:
    """Read what a request with `perplexity_params` has put out."""
    assert output.prompt_logprobs is not None, "they were asked for"
    _, *reports = output.prompt_logprobs
    logprobs = [{token: one.logprob for token, one in (report or {}).items()} for report in reports]
    return ScoredWindow(length=length, token_ids=output.prompt_token_ids, logprobs=logprobs)


def perplexity(windows: Sequence[ScoredWindow]) -> float:
    """Return exp of the mean negative log-likelihood of all tokens that have one."""
    return math.exp(_mean([one for window in windows for one in window.negative_log_likelihoods()]))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The distance of a run from an exact one, over the same windows.

    Attributes:
        kl: Kullback-Leibler divergence of its distributions from the exact ones, in nats, as a mean over tokens.
        perplexity_ratio: its perplexity by the exact one.
    """

    kl: float
    perplexity_ratio: float


def compare(exact: Sequence[ScoredWindow], other: Sequence[ScoredWindow]) -> Comparison:
    """Compare a run with an exact one that has scored its windows, and maybe more; see `check_same_windows`.

    Tokens that only one of both reports count as one, so `kl` is what it is at least: to tell apart less never makes
    the divergence larger.
    """
    by_tokens = {tuple(window.token_ids): window for window in exact}
    pairs = [(by_tokens[tuple(window.token_ids)], window) for window in other]
    divergences = [
        _divergence(*both) for one, window in pairs for both in zip(one.logprobs, window.logprobs, strict=True)
    ]
    ratio = perplexity([window for _, window in pairs]) / perplexity([one for one, _ in pairs])
    return Comparison(kl=_mean(divergences), perplexity_ratio=ratio)


def check_same_windows(exact: Recording, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ParameterError, before a run, when these are not among the windows that it is to be compared with."""
    known = {tuple(window.token_ids) for window in exact.windows}
    missing = sum(tuple(prompt) not in known for prompt in prompts)
    if missing:
        lengths = ",".join(map(str, sorted({window.length for window in exact.windows})))
        problem = (
            f"has {exact.subject.model} with lengths {lengths}, but lacks {missing} of the {len(prompts)} windows "
            "here: give some of its lengths, as many samples, and a model with its tokenizer"
        )
        raise ParameterError("against", problem, exact.subject.model)


def _divergence(exact: dict[int, float], other: dict[int, float]) -> float:
    both = [(exact[token], other[token]) for token in exact.keys() & other.keys()]
    rest = [math.log(max(_ROUNDING, 1 - sum(map(math.exp, one)))) for one in zip(*both, strict=True)]
    return sum(math.exp(p) * (p - q) for p, q in (*both, rest))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
