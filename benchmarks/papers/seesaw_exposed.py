"""Seesaw's changes of clusters, simulated: exposed seconds, and the most that hidden weight reloads could save.

    python benchmarks/papers/seesaw_exposed.py    # some minutes

Rows are the best pairs of Fig. 10 for articles, with the stored sizes of passes. Hosts have 80 GiB per device as in the
paper, or less, which needs more changes.

- `late`: the seconds in which KV is swapped out while nothing is computed, if KV is copied after the prefill of a
  request. `streamed`: the same, if prefill steps copy each layer.
- `reload`: the seconds in which weights are reloaded while nothing is computed.
- `saved at most`: the part of the makespan that is saved if reloads take no time. No overlap of reloads can save more.
- `memory`: GiB per device that a second share of the weights needs, and GiB of KV of the decode cluster.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

from rich.console import Console
from rich.table import Table
from seesaw_serving import ARXIV, Case, Machine, Point, cases, stored

from longspan.core.cluster import Cluster
from longspan.core.view import ClusterView, Plan
from longspan.cost.step_cost import ReshardCost, RooflineCost
from longspan.policy.seesaw import Seesaw
from longspan.sim.run import Result

_SMALL_HOST_GIB = 4.0
_GIB = 2**30
_SEESAW_PLAN = Seesaw.plan


def late_plan(policy: Seesaw, view: ClusterView) -> Plan:
    """Plan as `seesaw`, with copies after the prefill of each request."""
    plan = _SEESAW_PLAN(policy, view)
    plan.offloads = False
    return plan


def free_reshard(cost: RooflineCost, cluster: Cluster) -> ReshardCost:
    """Price reloads of weights as if they were hidden."""
    del cost, cluster
    return ReshardCost(0.0, 0.0)


def main() -> int:
    points = {(point.figure, point.name): point for point in stored()}
    shown = Table(title="Changes of clusters: exposed seconds of a run, simulated")
    shown.add_column("pair of Fig. 10")
    for title in (
        "host GiB",
        "makespan",
        "changes",
        "late",
        "streamed",
        "reload",
        "saved at most",
        "memory: share, KV",
    ):
        shown.add_column(title, justify="right")
    for case in cases((10,), ARXIV):
        if "arxiv" in case.name and (of_case := points.get((10, case.name))) is not None and of_case.best_pair:
            for host_gib in (case.machine.host_gib, _SMALL_HOST_GIB):
                shown.add_row(*_row(case, of_case, replace(case.machine, host_gib=host_gib)))
    Console(width=160).print(shown)
    return 0


def _row(case: Case, of_case: Point, machine: Machine) -> list[str]:
    pair = of_case.best_pair
    assert pair is not None, "pairs were simulated"
    specs, tokens = pair.split(" → "), of_case.pairs[pair].pass_tokens
    requests = case.requests()

    def run() -> Result:
        return machine.experiment(tokens, *specs).run(requests)

    streamed = run()
    with patch.object(Seesaw, "plan", late_plan):
        late = run()
    with patch.object(RooflineCost, "reshard", free_reshard):
        hidden = run()
    saved = 1 - hidden.makespan_s / streamed.makespan_s
    return [
        f"{case.name}, {pair}",
        f"{machine.host_gib:g}",
        f"{streamed.makespan_s:.1f}",
        f"{len(streamed.transitions)}",
        f"{sum(one.swap_s for one in late.transitions):.3f}",
        f"{sum(one.swap_s for one in streamed.transitions):.3f}",
        f"{sum(one.exposed_s - one.swap_s for one in streamed.transitions):.2f}",
        f"{saved:.2%}",
        _memory(machine, specs, tokens),
    ]


def _memory(machine: Machine, specs: list[str], tokens: int) -> str:
    """Return the GiB of a share of the prefill cluster's weights, and of the KV of a device of the decode cluster."""
    prefill, experiment = machine.line(specs[0]), machine.experiment(tokens, *specs)
    share = max(map(prefill.layer.model.stage_bytes, prefill.stages)) / prefill.layer.tp
    decode = experiment.facts.phases[1]
    kv = decode.num_blocks[0] * experiment.block_bytes / len(decode.ranks(0))
    return f"{share / _GIB:.1f}, {kv / _GIB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
