"""Links between instances whose speed changes at random, as with other traffic on them.

The command line builds a flag from `NoisyLink`, so this module imports no cost model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspan.core.cluster import Cluster
    from longspan.core.steps import Forward, MoveKV
    from longspan.cost.flows import Flow
    from longspan.cost.step_cost import ReshardCost, RooflineCost


@dataclass(frozen=True, kw_only=True)
class NoisyLink:
    """Random factors of the speed of links, uniform from `low` to `high`: one per step and pair of instances.

    Attributes:
        seed: equal seeds give equal factors.
    """

    low: float
    high: float
    seed: int

    @classmethod
    def parse(cls, text: str) -> NoisyLink:
        """Parse `0.5:1:7`: factors from 0.5 to 1, with seed 7. Raise ValueError for another form."""
        try:
            low, high, seed = text.split(":")
            return cls(low=float(low), high=float(high), seed=int(seed))
        except ValueError:
            raise ValueError(f"is LOW:HIGH:SEED, such as 0.5:1:0, but {text!r:.60} given") from None

    def factor(self, step: int, first: int, second: int) -> float:
        """Return the factor of the link between two instances, in both directions, for all of a step."""
        low, high = sorted((first, second))
        return Random(f"{self.seed} {step} {low} {high}").uniform(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}:{self.seed}"


@dataclass(frozen=True, kw_only=True)
class NoisyCost:
    """A `StepCost` with random speeds of links between instances. Every step has its own, by its number."""

    quiet: RooflineCost
    noise: NoisyLink

    @property
    def num_layers(self) -> int:
        return self.quiet.num_layers

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        if len(forward.instances) == 1:
            return self.quiet.stage_seconds(forward)  # no link is used, and the quiet cost remembers decode steps
        return self._in_step(forward.number).stage_seconds(forward)

    def exposed_s(self, forward: Forward) -> dict[int, float]:
        return self._in_step(forward.number).exposed_s(forward)

    def flows(self, move: MoveKV) -> Sequence[Flow]:
        return self._in_step(move.number).flows(move)

    def resharded(self, cluster: Cluster) -> NoisyCost:
        return NoisyCost(quiet=self.quiet.resharded(cluster), noise=self.noise)

    def reshard(self, cluster: Cluster) -> ReshardCost:
        return self.quiet.reshard(cluster)

    def _in_step(self, number: int) -> RooflineCost:
        return self.quiet.with_speeds(partial(self.noise.factor, number))
