"""Compare the choice of `longspan.plan` with the best of six measured layouts and policies, on two ranks of this CPU.

    longspan profile smollm2-135m --dtype bfloat16 --threads-per-rank 1 --parallel 2
    longspan profile smollm2-135m --dtype bfloat16 --threads-per-rank 1 --parallel tp2
    python benchmarks/plan_measured.py [--num-requests 60] [--runs 2] [--require] [--quick]

The profiles are those of `longspan profile`, measured just before. The candidates are two instances with `chunked`,
`auto`, `context` and `tetris`, and one instance of two ranks, tp2 or pp2. The real engine serves each of them with the
same requests, at the same times. Their rate is `--load` times the highest one, by a simulation of `chunked`. In each
run all candidates are served, in another order, so that a drift of the machine does not always concern the same ones.

A first token may take 4 times the median of a simulated idle machine, and a token 3 times. The score is the fraction of
requests that meet both. The choice passes if it has the best score, or one within the noise. Noise is two standard
errors of the difference of two such fractions, or the largest difference between runs of one candidate. It fails if no
candidate meets the level at all. `--quick` is a dry run with 8 requests whose numbers mean nothing. The exit
code is 1 with `--require` if the choice fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from tqdm import tqdm
from twin import drive, warm_up

from longspan import LLM, plan
from longspan.args import EngineArgs
from longspan.core.options import SchedulingArgs
from longspan.planner.candidates import Candidate
from longspan.profiling.store import profile_file
from longspan.resolve import EngineModel
from longspan.sim.experiment import Experiment
from longspan.sim.spec import ClusterSpec, ServiceLevel
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

_NUM_RANKS = 2
_LAYOUTS, _POLICIES = ("2", "tp2", "pp2"), ("chunked", "auto", "context", "tetris")
_LENGTHS = {"input_len": {"0": 100, "1": 6000}, "output_len": {"0": 8, "1": 64}}
_TTFT_FACTOR, _TBT_FACTOR = 4.0, 3.0
_QUICK_REQUESTS = 8


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A layout and a policy."""

    layout: str
    policy: str

    @classmethod
    def of(cls, candidate: Candidate) -> Kind:
        """Return the kind of a candidate. Policies for groups are `chunked` on a single instance."""
        alone = candidate.spec.instances == 1
        return cls(layout=candidate.layout, policy="chunked" if alone else candidate.policy)

    def __str__(self) -> str:
        return f"{self.layout} {self.policy}"


