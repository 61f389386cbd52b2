"""Runs the checks of a machine with a CUDA device within a fixed time: scripts/gpu_check.sh starts it.

    python tools/gpu_check.py quick|full OUT [--only CHECK ...]

PYTHON names the interpreter of the checks, and WHEELS a folder of wheels to install for them. OUT gets log.txt, with
the output of every check, and report.json, which is replaced whenever a check begins or ends. So an interrupted run
leaves a complete report. Standard output is short: a line per check, and the last lines of each failed check. The exit
code is 1 if a check failed, and 128 plus the number of the signal if a signal ended the run.

This file and `gpu_plan` use the standard library only, since the machine may have nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_plan import GRACE_S, TOTAL_S, Check, aims, chosen, plan

ROOT = Path(__file__).resolve().parents[1]
TEST_FOLDERS = ("attn", "model", "support")
"""The folders of `tests` that the modules of `tests/gpu` import from."""
TAIL_LINES = 15
"""Lines of a failed check on standard output."""
MAX_PRINTED = 9000
"""Characters on standard output. A caller that sees the last 12,000 characters sees all."""
LEAST_TAIL = 400
"""Characters of standard output that are reserved for each later check, in case it fails, too."""
MAX_WIDTH, MAX_LINE = 160, 1000
"""Characters of each such line on standard output, and in the report."""
MAX_LOGGED = 2 << 20
"""Bytes of a check's output in the log. The middle of longer output is cut out, so that the log fits into 16 MiB."""
MAX_FAILURES = 50
"""Failed tests that the report names."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):  # noqa: N818 - a request, and no error
    """This process received a signal to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main() -> int:
    """Run the requested checks and return the exit code."""
    begun_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=tuple(TOTAL_S), help="quick takes 150 seconds at most, full 590")
    parser.add_argument("out", type=Path, help="folder for report.json and log.txt")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run these checks of the mode, such as failed ones")
    args = parser.parse_args()
    names = [check.name for check in plan(args.mode, "", "", ())]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only names {', '.join(sorted(unknown))}; the checks of {args.mode} are {', '.join(names)}")
    wheels: tuple[str, ...] = ()
    if folder := os.environ.get("WHEELS"):
        wheels = tuple(sorted(str(path.resolve()) for path in Path(folder).glob("*.whl")))
        if not wheels:
            parser.error(f"WHEELS is {folder!r}, where no .whl file is: collect them with tools/gpu_wheels.py")
    args.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    run = Run(args.mode, args.out.resolve(), scratch, wheels, begun_s, args.only)
    try:
        for number in _SIGNALS:
            signal.signal(number, _interrupt)
        return run.all()
    except Interrupted as interruption:
        run.end(f"interrupted by {interruption}")
        return 128 + interruption.number
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _interrupt(number: int, _frame: object) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


