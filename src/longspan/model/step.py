"""The arguments of one step of a model, and its state that transformers does not hand to every module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from longspan.attn.paged import PagedKv, PagedPlan, on_device

if TYPE_CHECKING:
    from longspan.core.steps import Link

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, q [heads, tokens, head_dim], k and v [kv_heads, tokens, head_dim]) -> out [heads, tokens, head_dim]`

It may have a method `single_tokens() -> SingleTokens | None`. If the result is not None, the step may be computed as a
whole, without calls of `Attend`.

It may have the methods of `AttendStored`, for layers that store their KV themselves.
"""
SampledToken = tuple[int, Tensor, int]
"""The row of a token, and the tensor on the device and the index in it that have the token."""
Reduce = Callable[[Tensor], Tensor]
"""Sums `[1, tokens, hidden]` over the ranks of tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One packed row of tokens, of one request or several. `Attend` keeps the requests apart.

    Tensors are int64 on the host. Only where `Attend` has no `single_tokens` may they be on the device.

    Attributes:
        tokens, positions: `[tokens]`, at least one token.
        keep: `[n]`, the indices of the tokens whose logits are computed. With n = 0 there are none.
        rope_lengths: `[tokens]`, the pinned length of each token's request, which only longrope models read.
        sampled: replacements of entries of `tokens`, see `SampledToken`.
    """

    tokens: Tensor
    positions: Tensor
    keep: Tensor
    rope_lengths: Tensor
    sampled: list[SampledToken] = field(default_factory=list)


def put_sampled(sampled: Sequence[SampledToken], tokens: Tensor) -> None:
    """Write sampled tokens to `tokens` in place, with one copy for each tensor that has them."""
    sources = {id(source): source for _, source, _ in sampled}
    for key, source in sources.items():
        rows, indices = zip(*((row, index) for row, own, index in sampled if id(own) == key), strict=True)
        if rows == indices == tuple(range(len(source))):
            tokens[: len(source)] = source
            continue
        at, of = on_device([torch.tensor(numbers) for numbers in (rows, indices)], tokens.device)
        tokens[at] = source[of]


@dataclass(frozen=True, kw_only=True)
class RecordedSums:
    """Sums over the ranks of tensor parallelism that a device makes without its host.

    Attributes:
        sent: payload bytes of the sums so far, by exchange and link.
    """

    reduce: Reduce
    sent: Counter[tuple[str, Link]]


@dataclass(frozen=True, kw_only=True)
class SingleTokens:
    """The KV that a step reads and writes if each of its tokens is the only one of its request.

    Attributes:
        kv: the pools of the rank's layers, in order.
        blocks, offsets: where the KV of each token is stored, `[tokens]` int64 on the host.
        plans: of each layer, its reads for one query per token. None if only `Attend` can compute attention and store
            KV, since messages are exchanged or keys lie on hosts.
        sent: payload bytes of the step so far, by exchange and link. A step computed as a whole adds its own.
        sums: None if messages make the sums over ranks.
    """

    blocks: Tensor
    offsets: Tensor
    kv: Sequence[PagedKv]
    plans: Sequence[PagedPlan] | None
    sent: Counter[tuple[str, Link]] = field(default_factory=Counter)
    sums: RecordedSums | None = None


@dataclass(frozen=True, kw_only=True)
class KvSlots:
    """The slots of a layer's pool in which the KV of a step's tokens is stored.

    Token i has slot `offsets[i]` of block `blocks[i]`, both `[tokens]` int64 on the device. Block `NOWHERE` stores
    nothing.
    """

    kv: PagedKv
    blocks: Tensor
    offsets: Tensor


class AttendStored(Protocol):
    """An `Attend` for layers that store the KV of all tokens before attention."""

    def slots(self, layer: int) -> KvSlots | None:
        """Return the slots of all tokens of the step. None if `Attend` stores the KV of this step itself."""

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention as `Attend` does, after the KV was stored in `slots(layer)`."""


@dataclass(kw_only=True)
class StepState:
    """The state of one call of a model's modules.

    It has the arguments of `LayerTrunk.run`, on the device. Hooks set the results: `base_output` of the module below
    the head, or `passed`, the hidden states `[1, tokens, width]` for the next stage.
    """

    rope_lengths: Tensor | None = None
    hidden: Tensor | None = None
    reduce: Reduce | None = None
    base_output: Any = None  # its first item is the hidden states, also in transformers' output classes
    passed: Tensor | None = None


class CurrentStep:
    """The state of the call in progress, for the hooks and the replaced modules of one model.

    transformers hands the keyword arguments of a call to layers and attention, which is how `Attend` gets there.
    It hands none to `rotary_emb`, to norms and to projections, and hooks cannot return a value to the caller. So hooks
    and replaced modules read and write this state. Only `during` sets it, and a model computes one call at a time.
    """

    def __init__(self) -> None:
        self._state: StepState | None = None

    @contextmanager
    def during(self, state: StepState) -> Iterator[None]:
        """Set the state for one call. Calls may nest: the outer state returns at the end."""
        outer, self._state = self._state, state
        try:
            yield
        finally:
            self._state = outer

    @property
    def state(self) -> StepState:
        assert self._state is not None, "modules of a model are called inside `during`"
        return self._state

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum a partial result over the ranks of tensor parallelism."""
        reduce = self.state.reduce
        assert reduce is not None, "a share of a model needs the sums over all shares"
        return reduce(partial)
