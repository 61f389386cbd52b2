"""Decode steps as CUDA graphs: the device replays recorded kernels, and no Python runs between them.

The inputs of a step lie in tensors with fixed addresses, and are uploaded in one copy. A graph has a fixed number of
tokens, and space for a mean context length. Smaller steps are padded. Padding rows attend to nothing and are stored
nowhere. Padding splits end at once. So padding changes no bit of any other row.

An engine records the graphs of all sizes when it starts, since a recording takes as long as some ten steps.

A step whose attention exchanges messages, or reads keys on hosts, is a sequence of graphs. The host computes attention
between two of them. Sums over the ranks of tensor parallelism are recorded if the device makes them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from longspan.attn.backends import NOWHERE, with_sinks
from longspan.attn.paged import Numbers, PagedKv, PagedPlan
from longspan.attn.paged_splits import NumberBuffer, PagedSplits, max_splits
from longspan.attn.spec import AttnSpec, Visibility
from longspan.model.recording import Action, HostReadError, Recording, Replay, ReplayedStep, WithoutHostReads
from longspan.model.step import Attend, KvSlots, RecordedSums, Reduce, SampledToken, SingleTokens, put_sampled

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend
    from longspan.core.steps import Link

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

Forward = Callable[[Tensor, Tensor, Tensor, Attend, Tensor | None, Reduce | None], Tensor]
"""Computes rows `[tokens, width]`, see `LayerTrunk.all_rows`."""


@dataclass(frozen=True)
class _Size:
    """The space of a graph: for `rows` tokens, with contexts of `context` tokens on average.

    With a context of 0 the host computes attention.
    """

    rows: int
    context: int

    def num_blocks(self, max_keys: int | None, block_size: int) -> int:
        """Return the space for blocks, of all rows. Contexts end, and windows and chunks begin, inside blocks."""
        context = self.context if max_keys is None else min(self.context, max_keys)
        return self.rows * (-(-context // block_size) + 1)


class GraphStep:
    """Computes single tokens by replays.

    Args:
        forward: computes the rows of all tokens, layer by layer.
        specs: the attention of each layer by number. The backend can record it. Layers with the same visibility
            read the same KV.
        sinks: `[heads]` float32 of each layer with sinks, by number.
        width: the elements of the hidden states from the stage before. 0 for the first stage.
        is_shared: the results are summed over the ranks of tensor parallelism.
    """

    def __init__(
        self,
        forward: Forward,
        specs: Mapping[int, AttnSpec],
        recording: Recording,
        device: torch.device,
        *,
        dtype: torch.dtype,
        sinks: Mapping[int, Tensor] | None = None,
        width: int = 0,
        is_shared: bool = False,
    ) -> None:
        self._forward, self._specs, self._recording, self._device = forward, specs, recording, device
        self._dtype, self._sinks, self._width, self._is_shared = dtype, sinks or {}, width, is_shared
        self._places = {layer: place for place, layer in enumerate(specs)}
        self._first_layers = {spec.visibility: self._places[layer] for layer, spec in reversed([*specs.items()])}
        self._kv: Sequence[PagedKv] = ()
        self._sums: RecordedSums | None = None
        self._graphs: dict[_Size, _Graph] = {}
        self._result: Tensor | None = None  # rows of the latest replay, with space for the largest recorded size
        self._too_large = set[_Size]()  # sizes without memory for a recording
        self._is_possible, self._reads_host = True, True  # `_record` may set them to False

    @torch.no_grad()
    def prepare(
        self,
        kv: Sequence[PagedKv],
        max_rows: int,
        max_context: int,
        *,
        sums: RecordedSums | None = None,
        by_pieces: bool = False,
    ) -> Iterator[tuple[int, int]]:
        """Record the graphs of steps of up to `max_rows` tokens, with contexts of up to `max_context` tokens.

        Yield the number of recorded graphs and the number of all graphs, after each recording.

        Sizes are left out if the pool is full before a step needs them. Only steps whose requests share blocks need
        such sizes. They are recorded when they occur.

        Args:
            sums: sums over ranks that the device can record. None if messages of the host make them.
            by_pieces: also record the steps whose attention is computed by the host.
        """
        self._set_pool(kv)
        self._sums = sums
        begun_s, pool_tokens = time.monotonic(), len(kv[0].keys) * kv[0].block_size
        sizes = [
            _Size(rows, context)
            for rows in reversed(_up_to(min(max_rows, _MAX_ROWS), 1, 2))  # largest first: the memory fits all
            for context in reversed(_up_to(min(max_context, pool_tokens // rows), _MIN_CONTEXT, _CONTEXT_FACTOR))
        ]
        if by_pieces and self._recording.between is not None:
            sizes += [_Size(rows, 0) for rows in reversed(_up_to(min(max_rows, _MAX_ROWS), 1, 2))]
        for number, size in enumerate(sizes, 1):
            no_inputs = [_NOTHING] * len(_INPUT_PADDING)
            no_splits = [[_NOTHING] * len(PagedSplits._fields)] * (len(self._first_layers) if size.context else 0)
            if self._filled(size, no_inputs, no_splits) is None:
                return
            yield number, len(sizes)
        _log.info("%d CUDA graphs of decode steps recorded in %.1f s", len(self._graphs), time.monotonic() - begun_s)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        rope_lengths: Tensor,
        step: SingleTokens,
        *,
        sampled: Sequence[SampledToken] = (),
        attend: Attend | None = None,
        hidden: Tensor | None = None,
        reduce: Reduce | None = None,
    ) -> Tensor | None:
        """Compute the rows of all tokens, see `LayerTrunk.all_rows`, and store their KV.

        The rows are valid until the next call. Return None for more than `_MAX_ROWS` tokens, and if the model or a
        step of this size cannot be recorded. KV may have been stored then.

        Args:
            tokens, positions, rope_lengths: `[tokens]` int64 on the host.
            sampled: tokens on the device.
            attend: computes attention if `step` has no plans.
            hidden: from the stage before, `[1, tokens, width]`.
            reduce: sums over ranks by messages, if `step` has no `sums`.
        """
        if len(tokens) > _MAX_ROWS or not self._is_possible:
            return None
        self._set_pool(step.kv)
        self._sums = step.sums
        inputs = [array.numpy() for array in (tokens, positions, rope_lengths, step.blocks, step.offsets)]
        splits: list[tuple[Numbers, ...]] = []
        if step.plans is not None:
            splits = [step.plans[place].split_items() for place in self._first_layers.values()]
            size = self._size(len(tokens), [len(blocks) for blocks, *_ in splits])
        else:
            size = _Size(_padded_rows(len(tokens)), 0)
        if not self._may_record(size):
            return None
        graph = self._filled_in_memory(size, inputs, splits)
        if graph is None or graph.replay is None:
            return None
        if graph.hidden is not None and hidden is not None:
            graph.hidden[:, : len(tokens)] = hidden
        put_sampled(sampled, graph.inputs.arrays[0])
        result = graph.replay(ReplayedStep(len(tokens), attend, reduce))
        step.sent.update(graph.sent)
        return result[: len(tokens)]

    def _may_record(self, size: _Size) -> bool:
        """Return whether a step of this size can be recorded."""
        needs_host = not size.context or (self._is_shared and self._sums is None)
        return size not in self._too_large and not (needs_host and self._recording.between is None)

    def _filled_in_memory(
        self, size: _Size, inputs: Sequence[Numbers], splits: Sequence[Sequence[Numbers]]
    ) -> _Graph | None:
        """Fill the inputs of a graph, see `_filled`. Return None if there is too little memory to record it.

        All ranks that sum must replay the step, or none, so a lack of memory is an error there.
        """
        try:
            return self._filled(size, inputs, splits)
        except torch.OutOfMemoryError as error:
            if self._is_shared:
                raise
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
        """Return the smallest size with space for `num_rows` tokens, and for the blocks that they read per plan."""
        size = _Size(_padded_rows(num_rows), _MIN_CONTEXT)
        for visibility, number in zip(self._first_layers, num_blocks, strict=True):
            max_keys = visibility.max_keys
            while size.num_blocks(max_keys, self._kv[0].block_size) < number:
                assert max_keys is None or size.context < max_keys, "a query reads no block before its first key"
                size = _Size(size.rows, size.context * _CONTEXT_FACTOR)
        return size

    def _filled(self, size: _Size, inputs: Sequence[Numbers], splits: Sequence[Sequence[Numbers]]) -> _Graph | None:
        """Fill the inputs of the graph of a size. Record it if it is new. Return None if that is not possible."""
        graph = self._graphs.get(size) or self._new_graph(size)
        arrays, padding = [*inputs], [*_INPUT_PADDING]
        for arrays_of_plan in splits:
            *_, of_query = arrays_of_plan
            arrays += arrays_of_plan
            padding += *[0] * (len(arrays_of_plan) - 1), of_query[-1] if len(of_query) else 0
        graph.inputs.fill(arrays, padding)
        if graph.replay is None and not self._record(graph):
            return None
        self._graphs[size] = graph
        return graph

    def _new_graph(self, size: _Size) -> _Graph:
        block_size, sizes = self._kv[0].block_size, [size.rows] * len(_INPUT_PADDING)
        hidden = None
        if self._width:
            hidden = torch.zeros(1, size.rows, self._width, dtype=self._dtype, device=self._device)
        for visibility in self._first_layers if size.context else ():
            num_blocks = size.num_blocks(visibility.max_keys, block_size)
            sizes += *[num_blocks] * 3, *[max_splits(num_blocks, size.rows, block_size)] * 3, size.rows + 1
        return _Graph(inputs=NumberBuffer(sizes, self._device), hidden=hidden)

    def _record(self, graph: _Graph) -> bool:
        """Compute a step to warm up, then record it. Return False, and log the reason, if that is not possible."""
        tokens, positions, rope_lengths, *_ = graph.inputs.arrays
        attend, reduce, sums = self._attend_of(graph), self._reduce(), self._sums
        sent_before = Counter() if sums is None else Counter(sums.sent)

        def compute() -> Tensor:
            return self._forward(tokens, positions, rope_lengths, attend, graph.hidden, reduce)

        try:
            # The operators depend on the model, not on the size, so the first recording checks them. It is slow.
            with WithoutHostReads() if self._reads_host else nullcontext():  # type: ignore[no-untyped-call]  # PyTorch's
                computed = compute()
        except HostReadError as error:
            return self._disable(error)
        self._reads_host = False
        if self._result is None or len(self._result) < len(computed):  # graphs keep the result that they write
            self._result = torch.empty_like(computed)
        result = self._result[: len(computed)]
        del computed
        recorded_before = Counter() if sums is None else Counter(sums.sent)
        try:
            graph.replay = self._recording.record(lambda: result.copy_(compute()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return self._disable(error)
        if sums is not None:
            graph.sent = sums.sent - recorded_before
            sums.sent.clear()
            sums.sent.update(sent_before)
        return True

    def _attend_of(self, graph: _Graph) -> Attend:
        """Return the attention inside a graph, or between its pieces."""
        *_, blocks, offsets = graph.inputs.arrays[: len(_INPUT_PADDING)]
        splits, size = graph.inputs.arrays[len(_INPUT_PADDING) :], len(PagedSplits._fields)
        if not splits:
            return self._attend_between
        plans = [_StaticPlan(PagedSplits(*splits[start : start + size])) for start in range(0, len(splits), size)]
        by_visibility = dict(zip(self._first_layers, plans, strict=True))
        kv = {layer: self._kv[place] for layer, place in self._places.items()}
        return _GraphAttend(self._recording.backend, kv, self._specs, self._sinks, by_visibility, blocks, offsets)

    def _attend_between(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)

        def attend(step: ReplayedStep) -> None:
            assert step.attend is not None, "the host computes attention"
            rows = slice(step.num_tokens)
            out[:, rows] = step.attend(layer, q[:, rows], k[:, rows], v[:, rows])

        self._between(attend)
        return out

    def _reduce(self) -> Reduce | None:
        """Return the sums over ranks, inside a graph or between its pieces. None for whole layers."""
        if not self._is_shared:
            return None
        return self._reduce_between if self._sums is None else self._sums.reduce

    def _reduce_between(self, partial_sum: Tensor) -> Tensor:
        out = torch.empty_like(partial_sum)

        def reduce(step: ReplayedStep) -> None:
            assert step.reduce is not None, "the ranks of a stage exchange messages"
            out.copy_(step.reduce(partial_sum))

        self._between(reduce)
        return out

    def _between(self, action: Action) -> None:
        assert self._recording.between is not None, "such steps are recorded only with actions between pieces"
        self._recording.between(action)

    def _disable(self, error: Exception) -> bool:
        _log.warning("decode steps are computed layer by layer, as with enforce_eager, not as CUDA graphs: %s", error)
        self._is_possible = False
        self.release_pool()
        return False


@dataclass
class _Graph:
    """The inputs of a graph, and the replay after recording.

    Attributes:
        hidden: the hidden states from the stage before, `[1, rows, width]`. None for the first stage.
        sent: the payload bytes of the sums of a replay, by exchange and link.
    """

    inputs: NumberBuffer
    hidden: Tensor | None = None
    replay: Replay | None = None
    sent: Counter[tuple[str, Link]] = field(default_factory=Counter)


class _StaticPlan(PagedPlan):
    """A plan whose contents change between replays, for kernels that read only its `splits`."""

    def __init__(self, splits: PagedSplits) -> None:
        self.num_queries, self.splits = len(splits.of_query) - 1, splits


@dataclass(frozen=True)
class _GraphAttend:
    """The `AttendStored` of a graph, which reads and writes the graph's inputs."""

    backend: AttentionBackend
    kv: Mapping[int, PagedKv]
    specs: Mapping[int, AttnSpec]
    sinks: Mapping[int, Tensor]
    plans: Mapping[Visibility, PagedPlan]
    blocks: Tensor
    offsets: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.backend.store(self.kv[layer], self.blocks, self.offsets, k, v)
        return self.attend_stored(layer, q, k, v)

    def slots(self, layer: int) -> KvSlots:
        return KvSlots(kv=self.kv[layer], blocks=self.blocks, offsets=self.offsets)

    def attend_stored(self, layer: int, q: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
        spec = self.specs[layer]
        out, lse = self.backend.attend_paged(q, self.kv[layer], self.plans[spec.visibility], spec)
        return with_sinks(out, lse, self.sinks[layer]).to(q.dtype) if spec.has_sinks else out


def _padded_rows(number: int) -> int:
    return next(rows for rows in _products(1, 2) if rows >= number)


def _products(first: int, factor: int) -> Iterator[int]:
    return itertools.accumulate(itertools.repeat(factor), mul, initial=first)


def _up_to(number: int, first: int, factor: int) -> list[int]:
    """Return `first` times the powers of `factor`, up to the first product that is not below `number`."""
    below = [*itertools.takewhile(lambda product: product < number, _products(first, factor))]
    return [*below, first * factor ** len(below)]
