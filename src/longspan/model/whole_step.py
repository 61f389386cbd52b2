"""Decode steps in one native call: all layers, their attention over paged KV, and the output head.

No Python runs between the kernels of such a step. Every layer streams its weights through the processor's caches, so
Python would find its code and data evicted after each kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from longspan.attn.backends.native import NativeCpu
from longspan.attn.paged import PagedKv, Reads
from longspan.attn.spec import AttnSpec
from longspan.model.fused import COST, FusedLayer, Product, Rotary, check_known, check_rows, norm_of, spread
from longspan.model.skeleton import trunk_base
from longspan.model.step import Attend, SingleTokens
from longspan.native.chain import Args, Chain, LinearArgs, PagedArgs, StoreArgs, fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("longspan")
_PROBE = 64
"""The largest number of tokens in the dry run, each of its own request. More tokens make each start slower."""
_PROBE_SLOTS = 32
_MIN_ROWS, _MAX_ROWS = 1 << 12, 1 << 17
"""Bounds of the number of positions in a table. The upper bound takes 64 MiB if heads have 128 dimensions."""
_BUFFER_STEP = 16
"""Buffers grow in steps of this many tokens."""
_PRODUCTS = 4
"""Calls of `linear.cpp` per layer."""

Forward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]
"""Computes logits `[tokens, vocab]` from tokens, positions and RoPE lengths `[tokens]`, layer by layer."""
RotaryOf = Callable[[Tensor, Tensor], Rotary]
"""Computes cosines and sines `[1, tokens, rotary_dim]` from positions and RoPE lengths `[tokens]`."""


class WholeStep:
    """Computes logits of single tokens by a prepared chain of kernels.

    `layers` are all layers of the model, and `module` has its last norm and its embeddings. Raise ValueError for a
    model of another form.
    """

    def __init__(self, module: PreTrainedModel, layers: Sequence[FusedLayer], head: Product, rotary: RotaryOf) -> None:
        base = trunk_base(module)
        check_known(module, base)
        self._norm, epsilon = norm_of(base.norm)  # keeps the memory: the kernel has its address only
        self._embeddings = module.get_input_embeddings().weight
        width = layers[0].products[0].problem.inputs
        if self._embeddings.shape[1] != width or self._embeddings.dtype != torch.bfloat16:
            shape, dtype = tuple(self._embeddings.shape), self._embeddings.dtype
            raise ValueError(f"its embeddings {shape} of {dtype} do not fit layers of width {width} in bfloat16")
        self._layers, self._head, self._rotary = layers, head, rotary
        specs = [layer.spec for layer in layers]
        if any(spec.has_sinks or not NativeCpu.knows(spec) for spec in specs):
            raise ValueError("the kernel does not compute its attention")
        problems = [product.problem for layer in layers for product in layer.products] + [head.problem]
        self._linears = (LinearArgs * len(problems))(*problems)  # copies: other steps use the layers' own
        self._linears[-1].norm, self._linears[-1].epsilon = self._norm.data_ptr(), epsilon
        self._stores = (StoreArgs * len(layers))(*(_store_args(spec) for spec in specs))
        self._reads = (PagedArgs * len(layers))(*(_paged_args(spec) for spec in specs))
        links: list[Args] = []
        for index in range(len(layers)):
            first = _PRODUCTS * index
            qkv, *rest = self._linears[first : first + _PRODUCTS]
            links += [qkv, self._stores[index], self._reads[index], *rest]
        self._chain = Chain(*links, self._linears[-1])
        self._linear_fields, self._store_fields = fields(self._linears), fields(self._stores)
        self._read_fields = fields(self._reads)
        self._specs = specs
        self._kv: Sequence[PagedKv] = ()
        self._allocate(1)

    def __call__(
        self, tokens: Tensor, positions: Tensor, rope_lengths: Tensor, step: SingleTokens, **_others: object
    ) -> Tensor | None:
        """Compute bfloat16 logits `[tokens, vocab]`, and store the tokens' KV. Arguments are `[tokens]` int64.

        The logits are valid until the next call. Return None for a step without plans. Only graphs read the other
        arguments.
        """
        if step.plans is None:
            return None
        num_tokens = len(tokens)
        if num_tokens > len(self._hidden):
            self._allocate(-(-num_tokens // _BUFFER_STEP) * _BUFFER_STEP)
        if step.kv is not self._kv:
            self._set_pool(step.kv)
        torch.index_select(self._embeddings, 0, tokens, out=self._hidden[:num_tokens])
        cos, sin = self._rotary(positions, rope_lengths)
        assert cos.is_contiguous() and sin.is_contiguous(), "the kernel reads them as arrays"
        self._linear_fields["tokens"] = num_tokens
        self._linear_fields["cos"], self._linear_fields["sin"] = cos.data_ptr(), sin.data_ptr()
        self._linear_fields["rotary_dim"] = cos.shape[-1]
        self._store_fields["tokens"] = self._read_fields["queries"] = num_tokens
        self._store_fields["blocks"], self._store_fields["offsets"] = step.blocks.data_ptr(), step.offsets.data_ptr()
        addresses = np.array([plan.addresses for plan in step.plans], dtype=np.uint64)
        for field, column in zip(("first_item", "blocks", "low", "high"), addresses.T, strict=True):
            self._read_fields[field] = column
        self._chain.run()
        return self._logits[:num_tokens]

    def prepare(
        self, _kv: Sequence[PagedKv], _max_rows: int, _max_context: int, **_others: object
    ) -> Iterator[tuple[int, int]]:
        """Do nothing: kernels are called with the addresses of each step."""
        return iter(())

    def release_pool(self) -> None:
        """Release the KV pool of the latest step."""
        self._kv = ()

    def check(self, forward: Forward, positions: Sequence[int]) -> None:
        """Raise ValueError unless a step agrees with `forward`, see `whole_step`."""
        probe = spread(positions, _PROBE)
        numbers = torch.Generator().manual_seed(0)
        rows = torch.arange(len(probe))
        tokens = torch.randint(0, len(self._embeddings), (len(probe),), generator=numbers)
        at, offsets = torch.tensor(probe), rows % _PROBE_SLOTS

        def pools() -> list[PagedKv]:
            random = torch.Generator().manual_seed(1)
            shapes = [(len(probe), spec.num_kv_heads, _PROBE_SLOTS, spec.head_dim) for spec in self._specs]
            pairs = [(torch.randn(shape, generator=random), torch.randn(shape, generator=random)) for shape in shapes]
            return [PagedKv(keys=keys.bfloat16(), values=values.bfloat16()) for keys, values in pairs]

        own_kv, backend = pools(), NativeCpu()
        reads = [Reads(blocks=[row], start=0, stop=offset + 1) for row, offset in enumerate(offsets.tolist())]
        plans = [backend.plan(reads, kv) for kv in own_kv]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            backend.store(own_kv[layer], rows, offsets, k, v)
            return backend.attend_paged(q, own_kv[layer], plans[layer], self._specs[layer])[0]

        with torch.no_grad():
            own = forward(tokens, at, at + 1, attend)
            step = SingleTokens(blocks=rows, offsets=offsets, kv=pools(), plans=plans)
            result = self(tokens, at, at + 1, step)
            assert result is not None, "the step has plans"
        self.release_pool()
        self._allocate(1)
        check_rows(result, own, probe, scale=own)

    def _allocate(self, num_tokens: int) -> None:
        """Allocate buffers for `num_tokens`, which all layers share, and set their addresses in all kernels."""
        width, inner = self._embeddings.shape[1], max(layer.inner_size for layer in self._layers)
        heads, kv_heads = (max(sizes) for sizes in zip(*map(_sizes, self._specs), strict=True))
        widths = (width, width, heads, heads, kv_heads, kv_heads, inner, self._head.problem.matrices[0].outputs)
        self._buffers = [torch.empty(num_tokens, size, dtype=torch.bfloat16) for size in widths]
        self._hidden, *_, self._logits = self._buffers
        hidden, middle, q, attended, k, v, gated, logits = (buffer.data_ptr() for buffer in self._buffers)
        of_layers = self._linear_fields[:-1].reshape(-1, _PRODUCTS)
        products = (
            (hidden, 0, (q, k, v)),
            (attended, hidden, (middle,)),
            (middle, 0, (gated,)),
            (gated, middle, (hidden,)),
        )
        for product, (x, residual, outs) in enumerate(products):
            own = of_layers[:, product]
            own["x"], own["residual"], own["x_row"], own["residual_row"] = x, residual, own["inputs"], width
            for index, out in enumerate(outs):
                own["matrices"]["out"][:, index] = out
        last = self._linear_fields[-1:]
        last["x"], last["x_row"], last["residual"] = hidden, width, 0
        last["matrices"]["out"][:, 0] = logits
        self._store_fields["k"], self._store_fields["v"] = k, v
        self._read_fields["q"], self._read_fields["out"] = q, attended

    def _set_pool(self, kv: Sequence[PagedKv]) -> None:
        """Set the addresses of keys and values in all kernels."""
        for args in (self._store_fields, self._read_fields):
            args["keys"] = [layer.keys.data_ptr() for layer in kv]
            args["values"] = [layer.values.data_ptr() for layer in kv]
            args["block_size"] = [layer.block_size for layer in kv]
        self._kv = kv


class RotaryTable:
    """Keeps cosines and sines of positions below `_MAX_ROWS` from step to step.

    Args:
        rotary: computes them for positions `[tokens]`.
    """

    def __init__(self, rotary: Callable[[Tensor], Rotary]) -> None:
        self._rotary = rotary
        self._cos, self._sin = torch.empty(2, 0, 0)

    def __call__(self, positions: Tensor) -> Rotary:
        """Return the cosines and sines of `positions` `[tokens]`."""
        num_rows = int(positions.max()) + 1
        if num_rows > _MAX_ROWS:
            return self._rotary(positions)
        if num_rows > len(self._cos):
            cos, sin = self._rotary(torch.arange(min(_MAX_ROWS, max(_MIN_ROWS, 2 * num_rows))))
            self._cos, self._sin = cos[0], sin[0]
        cos, sin = (table.index_select(0, positions)[None] for table in (self._cos, self._sin))
        return cos, sin

    def clear(self) -> None:
        """Free the table. The next step computes the rows that it needs."""
        self._cos, self._sin = torch.empty(2, 0, 0)


def whole_step(
    module: PreTrainedModel,
    layers: Sequence[FusedLayer],
    head: Product,
    rotary: RotaryOf,
    forward: Forward,
    positions: Sequence[int],
    *,
    log: Callable[[str], object] = _log.info,
) -> WholeStep | None:
    """Return the whole step of a model with fused layers and a fused head. Return None if the model has another form.

    A dry run at up to `_PROBE` of `positions` must agree with `forward`.
    """
    try:
        step = WholeStep(module, layers, head, rotary)
        step.check(forward, positions)
    except ValueError as error:
        log(f"decode steps are computed layer by layer, so {COST}: {error}")
        return None
    return step


def _sizes(spec: AttnSpec) -> tuple[int, int]:
    return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim


def _store_args(spec: AttnSpec) -> StoreArgs:
    _, row = _sizes(spec)
    dim = spec.head_dim
    return StoreArgs(kv_heads=spec.num_kv_heads, dim=dim, k_head=dim, k_row=row, v_head=dim, v_row=row)


def _paged_args(spec: AttnSpec) -> PagedArgs:
    row, _ = _sizes(spec)
    dim = spec.head_dim
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads, "dim": dim}
    return PagedArgs(**heads, q_head=dim, q_row=row, out_head=dim, out_row=row, scale=spec.scale)
