"""The requests of `longspan simulate`: lengths and times, as prompts of a simulated cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from longspan.cli.simulate import WorkloadOptions
from longspan.loadgen.lengths import NAMED, Lengths, draw_lengths, quantiles
from longspan.loadgen.traces import BLOCK_LEN, read_trace
from longspan.loadgen.workload import Arrivals, Ask
from longspan.sim.arrivals import Arrival, conversations, prompt_of

NUM_REQUESTS = 1000
_THINK_S = 10.0
_INPUTS, _OUTPUTS, _PREFIXES = 11, 12, 13  # streams of random numbers that do not depend on each other


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests, in the order in which they come.

    Attributes:
        shares: whether prompts can begin alike, so that it pays to remember what was computed.
    """

    arrivals: Sequence[Arrival]
    shares: bool

    def at_rate(self, rate: float) -> Workload:
        """The same with the times of first turns stretched, so that all turns together come at this rate."""
        last_s = max(one.due_s for one in self.arrivals if one.follows is None)
        factor = len(self.arrivals) / rate / last_s if last_s else 0.0
        stretched = [
            one if one.follows is not None else replace(one, due_s=one.due_s * factor) for one in self.arrivals
        ]
        return replace(self, arrivals=stretched)

    def one_by_one(self, gap_s: float) -> Workload:
        """The same with so much time between the conversations that none meets another."""
        spaced = [
            one if one.follows is not None else replace(one, due_s=place * gap_s)
            for place, one in enumerate(self.arrivals)
        ]
        return replace(self, arrivals=spaced)


def workload_of(options: WorkloadOptions) -> Workload:
    """The requests.

    Raises:
        ValueError: for a value that is not possible, options that exclude each other, or a bad file.
    """
    _check(options)
    asks = _timed(_asks(options), options)
    rng = np.random.default_rng([options.seed, _PREFIXES])
    shared = rng.integers(options.num_prefixes or 1, size=len(asks)).tolist()
    arrivals = [
        Arrival(
            due_s=ask.due_s or 0.0,
            prompt=prompt_of(
                place,
                ask.input_len + options.prefix_len,
                shared=shared[place],
                shared_len=options.prefix_len,
                blocks=ask.block_ids,
                block_len=BLOCK_LEN,
            ),
            output_len=ask.output_len,
        )
        for place, ask in enumerate(asks)
    ]
    shares = options.prefix_len > 0 or options.turns > 1 or any(ask.block_ids for ask in asks)
    think_s = _THINK_S if options.think_time is None else options.think_time
    return Workload(arrivals=conversations(arrivals, turns=options.turns, think_s=think_s), shares=shares)


def _check(options: WorkloadOptions) -> None:
    for flag, value, least in (
        ("--num-requests", options.num_requests, 1),
        ("--output-len", options.output_len, 1),
        ("--prefix-len", options.prefix_len, 0),
        ("--num-prefixes", options.num_prefixes, 1),
        ("--seed", options.seed, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, but {value} given")
    if options.num_prefixes is not None and not options.prefix_len:
        raise ValueError(f"--num-prefixes {options.num_prefixes} is of starts that prompts share: give --prefix-len")
    if options.think_time is not None and options.turns == 1:
        raise ValueError(f"--think-time {options.think_time:g} is between turns of a conversation: give --turns")
    if options.rate is not None and not options.rate > 0:
        raise ValueError(f"--rate must be above 0 (inf is allowed), but {options.rate} given")


def _asks(options: WorkloadOptions) -> list[Ask]:
    """Without times but those of a trace."""
    if options.workload in NAMED:
        inputs, outputs = NAMED[options.workload]
        return _drawn(inputs, outputs, options)
    path = Path(options.workload)
    if not path.is_file():
        raise ValueError(f"--workload {options.workload!r} is none of {', '.join(NAMED)}, nor a file")
    if path.suffix == ".json":
        return _drawn(*_quantiles(path), options)
    asks = read_trace(path, num=options.num_requests, num_flag="--num-requests")
    return [replace(ask, output_len=options.output_len or ask.output_len) for ask in asks]


def _quantiles(path: Path) -> tuple[Lengths, Lengths]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--workload {str(path)!r} cannot be read: {error}") from None
    if not isinstance(found, dict) or set(found) != {"input_len", "output_len"}:
        raise ValueError(
            f"--workload {str(path)!r} must be an object with input_len and output_len, each an object of quantiles "
            'such as {"0": 100, "0.5": 800, "1": 9000}'
        )
    return quantiles("input_len", found["input_len"]), quantiles("output_len", found["output_len"])


def _drawn(inputs: Lengths, outputs: Lengths, options: WorkloadOptions) -> list[Ask]:
    num = options.num_requests or NUM_REQUESTS
    input_lens = draw_lengths(inputs, num, np.random.default_rng([options.seed, _INPUTS]))
    output_lens = draw_lengths(outputs, num, np.random.default_rng([options.seed, _OUTPUTS]))
    return [
        Ask(input_len=one, output_len=options.output_len or other)
        for one, other in zip(input_lens, output_lens, strict=True)
    ]


def _timed(asks: list[Ask], options: WorkloadOptions) -> list[Ask]:
    """With times of their own, or those of the trace, stretched to the rate if one is given."""
    due = [ask.due_s for ask in asks if ask.due_s is not None]
    if not due:
        if options.rate is None:
            raise ValueError(f"--workload {options.workload} has no times of its own: give --rate")
        burstiness = 1.0 if options.burstiness is None else options.burstiness
        arrivals = Arrivals(request_rate=options.rate or 1.0, burstiness=burstiness, closed_loop=False)
        return arrivals.timed(asks, options.seed)
    if options.burstiness is not None:
        raise ValueError(f"--burstiness {options.burstiness} contradicts a trace that brings its own times")
    if options.rate is None or not due[-1]:
        return asks
    factor = 0.0 if math.isinf(options.rate) else len(asks) / options.rate / due[-1]
    return [replace(ask, due_s=time * factor) for ask, time in zip(asks, due, strict=True)]
