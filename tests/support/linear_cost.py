"""A cost that can be computed in the head."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from longspan.core.steps import Forward, MoveKV
from longspan.cost.flows import Flow


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """`base_s` plus `per_token_s` for every token of the busiest instance. Stages take equal parts of it.

    A transfer takes `per_block_s` for every block.
    """

    base_s: float = 0.01
    per_token_s: float = 0.0005
    num_layers: int = 1
    per_block_s: float = 0.001
    num_stages: int = 1

    def seconds(self, forward: Forward) -> dict[int, float]:
        """Prices it as `StepCost` says."""
        tokens: Counter[int] = Counter()
        for part in forward.parts:
            for instance, runs in zip(part.group, part.runs, strict=True):
                tokens[instance] += sum(len(run) for run in runs)
        return dict.fromkeys(forward.instances, self.base_s + self.per_token_s * max(tokens.values()))

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        """Splits it as `StepCost` says."""
        parts = self.num_stages
        return {instance: (seconds / parts,) * parts for instance, seconds in self.seconds(forward).items()}

    def exposed_s(self, forward: Forward) -> None:
        """Returns None: it has no messages."""

    def flows(self, move: MoveKV) -> tuple[Flow, ...]:
        """See `StepCost`. Bytes are blocks."""
        pairs = Counter((source.instance, target.instance) for source, target in move.copies)
        return tuple(
            Flow(*pair, number, 0.0, ((("out", pair[0]), self.per_block_s), (("in", pair[1]), self.per_block_s)))
            for pair, number in pairs.items()
        )
