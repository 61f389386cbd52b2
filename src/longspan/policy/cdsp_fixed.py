"""The baseline of Tetris: groups of one size that never change; a prompt goes to the one that is free first."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.policy.cdsp import Chunk, ChunkPlan, Prompt
from longspan.policy.cdsp_times import SpTimes


class FixedGroups:
    """Groups of `size` neighbours, in the order of `everyone`, who divide into such groups."""

    def __init__(self, times: SpTimes, everyone: Sequence[int], size: int) -> None:
        assert len(everyone) % size == 0, "nobody is left over"
        self.groups = [tuple(everyone[start : start + size]) for start in range(0, len(everyone), size)]
        self._times = times

    @property
    def largest(self) -> int:
        """How many instances can have one prompt."""
        return len(self.groups[0])

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:
        """Of a chunk."""
        assert size == self.largest, "there is one size"
        return self._times.seconds(new_tokens, cached_tokens)

    def plan(self, prompt: Prompt, queue_s: Sequence[float]) -> ChunkPlan | None:
        """All tokens in one chunk, on the group with the shortest queue of those that have all of `prompt.held`."""
        able = [group for group in self.groups if set(prompt.held) <= set(group)]
        if not able:
            return None
        group = min(able, key=lambda one: max(queue_s[i] for i in one))
        seconds = self._times.seconds(prompt.new_tokens, prompt.cached_tokens)
        chunk = Chunk(num_tokens=prompt.new_tokens, group=group)
        return ChunkPlan(chunks=(chunk,), ttft_s=max(queue_s[i] for i in group) + seconds)
