"""The check of the project's English finds words that the style guide avoids, and accepts their replacements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import words

AVOIDED = {
    "a headless relative clause": "It returns what the pool has left.",
    "a pronoun for blocks": "Copy those that a request reads.",
    "a person for a request": "Preempt whoever was admitted last.",
    "a promise of blocks": "Blocks that are promised to a transfer.",
    "a preposition for addition": "Blocks beside the table.",
}
PLAIN = (
    "Return the free blocks of the pool.",
    "Copy those blocks to the host pool.",
    "Preempt the most recently admitted request.",
    "Users who run several models choose a port.",
    "What is a group? A tuple of instances.",
)


def kinds(folder: Path, text: str, suffix: str = ".md") -> list[str]:
    page = folder / f"page{suffix}"
    page.write_text(text)
    return [finding.kind for finding in words.findings(page)]


@pytest.mark.parametrize("sentence", AVOIDED.values(), ids=AVOIDED.keys())
@pytest.mark.parametrize("place", ["{}", '"""{}"""', "# {}", 'raise ValueError("{}")'])
def test_avoided_words_are_found_in_pages_docstrings_comments_and_errors(
    tmp_path: Path, sentence: str, place: str
) -> None:
    suffix = ".md" if place == "{}" else ".py"
    assert "banned" in kinds(tmp_path, place.format(sentence), suffix)


@pytest.mark.parametrize("sentence", PLAIN)
def test_plain_sentences_are_accepted(tmp_path: Path, sentence: str) -> None:
    assert kinds(tmp_path, sentence) == []


def test_long_sentences_and_semicolons_are_found_outside_code(tmp_path: Path) -> None:
    long = "A " + "long " * words.MAX_WORDS + "sentence."
    assert kinds(tmp_path, long) == kinds(tmp_path, "One fact; another fact.") == ["sentences"]
    assert kinds(tmp_path, f"```\n{long}; what\n```\n") == kinds(tmp_path, f"`{long}`") == []


def test_test_names_are_read_as_text(tmp_path: Path) -> None:
    assert "banned" in kinds(tmp_path, "def test_who_waits_for_room_begins_anew(): ...", ".py")
