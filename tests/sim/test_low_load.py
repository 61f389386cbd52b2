"""Laws of a cluster on which requests seldom meet: slower devices, more devices, faster links."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from longspan import ClusterSpec, WorkloadSpec, simulate
from longspan.core.options import SchedulingArgs
from longspan.sim.run import Result
from longspan.sim.spec import Faults

NUM_REQUESTS = 20


@cache
def served(
    policy: str,
    *,
    hosts: int = 1,
    rate: float = 0.1,
    workload: str = "medium",
    output_len: int | None = 100,
    link_gbytes_per_s: float | None = None,
    slow: float = 1.0,
) -> Result:
    cluster = ClusterSpec(hardware="a100-sxm-80g", hosts=hosts, gpus_per_host=8, link_gbytes_per_s=link_gbytes_per_s)
    requests = WorkloadSpec(workload=workload, rate=rate, num_requests=NUM_REQUESTS, output_len=output_len)
    faults = Faults(slow=dict.fromkeys(range(8 * hosts), slow))
    return simulate("llama-3-8b", cluster, requests, scheduling=SchedulingArgs(policy=policy), faults=faults)


def mean_e2e_s(result: Result) -> float:
    return float(np.mean([request.e2e_s for request in result.served]))


@pytest.mark.parametrize(
    ("policy", "rate", "factor"), [("auto", 0.1, 0.5), ("auto", 0.1, 3.0), ("auto", 1.0, 2.0), ("context", 0.1, 2.0)]
)
def test_slower_instances_at_a_lower_rate_scale_all_times(policy: str, rate: float, factor: float) -> None:
    """To 1 %: links do not slow down, so KV arrives a little sooner relative to a step."""
    before = served(policy, rate=rate)
    after = served(policy, rate=rate / factor, slow=factor)
    for percent in (50, 99):
        expected = factor * np.percentile(before.ttfts_s, percent)
        assert np.percentile(after.ttfts_s, percent) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("workload", ["short", "medium"])
@pytest.mark.parametrize("policy", ["csps", "auto"])
def test_more_devices_do_not_slow_down_requests_at_low_load(policy: str, workload: str) -> None:
    many = 4 if workload == "short" else 2
    times = [mean_e2e_s(served(policy, hosts=hosts, workload=workload)) for hosts in (1, 2, 4) if hosts <= many]
    for fewer, more in pairwise(times):
        assert more <= 1.01 * fewer, times


@pytest.mark.parametrize("workload", ["short", "medium"])
def test_a_faster_link_does_not_slow_down_requests_at_low_load(workload: str) -> None:
    times = [mean_e2e_s(served("context", workload=workload, link_gbytes_per_s=speed)) for speed in (25.0, 50.0, 100.0)]
    for slower, faster in pairwise(times):
        assert faster <= 1.03 * slower, times
