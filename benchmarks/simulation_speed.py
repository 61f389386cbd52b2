"""Measure the wall-clock and CPU time of simulating many requests on 64 devices.

    python benchmarks/simulation_speed.py [--num-requests 100000] [--policies tetris] [--no-roles]

The model is Llama 3 8B on 8 hosts of 8 A100, with requests of the workload `short` at `--rate`. The first cluster has
64 instances of one device. The second, with `tetris`, has 32 prefill instances of one device and 4 decode instances of
eight. The simulation runs in one process with one thread, without plots or output files.
"""

from __future__ import annotations

import argparse
import sys
import time

from longspan.core.options import SchedulingArgs
from longspan.sim.spec import ClusterSpec
from longspan.simulation import simulate
from longspan.workload.spec import WorkloadSpec

_POLICIES = ("auto", "chunked", "context", "tetris", "loongserve")
_CLUSTER = ClusterSpec(hardware="a100-sxm-80g", hosts=8, gpus_per_host=8)
_ROLES = ClusterSpec(hardware="a100-sxm-80g", hosts=8, gpus_per_host=8, prefill_parallel="32", decode_parallel="4xtp8")


def speed(policy: str, cluster: ClusterSpec, num_requests: int, rate: float) -> str:
    """Return a text with the seconds to simulate all requests, including the time to draw them."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    scheduling = SchedulingArgs(policy=policy, max_num_batched_tokens=2048)
    workload = WorkloadSpec(workload="short", rate=rate, num_requests=num_requests)
    result = simulate("llama-3-8b", cluster, workload, scheduling=scheduling)
    assert len(result.served) == num_requests, "all fit"
    clock_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    per_s = num_requests / cpu_s
    return f"{clock_s:.1f} s ({cpu_s:.1f} s of CPU, {per_s:.0f} requests/s) for {result.makespan_s:,.0f} simulated ones"


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--policies", nargs="+", default=["tetris"], choices=_POLICIES)
    parser.add_argument("--no-roles", action="store_true", help="skip the cluster with prefill and decode instances")
    args = parser.parse_args()
    if args.num_requests < 1 or not args.rate > 0:
        sys.exit("--num-requests must be at least 1, and --rate above 0")
    cases = [(f"{policy}, 64 instances", policy, _CLUSTER) for policy in args.policies]
    if not args.no_roles:
        cases.append(("tetris, 32 prefill and 4xtp8 decode instances", "tetris", _ROLES))
    for name, policy, cluster in cases:
        print(f"{name}: {speed(policy, cluster, args.num_requests, args.rate)}", flush=True)


if __name__ == "__main__":
    main()
