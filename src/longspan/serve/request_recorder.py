"""Records the sizes, times and prefix hashes of a server's requests in a file (`longspan serve --record`)."""

from __future__ import annotations

import fcntl
import gzip
import json
import logging
import os
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from longspan.args import EngineArgs
from longspan.core.options import PolicySettings, option_text
from longspan.errors import ParameterError
from longspan.file_errors import unread, unwritten
from longspan.serve import messages
from longspan.text.input_processor import EngineRequest
from longspan.workload.recorded import HEADER, block_ids, recorded_layout

_log = logging.getLogger("longspan")
_FLUSH_S = 1.0
"""Seconds between writes. Lines of less time are lost if the process is killed."""
_MAX_LINES, _MAX_TOKENS = 10_000, 2**25
"""Limits of requests, and of their prompt tokens, that wait to be written. Further requests are not recorded. A token
takes 8 bytes."""
_CLOSE_S = 5.0
"""Seconds in which the last lines are written before the server ends without them."""
_BEGIN = f'{{"{HEADER}": '.encode()
_GZIP = 16 + zlib.MAX_WBITS
_REASONS = frozenset({"stop", "length", "abort"})


@dataclass(kw_only=True, slots=True)
class _Open:
    """A request without an end.

    Attributes:
        num_choices: choices that have not ended.
        num_recorded: choices that are in the recording.
        num_repeated: recorded choices that a new engine core computes again, and that have not ended again.
    """

    at_s: float
    engine_request: EngineRequest
    num_choices: int
    num_recorded: int = 0
    num_repeated: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended:
    at_s: float
    engine_request: EngineRequest
    choice: messages.FinishedChoice


