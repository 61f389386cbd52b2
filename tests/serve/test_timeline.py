"""`/admin/timeline`: a trace of the last seconds of a server, and the files at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thread_server import ThreadServer, thread_server

from longspan.args import EngineArgs


def args(tiny: Path, **given: Any) -> EngineArgs:
    return EngineArgs(model=str(tiny), dtype="float32", skip_tokenizer_init=True, block_size=16, **given)


def served(server: ThreadServer, query: str = "") -> set[str]:
    """Return the names of the requests in the timeline."""
    reply = server.ask("GET", f"/admin/timeline{query}")
    assert reply.status == 200, reply.data
    events = json.loads(reply.data)["traceEvents"]
    return {event["name"] for event in events if event["ph"] == "b" and event["cat"] == "request"}


def test_a_recording_starts_and_stops_while_the_server_serves(tiny: Path) -> None:
    with thread_server(args(tiny)) as server:
        assert server.ask("GET", "/admin/timeline").status == 409
        server.complete(prompt=[1, 2, 3], max_tokens=2)
        assert server.service.recorder is None
        assert server.ask("POST", "/admin/timeline", {"recording": True}).status == 200
        assert served(server) == set()
        for first in (4, 5):
            server.complete(prompt=[first, 6], max_tokens=3)
        assert len(served(server)) == len(served(server, "?seconds=1000")) == 2
        assert served(server, "?seconds=0.000001") == set()
        for seconds in ("0", "nan", "inf", "x"):
            assert server.ask("GET", f"/admin/timeline?seconds={seconds}").status == 400
        assert server.ask("POST", "/admin/timeline", {"recording": "yes"}).status == 400
        assert server.ask("POST", "/admin/timeline", {"recording": False}).status == 200
        assert server.service.recorder is None
        assert server.ask("GET", "/admin/timeline").status == 409


def test_a_recording_goes_on_in_a_new_engine_core_until_it_is_stopped(tiny: Path) -> None:
    with thread_server(args(tiny)) as server:
        assert server.ask("POST", "/admin/timeline", {"recording": True}).status == 200
        server.kill("core")
        names = served(server)
        server.complete(prompt=[4, 6], max_tokens=3)
        assert len(served(server) - names) == 1
        assert server.ask("POST", "/admin/timeline", {"recording": False}).status == 200
        server.kill("core")
        server.complete(prompt=[5, 6], max_tokens=3)
        assert server.ask("GET", "/admin/timeline").status == 409


def test_a_server_writes_its_trace_at_the_end_and_records_on_after_a_loss(tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    with thread_server(args(tiny, trace=str(trace), parallel="2", policy="chunked")) as server:
        server.complete(prompt=[1, 2, 3], max_tokens=4)
        server.kill("worker")
        server.complete(prompt=[7, 8], max_tokens=4)
        assert len(served(server)) == 3, "one of them after the loss"
    events = json.loads(trace.read_text())["traceEvents"]
    ended = [event for event in events if event["ph"] == "e" and event["cat"] == "request"]
    assert len(ended) == 3
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"prefill", "decode"}
