"""Throughput of offline work under parallel specs, on ranks of one thread each, and what the simulator says of it.

    python benchmarks/offline.py [--specs pp2 2] [--rounds 3] [--least 1.6]

The same random prompts at once under each spec and, by turns, on one rank: tokens per second, prompts and outputs
together, as a ratio to one rank in the same round. A spec `2` beside the others is what this machine gives two
processes: instances that have nothing to do with each other, but for the memory that they share. Run
`longspan profile --parallel 2 --threads-per-rank 1` with the same model and dtype before: the simulator's ratio and
seconds are by that. Exits 1 when the first spec is less than `--least` times as quick as one rank, or the simulator is
further than 15 % from its seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longspan import LLM
from longspan.core.sampling import SamplingParams
from longspan.cost.step_cost import FittedCost
from longspan.policy import make_policy
from longspan.sim.run import simulate
from longspan.workload.arrivals import Arrival

WITHIN = 0.15
ALONE = "1"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one round, as they were measured and as the simulator says; None without a profile."""

    real_s: float
    simulated_s: float | None


def main() -> int:
    """Serves, simulates, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--specs", nargs="+", default=["pp2", "2"])
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, nargs=2, default=(500, 1500))
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=float, default=1.6, help="the ratio that the first spec must reach")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    shortest, longest = asked.input_len
    lengths = rng.integers(shortest, longest, size=asked.num_prompts, endpoint=True)
    prompts = [rng.integers(5, 40_000, size=length).tolist() for length in lengths]
    found: dict[str, list[Times]] = {spec: [] for spec in (ALONE, *asked.specs)}
    for _ in range(asked.rounds):
        for spec, times in found.items():
            times.append(_run(spec, prompts, asked))
            print(f"{spec}: {times[-1].real_s:.1f} s", file=sys.stderr, flush=True)
    tokens = sum(map(len, prompts)) + asked.output_len * len(prompts)
    return _report(found, tokens, asked.specs[0], asked.least)


def _run(spec: str, prompts: Sequence[list[int]], asked: argparse.Namespace) -> Times:
    params = SamplingParams(temperature=0.0, max_tokens=asked.output_len, ignore_eos=True)
    with LLM(asked.model, parallel=spec, dtype=asked.dtype, threads_per_rank=1, skip_tokenizer_init=True) as llm:
        num_instances = llm.engine.config.cluster.num_instances
        llm.generate([[7] * 300] * num_instances, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        begin_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        real_s = time.perf_counter() - begin_s
        profile, shape, config = llm.facts.profile, llm.facts.shape, llm.engine.config
        if profile is None or shape is None:
            return Times(real_s=real_s, simulated_s=None)
        policy = make_policy(llm.service.policy_settings.name, num_instances=num_instances, options={}, facts=llm.facts)
        cost = FittedCost(profile, shape, block_size=config.block_size, cluster=config.cluster)
        arrivals = [Arrival(due_s=0.0, prompt=tuple(prompt), output_len=asked.output_len) for prompt in prompts]
        return Times(real_s=real_s, simulated_s=simulate(arrivals, config, policy, cost).makespan_s)


def _report(found: dict[str, list[Times]], tokens: int, spec: str, least: float) -> int:
    print(f"{'spec':12}{'tokens/s':>10}{'ratio':>8}{'simulated s':>13}{'real s':>9}{'error':>8}")
    ratios, errors = {}, {}
    for name, times in found.items():
        real_s = statistics.median(one.real_s for one in times)
        ratios[name] = statistics.median(a.real_s / one.real_s for a, one in zip(found[ALONE], times, strict=True))
        line = f"{name:12}{tokens / real_s:10.0f}{ratios[name]:8.2f}"
        if (simulated_s := times[-1].simulated_s) is None:
            print(f"{line}   (no profile)")
        else:
            errors[name] = simulated_s / real_s - 1
            print(f"{line}{simulated_s:13.1f}{real_s:9.1f}{errors[name]:8.1%}")
    is_quick, is_right = ratios[spec] >= least, abs(errors.get(spec, 0.0)) <= WITHIN
    print(f"{spec}: {ratios[spec]:.2f} times one rank, {least:g} wanted: {'pass' if is_quick else 'FAIL'}")
    if spec in errors:
        print(f"{spec}: simulated within {WITHIN:.0%} wanted, {errors[spec]:+.1%}: {'pass' if is_right else 'FAIL'}")
    return 0 if is_quick and is_right else 1


if __name__ == "__main__":
    sys.exit(main())
