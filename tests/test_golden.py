"""What users and ranks see stays as recorded: the steps of forty workloads, every `--help`, the OpenAPI document.

`python tests/test_golden.py` records all of it anew; the difference then shows in review what a change changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import golden_streams
import pytest
from fake_server import make_server

from longspan.serve.app import make_app

GOLDEN = Path(__file__).parent / "golden"
OPENAPI = GOLDEN / "openapi.json"
_CLI = "longspan"
HELP = {
    "longspan": (_CLI,),
    **{verb: (_CLI, verb) for verb in ("generate", "chat", "serve", "batch", "profile", "simulate", "estimate")},
    "attn-check": ("longspan.attn.check",),
}
"""What is run with `--help`, by the name of its file."""


def recorded_streams() -> dict[str, dict[str, object]]:
    return json.loads(golden_streams.RECORDED.read_text(encoding="utf-8"))


def shown_help(words: tuple[str, ...]) -> str:
    """The words of a help text, one line per option, whatever draws the boxes and breaks the lines."""
    module, *verb = words
    environment = {**os.environ, "COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", module, *verb, "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    lines = (re.sub(r"[╭─╮│╰╯\s]+", " ", line).strip() for line in shown.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def openapi() -> str:
    return json.dumps(make_app(make_server()).openapi(), indent=1, sort_keys=True) + "\n"


def test_every_stream_is_recorded() -> None:
    assert set(recorded_streams()) == set(golden_streams.STREAMS)


@pytest.mark.parametrize("name", golden_streams.STREAMS)
def test_the_steps_are_those_recorded(name: str) -> None:
    steps = golden_streams.STREAMS[name]()
    assert {"num_steps": len(steps), "hashes": golden_streams.hashes(steps)} == recorded_streams()[name]


@pytest.mark.parametrize("name", HELP)
def test_help_is_as_recorded(name: str) -> None:
    assert shown_help(HELP[name]) == (GOLDEN / f"help-{name}.txt").read_text(encoding="utf-8")


def test_the_openapi_document_is_as_recorded() -> None:
    assert openapi() == OPENAPI.read_text(encoding="utf-8")


if __name__ == "__main__":
    golden_streams.main()
    OPENAPI.write_text(openapi(), encoding="utf-8")
    with ThreadPoolExecutor() as pool:
        for name, text in zip(HELP, pool.map(shown_help, HELP.values()), strict=True):
            (GOLDEN / f"help-{name}.txt").write_text(text, encoding="utf-8")
