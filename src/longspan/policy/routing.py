"""Instances that only decode: which of them a request goes to, and what each does in a step.

By Tetris §5.2 a request goes where most slots are free for each request that decodes there. Blocks of KV on its way
count as used, also of requests that wait for them (the virtual usage of Llumix). Where that is more than there is, the
paper's quotient would prefer the instance with the most requests; the one that lacks the fewest blocks is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from longspan.core.protocols import ClusterView, Plan
from longspan.core.request import Request
from longspan.policy.batching import Batch, Placement, fill


class Router:
    """Chooses targets for the admissions of one plan."""

    def __init__(self, view: ClusterView, decode: Sequence[int]) -> None:
        self._view, self._decode = view, decode
        self._chosen: Counter[int] = Counter()

    def route(self, request: Request) -> int | None:
        """The instance with the highest freeness, of equals the first, which counts the request from now on; None for
        a request that ends with its next token.
        """
        if len(request.output) + 1 >= request.max_tokens:
            return None
        target = max(self._decode, key=self._freeness)
        self._chosen[target] += request.blocks_for(request.num_tokens)
        return target

    def _freeness(self, instance: int) -> float:
        """Free blocks for each request; where more are promised than there are, how many are missing, below 0."""
        view = self._view
        free = view.account.pool(instance).num_free - view.promised.get(instance, 0) - self._chosen.get(instance, 0)
        return free / max(1, len(view.running.on(instance))) if free > 0 else free


def plan_decodes(view: ClusterView, decode: Sequence[int], placement: Placement) -> Plan:
    """Continuous batching on each of these instances by itself; nobody is admitted there."""
    full, occupied = view.full, view.running.occupied
    able = [i for i in decode if i in occupied and i not in full]
    filled = [fill(view, frozenset((instance,)), placement, ()) or Batch() for instance in able]
    return Plan(
        preempted=tuple([request for batch in filled for request in batch.preempted]),
        batches=tuple([tuple(batch.shares) for batch in filled if batch.shares]),
    )
