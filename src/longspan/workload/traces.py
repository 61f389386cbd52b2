"""Traces of real services: CSV or JSONL, maybe compressed by gzip, told apart by the names of their columns."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

_log = logging.getLogger("longspan")
MAX_SPAN_S = 1e8
"""Three years. Much later, the clock could no longer tell a step from the next."""
BLOCK_LEN = 512
"""Tokens of a prompt that one of Mooncake's hash ids stands for."""


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """One request's size in tokens, and its time after the start if it is known.

    Attributes:
        block_ids: names of the blocks of `BLOCK_LEN` tokens, if a trace has them. Equal names are equal tokens.
    """

    due_s: float | None = None
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Format:
    """The columns of a known format. `seconds` makes seconds of what is in the column `arrival`."""

    name: str
    input_len: str
    output_len: str
    arrival: str | None = None
    seconds: Callable[[Any], float] = float
    block_ids: str | None = None

    @property
    def columns(self) -> set[str]:
        columns = (self.arrival, self.input_len, self.output_len, self.block_ids)
        return {column for column in columns if column is not None}


def _of_date(value: str) -> float:
    """Reads a date; one without a zone is taken for UTC."""
    date = datetime.fromisoformat(value)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


_MOONCAKE = _Format(
    name="Mooncake",
    arrival="timestamp",
    seconds=lambda milliseconds: float(milliseconds) / 1e3,
    input_len="input_length",
    output_len="output_length",
    block_ids="hash_ids",
)
_VIDUR = _Format(name="Vidur's lengths", input_len="num_prefill_tokens", output_len="num_decode_tokens")
_AZURE = _Format(
    name="Azure (2023, 2024)",
    arrival="TIMESTAMP",
    seconds=_of_date,
    input_len="ContextTokens",
    output_len="GeneratedTokens",
)
_FORMATS = (
    _MOONCAKE,
    replace(_MOONCAKE, name="Mooncake without hash_ids", block_ids=None),
    _AZURE,
    replace(_VIDUR, name="Vidur's Azure and Splitwise", arrival="arrived_at"),
    _VIDUR,
    _Format(name="BurstGPT", arrival="Timestamp", input_len="Request tokens", output_len="Response tokens"),
)
"""The first whose columns are all there counts."""


def read_trace(path: Path, *, num: int | None = None) -> list[RequestSpec]:
    """Returns the first `num` requests of a trace (all if None), in the order of arrival, the first one due at 0.

    Requests of a trace without times have none. Lines without an input or an output (requests that failed) are left
    out, and how many is logged.

    Raises:
        ValueError: when the file cannot be read, is in no known format, or holds fewer requests.
    """
    opened = gzip.open if path.suffix == ".gz" else Path.open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            requests = list(itertools.islice(_requests(path, file), num))
    except (OSError, UnicodeDecodeError, EOFError, csv.Error, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"trace {str(path)!r} cannot be read: {reason}") from None
    if not requests or len(requests) < (num or 0):
        wanted = "at least 1" if num is None else str(num)
        raise ValueError(f"trace {str(path)!r} holds {len(requests)} requests, but {wanted} needed")
    times = [request.due_s for request in requests if request.due_s is not None]
    if not times:
        return requests
    start = min(times)
    moved = [replace(request, due_s=time - start) for request, time in zip(requests, times, strict=True)]
    return sorted(moved, key=lambda request: request.due_s or 0.0)


def _requests(path: Path, file: IO[str]) -> Iterator[RequestSpec]:
    found: _Format | None = None
    num_empty, first_s = 0, None
    for number, row in _rows(path, file):
        found = found or _format(path, row)
        try:
            request = _request(found, row)
            first_s = request.due_s if first_s is None else first_s
            _check_time(request.due_s, first_s)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of trace {str(path)!r} is not of the format {found.name!r}: "
                f"{type(error).__name__}: {error}"
            ) from None
        if request.input_len < 1 or request.output_len < 1:
            num_empty += 1
        else:
            yield request
    if num_empty:
        _log.warning("%d lines of the trace have no input or no output and are left out", num_empty)


def _rows(path: Path, file: IO[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".csv"):
        reader = csv.DictReader(file)
        for row in reader:
            yield reader.line_num, row
        return
    if not name.endswith(".jsonl"):
        raise ValueError(f"trace {str(path)!r} must end in .csv, .csv.gz, .jsonl or .jsonl.gz")
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of trace {str(path)!r} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of trace {str(path)!r} is no JSON object: {line.strip():.60}")
        yield number, row


def _format(path: Path, row: Mapping[str, Any]) -> _Format:
    for known in _FORMATS:
        if known.columns <= row.keys():
            return known
    forms = "; ".join(", ".join(sorted(known.columns)) for known in _FORMATS)
    raise ValueError(
        f"trace {str(path)!r} has the columns {', '.join(map(str, row))}, which is no known format: {forms}"
    )


def _request(form: _Format, row: Mapping[str, Any]) -> RequestSpec:
    return RequestSpec(
        due_s=None if form.arrival is None else form.seconds(row[form.arrival]),
        input_len=_whole(row[form.input_len]),
        output_len=_whole(row[form.output_len]),
        block_ids=() if form.block_ids is None else tuple(_whole(one) for one in row[form.block_ids]),
    )


def _check_time(due_s: float | None, first_s: float | None) -> None:
    if due_s is None or first_s is None:
        return
    if not abs(due_s - first_s) <= MAX_SPAN_S:  # neither is NaN
        raise ValueError(
            f"comes at {due_s:g} s, and the first at {first_s:g} s: give finite times, at most {MAX_SPAN_S:g} s apart"
        )


def _whole(value: float | str) -> int:
    number = float(value)
    if not math.isfinite(number) or number != int(number) or number < 0:
        raise ValueError(f"a whole number is needed, but {value!r} given")
    return int(number)
