"""The comparison of the default policy with fixed ones: its requirements, and a small part of it."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import msgspec
import pytest
from workloads import machine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import choices


def point(policy: str, workload: str = "short", **numbers: float) -> choices.Point:
    times = dict.fromkeys(("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "e2e_p50"), 1.0)
    given = {"goodput": 0.8, "rate": 1.0, "load": 0.5, "num_requests": 9, **times, **numbers}
    return choices.Point(cluster="c", workload=workload, policy=policy, **given)


@pytest.mark.parametrize(
    ("ours", "workload", "fails"),
    [
        ({}, "short", 0),
        ({"goodput": 0.785}, "short", 0),
        ({"goodput": 0.783}, "short", 1),
        ({"ttft_p99": 1.25, "tbt_p99": 1.25, "e2e_p50": 1.1, "ttft_p50": 9.0}, "short", 0),
        ({"ttft_p99": 1.26, "tbt_p99": 1.26, "e2e_p50": 1.11}, "short", 3),
        ({"goodput": 0.87}, "chats and documents", 1),
        ({"goodput": 0.89}, "chats and documents", 0),
    ],
)
def test_requirements_of_the_default_policy(
    ours: dict[str, float], workload: str, fails: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the policy with the highest goodput counts."""
    others = [point("chunked", workload), point("context", workload, goodput=0.5, ttft_p99=0.1, e2e_p50=0.1)]
    assert choices.report([point("auto", workload, **ours), *others]) == (1 if fails else 0)
    assert f"{fails} requirements failed" in capsys.readouterr().out


def test_cells_that_are_left_out(tmp_path: Path) -> None:
    """Traces and profiles that are not given, workloads of other clusters, and groups that a machine does not have."""
    profile = tmp_path / "profile.json"
    profile.write_text(machine(2).to_json(), encoding="utf-8")
    none, both = choices.Files(), choices.Files(tmp_path, profile)
    sheets, small = "1x8 A100, 8B", "up to 6K"
    assert choices.is_possible(sheets, "short", "fixed-sp 8", none)
    assert not choices.is_possible(sheets, "splitwise_conv", "auto", none)
    assert choices.is_possible(sheets, "splitwise_conv", "auto", both)
    assert not choices.is_possible(sheets, small, "auto", both)
    assert not choices.is_possible(choices.MEASURED, small, "auto", none)
    assert not choices.is_possible(choices.MEASURED, "short", "auto", both)
    able = {policy for policy in choices.POLICIES if choices.is_possible(choices.MEASURED, small, policy, both)}
    assert set(choices.POLICIES) - able == {"fixed-sp 4", "fixed-sp 8"}


def test_a_page_of_plots(tmp_path: Path) -> None:
    cells = product(("auto", "chunked"), "ab", (0.2, 0.5))
    points = [point(policy, workload, load=load) for policy, workload, load in cells]
    choices.plot(points, tmp_path / "plots.html")
    page = (tmp_path / "plots.html").read_text(encoding="utf-8")
    assert page.count('"name":"chunked"') == 2 * 6


@pytest.mark.full
def test_the_default_is_ahead_on_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "points.json"
    monkeypatch.setattr(sys, "argv", ["choices.py", "--quick", "--json", str(file)])
    choices.main()
    points = msgspec.json.decode(file.read_bytes(), type=list[choices.Point])
    for load in (0.5, 0.8):
        cell = [one for one in points if (one.workload, one.load) == ("chats and documents", load)]
        mixed = {one.policy: one.goodput for one in cell}
        assert len(mixed) == 8 and mixed.pop("auto") > max(mixed.values())
