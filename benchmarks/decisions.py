"""Measure the time to plan a prompt with Tetris's algorithms, by number of instances, and the time of engine steps.

Lengths and queueing times are random, as in §7.4 of the paper. There are eight instances per host, and group sizes are
powers of two up to all instances. Prefill times are similar to its Table 1. They shrink with the size per token and
per pair, and each further member adds to the start. The output has one line per number of instances. With --other-hosts
it also has hosts of other sizes, which the groups do not always divide.

With --steps, the output has steps of the engine: 256 requests of a Llama 3 8B on 64 simulated A100, eight per host.
When a request ends, another one is added. `step` is the work of the engine for one completion, with the plans of its
policy and without the simulator's executor. `plan` is the time of the policy's plans. Completions before the first
answers end do not count. `check` is the KV account's check in an idle engine whose blocks are all cached.

p50 and p99 are wall-clock times, which other programs of a busy machine lengthen. cpu_p99 is CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.kv.check import Watch
from longspan.core.options import SchedulingArgs
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Content
from longspan.cost.profile import PrefillTime
from longspan.policy.tetris.planner import Planner, Prompt
from longspan.sim.executor import SimExecutor, VirtualClock
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import text

P = ParamSpec("P")
T = TypeVar("T")

SIZES = (8, 16, 32, 64, 128)
_PER_HOST = 8
_OTHER_HOSTS = (1, 3, 6, 7, 12, 16)
"""Instances per host, with the largest of `SIZES`."""
_STEP_POLICIES = ("chunked", "auto", "tetris")
_RUNNING = 256
_NUM_CHECKS = 1000
_CLUSTER = ClusterSpec(hardware="a100-sxm-80g", hosts=8, gpus_per_host=8)


def times_of(size: int) -> PrefillTime:
    """Return prefill times of an 8B model on `size` A100, similar to Table 1."""
    return PrefillTime(
        start_s=0.02 + 0.02 * (size - 1), token_s=6.5e-5 / size, cached_s=1.1e-9 / size, square_s=5e-10 / size
    )


def plan_times_s(num_instances: int, per_host: int, num_prompts: int, seed: int) -> tuple[list[float], list[float]]:
    """Measure the plan of each prompt: wall-clock seconds and CPU seconds."""
    sizes = [1 << bit for bit in range(num_instances.bit_length())]
    hosts = [instance // per_host for instance in range(num_instances)]
    planner = Planner({size: times_of(size) for size in sizes}, hosts)
    draw = random.Random(seed)
    wall_s, cpu_s = [], []
    for _ in range(num_prompts):
        longest_s = 10 ** draw.uniform(-1, 1.5)
        queue_s = [draw.uniform(0, longest_s) for _ in range(num_instances)]
        prompt = Prompt(new_tokens=draw.randrange(4_000, 200_000), improvement_rate=draw.uniform(0.05, 0.75))
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        planner.plan(prompt, queue_s)
        cpu_s.append(time.thread_time() - start_cpu_s)
        wall_s.append(time.perf_counter() - start_s)
    return wall_s, cpu_s


class Stopwatch:
    """Sums the wall-clock seconds and CPU seconds of function calls."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def around(self, function: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - start_cpu_s
                self.wall_s += time.perf_counter() - start_s

        return timed

    def read(self) -> tuple[float, float]:
        """Return both sums, and reset them."""
        read = self.wall_s, self.cpu_s
        self.wall_s = self.cpu_s = 0.0
        return read


