"""SIGINT and SIGTERM end every verb with 130 and 143, at any moment: quietly, and nothing is left behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from leftovers import left_names, wait_until_gone
from test_cli_engine import CONFIG

from longspan.cli import signals

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
MODEL = ("--load-format", "dummy", "--skip-tokenizer-init", "--threads-per-rank", "1", "--block-size", "16")
VARIABLES = {"OMP_NUM_THREADS": "1", "LONGSPAN_DTYPE": "float32"}
GENERATE = ("--token-ids", "5,6,7", "--max-tokens", "400", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6], "max_tokens": 100}}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(50)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    return folder


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """Every verb, with work for a while."""
    model, files = str(folder), ("-i", str(folder / "in.jsonl"), "-o", os.devnull.replace("null", "shm/none"))
    simulated = ("--hardware", "h100-sxm-80g", "--rate", "2", "--num-requests", "300")
    return {
        "generate": ("generate", model, *MODEL, *GENERATE),
        "two ranks": ("generate", model, *MODEL, *GENERATE, "--parallel", "2"),
        "chat": ("chat", "smollm2-135m"),
        "serve": ("serve", model, *MODEL, "--port", "0"),
        "batch": ("batch", model, *MODEL, *files[:3], str(folder / f"out-{time.monotonic_ns()}.jsonl")),
        "profile": ("profile", model, *MODEL, "--lengths", "64", "--max-model-len", "128", "--json"),
        "eval": ("eval", "--lengths", "512", "--num-samples", "1"),
        "tune": ("tune", "csa", "smollm2-135m", "--out", str(folder / "tuned.json"), "--max-minutes", "1"),
        "simulate": ("simulate", "llama-3-8b", *simulated),
        "estimate": ("estimate", "llama-3-8b", "--hardware", "h100-sxm-80g", "--context", "8K"),
    }


class Run:
    """A command in a folder of its own for temporary files, with all processes that it has started."""

    def __init__(self, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **VARIABLES,
                "TMPDIR": self._folder.name,
                "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor",
            },
        )

    def ended_by(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal. Return the exit code and stderr once no process is left."""
        family: list[int] = []
        with suppress(psutil.NoSuchProcess):
            family = [one.pid for one in psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        wait_until_gone(family, left_names())
        assert not list(Path(self._folder.name).iterdir())
        self._folder.cleanup()
        return self.process.returncode, err


# The command gets a signal when it looks for a module.
_EARLY = """
import os, runpy, sys
module, number = sys.argv[1], int(sys.argv[2])
class Finder:
    def find_spec(name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder)
sys.argv[1:3] = []
runpy.run_module("longspan", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("longspan.cli.app", signal.SIGINT),
        ("cyclopts", signal.SIGTERM),
        ("longspan.cli.generate", signal.SIGINT),
        ("numpy._core._exceptions", signal.SIGINT),  # of C code: numpy cannot be imported then
        ("numpy.exceptions", signal.SIGTERM),
        ("numpy._core.fromnumeric", signal.SIGTERM),  # an exception is lost there
        ("longspan.service", signal.SIGTERM),
    ],
)
def test_a_signal_in_an_import_ends_the_command(module: str, number: signal.Signals, folder: Path) -> None:
    run = Run("-c", _EARLY, module, str(int(number)), *commands(folder)["generate"])
    run.process.wait(60)
    assert run.ended_by(number) == (CODES[number], "")


@pytest.mark.parametrize(
    ("verb", "number", "delay_s"),
    [
        ("generate", signal.SIGINT, 1.0),
        ("two ranks", signal.SIGTERM, 2.5),
        ("serve", signal.SIGTERM, 1.5),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in itertools.product(
                commands(Path()), CODES, [number / 10 for number in (2, 4, 6, 9, 12, 16, 21, 27, 35, 45, 60)]
            )
        ),
    ],
)
def test_a_signal_ends_a_verb_at_any_moment(verb: str, number: signal.Signals, delay_s: float, folder: Path) -> None:
    """A verb that takes less time has ended by itself. A server without open requests ends with 0."""
    run = Run("-m", "longspan", *commands(folder)[verb])
    time.sleep(delay_s)
    code, err = run.ended_by(number)
    may_end = verb in ("simulate", "estimate", "profile", "batch") or "stopping; requests under way" in err
    assert code == CODES[number] or (may_end and code == 0), err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if " INFO " not in line]) <= 1, err


# ---------------------------------------------------------------- while an engine runs


@pytest.fixture
def caught(signals_restored: None) -> Iterator[None]:
    del signals_restored
    hook = sys.unraisablehook
    signals.catch()
    yield
    sys.unraisablehook = hook


@pytest.fixture
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def code_of(function: Callable[[], None]) -> object:
    """The exit code with which a signal ends a function that may unwind."""
    with pytest.raises(SystemExit) as ending, signals.unwinding():
        function()
    return ending.value.code


def wait_for_signal() -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        time.sleep(0.01)


@pytest.mark.usefixtures("caught")
def test_an_exception_that_gets_lost_is_raised_again() -> None:
    class Fragile:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def lose() -> None:
        Fragile()
        assert signals.exit_code() == 143
        wait_for_signal()

    assert code_of(lose) == 143


@pytest.mark.usefixtures("caught")
def test_nothing_is_raised_into_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted_module.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.3)\nis_whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def import_it() -> None:
        import_module("interrupted_module")
        wait_for_signal()

    assert code_of(import_it) == 130
    assert sys.modules.pop("interrupted_module").is_whole


@pytest.mark.usefixtures("caught")
def test_a_shutdown_is_not_interrupted_again() -> None:
    closed = []

    def close_slowly() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(0.2)
            with suppress(IndexError):
                closed.pop()  # another exception amid its handling
            time.sleep(0.2)
            closed.append(True)

    assert code_of(close_slowly) == 143
    assert closed


@pytest.mark.usefixtures("caught")
def test_a_first_signal_lets_a_shutdown_finish() -> None:
    """The signal comes when the verb has ended, while the engine saves KV and stops its workers."""
    finished = []

    def shut_down() -> None:
        signal.raise_signal(signal.SIGTERM)
        finished.append(True)

    with signals.finishing(), ExitStack() as stack, signals.unwinding():
        stack.callback(shut_down)
    assert finished and signals.exit_code() == 143


_TWICE = """
import os, signal, sys, time
from longspan.cli import signals
from longspan.runtime.child import make_run_dir, start_child
signals.catch()
folder, child = make_run_dir(), start_child("http.server", "0", stdout=-3, stderr=open(os.devnull, "wb"))
with signals.unwinding():
    try:
        print(child.pid, folder, flush=True)
        time.sleep(60)
    finally:
        print("unwinds", flush=True)
        time.sleep(60)
"""


def test_a_second_signal_ends_the_command_at_once_with_all_that_it_started() -> None:
    process = subprocess.Popen([sys.executable, "-c", _TWICE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "unwinds\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert not Path(folder).exists()
    wait_until_gone([int(pid)], left_names())


def test_a_process_under_nohup_survives_its_terminal(signals_restored: None) -> None:
    del signals_restored
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.catch()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
