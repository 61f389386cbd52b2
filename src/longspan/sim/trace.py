"""A simulation as a trace that Chrome (about:tracing) and Perfetto show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from longspan.sim.result import Result
from longspan.sim.timeline import Block, Timeline

_CLUSTER, _REQUESTS = 1, 2  # the two processes that viewers show


def chrome_trace(result: Result, timeline: Timeline) -> str:
    """Its JSON: a row per instance with what it did, a row per request from arrival to end, and counters."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(result, timeline))}) + "\n"


def _events(result: Result, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _CLUSTER, 0, "instances")
    yield _named("process_name", _REQUESTS, 0, "requests")
    for instance in range(len(result.busy_s)):
        yield _named("thread_name", _CLUSTER, instance, f"instance {instance}")
    for block in timeline.blocks:
        yield _of_block(block)
    for one in result.served:
        times = {"queue_s": one.scheduled_s - one.arrival_s, "ttft_s": one.ttft_s, "e2e_s": one.e2e_s}
        tokens = {"prompt_tokens": one.num_prompt_tokens, "output_tokens": one.num_output_tokens}
        common = {"cat": "request", "id": one.place, "pid": _REQUESTS, "tid": 0, "name": f"request {one.place}"}
        yield common | {"ph": "b", "ts": one.arrival_s * 1e6, "args": tokens | times}
        yield common | {"ph": "n", "ts": (one.arrival_s + one.ttft_s) * 1e6, "args": {"what": "first token"}}
        yield common | {"ph": "e", "ts": one.finished_s * 1e6}
    for moment in timeline.moments:
        common = {"ph": "C", "pid": _CLUSTER, "tid": 0, "ts": moment.at_s * 1e6}
        yield common | {"name": "waiting", "args": {"requests": moment.num_waiting}}
        yield common | {"name": "KV", "args": {"percent": 100 * moment.kv_used}}


def _of_block(block: Block) -> dict[str, Any]:
    event = {
        "ph": "X",
        "pid": _CLUSTER,
        "tid": block.instance,
        "ts": block.start_s * 1e6,
        "dur": (block.end_s - block.start_s) * 1e6,
    }
    if block.place is None:
        return event | {"name": f"{block.stop} decodes", "cat": "decode"}
    about = {"start": block.start, "stop": block.stop, "group": list(block.group), "exchange": block.exchange}
    return event | {"name": f"request {block.place}", "cat": "prefill", "args": about}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
