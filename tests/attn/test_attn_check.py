"""`python -m longspan.attn.check`: its output, its exit codes, and that it leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable

import cyclopts
import psutil
import pytest
from forked import Forked

from longspan.attn import exchanges
from longspan.attn.check import main
from longspan.attn.exchanges import Call
from longspan.core.exchange import RING_Q

LINE = re.compile(r"(\S.*?) +largest error (\S+) +([\d,]+) bytes sent on the same host, ([\d,]+) to another")


def run(arguments: tuple[str, ...], ring_q: Callable[[Call], None] | None = None) -> None:
    """Run the command, with a replaced `ring_q` if given. Forked processes inherit it."""
    if ring_q is not None:
        exchanges.exchange(RING_Q)(ring_q)
    cyclopts.App(default_command=main)(arguments)


def check(
    *arguments: str, ring_q: Callable[[Call], None] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return Forked(run, arguments, ring_q, environment=environment).wait(120)


def told(result: subprocess.CompletedProcess[str]) -> str:
    """Return its stderr without Python's warnings about other code, such as a debugger."""
    return re.sub(r"^(?!\S*/longspan/)\S+:\d+: \w*Warning: .*\n(  .*\n)?", "", result.stderr, flags=re.MULTILINE)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 3])
def test_every_exchange_has_a_line(ranks: int) -> None:
    result = check("--ranks", str(ranks), "--cases", "6", "--seed", "4")
    assert (result.returncode, told(result)) == (0, "")
    found = [LINE.fullmatch(line) for line in result.stdout.splitlines()]
    assert all(found), result.stdout
    rows = {one[1]: one for one in found if one}
    hidden = ["gather_hidden", "gather_hidden, x4"]
    assert list(rows) == ["ring_kv", "ring_q", "gather_kv", "gather_kv, dense", "alltoall", *hidden, "chain"]
    for row in rows.values():
        assert 0 < float(row[2]) < 1e-5
        assert (row[3] == "0") == (ranks == 1)
        assert row[4] == "0"
    assert rows[hidden[0]][3] == rows[hidden[1]][3]
    assert rows["ring_kv"][3] == rows["gather_kv"][3] == rows["gather_kv, dense"][3]


def test_bytes_are_reported_by_link_and_follow_from_the_seed() -> None:
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
        (["--device", "tpu"], ["--device", "tpu"]),
    ],
)
def test_mistakes_are_reported(
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


def copies(call: Call) -> None:
    call.out.copy_(call.q)


def makes_nothing(call: Call) -> None:
    call.out.fill_(float("nan"))


@pytest.mark.parametrize("ring_q", [copies, makes_nothing])
def test_a_wrong_exchange_is_found(ring_q: Callable[[Call], None]) -> None:
    result = check("--exchange", "ring_q", "--cases", "3", ring_q=ring_q)
    assert (result.returncode, told(result)) == (1, "not exact: an error exceeds 1e-05\n")
    assert result.stdout.startswith("ring_q ")


def raises(_: Call) -> None:
    raise ValueError("no")


def dies(call: Call) -> None:
    if not call.group.rank:
        os._exit(3)


@pytest.mark.parametrize("ring_q", [raises, dies])
def test_a_rank_that_fails_ends_the_check(ring_q: Callable[[Call], None]) -> None:
    result = check("--exchange", "ring_q", ring_q=ring_q)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search(r"rank \d failed\n$", told(result))


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
    process = Forked(run, ("--ranks", "3", "--cases", "100000"), own_group=True)
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(ranks := parent.children()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)  # in the midst of the cases
    send(process.pid, number)
    assert process.wait(60).returncode == code
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert (len(gone), alive) == (3, [])
