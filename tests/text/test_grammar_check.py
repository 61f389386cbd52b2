"""The process in which grammars are tried out: how often it is started."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from llguidance import LLMatcher

from longspan.text.grammar_check import check


@pytest.mark.parametrize("regex", ["[uvw]{3}", "(?!u)v", "(uvw"])  # which no other test has checked before
def test_a_check_is_made_once_whatever_it_finds(regex: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, num_runs = subprocess.run, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        return run(*arguments, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    outcomes = set()
    for _ in range(3):
        try:
            check(LLMatcher.grammar_from_regex(regex))
            outcomes.add("usable")
        except ValueError as error:
            outcomes.add(str(error))
    assert len(outcomes) == 1
    assert (outcomes == {"usable"}) == (regex == "[uvw]{3}")
    assert num_runs == 1


def test_a_check_that_timed_out_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, run = LLMatcher.grammar_from_regex("[xy]{4}"), subprocess.run

    def too_late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("check", 60)

    monkeypatch.setattr(subprocess, "run", too_late)
    with pytest.raises(ValueError, match="too much time"):
        check(grammar)
    monkeypatch.setattr(subprocess, "run", run)
    check(grammar)
