"""Decode steps as CUDA graphs: the device replays recorded kernels, and no Python runs between them.

The inputs of a step lie in tensors with fixed addresses, and are uploaded in one copy. A graph has a fixed number of
tokens, and space for a mean context length. Smaller steps are padded. Padding rows attend to nothing and are stored
nowhere. Padding splits end at once. So padding changes no bit of any other row.

An engine records the graphs of all sizes when it starts, since a recording takes as long as some ten steps.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.attn.backends import NOWHERE
from longspan.attn.paged import Numbers, PagedKv, PagedPlan
from longspan.attn.paged_splits import NumberBuffer, PagedSplits, max_splits
from longspan.attn.spec import AttnSpec
from longspan.model.step import Attend, SingleTokens

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend

_log = logging.getLogger("longspan")
_MAX_ROWS = 256
"""The largest number of tokens of a graph. With more tokens, kernels take longer than their launches."""
_MIN_CONTEXT, _CONTEXT_FACTOR = 256, 4
"""Tokens per row for which the smallest graphs have space, and the factor to the next size.

Padding costs three numbers per block, and the memory of a partial result per split. A smaller factor needs more graphs.
"""
_INPUT_PADDING = 0, 0, 0, NOWHERE, 0
"""The padding of tokens, positions, RoPE lengths, and the blocks and offsets of the tokens' KV."""
_NOTHING = np.empty(0, dtype=np.int64)
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