def step_times_s(policy: str, num_steps: int, seed: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Measure the plans of steps, and the steps: wall-clock seconds and CPU seconds of each."""
    scheduling = SchedulingArgs(policy=policy, enable_prefix_caching=False)
    experiment, clock, draw = make_experiment("llama-3-8b", _CLUSTER, scheduling), VirtualClock(), random.Random(seed)
    chosen, executor = experiment.policy(), SimExecutor(clock=clock, vocab_size=2**15, cost=experiment.cost)
    plans, steps, simulated = Stopwatch(), Stopwatch(), Stopwatch()
    chosen.plan = plans.around(chosen.plan)  # type: ignore[method-assign]
    for name in ("submit", "poll"):
        setattr(executor, name, simulated.around(getattr(executor, name)))
    config = EngineConfig.of(scheduling, experiment.cluster, chosen)
    engine = Engine(policy=chosen, executor=executor, clock=clock, config=config)
    step: Callable[[], Sequence[Any]] = steps.around(engine.step)
    num_added = 0

    def add() -> None:
        nonlocal num_added
        num_added += 1
        answer = SamplingParams(temperature=0.0, max_tokens=draw.randrange(50, 450), ignore_eos=True, seed=0)
        engine.add(text(num_added, draw.randrange(500, 4000)), answer)

    for _ in range(_RUNNING):
        add()
    plan_s: list[tuple[float, float]] = []
    step_s: list[tuple[float, float]] = []
    while len(step_s) < num_steps:
        ended = [request for request in step() if request.finish_reason is not None]
        of_plans, of_step, of_executor = plans.read(), steps.read(), simulated.read()
        if num_added > 2 * _RUNNING:
            plan_s.append(of_plans)
            step_s.append((of_step[0] - of_executor[0], of_step[1] - of_executor[1]))
        for _ in ended:
            add()
    return plan_s, step_s


def check_times_s(num_checks: int) -> list[tuple[float, float]]:
    """Measure checks of the KV account when all blocks are cached and the engine is idle."""
    scheduling = SchedulingArgs(policy="chunked")
    experiment, clock = make_experiment("llama-3-8b", _CLUSTER, scheduling), VirtualClock()
    chosen, executor = experiment.policy(), SimExecutor(clock=clock, vocab_size=2**15, cost=experiment.cost)
    config = EngineConfig.of(scheduling, experiment.cluster, chosen)
    engine = Engine(policy=chosen, executor=executor, clock=clock, config=config)
    for instance in config.cluster.instances:
        pool = engine.kv.pool(instance)
        contents = [Content(b"", range(block, block + config.block_size)) for block in range(pool.num_blocks)]
        pool.restore(enumerate(contents))
        assert pool.num_cached == pool.num_blocks, "all blocks are cached"
    watch, watched, found = Watch(), Stopwatch(), []
    check = watched.around(watch.check)
    for _ in range(num_checks):
        check(engine.kv)
        found.append(watched.read())
    assert not watch.num_violations, "every block is accounted for"
    return found


def shown(wall_s: Sequence[float], cpu_s: Sequence[float]) -> str:
    p99, cpu_p99 = (statistics.quantiles(one, n=100)[98] for one in (wall_s, cpu_s))
    return f"p50_us={statistics.median(wall_s) * 1e6:.1f} p99_us={p99 * 1e6:.1f} cpu_p99_us={cpu_p99 * 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--other-hosts", action="store_true", help=f"also {SIZES[-1]} instances on hosts of {_OTHER_HOSTS}"
    )
    parser.add_argument("--steps", action="store_true", help=f"steps with {_RUNNING} requests instead")
    parser.add_argument("--num-steps", type=int, default=20_000)
    given = parser.parse_args()
    if given.steps:
        for policy in _STEP_POLICIES:
            for what, times_s in zip(("plan", "step"), step_times_s(policy, given.num_steps, given.seed), strict=True):
                wall_s, cpu_s = zip(*times_s, strict=True)
                print(f"{what} {shown(wall_s, cpu_s)} policy={policy}", flush=True)
        print(f"check {shown(*zip(*check_times_s(_NUM_CHECKS), strict=True))}")
        return
    others = _OTHER_HOSTS if given.other_hosts else ()
    for num_instances, per_host in [(n, _PER_HOST) for n in SIZES] + [(SIZES[-1], per_host) for per_host in others]:
        times = shown(*plan_times_s(num_instances, per_host, given.num_prompts, given.seed))
        of_other = "" if per_host == _PER_HOST else f" per_host={per_host}"
        print(f"plan {times} instances={num_instances}{of_other}")


if __name__ == "__main__":
    main()
