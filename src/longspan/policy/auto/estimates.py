"""Predicted seconds of prefills by group size, and of decode steps on one instance."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from longspan.core.exchange import Exchange
from longspan.cost.profile import DecodeFit, PrefillTime
from longspan.policy.facts import Facts
from longspan.policy.tetris import expected_times, measured_times, sp_times

_MIN_TOKEN_S = 1e-5
"""Lower bound for the seconds of a decode step, for a fit that rounds to zero. No device is as quick."""
_GUESSED_DECODE = DecodeFit(mean_error=0.0, max_error=0.0, num_samples=0, start_s=0.02, request_s=1e-4, context_s=1e-7)
"""Decode-time fit used when no profile was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Predicted seconds.

    Attributes:
        prefill: by group size, ascending: 1, 2, 4 and so on, and all instances.
        decode: of a step of one instance.
        token_s: seconds of a decode step with a single request and no context. It is the unit of all times of `auto`:
            a machine with half the speed gets the same decisions at half the rate.
        is_measured: whether `decode` was measured.
    """

    prefill: dict[int, PrefillTime]
    decode: DecodeFit
    token_s: float
    is_measured: bool

    @classmethod
    def of(cls, facts: Facts, exchanges: Collection[Exchange], num_instances: int) -> Estimates:
        fits = {} if facts.profile is None else facts.profile.decode_fits()
        alone = next((fit for (members, _), fit in fits.items() if members == 1), None)
        decode = alone or _GUESSED_DECODE
        return cls(
            prefill=group_times(facts, exchanges, num_instances),
            decode=decode,
            token_s=max(_MIN_TOKEN_S, decode.seconds(1, 0)),
            is_measured=alone is not None,
        )

    def on(self, members: int) -> PrefillTime:
        """Return the times of the largest known size up to `members`. Running requests may have groups of any size."""
        return self.prefill.get(members) or self.prefill[max(size for size in self.prefill if size <= members)]

    def prefill_s(self, members: int, new_tokens: int, cached_tokens: int) -> float:
        return self.on(members).seconds(new_tokens, cached_tokens)

    def fastest_s(self, new_tokens: int, cached_tokens: int) -> float:
        return min([times.seconds(new_tokens, cached_tokens) for times in self.prefill.values()])

    def step_s(self, decodes: int, context: int) -> float:
        """Predict a decode step of one instance, for requests that have `context` tokens together."""
        fit = self.decode
        return fit.start_s + fit.request_s * decodes + fit.context_s * context


def group_times(facts: Facts, exchanges: Collection[Exchange], num_instances: int) -> dict[int, PrefillTime]:
    """Predict prefills on 1, 2, 4 and so on instances, and on all."""
    times = sp_times(facts, exchanges, "auto", num_instances)
    measured = measured_times(facts, exchanges)
    missing = {1, num_instances} - times.keys()
    times |= {size: found for size, found in measured.items() if size in missing}
    largest = max(measured, default=0)
    for size, expected in expected_times(facts, missing - times.keys()).items():
        times[size] = _scaled(measured[largest], largest / size) if largest else expected
    return dict(sorted(times.items()))


def _scaled(times: PrefillTime, factor: float) -> PrefillTime:
    """Scale all terms but the start."""
    return PrefillTime(
        start_s=times.start_s,
        token_s=times.token_s * factor,
        cached_s=times.cached_s * factor,
        square_s=times.square_s * factor,
    )
