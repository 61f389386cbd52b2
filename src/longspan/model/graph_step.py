"""Decode steps as CUDA graphs: the device replays recorded kernels, and no Python runs between them.

The inputs of a step lie in tensors with fixed addresses, and are uploaded in one copy. A graph has a fixed number of
tokens, blocks and splits of contexts, and smaller steps are padded. Padding rows attend to nothing and are stored
nowhere. Padding splits end at once. So padding changes no bit of any other row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.attn.backends import NOWHERE
from longspan.attn.paged import PagedKv, PagedPlan
from longspan.attn.paged_splits import NumberBuffer, PagedSplits
from longspan.attn.spec import AttnSpec
from longspan.model.step import Attend, SingleTokens

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend

_log = logging.getLogger("longspan")
_MAX_ROWS = 256
"""The largest number of tokens of a graph. With more tokens, kernels take longer than their launches."""
_ROWS_FACTOR, _SPLITS_FACTOR, _BLOCKS_FACTOR = 2, 4, 16
"""Factors between the sizes of graphs: of tokens, and of the splits and blocks that they read.

A padding split costs the memory of its partial result, and a padding block costs three numbers.
"""
_MAX_GRAPHS = 64
_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}

Forward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]
Replay = Callable[[], Tensor]
Record = Callable[[Callable[[], Tensor]], Replay]
"""Records the operations of a function on tensors with fixed addresses.

A replay repeats them on the current contents of these tensors, and returns the same tensor each time.
"""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recorder of steps on a device, and the kernels that compute attention there."""

    backend: AttentionBackend
    record: Record

    def fits(self, specs: Sequence[AttnSpec]) -> bool:
        return all(map(self.backend.is_recordable, specs))


class GraphStep:
    """Computes logits of single tokens by replays.

    Args:
        forward: computes float32 logits `[tokens, vocab]` from tokens, positions and RoPE lengths `[tokens]`, layer by
            layer.
        specs: the attention of each layer, which the backend can record.
    """

    def __init__(self, forward: Forward, specs: Sequence[AttnSpec], recording: Recording, device: torch.device) -> None:
        self._forward, self._specs, self._recording, self._device = forward, specs, recording, device
        self._kv: Sequence[PagedKv] = ()
        self._graphs: dict[object, _Graph] = {}  # least recently used first
        self._logits: dict[int, Tensor] = {}  # float32, by the number of tokens of a graph
        self._is_possible, self._reads_host = True, True  # `_record` may set them to False

    def __call__(self, tokens: Tensor, positions: Tensor, rope_lengths: Tensor, step: SingleTokens) -> Tensor | None:
        """Compute float32 logits `[tokens, vocab]`, and store the tokens' KV. Arguments are `[tokens]` int64 on hosts.

        The logits are valid until the next call. Return None for more than `_MAX_ROWS` tokens, and if the model cannot
        be recorded. KV may have been stored then.
        """
        if len(tokens) > _MAX_ROWS or not self._is_possible:
            return None
        if step.kv is not self._kv:
            self.release_pool()
            self._kv = step.kv
        rows = _size(len(tokens), 1, _ROWS_FACTOR)
        arrays = [array.numpy() for array in (tokens, positions, rope_lengths, step.blocks, step.offsets)]
        sizes, padding = [rows] * 5, [0, 0, 0, NOWHERE, 0]
        numbers = {plan: number for number, plan in enumerate(dict.fromkeys(step.plans))}
        for plan in numbers:
            blocks, low, high, owner, first, last, of_query = plan.split_items()
            arrays += blocks, low, high, owner, first, last, of_query
            num_blocks = _size(len(blocks), rows, _BLOCKS_FACTOR)
            num_splits = _size(len(owner), rows, _SPLITS_FACTOR)
            sizes += *[num_blocks] * 3, *[num_splits] * 3, rows + 1
            padding += *[0] * 6, of_query[-1]
        key = tuple(sizes), tuple(numbers[plan] for plan in step.plans)
        graph = self._graphs.pop(key, None) or _Graph(*key, self._device)
        graph.inputs.fill(arrays, padding)
        if graph.replay is None and not self._record(graph):
            return None
        self._graphs[key] = graph
        if len(self._graphs) > _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        assert graph.replay is not None, "it was recorded"
        return graph.replay()[: len(tokens)]

    def release_pool(self) -> None:
        """Release the KV pool of the latest step, and all graphs, which read it."""
        self._kv = ()
        self._graphs.clear()

    def _record(self, graph: _Graph) -> bool:
        """Compute a step to warm up, then record it. Return False, and log the reason, if that is not possible."""
        backend, kv, specs = self._recording.backend, self._kv, self._specs
        tokens, positions, rope_lengths, blocks, offsets, *splits = graph.inputs.arrays
        size = len(PagedSplits._fields)
        plans = [_StaticPlan(PagedSplits(*splits[start : start + size])) for start in range(0, len(splits), size)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            backend.store(kv[layer], blocks, offsets, k, v)
            return backend.attend_paged(q, kv[layer], plans[graph.of_layers[layer]], specs[layer])[0]

        def compute() -> Tensor:
            return self._forward(tokens, positions, rope_lengths, attend)

        try:
            # The operators depend on the model, not on the size, so the first recording checks them. It is slow.
            with WithoutHostReads() if self._reads_host else nullcontext():  # type: ignore[no-untyped-call]  # PyTorch's
                computed = compute()
        except HostReadError as error:
            return self._disable(error)
        self._reads_host = False
        logits = self._logits.setdefault(len(tokens), torch.empty_like(computed))
        del computed
        try:
            graph.replay = self._recording.record(lambda: logits.copy_(compute()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return self._disable(error)
        return True

    def _disable(self, error: Exception) -> bool:
        _log.warning("decode steps are computed layer by layer, as with enforce_eager, not as CUDA graphs: %s", error)
        self._is_possible = False
        self.release_pool()
        return False


class CudaRecorder:
    """Records CUDA graphs of the current device. They share one memory pool, since one graph is replayed at a time."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the memory pool: only a graph can name it
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        """Record launches on a separate stream. Raise RuntimeError if an operation cannot be captured.

        Other threads may use the device meanwhile. Unlike `torch.cuda.graph`, this does not synchronise the device. A
        stream that receives KV may wait for other ranks, and these ranks may wait for this one.
        """
        graph, pool = torch.cuda.CUDAGraph(), None if self._first is None else self._first.pool()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._first = self._first or graph

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class _Graph:
    """The inputs of a graph, the index of each layer's plan, and the replay after recording."""

    def __init__(self, sizes: Sequence[int], of_layers: Sequence[int], device: torch.device) -> None:
        self.inputs, self.of_layers = NumberBuffer(sizes, device), of_layers
        self.replay: Replay | None = None


class _StaticPlan(PagedPlan):
    """A plan whose contents change between replays, for kernels that read only its `splits`."""

    def __init__(self, splits: PagedSplits) -> None:
        self.num_queries, self.splits = len(splits.of_query) - 1, splits


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


def _size(number: int, smallest: int, factor: int) -> int:
    """Round up to `smallest` times a power of `factor`."""
    size = smallest
    while size < number:
        size *= factor
    return size
