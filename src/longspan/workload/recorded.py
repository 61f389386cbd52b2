"""Traces that longspan recorded: the parts that their writers and readers share."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from longspan.core.blocks import chain_key
from longspan.file_errors import unread
from longspan.workload.spec import BLOCK_LEN

Event = Mapping[str, Any]
HEADER = "longspan"
"""The only column of a header, a line of `longspan serve --record`. Its value is the layout of the next requests."""
_ID_BYTES = 6
"""Bytes of a block id, so that ids are exact numbers of JSON."""


def block_ids(token_ids: Sequence[int], root: bytes) -> list[int]:
    """Return ids of a prompt's blocks of `BLOCK_LEN` tokens, the last of which may be shorter.

    An id depends on all tokens up to its end. Without `root`, it cannot be compared with the ids of a guessed text.
    """
    key, ids = root, list[int]()
    for start in range(0, len(token_ids), BLOCK_LEN):
        key = chain_key(key, token_ids[start : start + BLOCK_LEN])
        ids.append(int.from_bytes(key[:_ID_BYTES]))
    return ids


def opened(path: Path) -> IO[str]:
    """Open a trace, which is compressed if its name ends in `.gz`."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open("rt", encoding="utf-8-sig", newline="")


def recorded_layout(path: Path) -> Mapping[str, Any] | None:
    """Return the engine's settings at the start of a recording, as `recorded_layouts` does. None for another trace."""
    return next(recorded_layouts(path), None)


def recorded_layouts(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the engine's settings at the start of a recording and after each change. Nothing for another trace.

    They have `start_s`, `parallel`, `policy`, `policy_options`, `options`, and `model` unless it is unknown.

    Raises:
        ValueError: the file cannot be read, or has an invalid header.
    """
    try:
        with opened(path) as file:
            for place, line in enumerate(file):
                if HEADER in line[: 2 * len(HEADER)]:
                    yield _layout(json.loads(line)[HEADER])
                elif not place:
                    return
    except (KeyError, TypeError, json.JSONDecodeError):
        return
    except _InvalidError as error:
        raise ValueError(f"a header of {str(path)!r} has {error}: record again with longspan serve --record") from None
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ValueError(unread(path, error)) from None


class _InvalidError(Exception):
    """A header has an invalid field."""


def _layout(layout: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON
    fields = {"options": {}, "policy_options": {}, **layout}
    kinds = {"start_s": int | float, "parallel": str, "policy": str, "policy_options": dict, "options": dict}
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            raise _InvalidError(f"no valid {name}")
    return fields


def recorded_run(trace: Any) -> tuple[Event, Sequence[Event], list[Event]]:  # noqa: ANN401 - any JSON
    """Return the run in a trace of `longspan.extras.trace`, its events, and its requests in order of arrival.

    Raise KeyError, TypeError or ValueError for other JSON, and for several runs.
    """
    [run], events = trace["otherData"]["runs"], trace["traceEvents"]
    arrivals = (event for event in events if event["ph"] == "b" and event["cat"] == "request")
    return run, events, sorted(arrivals, key=lambda event: float(event["ts"]))
