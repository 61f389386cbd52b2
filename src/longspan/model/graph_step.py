"""Steps of single tokens, as decodes are, as CUDA graphs: a device repeats what was recorded, without any Python.

What changes from step to step lies in tensors that stay where they are, and is uploaded in one copy. A graph is for so
many tokens, blocks and splits of their contexts, rounded up: rows of no token attend to nothing and are stored nowhere,
and splits of no query end at once. So neither changes a bit of any other row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.attn.backends import NOWHERE, AttentionBackend
from longspan.attn.paged import NumberBuffer, PagedKv, PagedPlan, PagedSplits
from longspan.attn.spec import AttnSpec
from longspan.model.step import Attend, SingleTokens

_log = logging.getLogger("longspan")
_MOST_ROWS = 256
"""The tokens of a step that has a graph: with more of them, kernels take longer than their launches."""
_MORE_ROWS, _MORE_SPLITS, _MORE_BLOCKS = 2, 4, 16
"""Factors between the sizes of graphs, for tokens, and for the splits and blocks that a token reads.

A split has memory for its partial result, and a block only three numbers.
"""
_MOST_GRAPHS = 64
_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}

Forward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]
Replay = Callable[[], Tensor]
Record = Callable[[Callable[[], Tensor]], Replay]
"""Records what a function computes from tensors that stay in their places.

The replay computes it anew from what these hold then, and returns the same tensor each time.
"""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Says how steps are recorded on a device, and which kernels compute attention there."""

    backend: AttentionBackend
    record: Record

    def fits(self, specs: Sequence[AttnSpec]) -> bool:
        return all(map(self.backend.is_recordable, specs))


