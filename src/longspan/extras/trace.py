"""Traces for Perfetto and Chrome: the writer and the reader of recorded and simulated runs."""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from longspan.core.cluster import Cluster
from longspan.extras.timeline import Block, Moment, Record, Timeline, TimeSplit, Transfer
from longspan.sim.run import Result, Served
from longspan.workload.recorded import recorded_run

_KINDS = ("instances", "requests", "transfers")
"""The trace processes of each run."""
_SECONDS = tuple(part.name for part in fields(TimeSplit))


def chrome_trace(records: Sequence[Record]) -> str:
    """Return a Perfetto trace as JSON: rows of stages and of requests, transfers, and counters.

    Each run has its own trace processes. `read_record` reads the trace of a single run.
    """
    is_named = len(records) > 1
    events = [event for number, record in enumerate(records) for event in _events(record, number, named=is_named)]
    runs = {"runs": [_of_run(record) for record in records]}
    return json.dumps({"displayTimeUnit": "ms", "otherData": runs, "traceEvents": events}) + "\n"


def _of_run(record: Record) -> dict[str, Any]:
    cluster, result = record.cluster, record.result
    return {
        "policy": record.policy,
        "parallel": str(cluster.spec),
        "decode_parallel": None if cluster.decode_spec is None else str(cluster.decode_spec),
        "is_recorded": record.is_recorded,
        "is_complete": record.timeline.complete,
        "busy_s": result.busy_s,
        "max_queue": result.max_queue,
        "num_preemptions": result.num_preemptions,
    }


