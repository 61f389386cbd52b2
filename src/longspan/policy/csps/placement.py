"""Placement by partitions: the length of a prompt gives the number of instances that share it (CSPS §3.2.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from longspan.core.view import ClusterView, RequestView
from longspan.policy.batching import Budget
from longspan.policy.by_length import ByLength

_MEMORY_SHARE = 0.5
"""The share of an instance's KV memory that a partition fills with `partition=memory`. The rest is for outputs and for
other requests. A larger share makes prompts wait for empty instances more often."""


class ByPartition:
    """Places prompts by partitions, or with partition `auto` by their length as `context` does.

    Args:
        size: option `partition`.
    """

    def __init__(self, by_length: ByLength, size: int | Literal["auto", "memory"]) -> None:
        self._by_length, self._size, self._host = by_length, size, by_length.host

    @property
    def is_concurrent(self) -> bool:
        return self._size != "auto" or self._by_length.is_concurrent

    def sized(self, num_tokens: int, block_size: int, num_blocks: int) -> tuple[int, int]:
        """Return the number of instances that share a new prompt, and the tokens of a partition.

        Args:
            num_blocks: size of each KV pool.
        """
        wanted, given = -(-num_tokens // block_size), self._size
        if given == "auto":
            members, blocks = self._by_length.num_members(num_tokens), 0
        else:
            blocks = int(_MEMORY_SHARE * num_blocks) if given == "memory" else min(-(-given // block_size), num_blocks)
            members = min(-(-wanted // max(1, blocks)), len(self._by_length.instances))
        return members, max(blocks, -(-wanted // members)) * block_size

    def members(self, request: RequestView, cached_tokens: int, view: ClusterView) -> int:
        if self._size != "auto":
            return self.sized(request.num_tokens, request.block_size, view.kv.num_blocks(0))[0]
        if request.sparse is not None:  # its partition is for the number of instances that ignores the answer
            return self._by_length.num_members(request.num_tokens - cached_tokens, cached_tokens)
        return self._by_length.members(request, cached_tokens, view)

    def partition(self, request: RequestView, view: ClusterView) -> int:
        if self._size == "auto":
            return 0
        return self.sized(request.num_tokens, request.block_size, view.kv.num_blocks(0))[1]

    def ranked(
        self, able: Sequence[int], cached: Mapping[int, int], request: RequestView, budget: Budget, members: int
    ) -> list[int]:
        """Sort by cached blocks, then free blocks for a partition, then idle instances, on hosts with most of these.

        With a partition, instances without free blocks for it are left out.
        """
        view, host = budget.view, self._host
        partition = self.partition(request, view)
        each = partition // request.block_size or -(-request.blocks_for(request.num_tokens) // members)
        cramped = {i: budget.blocks[i] - budget.reserved[i] + cached[i] < each for i in able}
        if partition:
            able = [i for i in able if not cramped[i]]
        busy = {i: len(view.running.on(i)) > 0 or budget.load[i] > 0 for i in able}
        num_idle, used = Counter(host[i] for i in able if not busy[i]), self._by_length.used_blocks(able, budget)
        return sorted(
            able,
            key=lambda i: (
                *(-cached[i], cramped[i], busy[i], -num_idle[host[i]], used[host[i]], host[i]),
                *(budget.load[i], view.kv.num_allocated(i)),
            ),
        )
