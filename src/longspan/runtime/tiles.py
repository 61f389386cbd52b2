"""How many rows of logits are worked on at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor

_CPU_NUMBERS = 2**18
"""Two copies in float64 fit a core's second-level cache; memory would take four times as long."""
_GPU_NUMBERS = 2**26
"""Bounds the memory of temporary copies: 512 MiB in float64."""

T = TypeVar("T")


def in_tiles(items: Sequence[T], logits: Tensor) -> Iterator[Sequence[T]]:
    """`items`, of which each stands for a row of `logits [rows, vocab]`, in slices of as many rows as suit its device.

    No result may depend on where the cuts are.
    """
    size = max(1, (_CPU_NUMBERS if logits.device.type == "cpu" else _GPU_NUMBERS) // logits.shape[-1])
    for start in range(0, len(items), size):
        yield items[start : start + size]
