"""What is asked for and when: lengths and arrivals, drawn from a seed or read from a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from longspan.loadgen.arrivals import arrival_times

_ARRIVALS, _LENGTHS = 1, 2  # streams of random numbers that do not depend on each other


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request's size and time.

    Attributes:
        due_s: when it is to be sent, in seconds after the start; None for as soon as there is a slot (closed loop).
        input_len: prompt tokens.
        output_len: most output tokens.
        block_ids: names of the prompt's blocks of 512 tokens, where a trace has them: equal names, equal tokens.
    """

    due_s: float | None = None
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """A rate of requests; see `arrival_times`. `closed_loop`: a request is due when another one has ended."""

    request_rate: float
    burstiness: float
    closed_loop: bool

    def __post_init__(self) -> None:
        """Checks that a rate and a closed loop do not contradict each other."""
        assert not self.closed_loop or math.isinf(self.request_rate), "a closed loop has no rate"

    def timed(self, asks: Sequence[Ask], seed: int) -> list[Ask]:
        """The same requests with a time each."""
        rng = np.random.default_rng([seed, _ARRIVALS])
        times = arrival_times(len(asks), request_rate=self.request_rate, burstiness=self.burstiness, rng=rng)
        return [replace(ask, due_s=None if self.closed_loop else time) for ask, time in zip(asks, times, strict=True)]


def random_asks(
    num: int, *, input_len: int, output_len: int, range_ratio: float, prefix_len: int, seed: int
) -> list[Ask]:
    """Returns `num` requests without times.

    Lengths are uniform over whole numbers from `len * (1 - range_ratio)`, rounded down, to `len * (1 + range_ratio)`,
    rounded up, as in vLLM. The prefix of all prompts comes in addition.

    Raises:
        ValueError: for a number that is out of range.
    """
    for flag, value, least in (
        ("--num-prompts", num, 1),
        ("--random-input-len", input_len, 1),
        ("--random-output-len", output_len, 1),
        ("--random-prefix-len", prefix_len, 0),
    ):
        if value < least:
            raise ValueError(f"{flag} must be at least {least}, but {value} given")
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio must be from 0 to below 1, but {range_ratio} given")
    rng = np.random.default_rng([seed, _LENGTHS])
    inputs, outputs = (_spread(length, range_ratio, num, rng) for length in (input_len, output_len))
    return [
        Ask(input_len=prefix_len + one_input, output_len=one_output)
        for one_input, one_output in zip(inputs, outputs, strict=True)
    ]


def _spread(length: int, ratio: float, num: int, rng: np.random.Generator) -> list[int]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return [int(one) for one in rng.integers(low, high, size=num, endpoint=True)]