class RequestRecorder:
    """Appends a line to a file for each choice of a request that has ended, in a thread of its own.

    It gets all messages to and from the engine core. The calling thread puts values into a queue, and neither hashes
    nor writes. An error of the file ends the recording with a line in the log.

    Args:
        path: ends in `.jsonl` or `.jsonl.gz`. Lines are appended to an existing recording.
        layout: settings of the engine for the header.

    Raises:
        ParameterError: the file cannot be written, is no recording, or another server records to it.
    """

    def __init__(self, path: Path, layout: Mapping[str, Any]) -> None:
        self._path, self._layout = path, dict(layout)
        self._file, start_s = _opened(path)
        now_s = time.time()
        self._start_s = now_s if start_s is None else start_s
        self._zero_s = time.monotonic() - max(0.0, now_s - self._start_s)
        """The time of the monotonic clock that is 0 in the recording."""
        self._salt = secrets.token_bytes(32)
        self._open: dict[int, _Open] = {}
        self._before_loss: dict[int, _Open] = {}
        self._items: queue.SimpleQueue[_Ended | str | None] = queue.SimpleQueue()
        self._num_put, self._num_put_tokens = 0, 0  # written by callers only
        self._num_done, self._num_done_tokens = 0, 0  # written by the thread only
        self._num_lost, self._has_failed = 0, False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def sent(self, command: messages.Command) -> None:
        """Record the arrival of a request. A request that a new engine core computes has arrived before."""
        if not isinstance(command, messages.Add):
            return
        number, request = command.id, command.engine_request
        at_s = time.monotonic() - self._zero_s
        opened = self._before_loss.pop(number, None) or _Open(at_s=at_s, engine_request=request, num_choices=0)
        opened.num_choices, opened.num_repeated = request.params.n, opened.num_recorded
        self._open[number] = opened

    def received(self, report: messages.Report) -> None:
        """Record the ends of choices, and the layout of the engine. Failed choices are left out."""
        match report:
            case messages.StepOutputs():
                for choice in report.finished:
                    self._end(choice)
            case messages.Failed(number) if number is not None:
                self._open.pop(number, None)
            case messages.Started():
                self._before_loss, self._open = self._open, {}
                self._set_layout(report.parallel, report.policy)
            case messages.ParallelSet(parallel, policy):
                self._set_layout(parallel, policy)
            case messages.PolicySet(policy):
                self._set_layout(self._layout["parallel"], policy)

    def _end(self, choice: messages.FinishedChoice) -> None:
        request = self._open.get(choice.id)
        if request is None:
            return
        request.num_choices -= 1
        if not request.num_choices:
            del self._open[choice.id]
        if request.num_repeated:
            request.num_repeated -= 1
        elif choice.reason in _REASONS and choice.num_output_tokens:
            request.num_recorded += 1
            self._put(_Ended(at_s=request.at_s, engine_request=request.engine_request, choice=choice))

    def _set_layout(self, parallel: str, policy: PolicySettings) -> None:
        """Record the instances and the policy from now on, unless they are as before."""
        given = {name: option_text(value) for name, value in policy.given.items()}
        layout = self._layout | {"parallel": parallel, "policy": policy.name, "policy_options": given}
        if layout != self._layout:
            self._layout = layout
            self._items.put(json.dumps({HEADER: {"start_s": self._start_s, **layout}}, default=str))

    def close(self) -> None:
        """Write the last lines. Return after a few seconds even if the disk hangs."""
        self._items.put(None)
        self._thread.join(_CLOSE_S)
        if self._num_lost:
            _log.warning("%d requests are not in %s, which was written too slowly", self._num_lost, self._path)

    def _put(self, ended: _Ended) -> None:
        num_lines, num_tokens = self._num_put - self._num_done, self._num_put_tokens - self._num_done_tokens
        if self._has_failed:
            return
        if num_lines >= _MAX_LINES or (num_lines and num_tokens >= _MAX_TOKENS):
            if not self._num_lost:
                _log.warning("%s is written too slowly: requests are left out", self._path)
            self._num_lost += 1
            return
        self._num_put += 1
        self._num_put_tokens += len(ended.engine_request.token_ids)
        self._items.put(ended)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        with closing(self._file):
            is_open = True
            while is_open:
                items = [self._items.get()]
                due_s = time.monotonic() + _FLUSH_S
                while items[-1] is not None and (left_s := due_s - time.monotonic()) > 0:
                    try:
                        items.append(self._items.get(timeout=left_s))
                    except queue.Empty:
                        break
                is_open = items[-1] is not None
                lines = [item if isinstance(item, str) else self._line(item) for item in items if item is not None]
                if not self._has_failed:
                    self._append("".join(line + "\n" for line in lines).encode())

    def _line(self, ended: _Ended) -> str:
        request, choice = ended.engine_request, ended.choice
        root = self._salt + request.cache_salt.encode("utf-8", "surrogatepass")
        columns: dict[str, Any] = {
            "timestamp": round(ended.at_s * 1e3, 3),
            "input_length": len(request.token_ids),
            "output_length": choice.num_output_tokens,
            "hash_ids": block_ids(request.token_ids, root),
        }
        if choice.ttft_s is not None and choice.decode_s is not None:
            columns["ttft_s"] = round(choice.ttft_s, 6)
            if choice.num_output_tokens > 1:
                columns["tpot_s"] = round(choice.decode_s / (choice.num_output_tokens - 1), 6)
        self._num_done += 1
        self._num_done_tokens += len(request.token_ids)
        return json.dumps(columns)

    def _append(self, data: bytes) -> None:
        """Write whole lines, or nothing. Each write is a gzip member of its own, so the file is always readable."""
        size = None
        try:
            size = self._file.seek(0, os.SEEK_END)
            rest = memoryview(gzip.compress(data) if self._path.suffix == ".gz" else data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._has_failed = True
            _log.error("the recording ends: %s", unwritten(self._path, error))
            if size is not None:
                try:
                    self._file.truncate(size)
                except OSError as again:
                    _log.error("its last line may not be complete: %s", again)


_NOT_LAYOUT = frozenset({"model", "parallel", "policy", "trace", "report", "disk_kv_dir", "ray_address", "topology"})


def layout_of(given: EngineArgs) -> dict[str, Any]:
    """Return the settings of an engine for the header: the model, and all options that were given, except files."""
    options = {
        option.name: getattr(given, option.name)
        for option in fields(given)
        if option.name not in _NOT_LAYOUT and getattr(given, option.name) != option.default
    }
    return {"model": given.model, "options": options}


def _opened(path: Path) -> tuple[BinaryIO, float | None]:
    """Open and lock a file at its end. Return the start of an existing recording, too.

    Raises:
        ParameterError: see `RequestRecorder`.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ParameterError("record", f"must end in .jsonl or .jsonl.gz, but {str(path)!r} given", path)
    if path.exists() and not path.is_file():
        raise ParameterError("record", f"{str(path)!r} exists and is no recording: give another file", path)
    with ExitStack() as on_error:
        try:
            file: BinaryIO = on_error.enter_context(path.open("ab", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"{str(path)!r} is the recording of another server that runs: give another file"
            raise ParameterError("record", problem, path) from None
        except OSError as error:
            raise ParameterError("record", unwritten(path, error), path) from None
        start_s = _start_of(path, file) if path.stat().st_size else None
        on_error.pop_all()
        return file, start_s


def _start_of(path: Path, file: BinaryIO) -> float | None:
    """Return the start of a recording, without the part of a write that a killed process left at its end."""
    try:
        whole, begin = _whole_size(path)
        layout = recorded_layout(path) if whole else None
    except (OSError, ValueError, zlib.error) as error:
        text = str(error) if isinstance(error, ValueError) else unread(path, error)
        raise ParameterError("record", text, path) from None
    if layout is None and (whole or not begin.startswith(_BEGIN[: len(begin)])):
        raise ParameterError("record", f"{str(path)!r} exists and is no recording: give another file", path)
    if whole < path.stat().st_size:
        _log.warning("%s ends within a line, which is removed", path)
        file.truncate(whole)
    return None if layout is None else float(layout["start_s"])


def _whole_size(path: Path) -> tuple[int, bytes]:
    """Return the bytes up to the end of the last whole line or gzip member, and the first bytes of the text."""
    whole, at, begin, member = 0, 0, b"", zlib.decompressobj(_GZIP)
    with path.open("rb") as file:
        while data := file.read(2**16):
            if path.suffix != ".gz":
                whole = at + end if (end := data.rfind(b"\n") + 1) else whole
                begin, at = begin or data[: len(_BEGIN)], at + len(data)
            while path.suffix == ".gz" and data:
                text = member.decompress(data)
                begin, at = begin or text[: len(_BEGIN)], at + len(data) - len(member.unused_data)
                data = member.unused_data
                if member.eof:
                    whole, member = at, zlib.decompressobj(_GZIP)
    return whole, begin
