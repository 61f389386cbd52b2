"""Processes that are started run no code that happens to lie in the current folder, and leave no pipe open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.args import EngineArgs
from longspan.runtime.executor.forkserver import _ForkServer
from longspan.serve.client import EngineClient
from longspan.serve.messages import EngineSetup
from longspan.text import grammar_check


def test_a_server_that_has_ended_leaves_no_pipe_open() -> None:
    server = _ForkServer()
    server.destroy()
    deadline_s = time.monotonic() + 60
    while not all(pipe is not None and pipe.closed for pipe in (server._process.stdin, server._process.stdout)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def start_engine(events: Path) -> None:
    async def start() -> None:
        client = EngineClient(
            EngineSetup(engine=EngineArgs(str(events)), max_num_queued_reqs=1024, max_num_queued_tokens=2**20)
        )
        try:
            await client.start()
        finally:
            await client.close()

    asyncio.run(start())


def start_forkserver(_: Path) -> None:
    _ForkServer().close()


def check_grammar(_: Path) -> None:
    grammar_check.check('{"grammars": [{"lark_grammar": "start: /anywhere/"}]}')  # nobody has tried it before


@pytest.mark.parametrize("start", [start_engine, start_forkserver, check_grammar])
def test_a_module_in_the_current_folder_is_not_imported(
    start: Callable[[Path], None], events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "anywhere"
    folder.mkdir()
    for name in ("random", "resource", "selectors", "msgspec", "threading"):
        (folder / f"{name}.py").write_text("open('was-run', 'w').close(); raise SystemExit(1)")
    monkeypatch.chdir(folder)
    start(events)
    assert not (folder / "was-run").exists()
