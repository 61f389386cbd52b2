"""The description of a workload. Importing it loads no numpy, so that the command line can make its flags from it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from longspan.core.options import Option, at_least_one
from longspan.errors import ParameterError

_LONGEST_S = 1e5
"""Maximum think time, about a day. Longer conversations would overlap in runs that place them far apart."""
_LONGEST_OUTPUT = 2**20
BLOCK_LEN = 512
"""Prompt tokens per block id in traces, as in Mooncake's."""
MAX_LEN = 2**32
"""Maximum tokens of a prompt, and of a shared prefix. More would leave fewer different texts, see `arrivals`."""
_workload = partial(Option, group="Requests")


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """Describes the requests and their times. Equal descriptions give equal requests.

    Raises:
        ParameterError: for an invalid value, or options that exclude each other.
    """

    workload: Annotated[
        str,
        _workload(
            "Lengths as in Tetris's traces, or a trace (.csv, .jsonl, maybe .gz), or quantiles (.json).",
            metavar="short|medium|long|FILE",
        ),
    ] = "short"
    rate: Annotated[
        float | None,
        _workload(
            "Requests per second. A trace with times is stretched to it.",
            default="a trace's own",
            may_be_infinite=True,
        ),
    ] = None
    offline: Annotated[bool, _workload("All requests arrive at the start, as with --rate inf.")] = False
    burstiness: Annotated[
        float | None,
        _workload("Shape of the gamma distribution of gaps: below 1 in bursts, above steadier.", default="1"),
    ] = None
    num_requests: Annotated[
        int | None, _workload("Total requests. Each turn counts.", default="1000, or all of a trace")
    ] = None
    output_len: Annotated[int | None, _workload("Output tokens of every request.", default="from the workload")] = None
    prefix_len: Annotated[int, _workload("Tokens of a shared prefix, added to prompts.")] = 0
    num_prefixes: Annotated[int | None, _workload("Number of different shared prefixes.", default="1")] = None
    turns: Annotated[int, _workload("Requests of each conversation. Each follows the answer before.")] = 1
    concurrency: Annotated[
        int | None,
        _workload("Instead of a rate: this many clients, each with one request or conversation at a time."),
    ] = None
    batch_size: Annotated[
        int | None,
        _workload("Instead of a rate: static batches. This many requests start together, when all before have ended."),
    ] = None
    think_time: Annotated[
        float | None,
        _workload(
            "Seconds from an answer to the next turn, and to the client's next request with --concurrency.",
            metavar="S",
            default="10 between turns, 0 with --concurrency",
        ),
    ] = None
    seed: Annotated[int, _workload("Seed of times and lengths.")] = 0

    def __post_init__(self) -> None:
        at_least_one(concurrency=self.concurrency, batch_size=self.batch_size)
        minima = {"num_requests": 1, "output_len": 1, "prefix_len": 0, "num_prefixes": 1, "turns": 1, "seed": 0}
        for name, minimum in minima.items():
            if (value := getattr(self, name)) is not None and value < minimum:
                raise ParameterError(name, f"must be at least {minimum}, but {value} given", value)
        for name, maximum in {"output_len": _LONGEST_OUTPUT, "prefix_len": MAX_LEN}.items():
            if (value := getattr(self, name)) is not None and value > maximum:
                raise ParameterError(name, f"must be at most {maximum:,}, but {value:,} given", value)
        if self.num_prefixes is not None and not self.prefix_len:
            problem = f"{self.num_prefixes} counts shared prefixes, but prefix_len is 0: give prefix_len"
            raise ParameterError("num_prefixes", problem, self.num_prefixes)
        if self.think_time is not None and self.turns == 1 and not self.is_closed_loop:
            problem = f"{self.think_time:g} is the time between turns, but there is one turn: give turns or concurrency"
            raise ParameterError("think_time", problem, self.think_time)
        if self.think_time is not None and not 0 <= self.think_time <= _LONGEST_S:
            problem = f"must be from 0 to {_LONGEST_S:g} seconds, but {self.think_time} given"
            raise ParameterError("think_time", problem, self.think_time)
        self._check_exclusive()
        for name in ("rate", "burstiness"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ParameterError(name, f"must be above 0 (inf is allowed), but {value} given", value)

    def _check_exclusive(self) -> None:
        """Raise ParameterError for options that give the times of requests in two ways."""
        if self.offline and self.rate is not None:
            problem = f"{self.rate:g} excludes `offline`, where all requests arrive at the start: leave one of them out"
            raise ParameterError("rate", problem, self.rate)
        loops = [name for name in ("concurrency", "batch_size") if getattr(self, name) is not None]
        for loop, other in itertools.product(loops, ("rate", "offline", "burstiness", "batch_size")):
            if loop != other and (value := getattr(self, other)) not in (None, False):
                problem = (
                    f"{value} excludes `{loop}`, where requests start when earlier requests end: leave one of them out"
                )
                raise ParameterError(other, problem, value)

    @property
    def is_closed_loop(self) -> bool:
        """True if requests start when earlier requests end. A workload then ignores the times of a trace."""
        return self.concurrency is not None or self.batch_size is not None

    @property
    def requests_per_s(self) -> float | None:
        """The rate, infinite if all requests arrive at the start."""
        return math.inf if self.offline else self.rate
