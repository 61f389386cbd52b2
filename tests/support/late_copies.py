"""Engines on CPUs that read sampled tokens late, as ranks on CUDA devices do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self
from unittest import mock

from longspan.model.graph_step import GraphStep
from longspan.model.step import SampledToken
from longspan.runtime import worker
from longspan.runtime.run_ahead import HostCopy


class LateCopies:
    """Lets engines on CPUs read tokens late, as a device that is busy, and counts steps that read unread tokens."""

    def __init__(self) -> None:
        self.num_ahead = 0

    def __enter__(self) -> Self:
        polls: dict[HostCopy, int] = {}
        call = GraphStep.__call__

        def is_ready(copy: HostCopy) -> bool:
            polls[copy] = polls.get(copy, 0) + 1
            return polls[copy] > 2000

        def counted(step: GraphStep, *row: Any, sampled: Sequence[SampledToken] = (), **others: Any) -> Any:
            self.num_ahead += bool(sampled)
            return call(step, *row, sampled=sampled, **others)

        self._patches = [
            mock.patch.object(worker, "runs_ahead", return_value=True),
            mock.patch.object(HostCopy, "is_ready", is_ready),
            mock.patch.object(GraphStep, "__call__", counted),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
