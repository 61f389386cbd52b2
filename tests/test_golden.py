"""Recorded outputs stay equal: the steps of some fifty workloads, every `--help`, the OpenAPI document.

`python tests/test_golden.py` records all of it again. Review then shows the difference.
"""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import cyclopts
import golden_streams
import pytest
from fake_server import make_server
from rich.console import Console

from longspan.attn import check
from longspan.cli import app
from longspan.serve.app import make_app

GOLDEN = Path(__file__).parent / "golden"
OPENAPI = GOLDEN / "openapi.json"
HELP = (
    "longspan",
    "generate",
    "ask",
    "get",
    "chat",
    "serve",
    "batch",
    "models",
    "profile",
    "eval",
    "tune",
    "simulate",
    "estimate",
    "plan",
    "cache",
    "attn-check",
)


def recorded_streams() -> dict[str, dict[str, object]]:
    return json.loads(golden_streams.RECORDED.read_text(encoding="utf-8"))


def shown_help(name: str) -> str:
    """The words of a help text, one line per option, whatever draws the boxes and breaks the lines."""
    attn_check = cyclopts.App(name="python -m longspan.attn.check", default_command=check.main)
    run = attn_check if name == "attn-check" else app.main
    verb = [] if name in ("longspan", "attn-check") else [name]
    wide = Console(width=400, color_system=None)
    consoles = patch.object(attn_check, "_console", wide), patch.object(app.app, "_console", wide)
    with consoles[0], consoles[1], redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as end:
        run([*verb, "--help"])
    assert end.value.code == 0
    lines = (re.sub(r"[╭─╮│╰╯\s]+", " ", line).strip() for line in shown.getvalue().splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def openapi() -> str:
    return json.dumps(make_app(make_server()).openapi(), indent=1, sort_keys=True) + "\n"


def test_every_stream_is_recorded() -> None:
    assert set(recorded_streams()) == set(golden_streams.STREAMS)


@pytest.mark.parametrize("name", golden_streams.STREAMS)
def test_the_steps_are_those_recorded(name: str) -> None:
    steps = golden_streams.STREAMS[name]()
    assert {"num_steps": len(steps), "hashes": golden_streams.hashes(steps)} == recorded_streams()[name]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("name", HELP)
def test_help_is_as_recorded(name: str) -> None:
    assert shown_help(name) == (GOLDEN / f"help-{name}.txt").read_text(encoding="utf-8")


def test_the_openapi_document_is_as_recorded() -> None:
    assert openapi() == OPENAPI.read_text(encoding="utf-8")


if __name__ == "__main__":
    golden_streams.main()
    OPENAPI.write_text(openapi(), encoding="utf-8")
    for name in HELP:
        (GOLDEN / f"help-{name}.txt").write_text(shown_help(name), encoding="utf-8")
