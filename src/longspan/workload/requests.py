"""The requests of a workload, drawn at random or read from a file, as its description says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from longspan.errors import ParameterError
from longspan.workload.arrivals import Arrival, Workload, arrival_times, conversations, prompt_of
from longspan.workload.lengths import NAMED, Lengths, draw_lengths, quantiles
from longspan.workload.spec import WorkloadSpec
from longspan.workload.traces import BLOCK_LEN, RequestSpec, read_trace

_NUM_REQUESTS = 1000
_THINK_S = 10.0
_TIMES, _INPUTS, _OUTPUTS, _PREFIXES = 1, 11, 12, 13  # streams of random numbers that do not depend on each other


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
            raise ParameterError("workload", f"{spec.workload} has no times of its own: give rate")
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
