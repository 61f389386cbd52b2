"""docs/serving.md says what the code says."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import make_server, routes_of

from longspan.serve.app import make_app

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "serving.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(DOCS / "generate.py"))


def test_the_generated_parts_are_up_to_date() -> None:
    rewritten: Callable[[str], str] = SCRIPT["rewritten"]
    assert rewritten(PAGE) == PAGE, "run make docs"
    stale = re.sub(r"\| `--port`.*\n", "", PAGE)
    assert stale != PAGE
    assert rewritten(stale) == PAGE


@pytest.mark.parametrize("part", SCRIPT["PARTS"])
def test_every_generated_part_is_on_the_page(part: str) -> None:
    assert f"<!-- generated: {part} -->" in PAGE
    assert SCRIPT["PARTS"][part]() in PAGE


def test_every_route_is_described() -> None:
    for method, path in routes_of(make_app(make_server(api_keys=("sesame",)))):
        assert method == "HEAD" or f"`{method} {path}`" in PAGE
