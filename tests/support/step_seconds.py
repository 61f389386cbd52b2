"""The seconds of a step on each instance, by a cost."""

from __future__ import annotations

from longspan.core.steps import Forward
from longspan.cost.step_cost import StepCost


def seconds_of(cost: StepCost, forward: Forward) -> dict[int, float]:
    """Return the sum of all stages of each instance."""
    return {instance: sum(stages) for instance, stages in cost.stage_seconds(forward).items()}
