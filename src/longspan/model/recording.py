"""Recording of the operations of a function on a device, and how the operators that cannot be recorded are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.attn.spec import AttnSpec
from longspan.model.step import Attend, Reduce

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend

_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}


class ReplayedStep(NamedTuple):
    """A step of `num_tokens` tokens, and the actions of the host between the pieces of its recording."""

    num_tokens: int
    attend: Attend | None = None
    reduce: Reduce | None = None


Action = Callable[[ReplayedStep], None]
Replay = Callable[[ReplayedStep], Tensor]
Record = Callable[[Callable[[], Tensor]], Replay]
"""Records the operations of a function on tensors with fixed addresses.

A replay repeats them on the current contents of these tensors, and returns the same tensor each time.
"""
Between = Callable[[Action], None]
"""Called by a function that is recorded: each replay calls the given action with its step at this place.

The recording does not call the action. Nothing happens if no function is recorded.
"""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recorder of steps on a device, and the kernels that compute attention there.

    Attributes:
        between: the actions of the host inside recorded steps. None if `record` supports none.
    """

    backend: AttentionBackend
    record: Record
    between: Between | None = None

    def fits(self, specs: Sequence[AttnSpec]) -> bool:
        return all(map(self.backend.is_recordable, specs))


class CudaRecorder:
    """Records CUDA graphs of the current device. They share one memory pool, since one graph is replayed at a time."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the memory pool: only a graph can name it
        self._stream: torch.cuda.Stream | None = None
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._pieces: list[Action] = []

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        """Record launches on a separate stream. Raise RuntimeError if an operation cannot be captured.

        Other threads may use the device meanwhile. Unlike `torch.cuda.graph`, this does not synchronise the device. A
        stream that receives KV may wait for other ranks, and these ranks may wait for this one.
        """
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        pieces: list[Action] = []
        self._pieces = pieces
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                result = compute()
            finally:
                self._end()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay(step: ReplayedStep) -> Tensor:
            for piece in pieces:
                piece(step)
            return result

        return replay

    def between(self, action: Action) -> None:
        """End a graph, and begin the next one after the action, see `Between`."""
        if self._recorded is not None:
            self._end()
            self._pieces.append(action)
            self._begin()

    def _begin(self) -> None:
        self._recorded = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        self._recorded.capture_begin(pool=pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._recorded = self._recorded, None
        assert graph is not None, "a recording has begun"
        graph.capture_end()
        self._first = self._first or graph
        self._pieces.append(lambda _: graph.replay())


class HostReadError(Exception):
    """A step reads values of the device on the host."""


class WithoutHostReads(TorchDispatchMode):
    """Refuses operators that read values of the device on the host. A replay would not read them again."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operator. Raise HostReadError if the host, or the shape of the result, needs values of the device."""
        if func.overloadpacket in _INDEXING:  # masks have data-dependent shapes, integer indices do not
            reads = any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1])
        else:
            reads = not _HOST_READS.isdisjoint(func.tags)
        if reads:
            raise HostReadError(f"{func} needs values of the device on the host")
        result = func(*args, **(kwargs or {}))
        if "cuda" in _devices((args, kwargs)) and "cpu" in _devices(result):
            raise HostReadError(f"{func} copies values of the device to the host")
        return result


def _devices(values: object) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
