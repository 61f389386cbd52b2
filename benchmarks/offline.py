"""Real and simulated throughput of offline work under parallel specs and policies, on ranks of one thread each.

    python benchmarks/offline.py [CONTESTANT ...] [--rounds 3] [--least 1.6] [--require]

A contestant is `policy:SPEC`, or only a parallel spec, which is served by `chunked`. Seesaw has two specs, as in
`seesaw:pp2,tp2`. With an option, `seesaw strict=true:pp2,tp2`, clusters also change if that saves no time.
All contestants serve the same prompts, cut from the topics of Python's help and submitted together. The table has
tokens per second, prompts and outputs together, as a ratio to one rank in the same round. The spec `2` shows the speed
of two processes on this machine: its instances share only the memory.

A second table has the transitions of Seesaw, and their exposed seconds: nothing is computed while KV is swapped out and
while ranks re-shard. `seesaw-late` copies the KV of a prompt after its prefill, `seesaw` in the steps that compute it.
Less `--host-kv-gib` gives more transitions.

Simulations need a profile. Run `longspan profile --parallel 2 --threads-per-rank 1` with the same model and dtype
before, and for specs with tp also `--parallel 2xtp2`. `--require` tests `pp2`. The exit code is 1 if its throughput is
below `--least` times that of one rank, or if its simulation has an error above 15 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import msgspec
import numpy as np

from longspan import LLM
from longspan.core.config import EngineConfig
from longspan.core.sampling import SamplingParams
from longspan.core.transitions import Transition
from longspan.core.view import ClusterView, Plan
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.profile import Profile
from longspan.errors import ParameterError
from longspan.policy.registry import make_policy, register_policy
from longspan.policy.seesaw import Seesaw
from longspan.profiling.store import load_profile
from longspan.sim.run import Result, simulate
from longspan.workload.arrivals import Arrival

WITHIN = 0.15
ALONE, JUDGED = "1", "pp2"
CONTESTANTS = (
    "2",
    JUDGED,
    "tp2",
    "prefill-first:pp2",
    "decode-first:pp2",
    "prefill-first:tp2",
    "decode-first:tp2",
    "seesaw:pp2,tp2",
    "seesaw-late strict=true:pp2,tp2",
    "seesaw strict=true:pp2,tp2",
)


def register_late_seesaw() -> None:
    """Register Seesaw whose steps copy no KV: the blocks of a request are swapped out after its prefill."""

    class LateSeesaw(Seesaw, name="seesaw-late"):
        def plan(self, view: ClusterView) -> Plan:
            plan = super().plan(view)
            plan.offloads = False
            return plan

    register_policy(LateSeesaw)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the number of tokens to generate."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measured and simulated seconds and transitions of one round. Simulated values are None without a profile."""

    real_s: float
    simulated_s: float | None
    transitions: Sequence[Transition]
    simulated_transitions: Sequence[Transition] | None


def main() -> int:
    """Serve, simulate and compare all contestants."""
    register_late_seesaw()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="*", default=CONTESTANTS, metavar="CONTESTANT")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, nargs=2, default=(600, 1500))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 64))
    parser.add_argument("--host-kv-gib", type=float, default=2.0, help="host memory for Seesaw's KV")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--least", type=float, default=1.6, help="the ratio that pp2 must reach")
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    requests = draw(args)
    runs_of: dict[str, list[Run]] = {name: [] for name in (ALONE, *args.contestants)}
    for _ in range(args.rounds):
        for name, runs in runs_of.items():
            runs.append(serve(name, requests, args))
            print(f"{name}: {runs[-1].real_s:.1f} s", file=sys.stderr, flush=True)
    is_good = _report(runs_of, sum(len(request.prompt) + request.output_len for request in requests), args.least)
    return 0 if is_good or not args.require else 1


def draw(args: argparse.Namespace) -> list[Request]:
    """Cut prompts from the topics of Python's help."""
    with LLM(args.model, dtype=args.dtype, threads_per_rank=1) as llm:
        tokens = llm.tokenize("\n\n".join(topics.values()))
    rng = np.random.default_rng(args.seed)
    lengths, outputs = (
        rng.integers(low, high, size=args.num_prompts, endpoint=True) for low, high in (args.input_len, args.output_len)
    )
    starts = rng.integers(0, len(tokens) - max(lengths), size=args.num_prompts)
    return [
        Request(prompt=tokens[start : start + length], output_len=int(output))
        for start, length, output in zip(starts, lengths, outputs, strict=True)
    ]


def _options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    chosen, _, spec = name.rpartition(":")
    policy, *options = chosen.split() or ["chunked"]
    arguments: dict[str, Any] = {"policy": policy, "policy_options": dict(option.split("=") for option in options)}
    first, comma, second = spec.partition(",")
    if not comma:
        return arguments | {"parallel": first}
    return arguments | {"prefill_parallel": first, "decode_parallel": second, "host_kv_gib": args.host_kv_gib}