class GraphStep:
    """Computes logits of single tokens by replays.

    Args:
        forward: computes float32 logits `[tokens, vocab]` of tokens, positions and RoPE lengths `[tokens]`, layer by
            layer.
        specs: of its layers, all of which the backend can record.
    """

    def __init__(self, forward: Forward, specs: Sequence[AttnSpec], recording: Recording, device: torch.device) -> None:
        self._forward, self._specs, self._recording, self._device = forward, specs, recording, device
        self._kv: Sequence[PagedKv] = ()
        self._graphs: dict[object, _Graph] = {}  # the one used last comes last
        self._logits: dict[int, Tensor] = {}  # of graphs of so many tokens, float32
        self._is_possible, self._reads_host = True, True  # until a recording shows that it does not

    def __call__(self, tokens: Tensor, positions: Tensor, rope_lengths: Tensor, step: SingleTokens) -> Tensor | None:
        """Returns float32 logits `[tokens, vocab]`, which stay until the next call; stores the tokens' KV.

        Tensors are on the host, `[tokens]` int64. Returns None for more tokens than graphs are for, and for a model
        that cannot be recorded, of which it may have stored KV.
        """
        if len(tokens) > _MOST_ROWS or not self._is_possible:
            return None
        if step.kv is not self._kv:
            self.release_pool()
            self._kv = step.kv
        rows = _size(len(tokens), 1, _MORE_ROWS)
        arrays = [one.numpy() for one in (tokens, positions, rope_lengths, step.blocks, step.offsets)]
        sizes, padding = [rows] * 5, [0, 0, 0, NOWHERE, 0]
        numbers = {plan: number for number, plan in enumerate(dict.fromkeys(step.plans))}
        for plan in numbers:
            blocks, low, high, owner, first, last, of_query = plan.split_items()
            arrays += blocks, low, high, owner, first, last, of_query
            num_blocks = _size(len(blocks), rows, _MORE_BLOCKS)
            num_splits = _size(len(owner), rows, _MORE_SPLITS)
            sizes += *[num_blocks] * 3, *[num_splits] * 3, rows + 1
            padding += *[0] * 6, of_query[-1]
        key = tuple(sizes), tuple(numbers[plan] for plan in step.plans)
        graph = self._graphs.pop(key, None) or _Graph(*key, self._device)
        graph.inputs.fill(arrays, padding)
        if graph.replay is None and not self._record(graph):
            return None
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        assert graph.replay is not None, "it was recorded"
        return graph.replay()[: len(tokens)]

    def release_pool(self) -> None:
        """Lets go of the pool of the latest step, and of all graphs, which read it."""
        self._kv = ()
        self._graphs.clear()

    def _record(self, graph: _Graph) -> bool:
        """Records a step, once it was computed to warm up; tells whether that was possible, and logs why not."""
        backend, kv, specs = self._recording.backend, self._kv, self._specs
        tokens, positions, rope_lengths, blocks, offsets, *others = graph.inputs.arrays
        size = len(PagedSplits._fields)
        plans = [_StaticPlan(PagedSplits(*others[start : start + size])) for start in range(0, len(others), size)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            backend.store(kv[layer], blocks, offsets, k, v)
            return backend.attend_paged(q, kv[layer], plans[graph.of_layers[layer]], specs[layer])[0]

        def compute() -> Tensor:
            return self._forward(tokens, positions, rope_lengths, attend)

        try:
            # Which operators run depends on the model, not on the size: one look is enough, and takes a while.
            with _WithoutHostReads() if self._reads_host else nullcontext():  # type: ignore[no-untyped-call]  # PyTorch's
                found = compute()
        except _HostReadError as error:
            return self._give_up(error)
        self._reads_host = False
        logits = self._logits.setdefault(len(tokens), torch.empty_like(found))
        del found
        try:
            graph.replay = self._recording.record(lambda: logits.copy_(compute()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return self._give_up(error)
        return True

    def _give_up(self, error: Exception) -> bool:
        _log.warning("decode steps are computed layer by layer, as with enforce_eager, not as CUDA graphs: %s", error)
        self._is_possible = False
        self.release_pool()
        return False


class CudaRecorder:
    """Records CUDA graphs of the current device, which share their memory, since no two are replayed at once."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None  # stays: without any graph its pool could not be named again
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        """Captures launches on a stream of their own; raises RuntimeError for what cannot be captured.

        Other threads may use the device meanwhile. Nothing waits for all of it, as `torch.cuda.graph` would: what
        receives KV may be waiting for other ranks, and these for this one.
        """
        graph, pool = torch.cuda.CUDAGraph(), None if self._first is None else self._first.pool()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                found = compute()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._first = self._first or graph

        def replay() -> Tensor:
            graph.replay()
            return found

        return replay


class _Graph:
    """A graph's inputs, which plan each layer reads by, and the replay, once it is recorded."""

    def __init__(self, sizes: Sequence[int], of_layers: Sequence[int], device: torch.device) -> None:
        self.inputs, self.of_layers = NumberBuffer(sizes, device), of_layers
        self.replay: Replay | None = None


class _StaticPlan(PagedPlan):
    """A plan of what may change, for kernels that read nothing but `splits`."""

    def __init__(self, splits: PagedSplits) -> None:
        self.num_queries, self.splits = len(splits.of_query) - 1, splits


class _HostReadError(Exception):
    """A step needs numbers of the device on the host."""


class _WithoutHostReads(TorchDispatchMode):
    """Lets nothing run that takes numbers of the device to the host: a replay would not look at them again."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs an operator, and raises _HostReadError where its result, or the shape of that, is up to numbers of the
        device, or where it copies these to the host.
        """
        if func.overloadpacket in _INDEXING:  # by whole numbers, mostly
            reads = any(one is not None and one.dtype in {torch.bool, torch.uint8} for one in args[1])
        else:
            reads = not _HOST_READS.isdisjoint(func.tags)
        if reads:
            raise _HostReadError(f"{func} needs numbers of the device on the host")
        found = func(*args, **(kwargs or {}))
        if "cuda" in _devices((args, kwargs)) and "cpu" in _devices(found):
            raise _HostReadError(f"{func} copies numbers of the device to the host")
        return found


def _devices(values: object) -> set[str]:
    return {one.device.type for one in tree_leaves(values) if isinstance(one, Tensor)}


def _size(number: int, least: int, factor: int) -> int:
    """Rounds up to `least` times a power of `factor`."""
    size = least
    while size < number:
        size *= factor
    return size
