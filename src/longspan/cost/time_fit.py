"""Seconds of a prefill by its lengths, of decodes by batch and context, of a transfer by its bytes: fitted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import mul, truediv
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Sample = tuple[int, int, float]
"""New tokens, cached tokens before them, seconds; of decodes: requests, tokens before each, seconds."""
Array = NDArray[np.float64]

_FEWEST_LENGTHS = 2
_SAME_PLACE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Errors of a fit over its samples.

    Attributes:
        mean_error, max_error: of the samples, relative to what was measured.
        num_samples: how many those were.
    """

    mean_error: float
    max_error: float
    num_samples: int


FitT = TypeVar("FitT", bound=Fit)


@dataclass(frozen=True, kw_only=True)
class TimeFit(Fit):
    """T(L, P) = start_s + token_s L + cached_s P L + square_s L², for L new tokens behind P cached ones.

    No term is negative, so that predictions are monotone in both lengths, also beyond what was measured.
    """

    start_s: float
    token_s: float
    cached_s: float
    square_s: float

    @property
    def pair_s(self) -> float:
        """Averages the cost of a query and a key. Both quadratic terms have a say, and this is their mean: a prompt has
        L²/2 pairs.
        """
        return (self.cached_s + 2 * self.square_s) / 2

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Returns seconds of a prefill of so many tokens."""
        per_token = self.token_s + self.cached_s * cached_tokens + self.square_s * new_tokens
        return self.start_s + per_token * new_tokens


@dataclass(frozen=True, kw_only=True)
class Times:
    """A fit, corrected by what it missed its samples by: near a sample it says what was measured there.

    The correction is the mean of measured over fitted seconds. A sample weighs less with the square of its distance, in
    doublings of new and of cached tokens.
    """

    fit: TimeFit
    samples: tuple[Sample, ...]

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Returns seconds of a prefill of so many tokens."""
        fitted = self.fit.seconds(new_tokens, cached_tokens)
        places, measured, expected = self._known
        if not places.found:
            return fitted
        nearness, weight = _nearness(places, new_tokens, cached_tokens)
        corrections: float = sum(map(truediv, map(mul, nearness, measured), expected))
        return fitted * corrections / weight

    @cached_property
    def _known(self) -> tuple[_Places, tuple[float, ...], tuple[float, ...]]:
        """Lists for each sample that takes time: where it lies, seconds, and what was fitted."""
        fitted = [(new, cached, seconds, self.fit.seconds(new, cached)) for new, cached, seconds in self.samples]
        known = [sample for sample in fitted if sample[-1]]
        return (
            _places(tuple((new, cached) for new, cached, _, _ in known)),
            tuple(seconds for _, _, seconds, _ in known),
            tuple(expected for _, _, _, expected in known),
        )


@dataclass(frozen=True, eq=False)
class _Places:
    """New and cached tokens of each sample. Fits of samples at the same places share one, so that it stands for them in
    what is known of it.
    """

    found: tuple[tuple[int, int], ...]


_places = lru_cache(maxsize=256)(_Places)


@lru_cache(maxsize=1024)
def _nearness(places: _Places, new_tokens: int, cached_tokens: int) -> tuple[list[float], float]:
    """Returns how much each sample weighs for a prefill of so many tokens, and all together."""
    behind, log2 = cached_tokens + 1, math.log2
    found = [
        1 / max(_SAME_PLACE, log2(new / new_tokens) ** 2 + log2((cached + 1) / behind) ** 2)
        for new, cached in places.found
    ]
    return found, sum(found)


def fit_times(samples: Sequence[Sample]) -> TimeFit | None:
    """Solves non-negative least squares over relative errors, so that short prompts count as much as long ones.

    Returns:
        None for samples of fewer than two lengths, which say nothing of other lengths.

    Raises:
        ValueError: for a time that is not positive.
    """
    return _fit(TimeFit, samples, _PREFILL_TERMS)