@dataclass(frozen=True)
class _Size:
    """The space of a graph: for `rows` tokens, with contexts of `context` tokens on average."""

    rows: int
    context: int

    def num_blocks(self, window: int | None, block_size: int) -> int:
        """Return the space for blocks, of all rows. Contexts end, and windows begin, inside blocks."""
        context = self.context if window is None else min(self.context, window)
        return self.rows * (-(-context // block_size) + 1)


class GraphStep:
    """Computes logits of single tokens by replays.

    Args:
        forward: computes float32 logits `[tokens, vocab]` from tokens, positions and RoPE lengths `[tokens]`, layer by
            layer.
        specs: the attention of each layer, which the backend can record. Layers with the same window read the same KV.
    """

    def __init__(self, forward: Forward, specs: Sequence[AttnSpec], recording: Recording, device: torch.device) -> None:
        self._forward, self._specs, self._recording, self._device = forward, specs, recording, device
        self._first_layers = {spec.window: layer for layer, spec in reversed([*enumerate(specs)])}
        self._kv: Sequence[PagedKv] = ()
        self._graphs: dict[_Size, _Graph] = {}
        self._logits: dict[int, Tensor] = {}  # float32, by the number of tokens of a graph
        self._too_large = set[_Size]()  # sizes without memory for a recording
        self._is_possible, self._reads_host = True, True  # `_record` may set them to False

    @torch.no_grad()
    def prepare(self, kv: Sequence[PagedKv], max_rows: int, max_context: int) -> None:
        """Record the graphs of steps of up to `max_rows` tokens, with contexts of up to `max_context` tokens.

        Sizes are left out if the pool is full before a step needs them. Only steps whose requests share blocks need
        such sizes. They are recorded when they occur.
        """
        self._set_pool(kv)
        begun_s, pool_tokens = time.monotonic(), len(kv[0].keys) * kv[0].block_size
        for rows in reversed(_up_to(min(max_rows, _MAX_ROWS), 1, 2)):  # largest first: the memory fits all
            for context in reversed(_up_to(min(max_context, pool_tokens // rows), _MIN_CONTEXT, _CONTEXT_FACTOR)):
                no_inputs = [_NOTHING] * len(_INPUT_PADDING)
                no_splits = [_NOTHING] * len(PagedSplits._fields)
                if self._filled(_Size(rows, context), no_inputs, [no_splits] * len(self._first_layers)) is None:
                    return
        _log.info("%d CUDA graphs of decode steps recorded in %.1f s", len(self._graphs), time.monotonic() - begun_s)

    def __call__(self, tokens: Tensor, positions: Tensor, rope_lengths: Tensor, step: SingleTokens) -> Tensor | None:
        """Compute float32 logits `[tokens, vocab]`, and store the tokens' KV. Arguments are `[tokens]` int64 on hosts.

        The logits are valid until the next call. Return None for more than `_MAX_ROWS` tokens, and if the model or a
        step of this size cannot be recorded. KV may have been stored then.
        """
        if len(tokens) > _MAX_ROWS or not self._is_possible:
            return None
        self._set_pool(step.kv)
        inputs = [array.numpy() for array in (tokens, positions, rope_lengths, step.blocks, step.offsets)]
        splits = [step.plans[layer].split_items() for layer in self._first_layers.values()]
        size = self._size(len(tokens), [len(blocks) for blocks, *_ in splits])
        replay = None if size in self._too_large else self._filled_in_memory(size, inputs, splits)
        return None if replay is None else replay()[: len(tokens)]

    def _filled_in_memory(
        self, size: _Size, inputs: Sequence[Numbers], splits: Sequence[Sequence[Numbers]]
    ) -> Replay | None:
        """Fill the inputs of a graph, see `_filled`. Return None if there is too little memory to record it."""
        try:
            return self._filled(size, inputs, splits)
        except torch.OutOfMemoryError as error:
            text = "decode steps of up to %d requests with %d tokens each are computed layer by layer: %s"
            _log.warning(text, size.rows, size.context, f"no memory for a CUDA graph ({error!s:.200})")
            self._too_large.add(size)
            return None

    def release_pool(self) -> None:
        """Release the KV pool of the latest step, and all graphs, which read it."""
        self._kv = ()
        self._graphs.clear()
        self._too_large.clear()

    def _set_pool(self, kv: Sequence[PagedKv]) -> None:
        if kv is not self._kv:
            self.release_pool()
            self._kv = kv

    def _size(self, num_rows: int, num_blocks: Sequence[int]) -> _Size:
        """Return the smallest size with space for `num_rows` tokens, and for the blocks that they read per window."""
        size = _Size(next(rows for rows in _products(1, 2) if rows >= num_rows), _MIN_CONTEXT)
        for window, number in zip(self._first_layers, num_blocks, strict=True):
            while size.num_blocks(window, self._kv[0].block_size) < number:
                assert window is None or size.context < window, "a query reads no block before its window"
                size = _Size(size.rows, size.context * _CONTEXT_FACTOR)
        return size

    def _filled(self, size: _Size, inputs: Sequence[Numbers], splits: Sequence[Sequence[Numbers]]) -> Replay | None:
        """Fill the inputs of the graph of a size. Record it if it is new. Return None if that is not possible."""
        graph = self._graphs.get(size) or self._new_graph(size)
        arrays, padding = [*inputs], [*_INPUT_PADDING]
        for arrays_of_window in splits:
            *_, of_query = arrays_of_window
            arrays += arrays_of_window
            padding += *[0] * (len(arrays_of_window) - 1), of_query[-1] if len(of_query) else 0
        graph.inputs.fill(arrays, padding)
        if graph.replay is None and not self._record(graph):
            return None
        self._graphs[size] = graph
        return graph.replay

    def _new_graph(self, size: _Size) -> _Graph:
        block_size, sizes = self._kv[0].block_size, [size.rows] * len(_INPUT_PADDING)
        for window in self._first_layers:
            num_blocks = size.num_blocks(window, block_size)
            sizes += *[num_blocks] * 3, *[max_splits(num_blocks, size.rows, block_size)] * 3, size.rows + 1
        return _Graph(inputs=NumberBuffer(sizes, self._device))

    def _record(self, graph: _Graph) -> bool:
        """Compute a step to warm up, then record it. Return False, and log the reason, if that is not possible."""
        backend, kv, specs = self._recording.backend, self._kv, self._specs
        tokens, positions, rope_lengths, blocks, offsets, *splits = graph.inputs.arrays
        size = len(PagedSplits._fields)
        starts = range(0, len(splits), size)
        plans = [_StaticPlan(PagedSplits(*splits[start : start + size])) for start in starts]
        by_window = dict(zip(self._first_layers, plans, strict=True))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            backend.store(kv[layer], blocks, offsets, k, v)
            return backend.attend_paged(q, kv[layer], by_window[specs[layer].window], specs[layer])[0]

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


@dataclass
class _Graph:
    """The inputs of a graph, and the replay after recording."""

    inputs: NumberBuffer
    replay: Replay | None = None


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


def _products(first: int, factor: int) -> Iterator[int]:
    return itertools.accumulate(itertools.repeat(factor), mul, initial=first)


def _up_to(number: int, first: int, factor: int) -> list[int]:
    """Return `first` times the powers of `factor`, up to the first product that is not below `number`."""
    below = [*itertools.takewhile(lambda product: product < number, _products(first, factor))]
    return [*below, first * factor ** len(below)]
