"""Fixed sequence parallelism, a baseline of Tetris: each prompt runs on one of equally large groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.cost.profile import PrefillTime
from longspan.errors import ParameterError
from longspan.policy.facts import Facts
from longspan.policy.tetris import GroupOptions, sp_times
from longspan.policy.tetris.execution import Cdsp
from longspan.policy.tetris.planner import ChunkPlan, Planner, Prompt


@dataclass(frozen=True, kw_only=True)
class FixedOptions(GroupOptions):
    """Options of `fixed-sp`: the size of groups, which is required, their exchanges, and `balance`."""

    sp: int = 0
    balance: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sp < 1:
            raise ParameterError("sp", "must be 1 or more: give the number of instances of each group", self.sp)


class FixedGroups(Planner):
    """Plans on fixed groups of `size` neighbours. For the planner, each group is a host."""

    def __init__(self, times: PrefillTime, instances: Sequence[int], size: int) -> None:
        assert len(instances) % size == 0, "all groups are equally large"
        self._group_of = {instance: index // size for index, instance in enumerate(instances)}
        super().__init__({size: times}, [self._group_of[instance] for instance in sorted(instances)])

    def plan(self, prompt: Prompt, queue_s: Sequence[float], used: Sequence[int] = ()) -> ChunkPlan | None:
        """Plan one chunk on the group with cached blocks, or with the shortest queue. None if several have them."""
        if len({self._group_of[instance] for instance in prompt.held}) > 1:
            return None
        return super().plan(prompt, queue_s, used)


class FixedSp(Cdsp, name="fixed-sp"):
    """Runs each prompt on one of the fixed groups."""

    Options = FixedOptions
    knows_roles = True

    def __init__(self, instances: tuple[int, ...], options: FixedOptions, facts: Facts) -> None:
        size, number = options.sp, len(instances)
        if size <= number and number % size:
            problem = f"({size}) does not divide {number} instances into groups: choose a divisor, or give `parallel`"
            raise ParameterError("sp", f"{problem} another number", size)
        times = sp_times(facts, options.exchanges, str(size), number)[size]
        planner = FixedGroups(times, instances, size)
        parts = options.group_parts(instances, facts, balance=options.balance)
        super().__init__(instances, options, planner, parts, decode=facts.decode)
