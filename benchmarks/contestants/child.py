"""The benchmark's side of the pipe: starts, pauses and ends a contestant's processes, and sends jobs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from contestants.roster import Entry
from contestants.serving import Answer, Submission

BENCHMARKS = Path(__file__).resolve().parent.parent
START_LIMIT_S = 600.0
ANSWER_LIMIT_S = 300.0
END_LIMIT_S = 30.0


class ContestantError(Exception):
    """A contestant does not start, dies or does not answer. The message has the reason."""


class Child:
    """The process of a contestant. It is stopped (SIGSTOP) between jobs and uses no CPU time then.

    Args:
        entry: its name, interpreter, options and environment.
        options: arguments of its `start` in addition to the entry's own options.
    """

    def __init__(self, entry: Entry, options: dict[str, Any]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._unread = b""
        pinned = ["taskset", "--cpu-list", entry.core] if entry.core else []
        command = [*pinned, str(entry.python), "-m", f"contestants.{entry.module}"]
        environment = os.environ | entry.environment | {"HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), *filter(None, [environment.get("PYTHONPATH")])])
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C reaches it through us only
            )
        except OSError as error:
            raise ContestantError(f"{error.strerror}: {command[0]}") from error
        self._order = options | entry.options

    def start(self) -> dict[str, str]:
        """Wait until the contestant is ready, and return its versions."""
        versions: dict[str, str] = self._ask(self._order, START_LIMIT_S)["versions"]
        return versions

    def run(self, submissions: Sequence[Submission]) -> Answer:
        """Run a job and return the answer."""
        return Answer.from_json(
            self._ask({"submissions": [asdict(submission) for submission in submissions]}, ANSWER_LIMIT_S)
        )

    def send(self, message: dict[str, Any]) -> None:
        """Continue the process and send a line."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContestantError(self._last_words()) from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Wait at most `limit_s` seconds for a line."""
        answer: dict[str, Any] = json.loads(self._read_line(limit_s))
        return answer

    def pause(self) -> None:
        """Stop all processes of the contestant until the next job."""
        self._signal(signal.SIGSTOP)

    def close_input(self) -> None:
        """Close the contestant's standard input, which ends its loop over jobs."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.close()

    def wait(self) -> None:
        """Wait at most `END_LIMIT_S` for the end of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)

    def kill(self) -> None:
        """Kill all processes that still run."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        self.send(message)
        return self.receive(limit_s)

    def _read_line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None, "a pipe"
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ContestantError(f"no answer within {limit_s:.0f} s")
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                raise ContestantError(self._last_words())
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        """Return the first and the last error of the log: the first is often the cause, but may be harmless."""
        self.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "Error: " in line]
        return " ... ".join(dict.fromkeys(errors[:1] + errors[-1:])) or f"exit status {self._process.poll()}"

    def _signal(self, number: int) -> None:
        """Send a signal to the process group and to all descendants: longspan's workers have groups of their own."""
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
