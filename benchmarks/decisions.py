"""Measures how long it takes to plan one prompt with Tetris's algorithms, by number of instances.

Lengths and queueing times are random, as in §7.4 of the paper; instances stand eight to a host, sizes are powers of two
up to all of them, and times are like those of its Table 1: per token and per pair they shrink with the size, while each
further member adds to the start. Prints one line per number of instances; with --other-hosts then some for hosts of
other sizes, also of such as the groups do not divide.

p50 and p99 are by the wall clock, and so include what other programs of a busy machine take; cpu_p99 does not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from longspan.cost.profile import PrefillTime
from longspan.policy.tetris.planner import Planner, Prompt

SIZES = (8, 16, 32, 64, 128)
_PER_HOST = 8
_OTHER_HOSTS = (1, 3, 6, 7, 12, 16)
"""Instances of a host, of the last and most of `SIZES`."""


def times_of(size: int) -> PrefillTime:
    """Returns times of an 8B model on `size` A100: about those of Table 1."""
    return PrefillTime(
        start_s=0.02 + 0.02 * (size - 1), token_s=6.5e-5 / size, cached_s=1.1e-9 / size, square_s=5e-10 / size
    )


def plan_times_s(num_instances: int, per_host: int, num_prompts: int, seed: int) -> tuple[list[float], list[float]]:
    """Times the plan of each prompt, by the wall clock and of the processor."""
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


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--other-hosts", action="store_true", help=f"also {SIZES[-1]} instances on hosts of {_OTHER_HOSTS}"
    )
    given = parser.parse_args()
    others = _OTHER_HOSTS if given.other_hosts else ()
    for num_instances, per_host in [(n, _PER_HOST) for n in SIZES] + [(SIZES[-1], per_host) for per_host in others]:
        wall_s, cpu_s = plan_times_s(num_instances, per_host, given.num_prompts, given.seed)
        p50, p99, cpu_p99 = (
            statistics.median(wall_s),
            *(statistics.quantiles(one, n=100)[98] for one in (wall_s, cpu_s)),
        )
        times = f"p50_us={p50 * 1e6:.1f} p99_us={p99 * 1e6:.1f} cpu_p99_us={cpu_p99 * 1e6:.1f}"
        of_other = "" if per_host == _PER_HOST else f" per_host={per_host}"
        print(f"plan {times} instances={num_instances}{of_other}")


if __name__ == "__main__":
    main()
