"""Context Parallelism, Appendix D: which ring is quicker, by a line that is fitted to measured times.

    python benchmarks/papers/appendix_d.py PROFILE.json

The file is a stored profile of `longspan profile`, with prompts of groups by both rings. The script prints the
coefficients for each group size, and the number of prompts that the rule misclassifies. No policy uses the rule:
measured times are more accurate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longspan.core.exchange import RING_KV, RING_Q, Exchange
from longspan.cost.profile import Profile

_RIDGES = [10.0**-k for k in range(1, 11)]
_MAX_NEWTON_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class AppendixD:
    """The empirical rule of Appendix D: `ring_kv` where a line in log(T) and log(T / (T + P)) is positive.

    Logarithms are natural. The paper's coefficients do not give the paper's choices in any usual base, so there are no
    defaults: `fit_appendix_d` fits them to measurements. For a fixed number of cached tokens the rule is monotone in
    new tokens if neither `alpha` nor `alpha + beta` is negative. Otherwise it may switch back from `ring_kv`.
    """

    alpha: float
    beta: float
    gamma: float

    def score(self, new_tokens: int, cached_tokens: int) -> float:
        """Return h(T, P), whose sign decides."""
        miss_rate = new_tokens / (new_tokens + cached_tokens)
        return self.alpha * math.log(new_tokens) + self.beta * math.log(miss_rate) + self.gamma

    def choose(self, new_tokens: int, cached_tokens: int) -> Exchange:
        """Return `ring_kv` for a score above 0, and `ring_q` otherwise."""
        return RING_KV if self.score(new_tokens, cached_tokens) > 0 else RING_Q


@dataclass(frozen=True, kw_only=True)
class RingSample:
    """One prefill of `new_tokens` behind `cached_tokens`, timed with both rings.

    Raises:
        ValueError: for lengths or times that no prefill has.
    """

    new_tokens: int
    cached_tokens: int
    ring_kv_s: float
    ring_q_s: float

    def __post_init__(self) -> None:
        timed = 0 < self.ring_kv_s < math.inf and 0 < self.ring_q_s < math.inf
        if self.new_tokens < 1 or self.cached_tokens < 0 or not timed:
            raise ValueError(f"not a measured prefill: {self}")

    @property
    def gain(self) -> float:
        """The logarithm of how much faster `ring_kv` is: negative when `ring_q` is faster."""
        return math.log(self.ring_q_s / self.ring_kv_s)

    @property
    def better(self) -> Exchange:
        """The faster ring, or `ring_kv` for equal times."""
        return RING_KV if self.gain >= 0 else RING_Q


@dataclass(frozen=True, kw_only=True)
class RingFit:
    """A fitted rule, and the samples for which it chooses the slower ring: none when a line separates them."""

    rule: AppendixD
    missed: tuple[RingSample, ...]


def fit_appendix_d(samples: Sequence[RingSample]) -> RingFit:
    """Fit alpha, beta and gamma by logistic regression.

    The weight of a sample is the absolute logarithm of the ratio of both times. Noise between nearly equal times
    therefore hardly moves the line. The penalty on large coefficients is lowered until the line separates all samples.
    If no penalty does, the rule is the fit with the least penalty. If one ring is faster for all samples, the rule is
    constant.

    Raises:
        ValueError: without samples.
    """
    if not samples:
        raise ValueError("no samples to fit: measure both rings for some lengths first")
    decided = [sample for sample in samples if sample.gain]
    winners = {sample.better for sample in decided or samples}
    if len(winners) == 1:
        rule = AppendixD(alpha=0.0, beta=0.0, gamma=1.0 if winners == {RING_KV} else -1.0)
    else:
        rule = _separate(decided)
    missed = (s for s in decided if rule.choose(s.new_tokens, s.cached_tokens) != s.better)
    return RingFit(rule=rule, missed=tuple(missed))


def _separate(samples: Sequence[RingSample]) -> AppendixD:
    """Fit a line between the samples that each ring won. Requires samples of both rings, without ties."""
    miss_rates = [s.new_tokens / (s.new_tokens + s.cached_tokens) for s in samples]
    points = np.log([[s.new_tokens, rate] for s, rate in zip(samples, miss_rates, strict=True)])
    gains = np.array([s.gain for s in samples])
    center, scale = points.mean(axis=0), points.std(axis=0)
    scale[scale == 0] = 1.0
    features = np.column_stack([(points - center) / scale, np.ones(len(points))])
    signed = features * np.sign(gains)[:, None]
    theta = np.zeros(3)
    for ridge in _RIDGES:
        theta = _regress(signed, np.abs(gains) / np.abs(gains).mean(), ridge, theta)
        if (signed @ theta > 0).all():
            break
    alpha, beta = (float(value) for value in theta[:2] / scale)
    return AppendixD(alpha=alpha, beta=beta, gamma=float(theta[2] - center @ [alpha, beta]))


def _regress(
    signed: NDArray[np.float64], weights: NDArray[np.float64], ridge: float, theta: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Minimize the sum of weights * log(1 + exp(-signed @ theta)) plus a penalty, by damped Newton steps.

    Args:
        signed: features [samples, 3], negated where `ring_q` won.
        weights: [samples].
        ridge: factor of the penalty ridge / 2 * |theta|².
        theta: start of the search, [3].
    """

    def loss(at: NDArray[np.float64]) -> float:
        return float(weights @ np.logaddexp(0.0, -(signed @ at)) + ridge / 2 * (at @ at))

    for _ in range(_MAX_NEWTON_STEPS):
        wrong = np.exp(-np.logaddexp(0.0, signed @ theta))  # the probability of the other ring
        slope = ridge * theta - signed.T @ (weights * wrong)
        curvature = (signed.T * (weights * wrong * (1 - wrong))) @ signed + ridge * np.eye(3)
        step = np.linalg.solve(curvature, slope)
        size = 1.0
        while loss(theta - size * step) > loss(theta) and size > 1e-6:
            size /= 2
        if size <= 1e-6 or np.abs(step).max() < 1e-9:
            break
        theta = theta - size * step
    return theta


def ring_rule(profile: Profile, members: int) -> RingFit | None:
    """Fit the rule to prompts of groups with `members` instances, by both rings. Return None if there are none."""
    times = {(p.exchange, p.new_tokens, p.cached_tokens): p.median_s for p in profile.prefills if p.members == members}
    samples = [
        RingSample(new_tokens=new, cached_tokens=cached, ring_kv_s=seconds, ring_q_s=times[RING_Q.kind, new, cached])
        for (exchange, new, cached), seconds in times.items()
        if exchange == RING_KV.kind and (RING_Q.kind, new, cached) in times
    ]
    return fit_appendix_d(samples) if samples else None


def main() -> None:
    """Print a line for each group size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    profile = Profile.from_json(parser.parse_args().profile.read_text(encoding="utf-8"))
    for members in sorted({prefill.members for prefill in profile.prefills}):
        if (ring := ring_rule(profile, members)) is not None:
            rule = ring.rule
            coefficients = f"alpha {rule.alpha:.4g}, beta {rule.beta:.4g}, gamma {rule.gamma:.4g}"
            print(f"{members} members: {coefficients}; {len(ring.missed)} prompts on the wrong side")


if __name__ == "__main__":
    main()
