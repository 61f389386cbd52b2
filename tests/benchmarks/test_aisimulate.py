"""The comparison with AISimulate: its configurations, its errors, and the verdict about two choices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import aisimulate
from aisimulate import LAYOUTS, QUESTIONS, Choice, Prediction, RefusedError, ask, error_line, is_worse, their_config


def predicted(goodput: float) -> Prediction:
    return Prediction(ttft_s=0.1, tpot_s=0.01, tokens_per_s_per_gpu=100.0, goodput_per_s=goodput)


@pytest.mark.parametrize(
    ("ours_of_theirs", "theirs_of_ours", "worse"), [(0.96, 0.96, False), (0.94, 1.0, True), (1.0, 0.94, True)]
)
def test_a_different_choice_is_worse_if_a_tool_predicts_less_goodput(
    ours_of_theirs: float, theirs_of_ours: float, worse: bool
) -> None:
    first, second = LAYOUTS[:2]
    table = {
        first: (predicted(1.0), predicted(theirs_of_ours)),
        second: (predicted(ours_of_theirs), predicted(1.0)),
    }
    assert is_worse(Choice(ours=first, theirs=second, our_s=1.0, their_s=1.0), table) is worse
    assert not is_worse(Choice(ours=first, theirs=first, our_s=1.0, their_s=1.0), table)


def test_a_choice_that_the_other_refuses_is_worse() -> None:
    first, second = LAYOUTS[:2]
    table = {first: (predicted(1.0), None), second: (predicted(1.0), predicted(1.0))}
    assert is_worse(Choice(ours=first, theirs=second, our_s=1.0, their_s=1.0), table)


def test_both_get_the_same_question(tmp_path: Path) -> None:
    for question in QUESTIONS:
        config = their_config(question, LAYOUTS[1])
        source, load = config["traffic"]["source"], config["traffic"]["load"]
        lengths = json.loads(aisimulate.lengths_file(question, tmp_path).read_text())
        assert lengths["input_len"] == {"0": source["input_tokens"], "1": source["input_tokens"]}
        assert lengths["output_len"] == {"0": source["output_tokens"], "1": source["output_tokens"]}
        assert load["requests_per_second"] == question.rate
        assert config["evaluation"]["sla"] == {"ttft_ms": 2000.0, "itl_ms": 50.0}
        assert config["engine"]["workers"]["aggregated"]["parallelism"] == {"replicas": 4, "tensor": 2}
        assert "optimization" not in config
        gpus = their_config(question, None)["optimization"]["constraints"]
        assert gpus == {"min_candidate_gpus": 8, "max_candidate_gpus": 8}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("aisimulate: error: 1 validation error\n  Extra inputs are not permitted\nsee a page", "Extra inputs are not"),
        ("warning\npredict failed: ValueError: no timing data", "predict failed: ValueError: no timing data"),
        ("longspan: there is no option --backend", "longspan: there is no option --backend"),
        ("", "no message"),
    ],
)
def test_the_line_with_the_reason_is_shown(text: str, reason: str) -> None:
    assert error_line(text).startswith(reason)


def test_answers_and_errors_of_the_command_line_are_read(tmp_path: Path) -> None:
    """Of the output, only the last line is JSON."""
    tool = tmp_path / "bin" / "aisimulate"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = predict ] || { echo "failed: $1" >&2; exit 2; }\necho progress\necho "[1]"\n')
    tool.chmod(0o755)
    assert ask(tmp_path, "predict", {}, tmp_path) == [1]
    with pytest.raises(RefusedError, match="failed: recommend"):
        ask(tmp_path, "recommend", {}, tmp_path)
