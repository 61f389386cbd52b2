"""Traces of real services: CSV or JSONL, optionally gzipped, or recorded by longspan. Column names tell the format."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from longspan.file_errors import unread
from longspan.workload.recorded import HEADER, opened, recorded_run
from longspan.workload.spec import MAX_LEN

_log = logging.getLogger("longspan")
_MAX_ID = 2**128
MAX_SPAN_S = 1e8
"""Maximum seconds between arrivals, about three years. Float times lose the precision for steps much later."""


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """The size of a request in tokens, and its arrival in seconds after the start, if known.

    Attributes:
        block_ids: ids of the prompt's blocks of `BLOCK_LEN` tokens, if the trace has them. Equal ids are equal tokens.
            Ids of a trace are hashes or any numbers. These ids count the different blocks from 0.
        slo_class: the value of the column `class`, which a trace of any format may have.
        ttft_s, tpot_s: its times in the recorded run, if the trace has them.
    """

    due_s: float | None = None
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    slo_class: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Format:
    """The columns of a known format. `seconds` converts a value of the column `arrival` to seconds."""

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
    """Parse a date as a timestamp. Dates without a zone are UTC."""
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
    _Format(
        name="recorded by longspan",
        arrival="arrival_s",
        input_len="prompt_tokens",
        output_len="output_tokens",
        block_ids="block_ids",
    ),
    _Format(name="BurstGPT", arrival="Timestamp", input_len="Request tokens", output_len="Response tokens"),
)
"""The first format whose columns all exist is used."""


def read_trace(path: Path, *, num: int | None = None) -> list[RequestSpec]:
    """Return the first `num` requests of a trace (all if None), in order of arrival. The first arrives at 0.

    Without arrival times in the trace, `due_s` is None. Lines without input or output (failed requests) are left out,
    and their number is logged.

    Raises:
        ValueError: if the file cannot be read, has an unknown format, or contains fewer requests.
    """
    try:
        with opened(path) as file:
            requests = list(itertools.islice(_requests(path, file), num))
    except (OSError, UnicodeDecodeError, EOFError, csv.Error, zlib.error) as error:
        raise ValueError(unread(path, error)) from None
    if not requests or len(requests) < (num or 0):
        needed = "at least 1 is needed: give another file" if num is None else f"`num_requests` is {num}: lower it"
        raise ValueError(f"trace {str(path)!r} holds {len(requests)} requests, but {needed}")
    times = [request.due_s for request in requests if request.due_s is not None]
    if not times:
        return requests
    start = min(times)
    shifted = [replace(request, due_s=time - start) for request, time in zip(requests, times, strict=True)]
    return sorted(shifted, key=lambda request: request.due_s or 0.0)


def _requests(path: Path, file: IO[str]) -> Iterator[RequestSpec]:
    form: _Format | None = None
    num_empty, first_s, numbers = 0, None, dict[int, int]()
    for number, row in _rows(path, file):
        form = form or _format(path, row)
        try:
            request = _request(form, row, numbers)
            first_s = request.due_s if first_s is None else first_s
            _check_time(request.due_s, first_s)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of trace {str(path)!r} is not of the format {form.name!r}: "
                f"{type(error).__name__}: {error}; correct the line"
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
    if name.endswith(".json"):
        yield from enumerate(_recorded_rows(path, file), start=1)
        return
    if not name.endswith(".jsonl"):
        raise ValueError(f"trace {str(path)!r} must end in .csv, .csv.gz, .jsonl, .jsonl.gz, or be recorded as .json")
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of trace {str(path)!r} is not JSON ({error}): correct the line") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of trace {str(path)!r} must be a JSON object, but is {line.strip():.60}")
        if row.keys() != {HEADER}:
            yield number, row


def _recorded_rows(path: Path, file: IO[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the columns of each request of a recorded run, in order of arrival."""
    try:
        for event in recorded_run(json.load(file))[2]:
            yield {"block_ids": (), **event["args"], "arrival_s": event["ts"] / 1e6}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"trace {str(path)!r} is no trace of one run of longspan ({error!r})") from None


def _format(path: Path, row: Mapping[str, Any]) -> _Format:
    for form in _FORMATS:
        if form.columns <= row.keys():
            return form
    forms = "; ".join(", ".join(sorted(form.columns)) for form in _FORMATS)
    columns = ", ".join(map(str, row))
    raise ValueError(f"trace {str(path)!r} has the columns {columns}, which is no known format: {forms}")


def _request(form: _Format, row: Mapping[str, Any], numbers: dict[int, int]) -> RequestSpec:
    """Read a row. `numbers` has the number of each block id so far, and receives the new ids."""
    ids = () if form.block_ids is None else [_whole(block, _MAX_ID) for block in row[form.block_ids]]
    return RequestSpec(
        due_s=None if form.arrival is None else form.seconds(row[form.arrival]),
        input_len=_whole(row[form.input_len]),
        output_len=_whole(row[form.output_len]),
        block_ids=tuple([numbers.setdefault(block, len(numbers)) for block in ids]),
        slo_class=str(row.get("class") or ""),
        ttft_s=_time(row, "ttft_s"),
        tpot_s=_time(row, "tpot_s"),
    )


def _time(row: Mapping[str, Any], column: str) -> float | None:
    return None if row.get(column) is None else float(row[column])


def _check_time(due_s: float | None, first_s: float | None) -> None:
    if due_s is None or first_s is None:
        return
    if not abs(due_s - first_s) <= MAX_SPAN_S:  # neither is NaN
        raise ValueError(
            f"arrives at {due_s:g} s, the first at {first_s:g} s: give finite times, at most {MAX_SPAN_S:g} s apart"
        )


def _whole(value: float | str, maximum: int = MAX_LEN) -> int:
    number = value if isinstance(value, int) else float(value)  # floats lose the last digits of large ids
    if not 0 <= number <= maximum or number != int(number):
        raise ValueError(f"a whole number up to {maximum} is needed, but {value!r:.40} given")
    return int(number)
