"""The same requests on two real instances, and on simulated ones that cost what `longspan profile` measured.

    python benchmarks/twin.py [--policies chunked context tetris] [--num-requests 60] [--load 0.9]

Percentiles of times, errors, and where each request was placed, side by side; below, single prompts, which say how far
the machine itself is from its profile by then. What was measured before with these options is read from the cache
folder, so that a second run only serves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from longspan import LLM
from longspan.cli.profile_run import measure, measure_links
from longspan.core.protocols import ClusterView, Plan, Policy, PolicySettings
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.cost.fitted_cost import FittedCost
from longspan.loadgen.arrivals import arrival_times
from longspan.loadgen.lengths import Quantiles, draw_lengths
from longspan.loadgen.prompts import PromptMaker
from longspan.loadgen.workload import Ask
from longspan.policy import make_policy
from longspan.sim.arrivals import Arrival
from longspan.sim.run import simulate

INPUT_LEN = Quantiles(points=((0.0, 100.0), (1.0, 6000.0)))
OUTPUT_LEN = Quantiles(points=((0.0, 8.0), (1.0, 64.0)))
PERCENTS = (50, 90)
POLICIES = ("chunked", "context", "tetris")
INSTANCES = 2
FAR_APART_S = 1e6
ALONE = (500, 1500, 4000)
"""Prompts that are served when nothing else is: the machine may be quicker or slower than when it was profiled."""
WITHIN = 0.15


@dataclass(kw_only=True)
class Recorded:
    """A policy, and where it placed requests: the group of each, in the order of admission."""

    policy: Policy
    placements: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def plan(self, view: ClusterView) -> Plan:
        """The policy's."""
        plan = self.policy.plan(view)
        admitted = [share for batch in plan.batches for share in batch if share.hit is not None]
        self.placements += [(share.request.id, share.group) for share in admitted]
        return plan

    @property
    def settings(self) -> PolicySettings:
        """The policy's."""
        return self.policy.settings

    def update(self, options: Mapping[str, str]) -> None:
        """The policy's."""
        self.policy.update(options)

    def check(self, num_prompt_tokens: int) -> None:
        """The policy's."""
        self.policy.check(num_prompt_tokens)

    def capacity_tokens(self, *, num_blocks: int, block_size: int) -> int:
        """The policy's."""
        return self.policy.capacity_tokens(num_blocks=num_blocks, block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one run: seconds to first tokens by request, between all tokens, and where requests were placed."""

    ttft_s: Sequence[float]
    tbt_s: Sequence[float]
    placements: Sequence[tuple[int, tuple[int, ...]]]


def main() -> None:
    """Profiles, serves, simulates, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument(
        "--load", type=float, default=0.9, help="part of the rate that keeps the simulated cluster busy"
    )
    parser.add_argument("--lengths", default="128,1024,4096", help="prompts that are profiled")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    def start(instances: int) -> LLM:
        return LLM(asked.model, instances=instances, dtype=asked.dtype, threads_per_rank=1, skip_tokenizer_init=True)

    lengths = [int(length) for length in asked.lengths.split(",")]
    measure_links(measure(start, INSTANCES, lengths, asked.repeats), INSTANCES)
    for name in asked.policies:
        with start(INSTANCES) as llm:
            arrivals = _arrivals(llm, name, asked)
            simulated = _simulate(llm, name, arrivals)
            real = _serve(llm, name, arrivals)
            alone = [_ratio(llm, name, length) for length in ALONE]
        _print(name, INSTANCES, real, simulated)
        print(
            f"one prompt at a time, simulated / real TTFT: {', '.join(f'{one:.2f}' for one in alone)} ({ALONE} tokens)"
        )


def _arrivals(llm: LLM, policy: str, asked: argparse.Namespace) -> list[Arrival]:
    """Poisson, at a rate near what the simulated cluster can do."""
    rng = np.random.default_rng(asked.seed)
    inputs, outputs = (draw_lengths(lengths, asked.num_requests, rng) for lengths in (INPUT_LEN, OUTPUT_LEN))
    prompts = PromptMaker(seed=asked.seed, vocab_size=llm.info.vocab_size)
    arrivals = [
        Arrival(
            due_s=FAR_APART_S * place,
            prompt=tuple(prompts.token_ids(place, Ask(input_len=one, output_len=other))),
            output_len=other,
        )
        for place, (one, other) in enumerate(zip(inputs, outputs, strict=True))
    ]
    alone = simulate(arrivals, llm.engine.config, _policy(llm, policy), _cost(llm))
    busy_s = sum(alone.busy_s) / len(alone.busy_s)
    rate = asked.load * asked.num_requests / busy_s
    times = arrival_times(asked.num_requests, request_rate=rate, burstiness=1.0, rng=rng)
    return [replace(one, due_s=due_s) for one, due_s in zip(arrivals, times, strict=True)]


def _ratio(llm: LLM, policy: str, length: int) -> float:
    """Simulated by real seconds to the first token of a prompt that is alone."""
    prompt = PromptMaker(seed=length, vocab_size=llm.info.vocab_size).token_ids(0, Ask(input_len=length, output_len=2))
    arrivals = [Arrival(due_s=0.0, prompt=tuple(prompt), output_len=2)]
    simulated, real = _simulate(llm, policy, arrivals), _serve(llm, policy, arrivals)
    return simulated.ttft_s[0] / real.ttft_s[0]


def _policy(llm: LLM, name: str) -> Recorded:
    num_instances = llm.engine.config.num_instances
    return Recorded(policy=make_policy(name, num_instances=num_instances, options={}, facts=llm.facts))


def _cost(llm: LLM) -> FittedCost:
    assert llm.facts.profile is not None, "it was measured just now"
    assert llm.facts.shape is not None, "the model runs"
    return FittedCost(llm.facts.profile, llm.facts.shape, block_size=llm.engine.config.block_size)


def _simulate(llm: LLM, name: str, arrivals: Sequence[Arrival]) -> Times:
    policy = _policy(llm, name)
    result = simulate(arrivals, llm.engine.config, policy, _cost(llm))
    gaps = [gap for one in result.served for gap in one.tbt_s]
    return Times(ttft_s=[one.ttft_s for one in result.served], tbt_s=gaps, placements=policy.placements)


def _serve(llm: LLM, name: str, arrivals: Sequence[Arrival]) -> Times:
    """By the engine itself, as `simulate` drives it."""
    engine, policy = llm.engine, _policy(llm, name)
    warm = engine.add(tuple(range(5, 600)), _params(4))
    while warm.finish_reason is None:
        engine.step()
    engine.set_policy(policy)
    requests: list[Request] = []
    begin = time.monotonic()
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
    first = requests[0].id
    return Times(
        ttft_s=[one.metrics.ttft_s or 0.0 for one in requests],
        tbt_s=[gap for one in requests for gap in one.metrics.tbt_s],
        placements=[(request_id - first, group) for request_id, group in policy.placements],
    )


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _print(name: str, num_instances: int, real: Times, simulated: Times) -> None:
    print(f"\npolicy {name}, {num_instances} x 1 thread")
    print(f"{'':10}{'real, s':>12}{'simulated, s':>14}{'error':>9}")
    errors = []
    for what in ("ttft_s", "tbt_s"):
        for percent in PERCENTS:
            took_s, said_s = (float(np.percentile(getattr(times, what), percent)) for times in (real, simulated))
            label = f"{what[:4].upper() if what == 'ttft_s' else 'TBT'} P{percent}"
            errors.append(said_s / took_s - 1)
            print(f"{label:10}{took_s:12.4f}{said_s:14.4f}{said_s / took_s - 1:9.1%}")
    verdict = "pass" if all(abs(error) <= WITHIN for error in errors) else "FAIL"
    print(f"{verdict}: TTFT and TBT within {WITHIN:.0%} wanted, {max(errors, key=abs):+.1%} at worst")
    pairs = list(zip(real.placements, simulated.placements, strict=False))
    same = sum(one == other for one, other in pairs)
    print(f"placements, request: group (real | simulated); {same} of {len(pairs)} the same")
    for one, other in pairs:
        mark = "" if one == other else "   <-"
        print(f"  {_words(one):>16} | {_words(other)}{mark}")


def _words(placement: tuple[int, tuple[int, ...]]) -> str:
    request, group = placement
    return f"{request}: {','.join(map(str, group))}"


if __name__ == "__main__":
    main()
