"""Check that one deployment serves any mix of short and long prompts without a tax, simulated.

    python benchmarks/no_tax.py [--require] [--gpus 8 16 32 64] [--shares 0 0.01 0.05 0.2] [--loads 0.3 0.7] [--jobs N]

A deployment serves prompts of 128 to 4,095 tokens. A share of the requests has 128K to 256K tokens instead. Answers
have 16 to 400 tokens. A load is a fraction of the rate at which `chunked` serves the mix if all requests wait at the
start. Policy `auto` must keep two targets:

- Short requests: mean TTFT, mean TBT and P99 of TTFT are at most 1.02 times those of `chunked`, which serves the short
  requests alone. Ratios to `chunked` with the same mix follow in brackets.
- Long requests: their prefill speed is at least 0.9 of the best policy `fixed-sp` with the same mix. Its groups have
  all instances, a half or a quarter of them. The speed is the sum of prompt tokens over the sum of TTFTs, with waits.

A row ends with the regret of each target that is missed. It also has the mean TTFT of short requests under the best
`fixed-sp`, relative to `chunked` alone. That is the price of its speed. The exit code is 1 with `--require` if a
target is missed. The table is Markdown. All cores are used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
from tqdm import tqdm

from longspan import limits
from longspan.core.options import SchedulingArgs
from longspan.sim.experiment import Experiment
from longspan.sim.run import Served
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload, arrival_times, prompt_of

MAX_SHORT, MIN_LONG = 1.02, 0.9
_SHORT, _LONG, _ANSWER = (128, 4096), (131_072, 262_144), (16, 400)
_NUM_REQUESTS, _NUM_LONG = 400, 10
"""Requests of a cell, or more until there are this many long ones."""
_SEED = 1
_GPUS_PER_HOST = 8
DEPLOYMENTS = {"8B": ("llama-3-8b", "a100-sxm-80g", 1), "70B": ("llama-3-70b", "h100-sxm-80g", 4)}
"""The model, the device and tp."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A deployment, the share of long requests, and the load."""

    deployment: str
    num_gpus: int
    long_share: float
    load: float

    @property
    def num_instances(self) -> int:
        return self.num_gpus // DEPLOYMENTS[self.deployment][2]

    @property
    def group_sizes(self) -> list[int]:
        """The sizes of static groups, none without long requests."""
        sizes = {max(2, self.num_instances // parts) for parts in (1, 2, 4)} if self.long_share else ()
        return sorted(size for size in sizes if self.num_instances % size == 0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The times of short requests in seconds, and the prefill speed of long ones in tokens per second."""

    ttft_s: float
    ttft_p99_s: float
    tbt_s: float
    long_tokens_per_s: float

    @classmethod
    def of(cls, served: Sequence[Served]) -> Measured:
        short = [one for one in served if one.num_prompt_tokens < _SHORT[1]]
        long = [one for one in served if one.num_prompt_tokens >= _LONG[0]]
        ttfts_s = np.array([one.ttft_s for one in short])
        waits_s = sum(one.ttft_s for one in long)
        return cls(
            ttft_s=float(ttfts_s.mean()),
            ttft_p99_s=float(np.percentile(ttfts_s, 99)),
            tbt_s=float(np.mean([one.mean_tbt_s for one in short])),
            long_tokens_per_s=sum(one.num_prompt_tokens for one in long) / waits_s if long else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The ratios of a cell.

    Attributes:
        short: of TTFT, its P99, and TBT, to `chunked` that serves short requests alone.
        short_same_mix: the same, to `chunked` that serves the mix.
        speed: of long requests, to the best static groups. None without long requests.
        best_size: the members of these groups.
        price: mean TTFT of short requests with these groups, to `chunked` that serves them alone.
    """

    short: tuple[float, float, float]
    short_same_mix: tuple[float, float, float]
    speed: float | None = None
    best_size: int = 0
    price: float = 0.0

    @property
    def regrets(self) -> list[str]:
        """The targets that are missed, with the percentage."""
        names = zip(("TTFT", "TTFT P99", "TBT"), self.short, strict=True)
        missed = [f"short {name} {ratio - 1:+.0%}" for name, ratio in names if ratio > MAX_SHORT]
        if self.speed is not None and self.speed < MIN_LONG:
            missed.append(f"long speed {self.speed - 1:+.0%}")
        return missed


def main() -> int:
    """Simulate all cells and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", nargs="+", choices=DEPLOYMENTS, default=list(DEPLOYMENTS))
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.01, 0.05, 0.2], help="of long requests")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.7])
    parser.add_argument("--jobs", type=int, default=limits.cores())
    parser.add_argument("--require", action="store_true", help="exit code 1 if a target is missed")
    args = parser.parse_args()
    keys = product(args.deployments, args.gpus, args.shares, args.loads)
    cells = [Cell(deployment=name, num_gpus=n, long_share=share, load=load) for name, n, share, load in keys]
    print(_HEAD, flush=True)
    num_missed = 0
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        jobs = [(cell, {name: pool.submit(measure, cell, name) for name in _runs(cell)}) for cell in cells]
        for cell, runs in tqdm(jobs, desc="cells", disable=None):
            verdict = verdict_of({name: run.result() for name, run in runs.items()})
            print(row(cell, verdict), flush=True)
            num_missed += bool(verdict.regrets)
    print(f"\n{num_missed} of {len(cells)} cells miss a target")
    return 1 if args.require and num_missed else 0


def _runs(cell: Cell) -> Iterator[str]:
    """Yield `alone`, which is `chunked` with short requests alone, and the policies with the mix."""
    yield from ("alone", "chunked", "auto")
    for size in cell.group_sizes:
        yield f"fixed-sp {size}"


# ---------------------------------------------------------------- simulations


def measure(cell: Cell, name: str) -> Measured:
    """Simulate a cell with a policy, or with short requests alone."""
    workload = mix(cell.long_share).at_rate(cell.load * _highest(cell.deployment, cell.num_gpus, cell.long_share))
    policy = name
    if name == "alone":
        short = [one for one in workload.arrivals if len(one.prompt) < _SHORT[1]]
        workload, policy = replace(workload, arrivals=short), "chunked"
    result = _experiment(cell.deployment, cell.num_gpus, policy).run(workload)
    assert not result.refused, "all requests fit on an instance"
    return Measured.of(result.served)


@lru_cache(maxsize=4)
def _highest(deployment: str, num_gpus: int, long_share: float) -> float:
    """Return the requests per second of `chunked` if all requests wait at the start."""
    result = _experiment(deployment, num_gpus, "chunked").run(mix(long_share).one_by_one(0.0))
    return len(result.served) / result.makespan_s


@lru_cache(maxsize=8)
def _experiment(deployment: str, num_gpus: int, policy: str) -> Experiment:
    model, hardware, tp = DEPLOYMENTS[deployment]
    cluster = ClusterSpec(
        hardware=hardware,
        hosts=max(1, num_gpus // _GPUS_PER_HOST),
        gpus_per_host=min(num_gpus, _GPUS_PER_HOST),
        parallel=f"{num_gpus // tp}xtp{tp}",
    )
    name, _, size = policy.partition(" ")
    return make_experiment(model, cluster, SchedulingArgs(policy=name, policy_options={"sp": size} if size else {}))


@lru_cache(maxsize=4)
def mix(long_share: float) -> Workload:
    """Draw requests with evenly spaced long ones, one per second on average."""
    number = max(_NUM_REQUESTS, round(_NUM_LONG / long_share)) if long_share else _NUM_REQUESTS
    rng = np.random.default_rng(_SEED)
    short, long, answers = (
        np.exp(rng.uniform(math.log(low), math.log(high), number)).astype(int) for low, high in (_SHORT, _LONG, _ANSWER)
    )
    every = round(1 / long_share) if long_share else number + 1
    is_long = np.arange(number) % every == every // 2 if long_share else np.zeros(number, dtype=bool)
    inputs = np.where(is_long, long, short).tolist()
    times = arrival_times(number, rate=1.0, burstiness=1.0, rng=rng)
    lengths = zip(times, inputs, answers.tolist(), strict=True)
    arrivals = [
        Arrival(due_s=due_s, prompt=prompt_of(index, prompt), output_len=answer)
        for index, (due_s, prompt, answer) in enumerate(lengths)
    ]
    return Workload(arrivals=arrivals, shares=False)


# ---------------------------------------------------------------- report


def verdict_of(measured: dict[str, Measured]) -> Verdict:
    """Return the ratios of `auto` to the other runs of a cell."""
    ours, alone = measured["auto"], measured["alone"]
    static = {name: one for name, one in measured.items() if name.startswith("fixed-sp")}
    verdict = Verdict(short=_ratios(ours, alone), short_same_mix=_ratios(ours, measured["chunked"]))
    if not static:
        return verdict
    static["fixed-sp 1"] = measured["chunked"]
    best = max(static, key=lambda name: static[name].long_tokens_per_s)
    return replace(
        verdict,
        speed=ours.long_tokens_per_s / static[best].long_tokens_per_s,
        best_size=int(best.split()[1]),
        price=static[best].ttft_s / alone.ttft_s,
    )


def _ratios(ours: Measured, other: Measured) -> tuple[float, float, float]:
    return ours.ttft_s / other.ttft_s, ours.ttft_p99_s / other.ttft_p99_s, ours.tbt_s / other.tbt_s


_HEAD = """\
| model | GPUs | long | load | short TTFT | TTFT P99 | TBT | long speed | best group | its short TTFT | missed |
|---|---|---|---|---|---|---|---|---|---|---|"""


def row(cell: Cell, verdict: Verdict) -> str:
    """Return the line of a cell in a Markdown table."""
    pairs = zip(verdict.short, verdict.short_same_mix, strict=True)
    short = (f"{alone:.2f} ({mixed:.2f})" for alone, mixed in pairs)
    long = ("", "", "")
    if verdict.speed is not None:
        long = (f"{verdict.speed:.2f}", str(verdict.best_size), f"{verdict.price:.2f}")
    first = (cell.deployment, cell.num_gpus, f"{cell.long_share:.0%}", f"{cell.load:g}")
    return f"| {' | '.join(map(str, (*first, *short, *long)))} | {', '.join(verdict.regrets)} |"


if __name__ == "__main__":
    sys.exit(main())
