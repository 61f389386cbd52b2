"""The programs of `docs/tasks/` run against a real server, whose model is nonsense: grammars alone make the calls."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, running

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "tasks" / "agents.md").read_text(encoding="utf-8")
MODEL = "smollm2-135m"
"""The name of the model on the page."""


@pytest.fixture(scope="module")
def agent_server(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the options of the page, and short answers."""
    template = ("--chat-template", str(EXAMPLES / "agent.jinja"), "--served-model-name", MODEL)
    limits = ("--max-model-len", "1024", "--threads-per-rank", "1")
    with running(str(speaking_model), *template, *limits, log=tmp_path_factory.mktemp("agent") / "log") as server:
        yield server


def url_of(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.client.port}"


def test_the_page_calls_tools_and_reads_reasoning(agent_server: ServerProcess) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = "\n".join(blocks).replace("http://localhost:8000", url_of(agent_server))
    names: dict[str, object] = {}
    exec(compile(code, "agents.md", "exec"), names)
    assert names["call"].type == "function_call"  # type: ignore[attr-defined]


def run_example(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_agent_calls_its_tool(
    agent_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("agent.py", "--base-url", f"{url_of(agent_server)}/v1", monkeypatch=monkeypatch)
    assert re.match(r"weather\({'city': '(Oslo|Rome)'}\) = \1: rain, \d\d degrees\n", capsys.readouterr().out)


@pytest.mark.parametrize("times", [("--rate", "100"), ("--concurrency", "2")])
def test_the_load_is_answered(
    times: tuple[str, str],
    agent_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ("--url", url_of(agent_server), "--num-requests", "3", *times, "--lengths", "500")
    run_example("load.py", *load, monkeypatch=monkeypatch)
    assert capsys.readouterr().out.count(" answered in ") == 3
