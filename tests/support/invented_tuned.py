"""An invented tuned file: losses by a formula, and the speeds of a member."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from longspan.core.sparse import DropMode
from longspan.cost.csa_pipeline import LinkSpeed, Rates
from longspan.cost.shape import ModelShape
from longspan.policy.csps.search import Configuration, Group
from longspan.policy.csps.tuned import Point, Tuned, tuned

TINY_SHAPE = ModelShape(num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, bytes_per_element=4)
RATES = Rates(inside=LinkSpeed(2e9, 1e-5), between=LinkSpeed(2e8, 1e-5), pairs_per_s=1e9, rest_s=1e-5)
_LENGTHS = (1024, 2048, 4096)


def invented_points(group: Group, *, kv: float = 40.0, qkv: float = 90.0) -> list[Point]:
    """Exact settings, and settings that lose points by the square of the drop ratio."""
    found = [_point(group, length, Configuration(1), "kv", 0.0) for length in _LENGTHS]
    for number in range(60):
        mode: DropMode = "kv" if number % 2 else "qkv"
        configuration = Configuration(2 + number // 2 % 2, round(0.02 * (number % 45), 2))
        ratios = group.mean_drop(configuration)
        lost = (kv if mode == "kv" else qkv) * sum(ratio**2 for ratio in ratios) / len(ratios)
        found.append(_point(group, _LENGTHS[number % 3], configuration, mode, lost))
    return found


def _point(group: Group, length: int, configuration: Configuration, mode: DropMode, lost: float) -> Point:
    return Point(
        num_tokens=length,
        levels=configuration.levels,
        drop=configuration.drop,
        mode=mode,
        scores=((90 - lost) / 100, (80 - lost) / 100),
        num_found=2,
        nll=(2.0, 2.5),
        ttft_s=replace(group, mode=mode).ttft_s(length, configuration),
        attention_s=group.shape.num_heads * group.shape.num_layers * length**2 / 2 / group.rates.pairs_per_s,
    )


@cache
def invented_tuned(shape: ModelShape = TINY_SHAPE, *, kv: float = 40.0, qkv: float = 90.0) -> Tuned:
    group = Group(shape=shape, hosts=(0, 0, 1, 1), rates=RATES)
    points = invented_points(group, kv=kv, qkv=qkv)
    return tuned(points, group, tuned_for="invented", dtype="float32", machine="none", data="none")
