"""The docs site, opened as files in headless Chromium: diagrams, search and layout work without a network."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'longspan[dev]'")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PICTURE = runpy.run_path(str(DOCS / "picture.py"))
MKDOCS, SCRIPTS = ROOT / ".venv-site" / "bin" / "mkdocs", ROOT / ".venv-site" / "scripts"
if PICTURE["find_chromium"]() is None:
    pytest.skip("Chromium is not installed: apt-get install chromium", allow_module_level=True)
if not (MKDOCS.exists() and SCRIPTS.exists()):
    pytest.skip("the tools of the docs site are not installed: make site-tools", allow_module_level=True)

TEXTS = {page.relative_to(DOCS): page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
DIAGRAMS = {page: text.count("```mermaid") for page, text in TEXTS.items() if "```mermaid" in text}
OPEN_SHADOWS = """
    const attach = Element.prototype.attachShadow
    Element.prototype.attachShadow = function () { return attach.call(this, {mode: 'open'}) }"""
"""The theme draws diagrams in closed shadow trees, which a test cannot see."""
ARE_DRAWN = "number => document.querySelectorAll('div.mermaid').length == number"
BOXES = """() => [...document.querySelectorAll('div.mermaid')].map(box => {
    const {width, height} = box.shadowRoot.querySelector('svg').getBoundingClientRect()
    return [width, height, box.shadowRoot.textContent.includes('Syntax error')]})"""
IS_WIDER = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"


class Site:
    """The built site in one page of a browser, with the page's requests and complaints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._complaints: list[str] = []
        self._addresses: list[str] = []

    def watch(self, page: Any) -> None:
        page.set_viewport_size({"width": 1400, "height": 900})  # wide enough for the navigation
        page.add_init_script(OPEN_SHADOWS)
        page.on("console", lambda message: self._complaints.append(message.text))
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("request", lambda request: self._addresses.append(request.url))
        self._page = page

    def open(self, page: Path) -> Any:
        self._complaints.clear()
        self._addresses.clear()
        self._page.goto((self.folder / page.with_suffix(".html")).as_uri())
        return self._page

    def check(self) -> None:
        """Check that the page loaded nothing from a network and complained of nothing."""
        remote = [address for address in self._addresses if not address.startswith(("file:", "data:", "blob:"))]
        assert (self._complaints, remote) == ([], [])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    site = Site(folder)
    with PICTURE["opened"](folder / "index.html", site.watch):
        yield site


@pytest.mark.parametrize("page", DIAGRAMS, ids=str)
def test_diagrams_are_drawn_without_a_network(page: Path, site: Site, tmp_path: Path) -> None:
    shown = site.open(page)
    shown.wait_for_function(ARE_DRAWN, arg=DIAGRAMS[page])
    for number, (width, height, is_error) in enumerate(shown.evaluate(BOXES)):
        assert width > 100 and height > 40 and not is_error
        picture = tmp_path / f"{page.stem}-{number}.png"
        shown.locator("div.mermaid").nth(number).screenshot(path=picture)
        assert picture.stat().st_size > 2000, "the picture is not blank"
    site.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "tasks/operate", "serving", "architecture/index"])
def test_pages_fit_the_window_without_a_network(name: str, scheme: str, site: Site, tmp_path: Path) -> None:
    shown = site.open(Path(f"{name}.md"))
    if scheme == "dark":
        shown.locator("label[title=Dark]").click()
    assert shown.evaluate("() => document.body.dataset.mdColorScheme") == ("slate" if scheme == "dark" else "default")
    assert not shown.evaluate(IS_WIDER)
    assert shown.locator(".md-nav--primary a:visible").count() > 5, "the navigation is shown"
    picture = tmp_path / f"{Path(name).name}-{scheme}.png"
    shown.screenshot(path=picture)
    assert picture.stat().st_size > 20_000, "the picture is not blank"
    if scheme == "dark":
        shown.locator("label[title=Light]").click()
    site.check()


def test_search_needs_no_network(site: Site) -> None:
    shown = site.open(Path("index.md"))
    shown.locator(".md-search__input").click()
    shown.keyboard.type("zigzag")
    result = shown.locator(".md-search-result__item").first
    result.wait_for()
    assert re.search("zigzag", result.text_content(), re.IGNORECASE)
    site.check()


def test_every_page_is_in_the_navigation(site: Site) -> None:
    shown = site.open(Path("index.md"))
    links = set(shown.eval_on_selector_all(".md-nav--primary a[href]", "links => links.map(link => link.href)"))
    pages = {(site.folder / page.with_suffix(".html")).as_uri() for page in TEXTS}
    missing = {page for page in pages - links if "/experiments/" not in page}
    assert not missing