def serve(name: str, requests: Sequence[Request], args: argparse.Namespace) -> Run:
    """Serve all requests on real ranks, and on simulated ranks."""
    params = [SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True) for request in requests]
    options = {"dtype": args.dtype, "threads_per_rank": 1, "skip_tokenizer_init": True, **_options(name, args)}
    with LLM(args.model, **options) as llm:
        num_instances = llm.engine.config.cluster.num_instances
        llm.generate([[7] * 300] * num_instances, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.reset_prefix_cache()
        num_before, config, begin_s = len(llm.engine.transitions), llm.engine.config, time.perf_counter()
        llm.generate([request.prompt for request in requests], params, use_tqdm=False)
        real_s = time.perf_counter() - begin_s
        simulated = _simulated(llm, config, requests)
        return Run(
            real_s=real_s,
            simulated_s=None if simulated is None else simulated.makespan_s,
            transitions=llm.engine.transitions[num_before:],
            simulated_transitions=None if simulated is None else simulated.transitions,
        )


def _simulated(llm: LLM, config: EngineConfig, requests: Sequence[Request]) -> Result | None:
    """Serve the requests on the simulated cluster `config`. Return None if a profile is missing."""
    facts, clusters = llm.facts, config.phases or (config.cluster,)
    profiles = {cluster.spec.tp: _profile(llm, cluster.spec.tp) for cluster in clusters}
    if facts.shape is None or not all(profiles.values()):
        return None
    first, *others = (profile for profile in profiles.values() if profile is not None)
    settings = llm.service.policy_settings
    number = clusters[0].num_instances
    policy = make_policy(settings.name, num_instances=number, options=settings.given, facts=facts)
    size = config.block_size
    cost = FittedCost(first, facts.shape, block_size=size, cluster=clusters[0], others=others)
    cost = cost.resharded(config.cluster)  # a cluster with two phases may be in either
    arrivals = [Arrival(due_s=0.0, prompt=tuple(request.prompt), output_len=request.output_len) for request in requests]
    try:
        return simulate(arrivals, config, policy, cost)
    except ParameterError as error:
        print(f"not simulated: {error}", file=sys.stderr)
        return None


def _profile(llm: LLM, tp: int) -> Profile | None:
    return load_profile(msgspec.structs.replace(llm.profile_key, tp=tp))


def _report(runs_of: dict[str, list[Run]], tokens: int, least: float) -> bool:
    print(f"{'contestant':28}{'tokens/s':>10}{'ratio':>8}{'simulated s':>13}{'real s':>9}{'error':>8}")
    ratios, errors = {}, {}
    for name, runs in runs_of.items():
        real_s = statistics.median(run.real_s for run in runs)
        ratios[name] = statistics.median(a.real_s / b.real_s for a, b in zip(runs_of[ALONE], runs, strict=True))
        line = f"{name:28}{tokens / real_s:10.0f}{ratios[name]:8.2f}"
        if (simulated_s := runs[-1].simulated_s) is None:
            print(f"{line}   (no profile)")
        else:
            errors[name] = simulated_s / real_s - 1
            print(f"{line}{simulated_s:13.1f}{real_s:9.1f}{errors[name]:8.1%}")
    _report_transitions(runs_of)
    if JUDGED not in ratios:
        return True
    is_quick, is_right = ratios[JUDGED] >= least, abs(errors.get(JUDGED, 0.0)) <= WITHIN
    print(f"{JUDGED}: {ratios[JUDGED]:.2f} times one rank, {least:g} wanted: {'pass' if is_quick else 'FAIL'}")
    if JUDGED in errors:
        words = "pass" if is_right else "FAIL"
        print(f"{JUDGED}: simulated within {WITHIN:.0%} wanted, {errors[JUDGED]:+.1%}: {words}")
    return is_quick and is_right


def _report_transitions(runs_of: dict[str, list[Run]]) -> None:
    """Print the exposed seconds of all transitions of the round with the median sum."""
    print(f"\n{'exposed seconds':36}{'transitions':>12}{'swap-out':>10}{'re-shard':>10}{'largest swap-out':>18}")
    for name, runs in runs_of.items():
        measured = sorted((run.transitions for run in runs), key=_swap_s)[len(runs) // 2]
        for title, transitions in ((name, measured), (f"{name}, simulated", runs[-1].simulated_transitions)):
            if transitions:
                swap_s, exposed_s = _swap_s(transitions), sum(transition.exposed_s for transition in transitions)
                most_s = max(transition.swap_s for transition in transitions)
                print(f"{title:36}{len(transitions):12}{swap_s:10.4f}{exposed_s - swap_s:10.4f}{most_s:18.4f}")
    print()


def _swap_s(transitions: Sequence[Transition]) -> float:
    return sum(transition.swap_s for transition in transitions)


if __name__ == "__main__":
    sys.exit(main())