KINDS = (
    *(Kind(layout="2", policy=policy) for policy in _POLICIES),
    *(Kind(layout=layout, policy="chunked") for layout in ("tp2", "pp2")),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The fraction of requests within the level, and mean TTFT and TBT in seconds, of one run."""

    attainment: float
    ttft_s: float
    tbt_s: float


def main() -> int:
    """Plan, measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 requests and one run: a test of this script")
    parser.add_argument("--require", action="store_true", help="exit code 1 if the choice is not among the best")
    args = parser.parse_args()
    if args.quick:
        args.num_requests, args.runs = _QUICK_REQUESTS, 1
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "lengths.json"
        file.write_text(json.dumps(_LENGTHS))
        setup = Setup.of(args, WorkloadSpec(workload=str(file), num_requests=args.num_requests, seed=args.seed))
        choice = setup.choice()
        requests = setup.requests()
    print(f"{args.num_requests} requests at {setup.workload.rate:.3g} per second, ", end="")
    print(f"TTFT up to {setup.level.slo_ttft:.2f} s, TBT up to {setup.level.slo_tbt:.3f} s: plan chooses {choice}")
    measured: dict[Kind, list[Measured]] = {kind: [] for kind in KINDS}
    for run in tqdm(range(args.runs), desc="runs", disable=None):
        for kind in np.random.default_rng(run).permutation(len(KINDS)).tolist():
            measured[KINDS[kind]].append(setup.serve(KINDS[kind], requests))
    passes = report(measured, choice, args.num_requests)
    return 1 if args.require and not passes else 0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The machine, and the question with its rate and service level."""

    given: EngineArgs
    profiles: Sequence[Path]
    workload: WorkloadSpec
    level: ServiceLevel

    @classmethod
    def of(cls, args: argparse.Namespace, workload: WorkloadSpec) -> Setup:
        """Find the stored profiles, and compute the rate and the service level from them."""
        given = EngineArgs(model=args.model, dtype=args.dtype, threads_per_rank=1)
        model = EngineModel.of(given)
        files = [profile_file(model.profile_key(given.device, tp=tp, threads=1)) for tp in (1, _NUM_RANKS)]
        for file, spec in zip(files, ("2", "tp2"), strict=True):
            if not file.is_file():
                command = f"longspan profile {args.model} --dtype {args.dtype} --threads-per-rank 1 --parallel {spec}"
                sys.exit(f"there is no profile of {spec}: run {command}")
        experiment = _simulated(args.model, files[0])
        drawn = make_workload(replace(workload, rate=1.0))
        offline, idle = experiment.run(drawn.one_by_one(0.0)), experiment.at_light_load(drawn)
        level = ServiceLevel(
            slo_ttft=_TTFT_FACTOR * median(one.ttft_s for one in idle.served),
            slo_tbt=_TBT_FACTOR * median(one.mean_tbt_s for one in idle.served),
        )
        rate = args.load * len(offline.served) / offline.makespan_s
        return cls(given=given, profiles=files, workload=replace(workload, rate=rate), level=level)

    def choice(self) -> Kind:
        """Return the layout and policy that `plan` chooses."""
        answer = plan(
            self.given.model,
            gpus=_NUM_RANKS,
            workload=self.workload,
            level=self.level,
            profiles=self.profiles,
            fewer=False,
            layouts=_LAYOUTS,
            policies=_POLICIES,
            stores=False,
        )
        assert answer.winner is not None, "candidates can run"
        return Kind.of(answer.winner.candidate)

    def requests(self) -> list[Arrival]:
        """Draw the requests, with random tokens."""
        vocab_size, rng = EngineModel.of(self.given).info.vocab_size, np.random.default_rng(self.given.seed)
        workload: Workload = make_workload(self.workload)
        return [
            replace(one, prompt=tuple(rng.integers(vocab_size, size=len(one.prompt)).tolist()))
            for one in workload.arrivals
        ]

    def serve(self, kind: Kind, requests: Sequence[Arrival]) -> Measured:
        """Serve the requests with the real engine."""
        with LLM(
            self.given.model,
            parallel=kind.layout,
            policy=kind.policy,
            dtype=self.given.dtype,
            threads_per_rank=1,
            skip_tokenizer_init=True,
        ) as llm:
            warm_up(llm)
            served = drive(llm, requests)
        times = [(one.metrics.ttft_s or math.inf, one.metrics.tbt_s) for one in served]
        means = [(ttft_s, fmean(tbt_s) if tbt_s else 0.0) for ttft_s, tbt_s in times]
        return Measured(
            attainment=fmean(is_good(self.level, ttft_s, tbt_s) for ttft_s, tbt_s in means),
            ttft_s=fmean(ttft_s for ttft_s, _ in means),
            tbt_s=fmean(tbt_s for _, tbt_s in means),
        )


def is_good(level: ServiceLevel, ttft_s: float, tbt_s: float) -> bool:
    """Return True if a request met both bounds."""
    assert level.slo_ttft is not None and level.slo_tbt is not None, "Setup.of sets both"
    return ttft_s <= level.slo_ttft and tbt_s <= level.slo_tbt


def _simulated(model: str, profile: Path) -> Experiment:
    cluster = ClusterSpec(profile=profile, parallel=str(_NUM_RANKS))
    return make_experiment(model, cluster, SchedulingArgs(policy="chunked"))


def noise(measured: Mapping[Kind, Sequence[Measured]], choice: Kind, best: Kind, num_requests: int) -> float:
    """Return the difference of two attainments that chance or the machine explains."""
    spread = max(
        max(one.attainment for one in runs) - min(one.attainment for one in runs) for runs in measured.values()
    )
    means = [fmean(one.attainment for one in measured[kind]) for kind in (choice, best)]
    variances = [mean * (1 - mean) / (num_requests * len(measured[choice])) for mean in means]
    return max(spread, 2 * math.sqrt(sum(variances)))


def report(measured: Mapping[Kind, Sequence[Measured]], choice: Kind, num_requests: int) -> bool:
    """Print a table, best first. Return True if the choice is the best, or within the noise."""
    means = {kind: fmean(one.attainment for one in runs) for kind, runs in measured.items()}
    print("\n| layout, policy | within the level | runs | TTFT s | TBT s | |\n|---|---|---|---|---|---|")
    for kind in sorted(means, key=lambda kind: (-means[kind], fmean(one.ttft_s for one in measured[kind]))):
        runs = measured[kind]
        each = ", ".join(f"{one.attainment:.2f}" for one in runs)
        ttft_s, tbt_s = fmean(one.ttft_s for one in runs), fmean(one.tbt_s for one in runs)
        mark = "chosen" if kind == choice else ""
        print(f"| {kind} | {means[kind]:.3f} | {each} | {ttft_s:.3f} | {tbt_s:.4f} | {mark} |")
    best = max(means, key=means.__getitem__)
    behind, allowed = means[best] - means[choice], noise(measured, choice, best, num_requests)
    passes = means[best] > 0 and behind <= allowed
    verdict = "pass" if passes else "FAIL"
    print(f"\n{verdict}: {choice} is {behind:.3f} behind {best}, and the noise is {allowed:.3f}", flush=True)
    return passes


if __name__ == "__main__":
    sys.exit(main())
