"""A workload: what is asked for and when, made from a few numbers, a trace, or quantiles of lengths."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from longspan.errors import ParameterError
from longspan.workload.arrivals import Arrival, Workload, arrival_times, conversations, prompt_of
from longspan.workload.lengths import NAMED, Lengths, draw_lengths, quantiles
from longspan.workload.traces import BLOCK_LEN, RequestSpec, read_trace

_NUM_REQUESTS = 1000
_THINK_S = 10.0
_TIMES, _INPUTS, _OUTPUTS, _PREFIXES = 1, 11, 12, 13  # streams of random numbers that do not depend on each other


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """Describes a workload; the same description gives the same requests.

    Attributes:
        workload: lengths as in Tetris's traces (`short`, `medium`, `long`), or a file: a trace (.csv, .jsonl, maybe
            .gz) or quantiles of lengths (.json).
        rate: requests per second. A trace with times is stretched to it, and needs none.
        burstiness: shape of the gamma distribution of gaps: below 1 in bursts, above steadier. 1 if None.
        num_requests: requests in all, each turn counted. 1000 if None, or all of a trace.
        output_len: output tokens of every request, instead of the workload's.
        prefix_len: tokens, in addition, at the start that prompts share.
        num_prefixes: how many different such starts there are. 1 if None.
        turns: requests of a conversation, which come one after the other.
        think_time: seconds from an answer to the next turn. 10 if None.
        seed: of times and lengths.

    Raises:
        ValueError: for a value that is not possible, or options that exclude each other.
    """

    workload: str = "short"
    rate: float | None = None
    burstiness: float | None = None
    num_requests: int | None = None
    output_len: int | None = None
    prefix_len: int = 0
    num_prefixes: int | None = None
    turns: int = 1
    think_time: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least_of = {"num_requests": 1, "output_len": 1, "prefix_len": 0, "num_prefixes": 1, "turns": 1, "seed": 0}
        for name, least in least_of.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ParameterError(name, f"must be at least {least}, but {value} given", value)
        if self.num_prefixes is not None and not self.prefix_len:
            problem = f"{self.num_prefixes} is of starts that prompts share: give --prefix-len"
            raise ParameterError("num_prefixes", problem, self.num_prefixes)
        if self.think_time is not None and self.turns == 1:
            problem = f"{self.think_time:g} is between turns of a conversation: give --turns"
            raise ParameterError("think_time", problem, self.think_time)
        if self.rate is not None and not self.rate > 0:
            raise ParameterError("rate", f"must be above 0 (inf is allowed), but {self.rate} given", self.rate)


def make_workload(spec: WorkloadSpec) -> Workload:
    """Draws the requests, or reads them from the file that `spec` names.

    Raises:
        ValueError: for no rate where times are needed, or a file that cannot be read.
    """
    requests = _timed(_requests(spec), spec)
    rng = np.random.default_rng([spec.seed, _PREFIXES])
    shared = rng.integers(spec.num_prefixes or 1, size=len(requests)).tolist()
    arrivals = [
        Arrival(
            due_s=request.due_s or 0.0,
            prompt=prompt_of(
                index,
                request.input_len + spec.prefix_len,
                shared=shared[index],
                shared_len=spec.prefix_len,
                blocks=request.block_ids,
                block_len=BLOCK_LEN,
            ),
            output_len=request.output_len,
        )
        for index, request in enumerate(requests)
    ]
    shares = spec.prefix_len > 0 or spec.turns > 1 or any(request.block_ids for request in requests)
    think_s = _THINK_S if spec.think_time is None else spec.think_time
    return Workload(arrivals=conversations(arrivals, turns=spec.turns, think_s=think_s), shares=shares)


def _requests(spec: WorkloadSpec) -> list[RequestSpec]:
    """Returns requests without times but those of a trace."""
    if spec.workload in NAMED:
        return _drawn(*NAMED[spec.workload], spec)
    path = Path(spec.workload)
    if not path.is_file():
        raise ParameterError("workload", f"{spec.workload!r} is none of {', '.join(NAMED)}, nor a file", spec.workload)
    if path.suffix == ".json":
        return _drawn(*_quantiles(path), spec)
    requests = read_trace(path, num=spec.num_requests)
    return [replace(request, output_len=spec.output_len or request.output_len) for request in requests]


def _quantiles(path: Path) -> tuple[Lengths, Lengths]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ParameterError("workload", f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(found, dict) or set(found) != {"input_len", "output_len"}:
        problem = (
            f"{str(path)!r} must be an object with input_len and output_len, each an object of quantiles such as "
            '{"0": 100, "0.5": 800, "1": 9000}'
        )
        raise ParameterError("workload", problem)
    return quantiles("input_len", found["input_len"]), quantiles("output_len", found["output_len"])


def _drawn(inputs: Lengths, outputs: Lengths, spec: WorkloadSpec) -> list[RequestSpec]:
    num = spec.num_requests or _NUM_REQUESTS
    input_lens = draw_lengths(inputs, num, np.random.default_rng([spec.seed, _INPUTS]))
    output_lens = draw_lengths(outputs, num, np.random.default_rng([spec.seed, _OUTPUTS]))
    return [
        RequestSpec(input_len=one, output_len=spec.output_len or other)
        for one, other in zip(input_lens, output_lens, strict=True)
    ]


def _timed(requests: list[RequestSpec], spec: WorkloadSpec) -> list[RequestSpec]:
    """Gives every request a time: drawn, or that of the trace, stretched to the rate if there is one."""
    due = [request.due_s for request in requests if request.due_s is not None]
    if not due:
        if spec.rate is None:
            raise ParameterError("workload", f"{spec.workload} has no times of its own: give --rate")
        burstiness = 1.0 if spec.burstiness is None else spec.burstiness
        rng = np.random.default_rng([spec.seed, _TIMES])
        times = arrival_times(len(requests), rate=spec.rate, burstiness=burstiness, rng=rng)
        return [replace(request, due_s=time) for request, time in zip(requests, times, strict=True)]
    if spec.burstiness is not None:
        raise ParameterError("burstiness", f"{spec.burstiness} contradicts a trace that brings its own times")
    if spec.rate is None or not due[-1]:
        return requests
    factor = 0.0 if math.isinf(spec.rate) else len(requests) / spec.rate / due[-1]
    return [replace(request, due_s=time * factor) for request, time in zip(requests, due, strict=True)]
