"""The messages of sparse attention that carry partial results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from longspan.attn.backends import Partial
from longspan.attn.comm import Message, Shape
from longspan.attn.exchanges import Call


def partial_room(call: Call, counts: Sequence[tuple[int, int]]) -> Message:
    """Allocates a message for the log-sum-exps, and then the outputs (or queries), of so many heads and tokens each."""
    shapes: list[Shape] = [(shape, torch.float32) for shape in counts]
    shapes += [((*shape, call.spec.head_dim), call.q.dtype) for shape in counts]
    return Message(shapes, call.q.device)


def partials_of(message: Message) -> Iterator[Partial]:
    half = len(message.tensors) // 2
    return zip(message.tensors[half:], message.tensors[:half], strict=True)
