"""Seconds of a prefill as a function of its lengths, fitted to measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Sample = tuple[int, int, float]
"""New tokens, cached tokens before them, seconds."""

_FEWEST_LENGTHS = 2


@dataclass(frozen=True, kw_only=True)
class TimeFit:
    """T(L, P) = start_s + token_s L + cached_s P L + square_s L², for L new tokens behind P cached ones.

    No term is negative, so that predictions are monotone in both lengths, also beyond what was measured.

    Attributes:
        mean_error, max_error: of the samples it was fitted to, relative to what was measured.
        num_samples: how many those were.
    """

    start_s: float
    token_s: float
    cached_s: float
    square_s: float
    mean_error: float
    max_error: float
    num_samples: int

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Of a prefill of so many tokens."""
        per_token = self.token_s + self.cached_s * cached_tokens + self.square_s * new_tokens
        return self.start_s + per_token * new_tokens


def fit_times(samples: Sequence[Sample]) -> TimeFit | None:
    """Non-negative least squares over relative errors, so that short prompts count as much as long ones.

    With four terms it is solved outright: of the ordinary fits of all subsets of terms, the best one in which none is
    negative is the solution. Where samples do not tell terms apart, the fewest are used.

    Returns:
        None for samples of fewer than two lengths, which say nothing of other lengths.

    Raises:
        ValueError: for a time that is not positive.
    """
    if len({(new, cached) for new, cached, _ in samples}) < _FEWEST_LENGTHS:
        return None
    if min(seconds for _, _, seconds in samples) <= 0:
        raise ValueError("a prefill takes some time, but a sample of none was given")
    new, cached, seconds = np.array(samples, dtype=np.float64).T
    terms = np.column_stack([np.ones(len(samples)), new, cached * new, new * new]) / seconds[:, None]
    scale = terms.max(axis=0)
    scale[scale == 0] = 1.0
    terms /= scale
    best, least = np.zeros(4), np.inf
    for chosen in (list(c) for size in range(1, 5) for c in itertools.combinations(range(4), size)):
        found, _, rank, _ = np.linalg.lstsq(terms[:, chosen], np.ones(len(samples)), rcond=None)
        if rank < len(chosen) or found.min() < 0:
            continue
        missed = float(np.square(terms[:, chosen] @ found - 1).sum())
        if missed < least - 1e-12:
            best, least = np.zeros(4), missed
            best[chosen] = found
    errors = np.abs(terms @ best - 1)
    start_s, token_s, cached_s, square_s = (float(value) for value in best / scale)
    return TimeFit(
        start_s=start_s,
        token_s=token_s,
        cached_s=cached_s,
        square_s=square_s,
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        num_samples=len(samples),
    )
