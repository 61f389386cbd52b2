"""The check of both targets for mixes of short and long prompts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import no_tax
from no_tax import Cell, Measured, mix, row, verdict_of

ALONE = Measured(ttft_s=0.1, ttft_p99_s=0.4, tbt_s=0.01, long_tokens_per_s=0.0)
CHUNKED = replace(ALONE, ttft_s=0.2, long_tokens_per_s=5000.0)
GROUPS = replace(ALONE, ttft_s=1.5, long_tokens_per_s=20_000.0)
CELL = Cell(deployment="8B", num_gpus=8, long_share=0.05, load=0.5)


@pytest.mark.parametrize(
    ("ours", "regrets"),
    [
        ({}, []),
        ({"ttft_s": 0.102, "ttft_p99_s": 0.408, "tbt_s": 0.0102, "long_tokens_per_s": 18_000.0}, []),
        ({"ttft_s": 0.103}, ["short TTFT +3%"]),
        ({"ttft_p99_s": 0.8}, ["short TTFT P99 +100%"]),
        ({"tbt_s": 0.0103, "long_tokens_per_s": 10_000.0}, ["short TBT +3%", "long speed -50%"]),
    ],
)
def test_a_missed_target_has_a_regret(ours: dict[str, float], regrets: list[str]) -> None:
    """Short requests are compared with `chunked` that serves no long ones, long ones with the best groups."""
    auto = replace(ALONE, long_tokens_per_s=20_000.0, **ours) if "long_tokens_per_s" not in ours else None
    runs = {"alone": ALONE, "chunked": CHUNKED, "auto": auto or replace(ALONE, **ours), "fixed-sp 8": GROUPS}
    verdict = verdict_of(runs)
    assert verdict.regrets == regrets
    assert (verdict.best_size, verdict.price) == (8, 15.0)
    assert row(CELL, verdict).endswith(f"| 8 | 15.00 | {', '.join(regrets)} |")


def test_a_mix_without_long_requests_has_no_speed() -> None:
    verdict = verdict_of({"alone": ALONE, "chunked": ALONE, "auto": ALONE})
    assert verdict.speed is None and not verdict.regrets


def test_single_instances_count_as_static_groups() -> None:
    slow_groups = replace(GROUPS, long_tokens_per_s=4000.0)
    auto = replace(ALONE, long_tokens_per_s=5000.0)
    verdict = verdict_of({"alone": ALONE, "chunked": CHUNKED, "auto": auto, "fixed-sp 8": slow_groups})
    assert (verdict.best_size, verdict.speed) == (1, 1.0)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.2])
def test_a_mix_has_the_share_of_long_requests(share: float) -> None:
    lengths = [len(one.prompt) for one in mix(share).arrivals]
    num_long = sum(length >= 131_072 for length in lengths)
    assert num_long == round(share * len(lengths)) and (num_long >= 10 or not share)
    assert all(length < 4096 or length >= 131_072 for length in lengths)


def test_groups_divide_the_instances() -> None:
    assert CELL.group_sizes == [2, 4, 8]
    assert replace(CELL, deployment="70B").group_sizes == [2]
    assert replace(CELL, num_gpus=64).group_sizes == [16, 32, 64]
    assert replace(CELL, long_share=0.0).group_sizes == []


def test_a_cell_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both policies serve a small mix, and short requests alone are faster than with long ones."""
    monkeypatch.setattr(no_tax, "_NUM_REQUESTS", 20)
    monkeypatch.setattr(no_tax, "_NUM_LONG", 2)
    cell = replace(CELL, long_share=0.2, load=0.9)
    mix.cache_clear()
    try:
        alone, chunked = no_tax.measure(cell, "alone"), no_tax.measure(cell, "chunked")
    finally:
        mix.cache_clear()
        no_tax._highest.cache_clear()
    assert alone.long_tokens_per_s == 0.0 < chunked.long_tokens_per_s
    assert alone.ttft_s <= chunked.ttft_s
