"""The table of all model types equals the findings of a run. A run notices wrong answers, crashes and hangs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import transformers
from models import CELLS, FAULTS, RESULTS, Cell, Row, TinyModel, all_rows, fill, keys_of
from tiny_types import causal_types

from longspan.errors import ParameterError

FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = FOUND["rows"]
PAGE = (models.ROOT / "docs" / "models.md").read_text(encoding="utf-8")
DRAWN = 12
same_transformers = pytest.mark.skipif(
    transformers.__version__ != FOUND["transformers"], reason="the table is of another version of transformers"
)


@same_transformers
def test_the_table_has_every_type_and_variant_once() -> None:
    assert [*ROWS] == [row.name for row in all_rows()]
    for kind in causal_types():
        assert PAGE.count(f"\n| `{kind}` |") == 1


def test_no_cell_of_the_table_is_wrong_or_lost() -> None:
    faults = [(name, *cell.values()) for name, row in ROWS.items() for cell in row["cells"].values()]
    assert [fault for fault in faults if fault[1] in FAULTS] == []


def test_every_verdict_but_exact_has_a_reason_of_one_line() -> None:
    for name, row in ROWS.items():
        assert [*row["cells"]] == [*CELLS]
        for cell in row["cells"].values():
            assert cell["verdict"] == "exact" or cell["reason"], name
            assert "\n" not in cell.get("reason", ""), name


@same_transformers
def test_results_belong_to_the_classes_of_transformers_that_are_installed() -> None:
    assert [row.name for row in all_rows() if keys_of(row)["source"] != ROWS[row.name]["source"]] == []


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> None:
    """Computes on one thread, with a store of its own."""
    del one_thread
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_alone")
def test_a_row_is_filled_in_cell_by_cell(tmp_path: Path) -> None:
    assert dict(fill(Row(kind="llama"), tmp_path)) == {name: {"verdict": "exact"} for name in CELLS}
    [(_, cell)] = fill(Row(kind="llama", variant="dynamic"), tmp_path / "dynamic", ["1"])
    assert cell["verdict"] == "refused"
    assert "dynamic RoPE" in cell["reason"]


@pytest.mark.usefixtures("_alone")
def test_another_answer_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = Row(kind="llama")
    right = models.ThreadLLM.generate

    def wrong(changed: str) -> Any:
        def generate(*args: Any, **options: Any) -> Any:
            answers = right(*args, **options)
            if changed == "logits":
                output = answers[-1].outputs[0]
                output.logits[-1] = output.logits[-1] + 0.01
            else:
                scored = answers[-1].prompt_logprobs[-1]
                for token, known in scored.items():
                    scored[token] = replace(known, logprob=known.logprob + 0.01)
            return answers

        return generate

    for changed in ("logits", "prompt"):
        monkeypatch.setattr(models.ThreadLLM, "generate", wrong(changed))
        [(_, cell)] = fill(row, tmp_path / changed, ["1"])
        assert cell["verdict"] == "wrong"
        assert changed in cell["reason"]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("error", "verdict"),
    [(ParameterError("tp", "must be 1"), "refused"), (RuntimeError("two lines\nof another"), "lost")],
)
def test_only_reasons_of_longspan_are_refusals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, verdict: str
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise error

    model = TinyModel(Row(kind="llama"), tmp_path)
    monkeypatch.setattr(models, "ThreadLLM", start)
    assert model.cell("tp2")["verdict"] == verdict


@pytest.mark.usefixtures("_alone")
def test_a_model_that_ignores_its_prompt_is_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Equal answers would say nothing."""
    monkeypatch.setattr(models, "_PROMPTS", ([5], [6], [7]))  # nothing lies where the change is made
    [(_, cell)] = fill(Row(kind="llama"), tmp_path, ["1"])
    assert cell == {"verdict": "not tried", "reason": "its answers hardly depend on the prompt"}


_DOOMED = """
import json, os, time
import models

class Doomed:
    def __init__(self, *_, **__):
        pass

    def cell(self, name):
        if name == "2":
            os._exit(3)
        if name == "pp2":
            time.sleep(60)
        return {"verdict": "exact"}

models.TinyModel = Doomed
[(_, cells)] = models.run([models.Row(kind="llama")], 1, 2.0, is_quiet=True)
print(json.dumps(cells))
"""
"""Ends its process in one cell, and hangs in another."""


def test_a_process_that_ends_or_hangs_loses_one_cell() -> None:
    """In a new process: `run` forks, which fails if the process of the tests has mapped more memory than there is."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", _DOOMED], check=True, env=paths, stdout=subprocess.PIPE, text=True)
    cells = json.loads(ran.stdout.splitlines()[-1])
    assert {name: cell["verdict"] for name, cell in cells.items()} == {
        "1": "exact",
        "2": "lost",
        "tp2": "exact",
        "pp2": "lost",
        "gather_hidden": "exact",
    }
    assert "exit code 3" in cells["2"]["reason"]
    assert "no answer in 2 s" in cells["pp2"]["reason"]


def test_a_stopped_run_goes_on_where_it_was_and_faults_are_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row(kind="llama"), Row(kind="opt"), Row(kind="phi")]
    seen: list[str] = []

    def found(todo: list[Row], *_: Any, **__: Any) -> Iterator[tuple[Row, dict[str, Cell]]]:
        for row in todo:
            if seen == ["llama"]:
                seen.append("stopped")
                raise KeyboardInterrupt
            seen.append(row.name)
            verdict = "lost" if row.kind == "phi" else "exact"
            yield row, {name: {"verdict": verdict, "reason": "a reason"} for name in CELLS}

    monkeypatch.setattr(models, "all_rows", lambda: rows)
    monkeypatch.setattr(models, "run", found)
    monkeypatch.setattr(sys, "argv", ["models.py", "--file", str(tmp_path / "models.json")])
    with pytest.raises(KeyboardInterrupt):
        models.main()
    assert models.main() == 1
    assert models.main() == 1
    assert seen == ["llama", "stopped", "opt", "phi"]
    assert "3 rows, 0 of them to be run" in capsys.readouterr().out
    monkeypatch.setattr(models, "all_rows", lambda: rows[:2])
    assert models.main() == 0


@pytest.mark.full
@same_transformers
def test_drawn_types_are_as_the_table_says(tmp_path: Path) -> None:
    """The same types each time, unless LONGSPAN_RANDOM_TESTS is set."""
    seed = time.time_ns() % 1000 if "LONGSPAN_RANDOM_TESTS" in os.environ else 0
    kinds = random.Random(seed).sample(causal_types(), DRAWN)
    print(f"seed {seed}: {', '.join(kinds)}")
    file = tmp_path / "models.json"
    command = [sys.executable, models.__file__, "--jobs", "1", "--file", str(file), "--types", *kinds]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for name, row in json.loads(file.read_text(encoding="utf-8"))["rows"].items():
        verdicts = {cell: found["verdict"] for cell, found in row["cells"].items()}
        assert verdicts == {cell: known["verdict"] for cell, known in ROWS[name]["cells"].items()}, name
