"""Serve the same requests on real instances and on simulated ones, whose costs `longspan profile` measured.

    python benchmarks/twin.py [--policies chunked context tetris runahead] [--runs 2] [--num-requests 60] [--load 0.9]
                              [--burstiness 1 0.1] [--device cuda --instances 1 --within 0.1]

The script prints real and simulated percentiles of times, errors, and the placement of each request. Shared machines
drift by tens of percent within minutes. A new profile is therefore measured before and after each run of all policies,
and replaces the stored profile. Policies decide by the profile from before. Simulated steps have the costs of that
profile in the first column, and of both profiles together in the second. The third column scales these costs by a
factor, so that simulated instances are busy for the same time as real ones. The last two columns are no predictions:
they exclude drift, so their errors have other causes. Single prompts and the drift follow below the table.

With `--stored`, the stored profile is used instead, and no profile is measured: that takes minutes, not an hour.
`longspan profile --threads-per-rank 1` stores it, with the same device and precision.

The exit code is 1 if the error of a prediction, by the profile from before, exceeds `--within`.

With `--learned`, `tetris` serves the requests, and the same again when no request waits. It starts without improvement
rates, and learns them. The same requests are then served with a rate that a simulation found before. The exit code is 1
if mean TTFT of the second half is too high in the real run. It may exceed that of the first half, and that with the
other rate, by `--within`.

`seesaw` has a different test, since it is for throughput. It serves 64 prompts, submitted together, on ranks that
alternate between `pp2` and `tp2`, both profiled before. It decides by costs, and by the paper's rule. Tokens per second
must be within 15 %, and the numbers of transitions must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import offline

from longspan import LLM
from longspan.args import locations
from longspan.core.config import EngineConfig
from longspan.core.policy import Policy
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.view import ClusterView, Plan
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.profile import Profile
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.policy.tetris.rates import IMPROVEMENT_RATES
from longspan.profiling.run import measure, measure_links
from longspan.profiling.store import profile_file
from longspan.sim.run import Result, simulate
from longspan.sim.spec import Faults
from longspan.workload.arrivals import Arrival, arrival_times
from longspan.workload.requests import draw_lengths, quantiles

INPUT_LEN = quantiles("input_len", {"0": 100, "1": 6000})
OUTPUT_LEN = quantiles("output_len", {"0": 8, "1": 64})
PERCENTS = (50, 90)
POLICIES = ("auto", "chunked", "context", "tetris", "runahead")
INSTANCES = 2
FAR_APART_S = 1e6
PAUSE = 1.5
"""The simulated seconds of all requests, times this, are the pause of `--learned` before they come again."""
ALONE = (500, 1500, 4000)
"""Tokens of prompts that are served alone. Their errors show a change of the machine's speed since the profile."""
WITHIN = 0.15
INPUT_LEN_OFFLINE = (600, 1500)
_ROUNDS = 4
_LONG_GAP = 3.0
"""A gap between tokens is long if it exceeds the real median by this factor, as during the prefill of a prompt."""


Placements = list[tuple[int, tuple[int, ...]]]
"""The id and group of each request, in the order of admission."""


def record(policy: Policy) -> Placements:
    """Return a list to which every admission of the policy is appended."""
    placements: Placements = []
    decide = policy.plan

    def plan(view: ClusterView) -> Plan:
        decision = decide(view)
        placements.extend((part.request.id, part.group) for batch in decision.batches for part in batch if part.hit)
        return decision

    policy.plan = plan  # type: ignore[method-assign]
    return placements


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times and placements of one run: seconds to first tokens and between tokens, and busy seconds."""

    ttft_s: Sequence[float]
    tbt_s: Sequence[float]
    placements: Sequence[tuple[int, tuple[int, ...]]]
    busy_s: float


def main() -> int:
    """Profile, serve, simulate and compare. Return 1 if a prediction is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    parser.add_argument("--policies", "--policy", nargs="+", default=POLICIES, choices=(*POLICIES, "seesaw"))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument(
        "--load", type=float, default=0.9, help="part of the rate that keeps simulated instances busy with `chunked`"
    )
    parser.add_argument("--burstiness", type=float, nargs="+", default=[1.0], help="of arrivals: below 1 in bursts")
    parser.add_argument("--lengths", default="128,1024,2048,4096", help="prompts that are profiled")
    parser.add_argument("--repeats", type=int, default=2, help="repeats of each measurement in a profile")
    parser.add_argument("--instances", type=int, default=INSTANCES, help="number of instances, except for seesaw")
    parser.add_argument("--stored", action="store_true", help="use the stored profile and measure none")
    parser.add_argument("--within", type=float, default=WITHIN, help="the largest error of TTFT and TBT")
    parser.add_argument("--learned", action="store_true", help="serve twice with improvement rates that are learned")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host-kv-gib", type=float, default=0.3, help="host memory for seesaw's KV")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for percentiles, except of seesaw")
    args = parser.parse_args()
    are_near: list[bool] = []
    if args.learned:
        return 0 if _serve_learned(args) else 1
    if "seesaw" in args.policies:
        are_near += _serve_offline(args)
        args.policies = [name for name in args.policies if name != "seesaw"]
    if args.policies:
        are_near += _serve_online(args)
    return 0 if all(are_near) else 1


