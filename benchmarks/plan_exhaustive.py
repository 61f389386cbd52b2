"""Compare the choice of `longspan.plan` with the best of a small space that is simulated exhaustively.

    python benchmarks/plan_exhaustive.py TRACE [TRACE ...] [--model llama-3-8b] [--num-requests 240] [--require]

A trace is a file of arrivals and lengths, such as Mooncake's or Splitwise's. The devices are 8 A100. The space has 24
candidates: six layouts, each with `chunked` and `auto`, and with two step budgets. Every candidate serves the requests
of every seed. Its goodput is the requests per second that meet the service level, as a mean over the seeds. Then
`plan` searches the same space, with the same seeds.

The rate of a trace is `--load` times the rate at which the best layout with `chunked` finishes requests that all wait
at the start. A first token may take 5 times the shortest median of an idle layout, and a token 3 times. A plan is good
if it keeps that for 0.9 of the requests.

`plan` must choose a candidate with at least 0.98 of the best goodput, and simulate at most a fifth of the requests. The
exit code is 1 with `--require` if it fails in either.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from longspan import limits, plan
from longspan.core.options import SchedulingArgs
from longspan.plan_runs import Runner, Setup
from longspan.planner.candidates import Candidate, Space, candidates
from longspan.planner.samples import Work
from longspan.planner.values import Plan
from longspan.sim.spec import ClusterSpec, HardwareSpec, ServiceLevel
from longspan.simulation import make_experiment, read_architecture
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

MIN_GOODPUT, MAX_REQUESTS = 0.98, 0.2
_HARDWARE, _NUM_GPUS = "a100-sxm-80g", 8
LAYOUTS = ("8", "4xtp2", "2xtp4", "tp8", "4xpp2", "2xtp2pp2")
POLICIES, STEP_BUDGETS = ("chunked", "auto"), (2048, 8192)
_TTFT_FACTOR, _TBT_FACTOR, _ATTAINMENT = 5.0, 3.0, 0.9
_SAMPLE = 60
"""Requests of a trace from which the rate and the level are computed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The goodputs of all candidates, and the choice of a plan.

    Attributes:
        goodputs: requests per second by candidate. A candidate that cannot run has 0.
        num_requests: of the exhaustive simulations.
        num_planned: of the plan's simulations.
    """

    goodputs: Mapping[Candidate, float]
    chosen: Candidate
    num_requests: int
    num_planned: int

    @property
    def best(self) -> Candidate:
        return max(self.goodputs, key=self.goodputs.__getitem__)

    @property
    def of_best(self) -> float:
        """The goodput of the choice, as a fraction of the best."""
        highest = self.goodputs[self.best]
        return self.goodputs[self.chosen] / highest if highest else 0.0

    @property
    def of_requests(self) -> float:
        """The requests that the plan simulated, as a fraction of all."""
        return self.num_planned / self.num_requests

    @property
    def passes(self) -> bool:
        return self.of_best >= MIN_GOODPUT and self.of_requests <= MAX_REQUESTS


def main() -> int:
    """Compare for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--num-requests", type=int, default=240, help="of each seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--jobs", type=int, default=limits.cores())
    parser.add_argument("--require", action="store_true", help="exit code 1 if a requirement is missed")
    args = parser.parse_args()
    passed = []
    for trace in args.traces:
        question = question_of(args.model, trace, args.num_requests, args.load)
        begin_s = time.perf_counter()
        goodputs = exhaustive(question, args.seeds, args.jobs)
        middle_s = time.perf_counter()
        answer = planned(question, args.seeds, args.jobs)
        assert answer.winner is not None, "candidates can run"
        comparison = Comparison(
            goodputs=goodputs,
            chosen=answer.winner.candidate,
            num_requests=len(goodputs) * args.seeds * args.num_requests,
            num_planned=answer.num_simulated_requests,
        )
        report(question, comparison, (middle_s - begin_s, time.perf_counter() - middle_s))
        passed.append(comparison.passes)
    return 1 if args.require and not all(passed) else 0


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, and a trace with its rate and service level."""

    model: str
    workload: WorkloadSpec
    level: ServiceLevel


def question_of(model: str, trace: Path, num_requests: int, load: float) -> Question:
    """Compute the rate and the service level of a trace."""
    sample = make_workload(WorkloadSpec(workload=str(trace), rate=1.0, num_requests=_SAMPLE))
    rates, ttfts_s, tbts_s = [], [], []
    for layout in LAYOUTS:
        cluster = ClusterSpec(hardware=_HARDWARE, gpus_per_host=_NUM_GPUS, parallel=layout)
        try:
            experiment = make_experiment(model, cluster, SchedulingArgs(policy="chunked"))
        except ValueError:
            continue  # the model does not fit
        offline = experiment.run(sample.one_by_one(0.0))
        rates.append(len(offline.served) / offline.makespan_s)
        idle = experiment.at_light_load(sample).served
        ttfts_s.append(median(one.ttft_s for one in idle))
        tbts_s.append(median(one.mean_tbt_s for one in idle))
    level = ServiceLevel(slo_ttft=_TTFT_FACTOR * min(ttfts_s), slo_tbt=_TBT_FACTOR * min(tbts_s))
    workload = WorkloadSpec(workload=str(trace), rate=load * max(rates), num_requests=num_requests)
    return Question(model=model, workload=workload, level=level)


def exhaustive(question: Question, seeds: int, jobs: int) -> dict[Candidate, float]:
    """Simulate all requests of all seeds with every candidate."""
    space = Space(
        hardware=(_HARDWARE,),
        max_gpus=_NUM_GPUS,
        num_layers=read_architecture(question.model).attention.num_layers,
        layouts=LAYOUTS,
        policies=POLICIES,
        step_budgets=STEP_BUDGETS,
    )
    setup = Setup(
        model=question.model,
        devices=HardwareSpec(),
        gpus_per_host=_NUM_GPUS,
        profiles=(),
        workload=question.workload,
        level=question.level,
    )
    number = question.workload.num_requests
    assert number is not None, "question_of sets it"
    all_work = {
        candidate: [Work(candidate=candidate, seed=seed, num_requests=number) for seed in range(seeds)]
        for candidate in candidates(space)
    }
    with tqdm(desc="exhaustive", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        with Runner(setup, jobs, progress, None) as simulate:
            outcomes = simulate([work for works in all_work.values() for work in works])
    return {
        candidate: fmean(outcomes[work].goodput_per_s if outcomes[work].problem is None else 0.0 for work in works)
        for candidate, works in all_work.items()
    }


def planned(question: Question, seeds: int, jobs: int) -> Plan:
    """Search the same space with `plan`."""
    return plan(
        question.model,
        hardware=_HARDWARE,
        gpus=_NUM_GPUS,
        workload=question.workload,
        level=question.level,
        attainment=_ATTAINMENT,
        fewer=False,
        layouts=LAYOUTS,
        policies=POLICIES,
        step_budgets=STEP_BUDGETS,
        host_kv_gib=(0.0,),
        seeds=seeds,
        num_processes=jobs,
        stores=False,
    )


def report(question: Question, comparison: Comparison, seconds: Sequence[float]) -> None:
    """Print the candidates by goodput, the choice, and both verdicts."""
    name, level = Path(question.workload.workload).name, question.level
    print(f"\n{name}, {question.model}, {_NUM_GPUS} {_HARDWARE}, {question.workload.rate:.3g} requests/s, ", end="")
    print(f"TTFT up to {level.slo_ttft:.3f} s, TBT up to {level.slo_tbt:.4f} s\n")
    print("| candidate | goodput/s | of the best | |\n|---|---|---|---|")
    highest = comparison.goodputs[comparison.best] or math.inf
    for candidate, goodput in sorted(comparison.goodputs.items(), key=lambda item: -item[1]):
        mark = "chosen" if candidate == comparison.chosen else ""
        print(f"| {candidate} | {goodput:.3f} | {goodput / highest:.3f} | {mark} |")
    verdict = "pass" if comparison.passes else "FAIL"
    print(f"\n{verdict}: the choice has {comparison.of_best:.3f} of the best goodput, ", end="")
    print(f"by {comparison.num_planned:,} of {comparison.num_requests:,} simulated requests ", end="")
    print(f"({comparison.of_requests:.0%}), in {seconds[1]:.0f} s instead of {seconds[0]:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
