"""The pages agree with the code, and name only files that exist."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import make_server, routes_of

from longspan.serve.app import make_app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "serving.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(DOCS / "generate.py"))
ROOT_PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES = (*ROOT_PAGES, *sorted(DOCS.rglob("*.md")))
ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]*)")
NAMED = re.compile(r"`(?:python )?((?:[\w.]+/)+[\w.]*\w)/?(?: --[^`]*)?`")
ROOMS = (ROOT, ROOT / "src" / "longspan", ROOT / "benchmarks", DOCS)
FOLDERS = {folder.name for room in ROOMS for folder in room.iterdir() if folder.is_dir()}
MADE = ("profiles", "site", ".venv", "exchanges/sparse_kv.py", "policy/last.py")
"""Parts of names of files that are made later, or that a reader makes."""


def test_the_generated_parts_are_up_to_date() -> None:
    rewritten: Callable[[str], str] = SCRIPT["rewritten"]
    for page in SCRIPT["PAGES"]:
        assert rewritten(page.read_text(encoding="utf-8")) == page.read_text(encoding="utf-8"), "run make docs"
    assert SCRIPT["served_types"]() == SCRIPT["TYPES"].read_text(encoding="utf-8"), "run make docs"
    stale = re.sub(r"\| `--port`.*\n", "", PAGE)
    assert stale != PAGE
    assert rewritten(stale) == PAGE


@pytest.mark.parametrize("part", SCRIPT["PARTS"])
def test_every_generated_part_is_on_the_page(part: str) -> None:
    begins = f"<!-- generated: {part} -->"
    [page] = [text for path in SCRIPT["PAGES"] if begins in (text := path.read_text(encoding="utf-8"))]
    assert SCRIPT["PARTS"][part]() in page


def test_every_route_is_described() -> None:
    for method, path in routes_of(make_app(make_server(api_keys=("sesame",)))):
        described = path.replace(":path", "")
        assert method == "HEAD" or f"`{method} {described}`" in PAGE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_are_there(page: Path) -> None:
    """Names such as `attn/merge.py`, from the root, the package, or a folder of scripts."""
    names = {name for name in NAMED.findall(page.read_text(encoding="utf-8")) if name.split("/")[0] in FOLDERS}
    missing = [name for name in names if not any((room / name).exists() for room in ROOMS)]
    assert [name for name in missing if not any(made in name for made in MADE)] == []


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings: words joined by hyphens, without punctuation, as MkDocs makes them."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.*)$", lines, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", title) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_that_pages_link_to_are_headings(page: Path) -> None:
    links = [(page.parent / path if path else page, name) for path, name in ANCHOR.findall(page.read_text("utf-8"))]
    assert [(str(path), name) for path, name in links if name not in anchors(path)] == []


@pytest.mark.parametrize("page", ROOT_PAGES, ids=lambda page: page.name)
def test_relative_links_of_root_pages_are_files(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert links == [link for link in links if (ROOT / link).exists()]


def test_description_for_package_indexes_has_no_relative_links(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", plugin)  # only builds have hatchling
    text = runpy.run_path(str(ROOT / "hatch_build.py"))["index_readme"]((ROOT / "README.md").read_text("utf-8"))
    assert LINK.findall(text) == [] and "![" not in text and text.startswith("# longspan\n")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
