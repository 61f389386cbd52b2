"""Every error about a parameter names it, and says what to give instead or what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from refusals import REMEDY

MAX_LACKING = 5
"""Errors without a word that is known as a remedy. The number may only fall."""
SOURCES = Path(__file__).parents[1] / "src"


def problems() -> Iterator[tuple[str, str]]:
    """Yield the place and the fixed words of each `ParameterError` whose text is written in its call."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ParameterError") and len(node.args) > 1:
                words = [part.value for part in ast.walk(node.args[1]) if isinstance(part, ast.Constant)]
                if words:
                    yield f"{path.relative_to(SOURCES)}:{node.lineno}", " ".join(map(str, words))


def test_errors_about_parameters_state_a_remedy() -> None:
    """Texts with most of their words in variables are left to the tests that raise them, see `refused`."""
    texts = {place: words for place, words in problems() if len(words.split()) > 3}
    assert len(texts) > 60
    lacking = {place: words for place, words in texts.items() if not REMEDY.search(words)}
    assert len(lacking) <= MAX_LACKING, lacking
