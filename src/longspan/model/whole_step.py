"""Steps of single tokens, as decodes are, in one call: all layers, their attention to KV in blocks, the output head.

Nothing of Python runs between the kernels of such a step, which would find its own code and data gone from the caches
each time, because every layer streams its weights through them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.attn.backends.native import NativeCpu
from longspan.attn.paged import PagedKv, Reads
from longspan.attn.spec import AttnSpec
from longspan.model.fused import COST, FusedLayer, Product, Rotary, check_known, check_rows, norm_of, spread
from longspan.model.step import Attend, SingleTokens
from longspan.native.chain import Args, Chain, LinearArgs, PagedArgs, StoreArgs, fields

_log = logging.getLogger("longspan")
_PROBE = 64
"""The most tokens by which a model is checked, each of a request of its own. More of them take longer at each start."""
_PROBE_SLOTS = 32
_FEWEST_ROWS, _MOST_ROWS = 1 << 12, 1 << 17
"""Bounds of the positions in a table: the most are 64 MiB with heads of 128 numbers."""
_MORE_ROOM = 16
"""Buffers grow by so many tokens."""
_PRODUCTS = 4
"""Calls of `linear.cpp` per layer."""

Forward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]
"""Computes logits `[tokens, vocab]` of tokens, positions and RoPE lengths `[tokens]`, layer by layer."""
RotaryOf = Callable[[Tensor, Tensor], Rotary]
"""Computes cosines and sines `[1, tokens, rotary_dim]` of positions and RoPE lengths `[tokens]`."""


class WholeStep:
    """Computes logits of single tokens by a chain of kernels that was prepared before.

    Args:
        module: the model, whose last norm and embeddings are taken.
        layers: its own, all of them.
        head: its output head.
        rotary: of its tokens.

    Raises:
        ValueError: for a model of another form.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401 - whatever its class
        layers: Sequence[FusedLayer],
        head: Product,
        rotary: RotaryOf,
    ) -> None:
        base = getattr(module, module.base_model_prefix)
        check_known(module, base)
        self._norm, epsilon = norm_of(base.norm)  # the kernel knows its address only
        self._embeddings = module.get_input_embeddings().weight
        width = layers[0].products[0].problem.inputs
        if self._embeddings.shape[1] != width or self._embeddings.dtype != torch.bfloat16:
            shape, dtype = tuple(self._embeddings.shape), self._embeddings.dtype
            raise ValueError(f"its embeddings {shape} of {dtype} are not what its layers of {width} numbers read")
        self._layers, self._head, self._rotary = layers, head, rotary
        specs = [layer.spec for layer in layers]
        if any(not NativeCpu.knows(spec) for spec in specs):
            raise ValueError("its attention is not that of the kernel")
        problems = [product.problem for layer in layers for product in layer.products] + [head.problem]
        self._linears = (LinearArgs * len(problems))(*problems)  # copies: layers go on to serve other steps
        self._linears[-1].norm, self._linears[-1].epsilon = self._norm.data_ptr(), epsilon
        self._stores = (StoreArgs * len(layers))(*(_store_args(spec) for spec in specs))
        self._reads = (PagedArgs * len(layers))(*(_paged_args(spec) for spec in specs))
        links: list[Args] = []
        for index in range(len(layers)):
            first = _PRODUCTS * index
            qkv, *rest = self._linears[first : first + _PRODUCTS]
            links += [qkv, self._stores[index], self._reads[index], *rest]
        self._chain = Chain(*links, self._linears[-1])
        self._of_linears, self._of_stores = fields(self._linears), fields(self._stores)
        self._of_reads = fields(self._reads)
        self._specs = specs
        self._kv: Sequence[PagedKv] = ()
        self._make_room(1)

    def __call__(self, tokens: Tensor, positions: Tensor, rope_lengths: Tensor, step: SingleTokens) -> Tensor:
        """Returns bfloat16 logits `[tokens, vocab]`, which stay until the next call; stores the tokens' KV.

        Tensors are `[tokens]` int64.
        """
        num_tokens = len(tokens)
        if num_tokens > len(self._hidden):
            self._make_room(-(-num_tokens // _MORE_ROOM) * _MORE_ROOM)
        if step.kv is not self._kv:
            self._set_pool(step.kv)
        torch.index_select(self._embeddings, 0, tokens, out=self._hidden[:num_tokens])
        cos, sin = self._rotary(positions, rope_lengths)
        assert cos.is_contiguous() and sin.is_contiguous(), "the kernel reads them as arrays"
        self._of_linears["tokens"] = num_tokens
        self._of_linears["cos"], self._of_linears["sin"] = cos.data_ptr(), sin.data_ptr()
        self._of_linears["rotary_dim"] = cos.shape[-1]
        self._of_stores["tokens"] = self._of_reads["queries"] = num_tokens
        self._of_stores["blocks"], self._of_stores["offsets"] = step.blocks.data_ptr(), step.offsets.data_ptr()
        places = np.array([plan.addresses for plan in step.plans], dtype=np.uint64)
        for field, column in zip(("first_item", "blocks", "low", "high"), places.T, strict=True):
            self._of_reads[field] = column
        self._chain.run()
        return self._logits[:num_tokens]

    def release_pool(self) -> None:
        """Lets go of the pool of the latest step."""
        self._kv = ()

    def check(self, forward: Forward, positions: Sequence[int]) -> None:
        """Raises ValueError unless it computes what the model does layer by layer, see `whole_step`."""
        probe = spread(positions, _PROBE)
        numbers = torch.Generator().manual_seed(0)
        rows, tokens = (
            torch.arange(len(probe)),
            torch.randint(0, len(self._embeddings), (len(probe),), generator=numbers),
        )
        where, offsets = torch.tensor(probe), rows % _PROBE_SLOTS

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
            own = forward(tokens, where, where + 1, attend)
            step = SingleTokens(blocks=rows, offsets=offsets, kv=pools(), plans=plans)
            found = self(tokens, where, where + 1, step)
        self.release_pool()
        self._make_room(1)
        check_rows(found, own, probe, scale=own)

    def _make_room(self, num_tokens: int) -> None:
        """Makes buffers for so many tokens, which all layers share, and tells every kernel where they are."""
        width, inner = self._embeddings.shape[1], max(layer.inner_size for layer in self._layers)
        heads, kv_heads = (max(sizes) for sizes in zip(*map(_sizes, self._specs), strict=True))
        widths = (width, width, heads, heads, kv_heads, kv_heads, inner, self._head.problem.matrices[0].outputs)
        self._buffers = [torch.empty(num_tokens, size, dtype=torch.bfloat16) for size in widths]
        self._hidden, *_, self._logits = self._buffers
        hidden, between, q, attended, k, v, inner_at, logits = (one.data_ptr() for one in self._buffers)
        of_layers = self._of_linears[:-1].reshape(-1, _PRODUCTS)
        for product, (x, residual, outs) in enumerate(
            (
                (hidden, 0, (q, k, v)),
                (attended, hidden, (between,)),
                (between, 0, (inner_at,)),
                (inner_at, between, (hidden,)),
            )
        ):
            own = of_layers[:, product]
            own["x"], own["residual"], own["x_row"], own["residual_row"] = x, residual, own["inputs"], width
            for index, out in enumerate(outs):
                own["matrices"]["out"][:, index] = out
        last = self._of_linears[-1:]
        last["x"], last["x_row"], last["residual"] = hidden, width, 0
        last["matrices"]["out"][:, 0] = logits
        self._of_stores["k"], self._of_stores["v"] = k, v
        self._of_reads["q"], self._of_reads["out"] = q, attended

    def _set_pool(self, kv: Sequence[PagedKv]) -> None:
        """Tells every kernel where keys and values are."""
        for args in (self._of_stores, self._of_reads):
            args["keys"] = [one.keys.data_ptr() for one in kv]
            args["values"] = [one.values.data_ptr() for one in kv]
            args["block_size"] = [one.block_size for one in kv]
        self._kv = kv


class RotaryTable:
    """Keeps cosines and sines of positions from step to step, as long as they are not too many.

    Args:
        rotary: computes them for positions `[tokens]`.
    """

    def __init__(self, rotary: Callable[[Tensor], Rotary]) -> None:
        self._rotary = rotary
        self._cos, self._sin = torch.empty(2, 0, 0)

    def __call__(self, positions: Tensor) -> Rotary:
        """Returns those of `positions` `[tokens]`."""
        number = int(positions.max()) + 1
        if number > _MOST_ROWS:
            return self._rotary(positions)
        if number > len(self._cos):
            cos, sin = self._rotary(torch.arange(min(_MOST_ROWS, max(_FEWEST_ROWS, 2 * number))))
            self._cos, self._sin = cos[0], sin[0]
        cos, sin = (table.index_select(0, positions)[None] for table in (self._cos, self._sin))
        return cos, sin

    def clear(self) -> None:
        """Frees the table. The next step computes as much as it needs."""
        self._cos, self._sin = torch.empty(2, 0, 0)


def whole_step(
    module: Any,  # noqa: ANN401 - whatever its class
    layers: Sequence[FusedLayer],
    head: Product,
    rotary: RotaryOf,
    forward: Forward,
    positions: Sequence[int],
) -> WholeStep | None:
    """Returns what computes whole steps of a model, whose layers and head are fused, if it is of the form for that.

    It is checked against `forward`, at `positions` or as many of them as one step can have.
    """
    try:
        found = WholeStep(module, layers, head, rotary)
        found.check(forward, positions)
    except ValueError as error:
        _log.info("decode steps are computed layer by layer, so %s: %s", COST, error)
        return None
    return found


def _sizes(spec: AttnSpec) -> tuple[int, int]:
    return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim


def _store_args(spec: AttnSpec) -> StoreArgs:
    _, row = _sizes(spec)
    dim = spec.head_dim
    return StoreArgs(kv_heads=spec.num_kv_heads, dim=dim, k_head=dim, k_row=row, v_head=dim, v_row=row)


def _paged_args(spec: AttnSpec) -> PagedArgs:
    row, _ = _sizes(spec)
    dim = spec.head_dim
    return PagedArgs(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        dim=dim,
        q_head=dim,
        q_row=row,
        out_head=dim,
        out_row=row,
        scale=spec.scale,
    )
