"""The messages of sparse attention that carry partial results, and the hops of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from longspan.attn.backends import Partial
from longspan.attn.comm import Message, Shape
from longspan.attn.exchanges import Call
from longspan.core.sparse import MOST_LEVELS, MOST_PIECES

TOKENS_HOP, RESULTS_HOP, SAMPLES_HOP = 0, MOST_PIECES, MOST_LEVELS * MOST_PIECES
SPARSE_HOPS = SAMPLES_HOP + 1
"""The hops of a layer: pieces of tokens; then, by level, pieces of results; then samples."""


def partial_room(call: Call, counts: Sequence[tuple[int, int]]) -> Message:
    """Allocates a message for the log-sum-exps, and then the outputs (or queries), of so many heads and tokens each."""
    shapes: list[Shape] = [(shape, torch.float32) for shape in counts]
    shapes += [((*shape, call.spec.head_dim), call.q.dtype) for shape in counts]
    return Message(shapes, call.q.device)


def partials_of(message: Message) -> Iterator[Partial]:
    half = len(message.tensors) // 2
    return zip(message.tensors[half:], message.tensors[:half], strict=True)
