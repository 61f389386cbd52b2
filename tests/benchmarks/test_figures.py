"""Figures of papers: every figure has numbers or a reason, pictures are of the stored numbers, and runs can go on."""

from __future__ import annotations

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))  # the script of pictures imports another one
import claims
import csps_serving
import kv_runahead
import runs
import seesaw_serving
import stored_runs
import tetris_serving
from panels import paper_points

ROOT = Path(__file__).parents[2]
FIGURES: dict[str, list[dict[str, Any]]] = json.loads(claims.FIGURES.read_text(encoding="utf-8"))
POINTS = paper_points()
NUM_FIGURES = {"Context Parallelism": 10, "KV-Runahead": 11, "Tetris": 14, "Seesaw": 15, "CSPS": 17}
KINDS = ("points", "ranges", "marks")


def entries(paper: str) -> dict[str, dict[str, Any]]:
    return {name: entry for entry in POINTS[paper] for name in entry["names"]}


@pytest.mark.parametrize("paper", NUM_FIGURES)
def test_every_figure_of_a_paper_has_numbers_or_a_reason(paper: str) -> None:
    """Numbers of its text for a panel, or the reason why there are none or no panel."""
    found = entries(paper)
    numbered = {int(number) for name in found for number in re.findall(r"\d+", name.split(",")[0])}
    assert numbered == set(range(1, NUM_FIGURES[paper] + 1))
    assert len(found) == sum(len(entry["names"]) for entry in POINTS[paper]), "no panel has two entries"
    for name, entry in found.items():
        has_numbers = any(kind in entry for kind in KINDS)
        assert [has_numbers, "none" in entry, "skip" in entry].count(True) == 1, name
        assert has_numbers == ("source" in entry), name


@pytest.mark.parametrize("paper", NUM_FIGURES)
def test_every_panel_has_the_paper_s_entry(paper: str) -> None:
    found = {name: entry for name, entry in entries(paper).items() if "skip" not in entry}
    panels = {panel["name"]: panel for panel in FIGURES[paper]}
    assert panels.keys() == found.keys() and len(panels) == len(FIGURES[paper])
    for name, panel in panels.items():
        assert bool(panel["ours"]) != bool(panel["missing"]), name
        if panel["ours"]:
            assert found[name].get("points", {}).keys() <= panel["ours"].keys(), name
        for line, ends in found[name].get("ranges", {}).items():
            assert ends[0] <= ends[1], (name, line)


def test_the_papers_points_are_those_of_its_tables() -> None:
    found, tables = entries("KV-Runahead"), kv_runahead._TABLES["llama-7b"]
    for name, columns in (("Fig. 8b", (0, 1)), ("Fig. 8c", (2, 3))):
        for method, column in zip(("TSP", "KVR-S"), columns, strict=True):
            assert found[name]["points"][method] == [[n, row[column]] for n, row in tables.items()]
    for gpus, column in (("1 GPU", 0), ("2 GPUs", 1), ("4 GPUs", 2)):
        wanted = [[n, row[column]] for n, row in kv_runahead._TABLE_3.items()]
        assert found["Figs. 8e and 8f, seconds"]["points"][gpus] == wanted


