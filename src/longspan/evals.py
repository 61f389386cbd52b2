"""Evaluations of long prompts: retrieval of a pass key, and perplexity.

Both measure changes of attention, such as sharing a prompt or dropping keys. This module makes the prompts, of Python's
own manual, and scores the outputs. The caller runs the engine.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from statistics import fmean
from typing import TYPE_CHECKING

from longspan.core.sampling import SamplingParams
from longspan.errors import ParameterError
from longspan.outputs import RequestOutput

if TYPE_CHECKING:
    from longspan.llm import LLM

ANSWER_TOKENS = 8
"""Tokens for five digits with a token each, and for a token before and after."""
NUM_TOP = 20
"""Number of most likely tokens whose probabilities are recorded, for each token of a window."""
_QUESTION = "\n\nThe secret pass key is"
_ROUNDING = 1e-6
"""Minimum probability of all tokens other than the top tokens, by the precision of float32 sums."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text, by default Python's manual, in the tokens of a model.

    Attributes:
        begin: special tokens at the beginning of every prompt.
    """

    token_ids: list[int]
    begin: list[int]

    @staticmethod
    def of(llm: LLM, text: str | None = None) -> Text:
        if text is None:
            text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
        return Text(token_ids=llm.tokenize(text, add_special_tokens=False), begin=llm.tokenize(""))

    def window(self, num_tokens: int, index: int, num_windows: int) -> list[int]:
        """Return one of `num_windows` windows, whose starts are evenly spread over the text."""
        num_starts = len(self.token_ids) - num_tokens
        if num_starts < 0:
            problem = f"need {num_tokens} tokens of text, but Python's manual has {len(self.token_ids)}: shorten them"
            raise ParameterError("lengths", problem, num_tokens)
        start = index * num_starts // num_windows
        return self.token_ids[start : start + num_tokens]


def check_lengths(lengths: Sequence[int], max_model_len: int) -> None:
    """Raise ParameterError unless the model supports all lengths, of prompt and answer together."""
    if not lengths:
        raise ParameterError("lengths", "must be one or more, but none given", lengths)
    longest = max(lengths)
    if longest > max_model_len:
        reason = "the model's context, or less if KV memory is short"
        problem = f"must be at most {max_model_len} ({reason}), but {longest} given: leave it out"
        raise ParameterError("lengths", problem, longest)


# ---------------------------------------------------------------- needle


@dataclass(frozen=True, kw_only=True)
class Needle:
    """A prompt in which a pass key is hidden.

    Attributes:
        length: tokens of the prompt and of the longest answer to it.
        depth: the fraction of the text before the key.
    """

    length: int
    depth: float
    key: str
    prompt: list[int]

    def found_in(self, answer: str) -> bool:
        return answer.lstrip().startswith(self.key)


NEEDLE_PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)


def needles(llm: LLM, text: Text, length: int, *, depths: Sequence[float], num_samples: int, seed: int) -> list[Needle]:
    """Hide keys in windows of the text: at each depth, one in each of `num_samples` windows.

    A key depends only on the seed, its length, its depth and its window.
    """
    tokenize = partial(llm.tokenize, add_special_tokens=False)
    question, hidden = tokenize(_QUESTION), []
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
    """The results at a length and a depth. `score` is the share of found keys."""

    length: int
    depth: float
    num_samples: int
    num_found: int
    score: float


def needle_results(answers: Sequence[tuple[Needle, bool]]) -> list[NeedleResult]:
    """Count the found keys for each length and depth, in order."""
    cells: dict[tuple[int, float], list[bool]] = {}
    for needle, is_found in answers:
        cells.setdefault((needle.length, needle.depth), []).append(is_found)
    return [
        NeedleResult(length=at, depth=depth, num_samples=len(cell), num_found=sum(cell), score=sum(cell) / len(cell))
        for (at, depth), cell in cells.items()
    ]


# ---------------------------------------------------------------- perplexity


@dataclass(frozen=True, kw_only=True)
class ScoredWindow:
    """A window of the text with the model's log-probabilities.

    Attributes:
        length: tokens of the window and of the answer that is computed with it.
        logprobs: log-probabilities by token id at each position after the first: of the token, then of the most likely.
    """

    length: int
    token_ids: list[int]
    logprobs: list[dict[int, float]]

    def negative_log_likelihoods(self) -> Iterator[float]:
        for token, logprobs in zip(self.token_ids[1:], self.logprobs, strict=True):
            yield -logprobs[token]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and options that were measured."""

    model: str
    parallel: str
    policy: str


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The scored windows of one run, for comparison with other runs."""

    subject: Subject
    windows: list[ScoredWindow]


def perplexity_params(*, num_top: int) -> SamplingParams:
    """Return parameters that report log-probabilities of each prompt token and of its `num_top` most likely tokens.

    The single token of the answer is ignored.
    """
    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_top)


def perplexity_prompts(text: Text, length: int, *, num_samples: int) -> list[list[int]]:
    """Cut windows of the text that have this length with special tokens and the single token of the answer."""
    num_others = len(text.begin) + 1
    if length < num_others + 2:
        raise ParameterError("lengths", f"must be at least {num_others + 2}, but {length} given", length)
    return [[*text.begin, *text.window(length - num_others, index, num_samples)] for index in range(num_samples)]


def scored(length: int, output: RequestOutput) -> ScoredWindow:
    """Convert the output of a request with `perplexity_params`."""
    assert output.prompt_logprobs is not None, "they were requested"
    _, *reports = output.prompt_logprobs
    logprobs = [{token: entry.logprob for token, entry in (report or {}).items()} for report in reports]
    return ScoredWindow(length=length, token_ids=output.prompt_token_ids, logprobs=logprobs)


def perplexity(windows: Sequence[ScoredWindow]) -> float:
    """Return exp of the mean negative log-likelihood of all scored tokens."""
    return math.exp(fmean(chain.from_iterable(window.negative_log_likelihoods() for window in windows)))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between a run and an exact run over the same windows.

    Attributes:
        kl: Kullback-Leibler divergence of its distributions from the exact distributions, in nats, mean over tokens.
        perplexity_ratio: its perplexity divided by the exact perplexity.
    """

    kl: float
    perplexity_ratio: float


