"""`python -m longspan.attn.check`: what it prints, its exit codes, and that it leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import cyclopts
import psutil
import pytest

from longspan.attn.check import main

COMMAND = [sys.executable, "-m", "longspan.attn.check"]
LINE = re.compile(r"(\S.*?) +largest error (\S+) +([\d,]+) bytes sent on the same host, ([\d,]+) to another")


def check(*arguments: str, command: list[str] = COMMAND, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, env=env, check=False)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_exchange_has_a_line(ranks: int) -> None:
    result = check("--ranks", str(ranks), "--cases", "6", "--seed", "4")
    assert (result.returncode, result.stderr) == (0, "")
    found = [LINE.fullmatch(line) for line in result.stdout.splitlines()]
    assert all(found), result.stdout
    rows = {one[1]: one for one in found if one}
    assert list(rows) == ["ring_kv", "ring_q", "gather_kv", "gather_kv, dense", "alltoall", "gather_hidden", "chain"]
    for row in rows.values():
        assert 0 < float(row[2]) < 1e-5
        assert (row[3] == "0") == (ranks == 1)
        assert row[4] == "0"
    assert rows["ring_kv"][3] == rows["gather_kv"][3] == rows["gather_kv, dense"][3]


def test_bytes_are_told_by_link_and_drawn_from_the_seed() -> None:
    one = check("--ranks", "4", "--exchange", "gather_kv", "--cases", "3", LONGSPAN_HOSTS="2")
    assert (one.returncode, len(one.stdout.splitlines())) == (0, 2)
    for line in one.stdout.splitlines():
        row = LINE.fullmatch(line)
        assert row
        assert int(row[3].replace(",", "")) == 2 * int(row[4].replace(",", "")) > 0
    other = check("--ranks", "4", "--exchange", "gather_kv", "--cases", "3", "--seed", "1", "--hosts", "2")
    assert other.stdout != one.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exchange", "ring"], ["'ring'", "ring_kv", "alltoall", "chain"]),
        (["--ranks", "0"], ["--ranks"]),
        (["--ranks", "2", "--hosts", "3"], ["1 to 2 hosts", "3 given"]),
        (["--cases", "0"], ["--cases"]),
        (["--seed", "x"], ["--seed"]),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, since they are found before any other starts."""
    monkeypatch.setenv("COLUMNS", "200")
    app = cyclopts.App(default_command=main)
    with pytest.raises(SystemExit) as exit_:
        app(arguments)
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, "")
    assert all(word in err for word in words), err


def broken(body: str) -> list[str]:
    """The check with a `ring_q` that is wrong; processes are forked, so they have it, too."""
    code = f"""
import cyclopts, os
from longspan.attn import check, exchanges
from longspan.core.exchange import RING_Q
def ring_q(call):
    {body}
exchanges.register(RING_Q, ring_q)
cyclopts.run(check.main)
"""
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("body", ["call.out.copy_(call.q)", "call.out.fill_(float('nan'))"])
def test_a_wrong_exchange_is_found(body: str) -> None:
    result = check("--exchange", "ring_q", "--cases", "3", command=broken(body))
    assert (result.returncode, result.stderr) == (1, "not exact: an error exceeds 1e-05\n")
    assert result.stdout.startswith("ring_q ")


@pytest.mark.parametrize("body", ["raise ValueError('no')", "call.group.rank or os._exit(3)"])
def test_a_rank_that_fails_ends_the_check(body: str) -> None:
    result = check("--exchange", "ring_q", command=broken(body))
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search(r"rank \d failed\n$", result.stderr)


@pytest.mark.parametrize(
    ("number", "code", "send"),
    [
        (signal.SIGINT, 130, os.killpg),  # Ctrl-C
        (signal.SIGINT, 130, os.kill),
        (signal.SIGTERM, 143, os.kill),
        (signal.SIGKILL, -signal.SIGKILL, os.kill),
    ],
)
def test_no_process_is_left(number: signal.Signals, code: int, send: Callable[[int, int], None]) -> None:
    process = subprocess.Popen([*COMMAND, "--ranks", "3", "--cases", "100000"], start_new_session=True)
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(ranks := parent.children()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1)  # in the midst of the cases
    send(process.pid, number)
    assert process.wait(timeout=20) == code
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert (len(gone), alive) == (3, [])