@dataclass(frozen=True, kw_only=True)
class DecodeFit(Fit):
    """T(B, C) = start_s + request_s B + context_s B C, for B requests that decode behind C tokens each.

    No term is negative here either.
    """

    start_s: float
    request_s: float
    context_s: float

    def seconds(self, batch: int, context_tokens: float) -> float:
        """Returns seconds of one step of so many requests with so many tokens before each."""
        return self.start_s + batch * (self.request_s + self.context_s * context_tokens)


def fit_decodes(samples: Sequence[Sample]) -> DecodeFit | None:
    """Fits decodes as `fit_times` fits prefills."""
    return _fit(DecodeFit, samples, _DECODE_TERMS)


def _fit(
    kind: type[FitT], samples: Sequence[Sample], terms: Mapping[str, Callable[[Array, Array], Array]]
) -> FitT | None:
    """A fit of that kind with a coefficient for each term, which is a function of a sample's first two numbers."""
    if len({sample[:2] for sample in samples}) < _FEWEST_LENGTHS:
        return None
    if min(seconds for _, _, seconds in samples) <= 0:
        raise ValueError("what is fitted takes some time, but a sample of none was given")
    first, second, seconds = np.array(samples, dtype=np.float64).T
    found, errors = _least_squares(np.column_stack([term(first, second) for term in terms.values()]), seconds)
    return kind(
        **dict(zip(terms, found, strict=True)),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        num_samples=len(samples),
    )


_PREFILL_TERMS = {
    "start_s": lambda new, _: np.ones_like(new),
    "token_s": lambda new, _: new,
    "cached_s": lambda new, cached: new * cached,
    "square_s": lambda new, _: new * new,
}
_DECODE_TERMS = {
    "start_s": lambda batch, _: np.ones_like(batch),
    "request_s": lambda batch, _: batch,
    "context_s": lambda batch, context: batch * context,
}


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """T(bytes) = start_s + bytes / bytes_per_s; `max_error` is relative, of the samples it was fitted to."""

    start_s: float
    bytes_per_s: float
    max_error: float

    def seconds(self, num_bytes: float) -> float:
        """Returns seconds of a transfer of so many bytes."""
        return self.start_s + num_bytes / self.bytes_per_s


def fit_link(samples: Sequence[tuple[int, float]]) -> LinkFit | None:
    """Fits transfers, from (bytes, seconds); None where more bytes take no longer."""
    num_bytes, seconds = np.array(samples, dtype=np.float64).reshape(-1, 2).T
    if len(set(num_bytes)) < _FEWEST_LENGTHS:
        return None
    (start_s, byte_s), errors = _least_squares(np.column_stack([np.ones(len(samples)), num_bytes]), seconds)
    if not byte_s:
        return None
    return LinkFit(start_s=start_s, bytes_per_s=1 / byte_s, max_error=float(errors.max()))


def _least_squares(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[list[float], NDArray[np.float64]]:
    """Finds what each column of `terms` [samples, terms] weighs, none below 0, and the relative error of each sample.

    Few terms are solved outright: of the ordinary fits of all subsets of them, the best one in which none is negative
    is the solution. Where samples do not tell terms apart, the fewest are used.
    """
    num_terms = terms.shape[1]
    relative = terms / seconds[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    relative = relative / scale
    best, least = np.zeros(num_terms), np.inf
    sizes = range(1, num_terms + 1)
    for chosen in (list(c) for size in sizes for c in itertools.combinations(range(num_terms), size)):
        found, _, rank, _ = np.linalg.lstsq(relative[:, chosen], np.ones(len(seconds)), rcond=None)
        if rank < len(chosen) or found.min() < 0:
            continue
        missed = float(np.square(relative[:, chosen] @ found - 1).sum())
        if missed < least - 1e-12:
            best, least = np.zeros(num_terms), missed
            best[chosen] = found
    return [float(value) for value in best / scale], np.abs(relative @ best - 1)