def _serve_offline(args: argparse.Namespace) -> Iterator[bool]:
    """Profile both specs of seesaw, and compare real and simulated runs. Yield True for each accurate simulation."""
    lengths = [int(length) for length in args.lengths.split(",") if int(length) < INPUT_LEN_OFFLINE[1]]
    for tp in (1, 2):
        start = partial(_start, args, tp=tp)
        with start(1) as llm:
            profile_file(llm.profile_key).unlink(missing_ok=True)
        profile = measure(start, INSTANCES // tp, lengths, args.repeats)
        if tp == 1:
            measure_links(profile, locations(INSTANCES))
    work = argparse.Namespace(
        **vars(args) | {"num_prompts": 64, "input_len": INPUT_LEN_OFFLINE, "output_len": (16, 64)}
    )
    requests = offline.draw(work)
    for run in range(args.runs):
        for policy in ("seesaw", "seesaw strict=true"):
            result = offline.serve(f"{policy}:pp2,tp2", requests, work)
            tokens = sum(len(request.prompt) + request.output_len for request in requests)
            assert result.simulated_s is not None, "both specs were profiled"
            num_changes, num_simulated = len(result.transitions), len(result.simulated_transitions or ())
            error = result.real_s / result.simulated_s - 1
            is_good = abs(error) <= args.within and num_changes == num_simulated
            print(f"run {run}, {policy}, pp2 and tp2 alternating: {tokens / result.real_s:.0f} tokens/s, ", end="")
            print(f"{tokens / result.simulated_s:.0f} simulated ({error:+.1%}); ", end="")
            print(f"{num_changes} transitions, {num_simulated} simulated: ", end="")
            print("pass" if is_good else "FAIL", flush=True)
            yield is_good


def _start(args: argparse.Namespace, instances: int, *, tp: int | None = None) -> LLM:
    options = {"device": args.device, "dtype": args.dtype, "threads_per_rank": 1, "skip_tokenizer_init": True}
    options["load_format"] = args.load_format
    return LLM(args.model, instances=instances, tp=tp, **options)


def _serve_online(args: argparse.Namespace) -> Iterator[bool]:
    """Serve with each policy, and yield True for each run with an accurate prediction."""
    start, profiled = partial(_start, args), partial(_profiled, args)
    before, rows = profiled(), list[dict[str, object]]()
    for run in range(args.runs):
        served = [
            _Served.by(start, name, args, burstiness, before)
            for burstiness in args.burstiness
            for name in args.policies
        ]
        after = profiled()
        for case in served:
            print(f"\nrun {run}, policy {case.twin.name}, {args.instances} x 1 thread, burstiness {case.burstiness:g}")
            yield case.report(before, after, args.within)
            rows.append({"run": run, **case.numbers(before)})
            if args.json:
                args.json.write_text(json.dumps({"within": args.within, "rows": rows}, indent=1) + "\n")
        print(f"\nrun {run}, profiled after / before, single instance: {_drift(before, after):.2f}", flush=True)
        before = after


def _profiled(args: argparse.Namespace) -> Profile:
    """Return the stored profile, or measure and store another one."""
    start = partial(_start, args)
    with start(1) as llm:
        stored = profile_file(llm.profile_key)
    if args.stored:
        return Profile.from_json(stored.read_text(encoding="utf-8"))
    stored.unlink(missing_ok=True)
    lengths = [int(length) for length in args.lengths.split(",")]
    return measure_links(measure(start, args.instances, lengths, args.repeats), locations(args.instances))


def _serve_learned(args: argparse.Namespace) -> bool:
    """Serve requests twice with learned improvement rates, and with rates that a simulation found before."""
    profile, number = _profiled(args), args.num_requests
    with _start(args, args.instances) as llm:
        facts = replace(llm.facts, traffic=None)
        twin = Twin(name="tetris", facts=facts, config=llm.engine.config, vocab_size=llm.info.vocab_size)
        arrivals = twin.arrivals(args, args.burstiness[0], profile)
        found = twin.best_rate(args, args.burstiness[0], profile)
        kinds = {"learned": twin, f"found before, {found}": replace(twin, options={"improvement_rate": found})}
        span_s = PAUSE * max(kind.served_s(arrivals, profile) for kind in kinds.values())
        again = [
            replace(twin.arrival(number + place, len(one.prompt), one.output_len), due_s=one.due_s + span_s)
            for place, one in enumerate(arrivals)
        ]
        halves_s = list[tuple[float, float]]()
        print(f"mean TTFT of {number} requests and of the same again, in seconds, real (simulated)")
        for name, kind in kinds.items():
            llm.reset_prefix_cache()
            real = _halves_s(_serve(llm, kind.policy(), [*arrivals, *again]))
            simulated = _halves_s(kind.simulate([*arrivals, *again], profile))
            pairs = (f"{ours:.3f} ({theirs:.3f})" for ours, theirs in zip(real, simulated, strict=True))
            print(f"{name:>20}: {', '.join(pairs)}", flush=True)
            halves_s.append(real)
    (first_s, learned_s), (_, before_s) = halves_s
    within: float = args.within
    return learned_s <= (1 + within) * min(first_s, before_s)


def _halves_s(times: Times) -> tuple[float, float]:
    first, second = np.split(np.array(times.ttft_s), 2)
    return float(first.mean()), float(second.mean())


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A policy on simulated instances with the configuration of the real instances."""

    name: str
    facts: Facts
    config: EngineConfig
    vocab_size: int
    options: Mapping[str, str] = field(default_factory=dict)

    def policy(self) -> Policy:
        """Return a new policy. The real and the simulated engine need one each."""
        number = self.config.cluster.num_instances
        return make_policy(self.name, num_instances=number, options=self.options, facts=self.facts)

    def best_rate(self, args: argparse.Namespace, burstiness: float, profile: Profile) -> str:
        """Return the improvement rate with the lowest mean TTFT of other requests, by simulation."""
        other = argparse.Namespace(**vars(args) | {"seed": args.seed + 1})
        arrivals = self.arrivals(other, burstiness, profile)
        kinds = {rate: replace(self, options={"improvement_rate": str(rate)}) for rate in IMPROVEMENT_RATES}
        means_s = {rate: np.mean(kind.simulate(arrivals, profile).ttft_s) for rate, kind in kinds.items()}
        return str(min(means_s, key=means_s.__getitem__))

    def arrival(self, place: int, input_len: int, output_len: int) -> Arrival:
        """Return a request that shares no prefix with other requests, and arrives long after the request before."""
        drawn = np.random.default_rng([input_len, place]).integers(self.vocab_size, size=input_len)
        return Arrival(due_s=FAR_APART_S * place, prompt=tuple(drawn.tolist()), output_len=output_len)

    def arrivals(self, args: argparse.Namespace, burstiness: float, profile: Profile) -> list[Arrival]:
        """Draw arrivals, the same for every policy, at `--load` times the simulated rate of `chunked`."""
        number, rng = args.num_requests, np.random.default_rng(args.seed)
        inputs, outputs = (draw_lengths(lengths, number, rng) for lengths in (INPUT_LEN, OUTPUT_LEN))
        arrivals = [self.arrival(place, *lengths) for place, lengths in enumerate(zip(inputs, outputs, strict=True))]
        busy_s = self._run(arrivals, profile, replace(self, name="chunked", options={}).policy()).busy_s
        rate = args.load * number * len(busy_s) / sum(busy_s)
        times = arrival_times(number, rate=rate, burstiness=burstiness, rng=rng)
        return [replace(arrival, due_s=due_s) for arrival, due_s in zip(arrivals, times, strict=True)]

    def simulate(self, arrivals: Sequence[Arrival], profile: Profile, slower: float = 1.0) -> Times:
        """Simulate with the steps' costs of a profile, multiplied by `slower`."""
        policy = self.policy()
        placements = record(policy)
        result = self._run(arrivals, profile, policy, slower)
        return Times(
            ttft_s=[request.ttft_s for request in result.served],
            tbt_s=[gap for request in result.served for gap in request.tbt_s],
            placements=placements,
            busy_s=sum(result.busy_s),
        )

    def served_s(self, arrivals: Sequence[Arrival], profile: Profile) -> float:
        """Return the simulated seconds until all requests are served."""
        return self._run(arrivals, profile, self.policy()).makespan_s

    def slower(self, arrivals: Sequence[Arrival], profile: Profile, busy_s: float) -> float:
        """Return the factor for a profile's costs with which simulated instances are busy for `busy_s` seconds."""
        factor = 1.0
        for _ in range(_ROUNDS):
            factor *= busy_s / self.simulate(arrivals, profile, factor).busy_s
        return factor

    def _run(self, arrivals: Sequence[Arrival], profile: Profile, policy: Policy, slower: float = 1.0) -> Result:
        assert self.facts.shape is not None, "the model runs"
        cost = FittedCost(profile, self.facts.shape, block_size=self.config.block_size)
        faults = Faults(slow=dict.fromkeys(range(self.config.cluster.num_instances), slower))
        return simulate(arrivals, self.config, policy, cost, faults=faults)


@dataclass(frozen=True, kw_only=True)
class _Served:
    """Times of real instances under a policy: with all requests, and with each prompt of `ALONE`."""

    twin: Twin
    burstiness: float
    arrivals: Sequence[Arrival]
    real: Times
    alone: Sequence[Times]

    @classmethod
    def by(
        cls, start: Callable[[int], LLM], name: str, args: argparse.Namespace, burstiness: float, profile: Profile
    ) -> _Served:
        with start(args.instances) as llm:
            twin = Twin(name=name, facts=llm.facts, config=llm.engine.config, vocab_size=llm.info.vocab_size)
            arrivals = twin.arrivals(args, burstiness, profile)
            real = _serve(llm, twin.policy(), arrivals)
            alone = [_serve(llm, twin.policy(), [twin.arrival(0, length, 2)]) for length in ALONE]
        return cls(twin=twin, burstiness=burstiness, arrivals=arrivals, real=real, alone=alone)

    def report(self, before: Profile, after: Profile, within: float) -> bool:
        """Print real times with simulated ones of each profile. Return True if the profile from before is accurate."""
        twin, arrivals, both = self.twin, self.arrivals, _joined(before, after)
        if max(prefill.members for prefill in both.prefills) < twin.config.cluster.num_instances:
            return report_times(self.real, {}, within)
        slower = twin.slower(arrivals, both, self.real.busy_s)
        columns = {
            "before": twin.simulate(arrivals, before),
            "both": twin.simulate(arrivals, both),
            f"both x{slower:.2f}": twin.simulate(arrivals, both, slower),
        }
        is_near = report_times(self.real, columns, within)
        simulated = [twin.simulate([twin.arrival(0, length, 2)], both) for length in ALONE]
        ratios = [times.ttft_s[0] / real.ttft_s[0] for times, real in zip(simulated, self.alone, strict=True)]
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"single prompts of {ALONE} tokens, simulated / real TTFT: {listed}")
        return is_near

    def numbers(self, before: Profile) -> dict[str, object]:
        """Return percentiles in seconds, measured, and simulated with the profile from before."""
        simulated = self.twin.simulate(self.arrivals, before)
        return {
            "policy": self.twin.name,
            "burstiness": self.burstiness,
            "real": percentiles(self.real),
            "simulated": percentiles(simulated),
        }