def compare(exact: Sequence[ScoredWindow], other: Sequence[ScoredWindow]) -> Comparison:
    """Compare a run with an exact run that has scored its windows, see `check_same_windows`.

    Tokens that are not in both reports are merged into one, so `kl` is a lower bound: merging events never increases
    the divergence.
    """
    by_tokens = {tuple(window.token_ids): window for window in exact}
    pairs = [(by_tokens[tuple(window.token_ids)], window) for window in other]
    reports = [both for first, window in pairs for both in zip(first.logprobs, window.logprobs, strict=True)]
    ratio = perplexity([window for _, window in pairs]) / perplexity([first for first, _ in pairs])
    return Comparison(kl=fmean(_divergence(*both) for both in reports), perplexity_ratio=ratio)


def check_same_windows(exact: Recording, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ParameterError, before a run, if its windows are not among the windows of the exact run."""
    exact_windows = {tuple(window.token_ids) for window in exact.windows}
    missing = sum(tuple(prompt) not in exact_windows for prompt in prompts)
    if missing:
        lengths = ",".join(map(str, sorted({window.length for window in exact.windows})))
        problem = (
            f"has {exact.subject.model} with lengths {lengths}, but lacks {missing} of the {len(prompts)} windows "
            "here: give lengths of its list, as many samples, and a model with its tokenizer"
        )
        raise ParameterError("against", problem, exact.subject.model)


def _divergence(exact: dict[int, float], other: dict[int, float]) -> float:
    common = [(exact[token], other[token]) for token in exact.keys() & other.keys()]
    rest = [math.log(max(_ROUNDING, 1 - sum(map(math.exp, logprobs)))) for logprobs in zip(*common, strict=True)]
    return sum(math.exp(p) * (p - q) for p, q in (*common, rest))
