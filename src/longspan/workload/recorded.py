"""Traces that longspan recorded, as their readers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]


def recorded_run(trace: Any) -> tuple[Event, Sequence[Event], list[Event]]:  # noqa: ANN401 - any JSON
    """Return the run in a trace of `longspan.extras.trace`, its events, and its requests in order of arrival.

    Raise KeyError, TypeError or ValueError for other JSON, and for several runs.
    """
    [run], events = trace["otherData"]["runs"], trace["traceEvents"]
    arrivals = (event for event in events if event["ph"] == "b" and event["cat"] == "request")
    return run, events, sorted(arrivals, key=lambda event: float(event["ts"]))
