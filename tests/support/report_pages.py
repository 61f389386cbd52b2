"""Records of runs for tests of pages, and the figures of a page."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

from longspan.core.options import SchedulingArgs
from longspan.extras.timeline import Record, Timeline
from longspan.sim.run import Refused, Result, Served
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

Figures = dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]
"""By id: the traces and the layout."""


def simulated(policy: str, *, num_gpus: int = 4, num_requests: int = 20, rate: float = 4.0, **spec: Any) -> Record:
    """Serve requests of the workload `short` on one or several hosts of eight A100."""
    cluster = ClusterSpec(hardware="a100-sxm-80g", hosts=max(1, num_gpus // 8), gpus_per_host=min(8, num_gpus), **spec)
    experiment, timeline = make_experiment("llama-3-8b", cluster, SchedulingArgs(policy=policy)), Timeline()
    requests = make_workload(WorkloadSpec(workload="short", num_requests=num_requests, rate=rate))
    result = experiment.run(requests, timeline.observers(experiment.cost))
    return Record(policy=policy, cluster=experiment.cluster, result=result, timeline=timeline)


def result_of(times: list[tuple[float, float]], num_refused: int = 0, slo_class: str = "") -> Result:
    """Return a result with a TTFT and a mean time between tokens for each request."""
    served = tuple(
        Served(
            index=index,
            arrival_s=0.1 * index,
            ttft_s=ttft_s,
            tbt_s=array("d", [tpot_s, tpot_s]),
            finished_s=0.1 * index + ttft_s + 2 * tpot_s,
            num_prompt_tokens=100,
            num_output_tokens=3,
            num_cached_tokens=0,
            num_missing_tokens=0,
            slo_class=slo_class,
        )
        for index, (ttft_s, tpot_s) in enumerate(times)
    )
    refused = {len(times) + i: Refused(reason="too long", num_prompt_tokens=10**6) for i in range(num_refused)}
    makespan_s = max((one.finished_s for one in served), default=0.0)
    return Result(served=served, refused=refused, makespan_s=makespan_s, busy_s=(1.0,), max_queue=1, num_preemptions=0)


def figures_of(page: str) -> Figures:
    """Read the figures of a page as the browser reads them."""
    found, decoder = Figures(), json.JSONDecoder()
    for match in re.finditer(r'Plotly\.newPlot\(\s*"([^"]+)",\s*(?=\[)', page):
        data, end = decoder.raw_decode(page, match.end())
        layout, _ = decoder.raw_decode(page, re.compile(r"[\s,]*").match(page, end).end())  # type: ignore[union-attr]
        found[match[1]] = data, layout
    return found


def blocks_of(page: str, name: str = "instances") -> dict[str, Any]:
    """Return the numbers from which the browser draws the blocks of a zoomed window."""
    text = re.search(rf'<script type="application/json" id="{name}-blocks">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    blocks: dict[str, Any] = json.loads(text[1])
    return blocks


def colours_of(value: object) -> set[str]:
    """Return all colours in a part of a figure."""
    return {
        colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{6}\b|rgba?\([^)]*\)|hsl\([^)]*\)", json.dumps(value))
    }
