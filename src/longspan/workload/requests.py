"""Create the requests of a workload: draw them at random, or read them from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from longspan.errors import ParameterError
from longspan.file_errors import unread
from longspan.workload.arrivals import Arrival, Clients, Workload, arrival_times, as_conversations, prompt_of
from longspan.workload.spec import BLOCK_LEN, MAX_LEN, WorkloadSpec
from longspan.workload.traces import MAX_SPAN_S, RequestSpec, read_trace

Lengths = Callable[[float], float]
"""A length distribution, given as its quantile function: maps a fraction from 0 to 1 to a length."""

_NUM_REQUESTS = 1000
_THINK_S = 10.0
_TIMES, _INPUTS, _OUTPUTS, _PREFIXES = 1, 11, 12, 13  # independent streams of random numbers


def make_workload(spec: WorkloadSpec) -> Workload:
    """Draw the requests, or read them from the file that `spec` names.

    Raises:
        ValueError: for a missing rate, or a file that cannot be read.
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
            slo_class=request.slo_class,
        )
        for index, request in enumerate(requests)
    ]
    shares = spec.prefix_len > 0 or spec.turns > 1 or any(request.block_ids for request in requests)
    clients = _clients(spec)
    think_s = clients.think_s if clients else _THINK_S if spec.think_time is None else spec.think_time
    conversations = as_conversations(arrivals, turns=spec.turns, think_s=think_s)
    return Workload(arrivals=conversations, shares=shares, clients=clients)


def _clients(spec: WorkloadSpec) -> Clients | None:
    number = spec.concurrency or spec.batch_size
    if number is None:
        return None
    return Clients(number=number, think_s=spec.think_time or 0.0, together=spec.batch_size is not None)


def is_drawn(spec: WorkloadSpec) -> bool:
    """Return whether requests are drawn at random, so that another seed gives other requests."""
    path = Path(spec.workload)
    return spec.workload in _NAMED or (path.suffix == ".json" and not _is_recorded(_read_json(path)))


def _requests(spec: WorkloadSpec) -> list[RequestSpec]:
    """Return the requests of a workload. Only requests of a trace may have times."""
    if spec.workload in _NAMED:
        return _drawn(named_lengths(spec.workload), _bounded(4, 256, 32), spec)
    path = Path(spec.workload)
    if not path.is_file():
        raise ParameterError(
            "workload", f"{spec.workload!r} is none of {', '.join(_NAMED)}, nor a file: check the path", spec.workload
        )
    if path.suffix == ".json" and not _is_recorded(points := _read_json(path)):
        return _drawn(*_quantiles(path, points), spec)
    try:
        requests = read_trace(path, num=spec.num_requests)
    except ValueError as error:
        raise ParameterError("workload", f": {error}", spec.workload) from error
    return [replace(request, output_len=spec.output_len or request.output_len) for request in requests]


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ParameterError("workload", unread(path, error)) from None


def _is_recorded(content: object) -> bool:
    """Return whether the content of a file is a trace for Perfetto, as `longspan` records it."""
    return isinstance(content, dict) and "traceEvents" in content


def _quantiles(path: Path, points: object) -> tuple[Lengths, Lengths]:
    if not isinstance(points, dict) or set(points) != {"input_len", "output_len"}:
        problem = (
            f"{str(path)!r} must be an object with input_len and output_len, each an object of quantiles such as "
            '{"0": 100, "0.5": 800, "1": 9000}'
        )
        raise ParameterError("workload", problem)
    return quantiles("input_len", points["input_len"]), quantiles("output_len", points["output_len"])