class Run:
    """Runs the checks of a plan one after the other, and keeps their report.

    Args:
        scratch: a folder for the files of the checks.
        begun_s: the start of the run, by the monotonic clock.
        only: the checks to run, in addition to the checks that they need. None means all of the mode.
    """

    def __init__(
        self,
        mode: str,
        out: Path,
        scratch: Path,
        wheels: tuple[str, ...],
        begun_s: float,
        only: Sequence[str] | None = None,
    ) -> None:
        self._out, self._results, self._begun_s = out, scratch / "results", begun_s
        self._python, self._mode = os.environ.get("PYTHON") or sys.executable, mode
        packages = scratch / "packages"
        self._results.mkdir()
        checks = plan(mode, str(self._results), str(packages), wheels)
        self._checks = checks if only is None else chosen(checks, only)
        folders = ("src", "tools", *(f"tests/{name}" for name in TEST_FOLDERS))
        path = [*(str(ROOT / name) for name in folders), str(packages)]
        path.append(os.environ.get("PYTHONPATH", ""))
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "LONGSPAN_CACHE": str(scratch / "cache"),  # without profiles of earlier runs
            "TRITON_CACHE_DIR": str(scratch / "triton"),
            "TMPDIR": str(scratch),
        }
        self._printed = 0
        self._entries: list[dict[str, Any]] = [
            {"name": check.name, "status": "not run", "command": [self._python, *check.command]}
            for check in self._checks
        ]
        self._report: dict[str, Any] = {
            "mode": mode,
            "state": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "limit_s": TOTAL_S[mode],
            "checks": self._entries,
        }
        self._log = out / "log.txt"
        self._log.write_text("")
        self._save()

    def all(self) -> int:
        """Run every check, but stop if a check with `stops` fails. Return the exit code."""
        state = "complete"
        for place, check in enumerate(self._checks):
            if self._run(place, check) != "passed" and check.stops:
                state = f"stopped: {check.name} failed"
                break
        self.end(state)
        return 0 if all(entry["status"] == "passed" for entry in self._entries) else 1

    def end(self, state: str) -> None:
        """Save the report of a finished run, and print its aims."""
        self._report["state"] = state
        self._save()
        for aim in self._report["aims"]:
            reached = (
                "not measured" if aim["share"] is None else f"{aim['share']:.0%}, {'met' if aim['met'] else 'MISSED'}"
            )
            self._print(f"aim of {aim['wanted']:.0%}: {aim['aim']}: {reached}")
        counts = [
            f"{sum(entry['status'] == status for entry in self._entries)} {status}" for status in ("passed", "not run")
        ]
        failed = [entry["name"] for entry in self._entries if entry["status"] not in {"passed", "not run"}]
        self._print(f"{state}: {', '.join(counts)}, {len(failed)} failed in {self._seconds():.0f} s {' '.join(failed)}")

    def _run(self, place: int, check: Check) -> str:
        entry, begun_s = self._entries[place], self._seconds()
        reserved_s = sum(later.seconds for later in self._checks[place + 1 :])
        limit_s = min(check.at_most, TOTAL_S[self._mode] - begun_s - reserved_s)
        entry.update(status="running", limit_s=round(limit_s, 1))
        self._save()
        start = self._begin_of(check)
        try:
            code, is_late = self._execute(check, limit_s)
            status = "timed out" if is_late else "passed" if code == 0 else "failed"
            entry.update(exit_code=code)
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self._log_printed(check)
            results = self._results_of(check)
            if status == "passed" and check.junit and _ran_nothing(results.get("tests")):
                status = "failed"
                results["tests"]["problem"] = "no test ran: all were skipped"
            tail = self._tail(start)
            entry.update(status=status, seconds=round(self._seconds() - begun_s, 1), results=results, tail=tail)
            self._save()
        self._print(f"{check.name}: {status} in {entry['seconds']:.0f} s")
        if status != "passed":
            self._print_tail(tail, len(self._checks) - place - 1)
        return status

    def _execute(self, check: Check, limit_s: float) -> tuple[int, bool]:
        """Run a command with its output in the log. Return the exit code, and True if it exceeded its time.

        A command that exceeds its time first receives SIGINT: Python prints a traceback, and pytest writes its results.
        """
        begun_s = time.monotonic()
        with contextlib.ExitStack() as files:
            log = files.enter_context(self._log.open("ab"))
            printed = check.printed and files.enter_context((self._results / f"{check.printed}.json").open("wb"))
            try:
                process = subprocess.Popen(
                    [self._python, *check.command],
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=printed or log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{self._python} cannot be started: {error}\n".encode())
                return 127, False
            try:
                return process.wait(max(0.0, limit_s - GRACE_S)), False
            except subprocess.TimeoutExpired:
                log.write(f"\n{check.name} takes longer than {limit_s:.0f} s: it is interrupted\n".encode())
                log.flush()
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, limit_s - (time.monotonic() - begun_s)))
                return process.poll() or 124, True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its children
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs cannot be killed
                    process.wait(GRACE_S / 2)

    # ------------------------------------------------------------ results

    def _results_of(self, check: Check) -> dict[str, Any]:
        """Read and remove the results of a check: a later check may write a file of the same name."""
        results: dict[str, Any] = {}
        for name in (*check.results, *filter(None, [check.printed])):
            path = self._results / f"{name}.json"
            if path.exists():
                with contextlib.suppress(ValueError):  # it was interrupted while it wrote
                    results[name] = json.loads(path.read_text(encoding="utf-8"))
                if name != "ceilings":  # later checks read it
                    path.unlink()
        if check.junit and (self._results / check.junit).exists():
            with contextlib.suppress(ET.ParseError):
                results["tests"] = summary_of_tests(self._results / check.junit)
        return results

    def _save(self) -> None:
        """Replace the report atomically, so that a reader never sees a part of it."""
        results = {entry["name"]: entry["results"] for entry in self._entries if "results" in entry}
        self._report.update(seconds=round(self._seconds(), 1), aims=aims(self._mode, results))
        draft = self._out / ".report.json.new"
        draft.write_text(json.dumps(self._report, indent=1) + "\n", encoding="utf-8")
        draft.replace(self._out / "report.json")

    def _seconds(self) -> float:
        return time.monotonic() - self._begun_s

    # ------------------------------------------------------------ output

    def _begin_of(self, check: Check) -> int:
        """Write the title of a check to the log. Return the position at which its output begins."""
        with self._log.open("ab") as log:
            log.write(f"\n===== {check.name}: {' '.join(check.command)}\n".encode())
            return log.tell()

    def _log_printed(self, check: Check) -> None:
        """Append the command's printed result to the log: it may be an error message."""
        if check.printed and (printed := self._results / f"{check.printed}.json").exists():
            with self._log.open("ab") as log:
                log.write(printed.read_bytes())

    def _tail(self, start: int) -> list[str]:
        """Return the last lines of the log from `start` on. Cut the middle of long output out of the log."""
        whole = self._log.read_bytes()
        output = whole[start:]
        if len(output) > MAX_LOGGED:
            half = MAX_LOGGED // 2
            output = b"%s\n... %d bytes are left out ...\n%s" % (output[:half], len(output) - 2 * half, output[-half:])
            draft = self._out / ".log.txt.new"
            draft.write_bytes(whole[:start] + output)
            draft.replace(self._log)
        lines = output.decode(errors="replace").replace("\r", "\n").splitlines()
        return [line[:MAX_LINE] for line in lines if line.strip()][-TAIL_LINES:]

    def _print_tail(self, tail: Sequence[str], num_later: int) -> None:
        """Print last lines, truncated so that enough characters remain for later checks."""
        left = MAX_PRINTED - self._printed
        share = max(left - LEAST_TAIL * (num_later + 1), left // (num_later + 2))
        width = max(1, min(MAX_WIDTH, share // max(1, len(tail)) - 3))
        for line in tail:
            self._print(f"  {line[:width]}")

    def _print(self, line: str) -> None:
        """Print a line, truncated to the remaining characters."""
        line = line[: max(0, MAX_PRINTED + 1000 - self._printed)]
        self._printed += len(line) + 1
        if line:
            print(line.encode(errors="replace").decode(), flush=True)


def _ran_nothing(tests: dict[str, Any] | None) -> bool:
    return tests is not None and tests["passed"] + len(tests["failed"]) == 0


def summary_of_tests(junit: Path) -> dict[str, Any]:
    """Return the numbers of passed and skipped tests, and the failed tests, from JUnit's XML."""
    passed, skipped, failed = 0, dict[str, int](), list[dict[str, str]]()
    for case in ET.parse(junit).getroot().iter("testcase"):  # noqa: S314 - pytest wrote it here
        problems = [*_problems(case)]
        if problems:
            failed.append({"test": f"{case.get('classname')}::{case.get('name')}", "problem": problems[0]})
        elif (skip := case.find("skipped")) is not None:
            reason = skip.get("message") or ""
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "num_failed": len(failed), "failed": failed[:MAX_FAILURES]}


def _problems(case: ET.Element) -> Iterator[str]:
    for kind in ("failure", "error"):
        for problem in case.iter(kind):
            yield (problem.get("message") or kind)[:500]


if __name__ == "__main__":
    sys.exit(main())