def _joined(before: Profile, after: Profile) -> Profile:
    """Return `before` with the times of `after` added. Links have the times of `after` only."""
    for measured in after.prefills + after.decodes:
        before = before.with_measured(measured)
    for transfer in after.transfers:
        before = before.with_transfer(transfer)
    return before


def _drift(before: Profile, after: Profile) -> float:
    """Return the geometric mean of the ratios, after to before, of prefill seconds on one instance."""
    pairs = [(prefill.median_s, after.find(prefill)) for prefill in before.prefills if prefill.members == 1]
    return statistics.geometric_mean(other.median_s / seconds for seconds, other in pairs if other is not None)


def _serve(llm: LLM, policy: Policy, arrivals: Sequence[Arrival]) -> Times:
    """Serve requests with a policy on the real engine."""
    engine = llm.engine
    warm_up(llm)
    placements = record(policy)
    engine.set_policy(policy)
    busy_s = sum(engine.load().busy_s)
    requests = drive(llm, arrivals)
    first = requests[0].id
    return Times(
        ttft_s=[request.metrics.ttft_s or 0.0 for request in requests],
        tbt_s=[gap for request in requests for gap in request.metrics.tbt_s],
        placements=[(request_id - first, group) for request_id, group in placements],
        busy_s=sum(engine.load().busy_s) - busy_s,
    )


