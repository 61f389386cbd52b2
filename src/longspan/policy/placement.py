"""Placement of requests on groups: how many instances share a request, which ones, and how many tokens each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from longspan.core.view import ClusterView, RequestView
from longspan.policy.batching import Budget


class Placement(Protocol):
    """Places the requests of policy `context`."""

    @property
    def is_concurrent(self) -> bool:
        """Whether groups without a common instance prefill sharded prompts at the same time."""

    def members(self, request: RequestView, cached_tokens: int, view: ClusterView, /) -> int:
        """Return the number of instances for a request with cached tokens, without a check of free blocks."""

    def partition(self, request: RequestView, view: ClusterView, /) -> int:
        """Return the tokens of a whole prompt on each member but the last, which has the rest. 0 is even pieces."""

    def ranked(
        self, able: Sequence[int], cached: Mapping[int, int], request: RequestView, budget: Budget, members: int, /
    ) -> list[int]:
        """Sort the instances that can take a prompt, best first.

        Args:
            cached: blocks of the prompt that each instance has, or can load.
        """
