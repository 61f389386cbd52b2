"""What can go wrong in a simulation: instances that are slow, and workers that are lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from longspan.core.cluster import teams_of
from longspan.core.steps import Forward, MoveKV
from longspan.cost.step_cost import StepCost


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong.

    Attributes:
        slow: by which factor an instance takes longer than its cost, for each that is slow.
        lost_at_s: when a worker is lost. As in a real engine all its fellows are then stopped, and new ones started.
        restart_s: how long those take until they can work.

    Raises:
        ValueError: for a factor or a time out of range.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    lost_at_s: tuple[float, ...] = ()
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        for instance, factor in self.slow.items():
            if instance < 0 or not (factor > 0 and math.isfinite(factor)):
                raise ValueError(f"instance {instance} cannot be slower by {factor}: give a factor above 0")
        for name, value in (*(("a loss", at) for at in self.lost_at_s), ("a restart", self.restart_s)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} at, or of, {value} seconds cannot be: give 0 or more")

    def check(self, num_instances: int) -> None:
        """Raises ValueError when an instance is slow that is not there."""
        for instance in self.slow:
            if instance >= num_instances:
                raise ValueError(f"instance {instance} is to be slow, but there are {num_instances}, counted from 0")


@dataclass(frozen=True)
class SlowedCost:
    """A cost under which some instances compute slowly, by all of their time, also what they wait and sample.

    Links are as quick as ever. Whoever shares a ring with a slow one ends with it, and those behind it in a chain are
    as late; who is late only for that does not make others of a further chain in the same step late.
    """

    cost: StepCost
    factors: Mapping[int, float]

    @property
    def num_layers(self) -> int:
        """See `StepCost`."""
        return self.cost.num_layers

    def move_s(self, move: MoveKV) -> float:
        """See `StepCost`."""
        return self.cost.move_s(move)

    def received_s(self, move: MoveKV) -> float:
        """See `StepCost`."""
        return self.cost.received_s(move)

    def seconds(self, forward: Forward) -> dict[int, float]:
        """See `StepCost`. Whoever works with a slow instance waits for it, but for those before it in a chain."""
        own_s = self.cost.seconds(forward)
        found = {i: seconds * self.factors.get(i, 1.0) for i, seconds in own_s.items()}
        parts = [part for part in forward.parts if len(part.group) > 1]
        for part in parts:
            if part.exchange == "chain":
                late_s = -math.inf
                for instance in part.group:
                    found[instance] = max(found[instance], own_s[instance] + late_s)
                    late_s = max(late_s, found[instance] - own_s[instance])
        for team in teams_of({part.group for part in parts if part.exchange != "chain"}):
            late_s = max(found[instance] - own_s[instance] for instance in team)
            found.update({instance: max(found[instance], own_s[instance] + late_s) for instance in team})
        return found