def _drawn(inputs: Lengths, outputs: Lengths, spec: WorkloadSpec) -> list[RequestSpec]:
    num = spec.num_requests or _NUM_REQUESTS
    input_lens = draw_lengths(inputs, num, np.random.default_rng([spec.seed, _INPUTS]))
    output_lens = draw_lengths(outputs, num, np.random.default_rng([spec.seed, _OUTPUTS]))
    return [
        RequestSpec(input_len=input_len, output_len=spec.output_len or output_len)
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def _timed(requests: list[RequestSpec], spec: WorkloadSpec) -> list[RequestSpec]:
    """Set the time of every request: drawn, or from the trace, scaled to the rate if there is one."""
    if spec.is_closed_loop:
        return [replace(request, due_s=0.0) for request in requests]
    rate = spec.requests_per_s
    if rate is not None and len(requests) / rate > MAX_SPAN_S:
        min_rate = len(requests) / MAX_SPAN_S
        problem = f"{rate:g} spreads {len(requests)} requests over more than {MAX_SPAN_S:g} s"
        raise ParameterError("rate", f"{problem}: give {min_rate:g} or more", rate)
    due = [request.due_s for request in requests if request.due_s is not None]
    if not due:
        if rate is None:
            raise ParameterError("workload", f"{spec.workload} has no arrival times: give `rate` or `concurrency`")
        burstiness = 1.0 if spec.burstiness is None else spec.burstiness
        rng = np.random.default_rng([spec.seed, _TIMES])
        times = arrival_times(len(requests), rate=rate, burstiness=burstiness, rng=rng)
        return [replace(request, due_s=time) for request, time in zip(requests, times, strict=True)]
    if spec.burstiness is not None:
        raise ParameterError("burstiness", f"{spec.burstiness} contradicts a trace with arrival times: leave it out")
    if rate is None or not due[-1]:
        return requests
    factor = 0.0 if math.isinf(rate) else len(requests) / rate / due[-1]
    return [replace(request, due_s=time * factor) for request, time in zip(requests, due, strict=True)]


# ---------------------------------------------------------------- lengths

_NAMED = {"short": (4_000, 95_000, 23_600), "medium": (8_000, 142_000, 32_800), "long": (16_000, 190_000, 50_100)}
"""Ranges and means of prompt lengths in the traces of Tetris (§7.1). Its 4k is 4,000 here. The paper has no answer
lengths: ours have the same kind of distribution, from 4 to 256."""
_NORMAL = NormalDist()
_SIGMAS_OF_RANGE = 6
_SEARCH_SIGMAS = 4  # the mean of the unbounded logarithm is searched up to this many sigmas outside the range
_HALVINGS = 60


def draw_lengths(lengths: Lengths, num: int, rng: np.random.Generator) -> list[int]:
    return [max(1, round(lengths(part))) for part in rng.random(num)]


def named_lengths(workload: str) -> Lengths:
    return _bounded(*_NAMED[workload])


def quantiles(name: str, points: object) -> Lengths:
    """Return the distribution of a mapping from fractions, as text, to lengths. The logarithm is interpolated.

    Raises:
        ValueError: for another type, or fractions and lengths that do not ascend from fraction 0 to fraction 1.
    """
    try:
        pairs = sorted((float(part), float(length)) for part, length in points.items())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f'{name} is an object of quantiles such as {{"0": 100, "0.5": 800, "1": 9000}}, but {points!r:.80} given'
        ) from None
    parts, lengths = [part for part, _ in pairs], [length for _, length in pairs]
    if len(parts) < 2 or parts[0] != 0 or parts[-1] != 1 or sorted(set(parts)) != parts:
        raise ValueError(f"quantiles ascend from 0 to 1, but {parts} given: give at least 0 and 1")
    if sorted(lengths) != lengths or not 1 <= lengths[0] <= lengths[-1] <= MAX_LEN:
        raise ValueError(f"lengths at ascending quantiles ascend from 1 to at most {MAX_LEN}: {lengths} given")
    logarithms = np.log(lengths)
    return lambda part: math.exp(float(np.interp(part, parts, logarithms)))


def _bounded(low: float, high: float, mean: float) -> Lengths:
    """Return a log-normal distribution truncated to `low` and `high`, with this `mean`.

    Range and mean do not determine the standard deviation of the logarithm. A sixth of the logarithm's range is used,
    so that nearly all lengths lie in the range without truncation.
    """
    sigma = math.log(high / low) / _SIGMAS_OF_RANGE
    low_mu, high_mu = math.log(low) - _SEARCH_SIGMAS * sigma, math.log(high) + _SEARCH_SIGMAS * sigma
    for _ in range(_HALVINGS):
        mu = (low_mu + high_mu) / 2
        low_mu, high_mu = (mu, high_mu) if _mean_of_cut(low, high, mu, sigma) < mean else (low_mu, mu)
    first, last = (_NORMAL.cdf((math.log(end) - mu) / sigma) for end in (low, high))

    def at(part: float) -> float:
        inside = min(max(first + part * (last - first), 1e-300), 1 - 1e-16)
        return min(max(math.exp(mu + sigma * _NORMAL.inv_cdf(inside)), low), high)

    return at


def _mean_of_cut(low: float, high: float, mu: float, sigma: float) -> float:
    ends = [(math.log(end) - mu) / sigma for end in (low, high)]
    inside = _NORMAL.cdf(ends[1]) - _NORMAL.cdf(ends[0])
    shifted = _NORMAL.cdf(ends[1] - sigma) - _NORMAL.cdf(ends[0] - sigma)
    return math.exp(mu + sigma**2 / 2) * shifted / inside
