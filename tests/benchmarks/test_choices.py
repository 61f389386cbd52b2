"""The comparison of the default policy with fixed ones: what it requires, and a small part of it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import choices


def point(policy: str, workload: str = "short", **numbers: float) -> choices.Point:
    times = dict.fromkeys(("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "e2e_p50"), 1.0)
    given = {"goodput": 0.8, "rate": 1.0, "load": 0.5, **times, **numbers}
    return choices.Point(cluster="c", workload=workload, policy=policy, **given)


@pytest.mark.parametrize(
    ("ours", "workload", "fails"),
    [
        ({}, "short", 0),
        ({"goodput": 0.785}, "short", 0),
        ({"goodput": 0.783}, "short", 1),
        ({"ttft_p99": 1.1, "tbt_p99": 1.1, "e2e_p50": 1.1, "ttft_p50": 9.0}, "short", 0),
        ({"ttft_p99": 1.11, "tbt_p99": 1.11, "e2e_p50": 1.11}, "short", 3),
        ({"goodput": 0.87}, "chats and documents", 1),
        ({"goodput": 0.89}, "chats and documents", 0),
    ],
)
def test_what_is_required_of_the_default(
    ours: dict[str, float], workload: str, fails: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the policy with the highest goodput counts."""
    others = [point("chunked", workload), point("context", workload, goodput=0.5, ttft_p99=0.1, e2e_p50=0.1)]
    assert choices._report([point("auto", workload, **ours), *others]) == (1 if fails else 0)
    assert f"{fails} requirements failed" in capsys.readouterr().out


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