def _events(record: Record, run: int, *, named: bool) -> Iterator[dict[str, Any]]:
    result, timeline = record.result, record.timeline
    instances, requests, transfers = (len(_KINDS) * run + number for number in range(1, len(_KINDS) + 1))
    names = [("process_name", instances + number, 0, kind) for number, kind in enumerate(_KINDS)]
    if named:
        names = [(what, process, thread, f"{record.policy}: {name}") for what, process, thread, name in names]
    rows = {pair: number for number, pair in enumerate(record.rows)}
    names += [("thread_name", instances, row, f"instance {name}") for row, name in enumerate(record.rows.values())]
    for kind, process, thread, name in names:
        yield {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
    for block in timeline.blocks:
        yield _of_block(block) | {"pid": instances, "tid": rows[block.instance, block.stage]}
    for request in result.served:
        common = {"cat": "request", "id": request.index, "pid": requests, "tid": 0, "name": f"request {request.index}"}
        about = _of_request(record, request)
        yield common | {"ph": "b", "ts": request.arrival_s * 1e6, "args": about}
        yield common | {"ph": "n", "ts": (request.arrival_s + request.ttft_s) * 1e6, "args": {"what": "first token"}}
        yield common | {"ph": "e", "ts": request.finished_s * 1e6}
    for number, move in enumerate(timeline.transfers):
        common = {"cat": "transfer", "id": number, "pid": transfers, "tid": 0, "name": f"request {move.index}"}
        about = {"from": list(move.sources), "to": list(move.targets), "blocks": move.num_blocks, "way": move.way}
        yield common | {"ph": "b", "ts": move.start_s * 1e6, "args": about}
        yield common | {"ph": "e", "ts": move.end_s * 1e6}
    for moment in timeline.moments:
        common = {"ph": "C", "pid": instances, "tid": 0, "ts": moment.at_s * 1e6}
        yield common | {"name": "waiting", "args": {"requests": moment.num_waiting}}
        for role in moment.held:
            percents = {"held": 100 * moment.held[role], "cached": 100 * moment.cached[role]}
            yield common | {"name": "KV" if role == "all" else f"KV {role}", "args": percents}
        if moment.bytes_sent:
            yield common | {"name": "bytes sent", "args": dict(moment.bytes_sent)}


def _of_request(record: Record, request: Served) -> dict[str, Any]:
    about: dict[str, Any] = {
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "cached_tokens": request.num_cached_tokens,
        "ttft_s": request.ttft_s,
        "e2e_s": request.e2e_s,
        **asdict(record.timeline.split(request)),
        "tbt_us": [round(1e6 * tbt_s) for tbt_s in request.tbt_s],
    }
    if request.index in record.block_ids:
        about["block_ids"] = list(record.block_ids[request.index])
    return about


def _of_block(block: Block) -> dict[str, Any]:
    about: dict[str, Any] = {"step": block.step, "group": list(block.group), "exchange": block.exchange}
    event = {
        "ph": "X",
        "ts": block.start_s * 1e6,
        "dur": (block.end_s - block.start_s) * 1e6,
    }
    if block.index is None:
        return event | {"name": f"{block.stop} decodes", "cat": "decode", "args": about | {"decodes": block.stop}}
    about |= {"start": block.start, "stop": block.stop}
    return event | {"name": f"request {block.index}", "cat": "prefill", "args": about}


def read_record(text: str) -> Record:
    """Read the trace of a single run, as `chrome_trace` writes it. Requests are numbered in order of arrival.

    Raises:
        ValueError: it is no such trace.
    """
    try:
        return _read_run(*recorded_run(json.loads(text)))
    except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is no trace of one run that longspan wrote ({type(error).__name__}: {error})") from None


def _read_run(
    run: Mapping[str, Any], events: Sequence[Mapping[str, Any]], arrived: Sequence[Mapping[str, Any]]
) -> Record:
    rows: dict[int, tuple[int, int]] = {}
    by_kind: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_kind[event["ph"], event.get("cat", "")].append(event)
        if event["ph"] == "M" and event["name"] == "thread_name":
            instance, _, stage = event["args"]["name"].removeprefix("instance ").partition(", stage ")
            rows[event["tid"]] = int(instance), int(stage or 0)
    indices: dict[int, int] = {event["id"]: index for index, event in enumerate(arrived)}

    def index_of(event: Mapping[str, Any]) -> int:
        return indices.setdefault(int(event["name"].removeprefix("request ")), len(indices))

    served = tuple(_read_request(event, index_of(event)) for event in arrived)
    blocks = [
        _read_block(event, *rows[event["tid"]], index_of)
        for kind in ("prefill", "decode")
        for event in by_kind["X", kind]
    ]
    ends_s = {event["id"]: event["ts"] / 1e6 for event in by_kind["e", "transfer"]}
    transfers = [
        Transfer(
            index=index_of(event),
            start_s=event["ts"] / 1e6,
            end_s=ends_s[event["id"]],
            sources=tuple(event["args"]["from"]),
            targets=tuple(event["args"]["to"]),
            num_blocks=event["args"]["blocks"],
            way=event["args"]["way"],
        )
        for event in by_kind["b", "transfer"]
    ]
    splits = {
        index: TimeSplit(**{name: event["args"][name] for name in _SECONDS}) for index, event in enumerate(arrived)
    }
    timeline = Timeline.of(
        sorted(blocks, key=lambda block: block.start_s), transfers, _read_moments(by_kind["C", ""]), splits
    )
    timeline.complete = run["is_complete"]
    result = Result(
        served=served,
        refused={},
        makespan_s=max((request.finished_s for request in served), default=0.0),
        busy_s=tuple(run["busy_s"]),
        max_queue=run["max_queue"],
        num_preemptions=run["num_preemptions"],
    )
    return Record(
        policy=run["policy"],
        cluster=Cluster.of(run["parallel"], run["decode_parallel"]),
        result=result,
        timeline=timeline,
        block_ids={i: event["args"]["block_ids"] for i, event in enumerate(arrived) if "block_ids" in event["args"]},
        is_recorded=run["is_recorded"],
    )


def _read_request(event: Mapping[str, Any], index: int) -> Served:
    about, arrival_s = event["args"], event["ts"] / 1e6
    return Served(
        index=index,
        arrival_s=arrival_s,
        ttft_s=about["ttft_s"],
        tbt_s=array("d", [tbt_us / 1e6 for tbt_us in about["tbt_us"]]),
        finished_s=arrival_s + about["e2e_s"],
        num_prompt_tokens=about["prompt_tokens"],
        num_output_tokens=about["output_tokens"],
        num_cached_tokens=about["cached_tokens"],
        num_missing_tokens=0,
    )


def _read_block(
    event: Mapping[str, Any], instance: int, stage: int, index_of: Callable[[Mapping[str, Any]], int]
) -> Block:
    about, start_s = event["args"], event["ts"] / 1e6
    is_decode = event["cat"] == "decode"
    return Block(
        step=about["step"],
        instance=instance,
        stage=stage,
        start_s=start_s,
        end_s=start_s + event["dur"] / 1e6,
        index=None if is_decode else index_of(event),
        start=0 if is_decode else about["start"],
        stop=about["decodes"] if is_decode else about["stop"],
        group=tuple(about["group"]),
        exchange=about["exchange"],
    )


def _read_moments(counters: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
    """Join the counters of each time to a snapshot. The first counter of a snapshot is `waiting`."""
    moment: Moment | None = None
    for event in counters:
        name, values = event["name"], event["args"]
        if name == "waiting":
            if moment is not None:
                yield moment
            moment = Moment(event["ts"] / 1e6, values["requests"], {}, {})
        assert moment is not None, "a counter is part of a snapshot"
        if name == "bytes sent":
            moment = replace(moment, bytes_sent=values)
        elif name != "waiting":
            role = name.removeprefix("KV").strip() or "all"
            held, cached = (
                {**old, role: values[key] / 100} for old, key in ((moment.held, "held"), (moment.cached, "cached"))
            )
            moment = replace(moment, held=held, cached=cached)
    if moment is not None:
        yield moment