def warm_up(llm: LLM) -> None:
    """Serve two lengths, and then a request alone: Triton compiles separate kernels for multiples of 16, and for 1."""
    ids = [5 + token % (llm.info.vocab_size - 5) for token in range(608)]
    warm = [llm.engine.add(tuple(ids[:length]), _params(number)) for length, number in ((595, 4), (608, 8))]
    while any(request.finish_reason is None for request in warm):
        llm.engine.step()


def drive(llm: LLM, arrivals: Sequence[Arrival]) -> list[Request]:
    """Serve requests at their times, with the same loop as `simulate`."""
    engine, requests, begin = llm.engine, list[Request](), time.monotonic()
    while len(requests) < len(arrivals) or engine.has_unfinished:
        now = time.monotonic() - begin
        while len(requests) < len(arrivals) and arrivals[len(requests)].due_s <= now:
            arrival = arrivals[len(requests)]
            requests.append(engine.add(arrival.prompt, _params(arrival.output_len)))
        to_next = arrivals[len(requests)].due_s - now if len(requests) < len(arrivals) else None
        if engine.has_unfinished:
            engine.step(to_next)
        elif to_next is not None:
            time.sleep(to_next)
    return requests


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def report_times(real: Times, simulated: Mapping[str, Times], within: float) -> bool:
    """Print percentiles, errors and placements. Return True if all errors of the first simulation are small."""
    if simulated:
        print("simulated with the profile from before, with both, and as busy")
    print(f"{'':10}{'real, s':>12}" + "".join(f"{column + ', s':>14}{'error':>9}" for column in simulated))
    errors: dict[str, list[float]] = {column: [] for column in simulated}
    predicted = {column: percentiles(times) for column, times in simulated.items()}
    for name, real_s in percentiles(real).items():
        line = f"{name:10}{real_s:12.4f}"
        for column, seconds in predicted.items():
            errors[column].append(seconds[name] / real_s - 1)
            line += f"{seconds[name]:14.4f}{errors[column][-1]:9.1%}"
        print(line)
    cliff_s = _LONG_GAP * float(np.median(real.tbt_s))
    shares = {column: np.mean(np.array(times.tbt_s) > cliff_s) for column, times in {"real": real, **simulated}.items()}
    listed = ", ".join(f"{column} {share:.1%}" for column, share in shares.items())
    print(f"gaps between tokens of more than {cliff_s:.2f} s: {listed}")
    for column, of_column in errors.items():
        verdict = "pass" if _are_within(of_column, within) else "FAIL"
        print(f"{column}: {verdict}: TTFT and TBT within {within:.0%} wanted, {max(of_column, key=abs):+.1%} at worst")
    if not simulated:
        print("groups are larger than the profiled ones: not simulated")
        return True
    pairs = list(zip(real.placements, simulated["before"].placements, strict=False))
    same = sum(placed == predicted_place for placed, predicted_place in pairs)
    print(f"placements, request: group (real | simulated); {same} of {len(pairs)} the same")
    for placed, predicted_place in pairs:
        mark = "" if placed == predicted_place else "   <-"
        print(f"  {_words(placed):>16} | {_words(predicted_place)}{mark}")
    return _are_within(errors["before"], within)


def percentiles(times: Times) -> dict[str, float]:
    """Return seconds by names such as `TTFT P90`."""
    return {
        f"{label} P{percent}": float(np.percentile(seconds, percent))
        for label, seconds in (("TTFT", times.ttft_s), ("TBT", times.tbt_s))
        for percent in PERCENTS
    }


def _are_within(errors: Sequence[float], within: float) -> bool:
    return all(abs(error) <= within for error in errors)


def _words(placement: tuple[int, tuple[int, ...]]) -> str:
    request, group = placement
    return f"{request}: {','.join(map(str, group))}"


if __name__ == "__main__":
    sys.exit(main())