@pytest.mark.parametrize("paper", NUM_FIGURES)
def test_pictures_are_of_the_stored_numbers(paper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("plotly", "playwright"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'longspan[dev]'")
    drawing = runpy.run_path(str(ROOT / "docs" / "paper_figures.py"))
    assert drawing["is_current"](paper), "run make figures"
    assert drawing["path_of"](paper).stat().st_size < 400_000
    page = drawing["path_of"](paper).with_suffix(".md").read_text(encoding="utf-8")
    assert f"({drawing['path_of'](paper).name})" in page
    changed = {name: [*panels] for name, panels in FIGURES.items()}
    changed[paper][0] = {**changed[paper][0], "title": "another one"}
    monkeypatch.setitem(drawing["is_current"].__globals__, "numbers", lambda: changed)
    assert not drawing["is_current"](paper)


def test_the_hash_of_code_ignores_prose_and_notices_code(tmp_path: Path) -> None:
    path = tmp_path / "a.py"

    def hashed(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        return stored_runs.hash_of([path])

    code = 'def f(x):\n    """Return it."""\n    return x + 1\n'
    assert hashed(code) == hashed(code.replace("Return it.", "Other words.")) == hashed(f"# a comment\n{code}")
    assert hashed(code) != hashed(code.replace("1", "2"))


def test_stored_cases_are_not_simulated_again_unless_code_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupted run goes on with the next case."""
    [one, *_], path = csps_serving.stored(), tmp_path / "cases.json"
    simulated: list[str] = []

    def study(model: str, data_set: csps_serving.DataSet) -> csps_serving.Case:
        if len(simulated) == 3:
            raise KeyboardInterrupt
        simulated.append(f"{model} {data_set.name}")
        return replace(one, model=model, data_set=data_set.name, code=csps_serving.code_version(csps_serving.__file__))

    args = SimpleNamespace(json=path, models=[*csps_serving.MODELS])
    monkeypatch.setattr(csps_serving, "study", study)
    with pytest.raises(KeyboardInterrupt):
        csps_serving.run(args)
    assert len(csps_serving.stored(path)) == len(simulated) == 3
    simulated.clear()
    assert len(csps_serving.run(args)) == 4 and len(simulated) == 1
    simulated.clear()
    assert len(csps_serving.run(args)) == 4 and not simulated
    monkeypatch.setattr(csps_serving, "code_version", lambda _: "other code")
    with pytest.raises(KeyboardInterrupt):
        csps_serving.run(args)
    assert len(csps_serving.stored(path)) == 4, "the fourth case is still the one of the earlier code"


def test_points_of_seesaw_are_not_simulated_again_unless_code_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated: list[str] = []

    def point(case: seesaw_serving.Case) -> seesaw_serving.Point:
        simulated.append(case.name)
        rate = seesaw_serving.Rate(pass_tokens=256, requests_per_s=1.0)
        code = seesaw_serving.code_version(seesaw_serving.__file__)
        return seesaw_serving.Point(figure=13, name=case.name, static={"tp8": rate}, pairs={"a": rate}, code=code)

    args = SimpleNamespace(json=tmp_path / "points.json", figures=(13,), arxiv=seesaw_serving.ARXIV)
    monkeypatch.setattr(seesaw_serving, "point", point)
    assert len(seesaw_serving.run(args)) == len(simulated) == 6
    assert len(seesaw_serving.run(args)) == len(simulated) == 6
    monkeypatch.setattr(seesaw_serving, "code_version", lambda _: "other code")
    seesaw_serving.run(args)
    assert len(simulated) == 12


def test_a_study_of_tetris_replaces_the_numbers_of_its_workload_only(tmp_path: Path) -> None:
    path, before = tmp_path / "figures.json", tetris_serving.stored()
    path.write_bytes(tetris_serving.STORED.read_bytes())
    systems = {"tetris": 4.0, "fixed-sp 8": 3.0, "loongserve": 2.0, "loongserve-disagg": 2.0}
    times = {"ttft_p50_s": 1.0, "ttft_p99_s": 1.0, "ttft_mean_s": 1.0, "tbt_p50_s": 0.1, "tbt_p99_s": 0.1}
    at_limit = tetris_serving.Point(**times, throughput_tokens_per_s=1.0, computing=0.5)
    made = tetris_serving.Study(
        model="llama-3-8b",
        workload="medium",
        num_requests=1000,
        light_s=1.0,
        table="",
        code=tetris_serving.code_version(tetris_serving.__file__),
        max_rates=systems,
        at_limit=dict.fromkeys(systems, at_limit),
        fixed_rates={0.3: {0.1: (1.0, 1.0)}},
        single_chunk={0.3: (1.0, 1.0, 0.5, 0.5)},
    )
    tetris_serving._store(path, [made])
    after = tetris_serving.stored(path)
    assert after["llama-3-70b"] == before["llama-3-70b"]
    assert after["llama-3-8b"].max_rates == {**before["llama-3-8b"].max_rates, "medium": systems}
    assert [study.workload for study in tetris_serving.stored_studies(path)] == ["medium"]
    assert tetris_serving._is_current(made, 1000) and not tetris_serving._is_current(made, 400)
    assert not tetris_serving._is_current(replace(made, code="other code"), 1000)


def test_outdated_runs_are_printed_with_their_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "code_version", lambda _: "other code")
    runs.print_outdated()
    printed = capsys.readouterr().out
    for name, command in runs.COMMANDS.items():
        assert f"{name}: other code has simulated" in printed and f"python benchmarks/papers/{command}" in printed
        assert (ROOT / "benchmarks" / "papers" / command.split()[0]).is_file()


def test_nothing_is_computed_again_if_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stored = json.loads(claims.STORED.read_text(encoding="utf-8")) | {"made_of": claims.inputs()}
    monkeypatch.setattr(claims, "STORED", tmp_path / "claims.json")
    claims.STORED.write_text(json.dumps(stored), encoding="utf-8")
    computed: list[str] = []
    monkeypatch.setattr(claims, "compute", lambda made_of: computed.append(made_of) or stored)
    assert claims.main() and not computed
    printed = capsys.readouterr().out
    for paper in NUM_FIGURES:
        assert re.search(rf"{paper}: \d+ holds, \d+ fails, \d+ not modelled \(\d+ weak\)", printed)
    assert claims.main(again=True) and len(computed) == 1
    monkeypatch.setattr(claims, "inputs", lambda: "changed")
    assert claims.main() and computed[1] == "changed"


def test_the_version_of_a_run_knows_its_script_and_every_module_that_it_simulates(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("RATE = 1\n")
    first = stored_runs.code_version.__wrapped__(str(script))
    script.write_text('"""Words."""\nRATE = 1  # words\n')
    assert stored_runs.code_version.__wrapped__(str(script)) == first, "words decide nothing"
    script.write_text("RATE = 2\n")
    assert stored_runs.code_version.__wrapped__(str(script)) != first
    assert first != stored_runs.code_version.__wrapped__()
