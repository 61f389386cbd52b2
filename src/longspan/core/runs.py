"""The algebra of runs: token positions, and the keys that are visible to a run of queries.

A run is a set of token positions of one request. Positions count from 0 at the start of the prompt. Causality,
sliding windows and chunks are arithmetic on two runs, so that no mask of length squared is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Layout = Literal["zigzag", "striped", "contiguous", "single"]
"""One way to shard a span over a group, see `core.layouts`."""
RelationKind = Literal["skip", "full", "diagonal", "band"]


@dataclass(slots=True, unsafe_hash=True)  # not frozen: a run is made per token
class Run:
    """Token positions `start, start + step, ...` below `stop`. Immutable."""

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop or self.step < 1:
            raise ValueError(f"not a run of positions: start {self.start}, stop {self.stop}, step {self.step}")

    def __len__(self) -> int:
        return (self.stop - self.start + self.step - 1) // self.step

    @property
    def positions(self) -> range:
        return range(self.start, self.stop, self.step)


SpanShards = tuple[tuple[Run, ...], ...]
"""The runs of every member of a group, in ring order."""


@dataclass(frozen=True, slots=True)
class Relation:
    """The visible keys of a query run in a key run: query `i` sees key `j` iff `i+lower <= j <= i+upper`.

    `i` and `j` count inside their runs. `kind` is the case for kernels. `skip`: no key. `full`: all keys. `diagonal`:
    causal only, `lower` has no effect. `band`: with a sliding window.
    """

    kind: RelationKind
    lower: int
    upper: int


def relate(queries: Run, keys: Run, window: int | None = None) -> Relation:
    """Return the relation of two runs under the causal mask, and the sliding window `query - key < window` if given."""
    if len(queries) > 1 and len(keys) > 1 and queries.step != keys.step:
        raise ValueError(f"runs of steps {queries.step} and {keys.step} have no common diagonal: {queries}, {keys}")
    step = queries.step if len(queries) > 1 else keys.step
    distance = queries.start - keys.start
    num_queries, num_keys = len(queries), len(keys)
    upper = distance // step
    lower = -num_queries if window is None else (distance - window) // step + 1
    return Relation(_kind(num_queries, num_keys, lower, upper), lower, upper)


def _kind(num_queries: int, num_keys: int, lower: int, upper: int) -> RelationKind:
    if num_queries == 0 or num_keys == 0 or upper + num_queries - 1 < 0 or lower > num_keys - 1 or lower > upper:
        return "skip"
    sees_last_key = upper >= num_keys - 1
    sees_first_key = lower + num_queries - 1 <= 0
    if sees_last_key and sees_first_key:
        return "full"
    return "diagonal" if sees_first_key else "band"


def coalesce(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Sort runs of step 1, and join runs that touch."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda r: r.start):
        if joined and joined[-1].stop == run.start:
            joined[-1] = Run(joined[-1].start, run.stop)
        elif len(run):
            joined.append(run)
    return tuple(joined)


def positions(runs: Iterable[Run]) -> list[int]:
    """Return the positions of all runs, run by run."""
    return [position for run in runs for position in run.positions]


def num_tokens(runs: Iterable[Run]) -> int:
    return sum(map(len, runs))


def clip(runs: Iterable[Run], start: int, stop: int | None = None) -> tuple[Run, ...]:
    """Cut ascending runs to positions in `[start, stop)`."""
    clipped = []
    for run in runs:
        first = run.start + max(0, -(-(start - run.start) // run.step)) * run.step
        top = run.stop if stop is None else min(run.stop, stop)
        if first < top:
            clipped.append(Run(first, top, run.step))
    return tuple(clipped)


def stretch(runs: Iterable[Run]) -> Run:
    """Return the single run that disjoint runs cover without a gap."""
    filled = [run.positions for run in runs if len(run)]
    start, stop = min(run[0] for run in filled), max(run[-1] for run in filled) + 1
    assert sum(len(run) for run in filled) == stop - start, "the runs have no gap"
    return Run(start, stop)


_STEPS_PER_STAGE = 4
_MIN_CHUNK = 256


def chunk_tokens(num_due: int, num_stages: int) -> int:
    """Return the tokens of a step that keep all pipeline stages busy: the due tokens make 4 steps per stage.

    With two stages, a single prompt leaves each stage idle for a ninth of the time. Steps have at least 256 tokens.
    """
    return max(_MIN_CHUNK, -(-num_due // (_STEPS_PER_STAGE * num_stages)))
