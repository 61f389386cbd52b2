"""Triton kernels for the small operators of decoder layers: norms, rotary embeddings, gates and stores of KV.

Each kernel computes in float32 and rounds its results once. A row of a result depends on the same row of the inputs
only. So other tokens of the batch do not change a bit of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attn.backends.triton_paged import padded
from longspan.model.step import KvSlots

MAX_WIDTH = 1 << 15
"""The largest number of elements of a token that one program normalises in registers."""
_GATE_COLUMNS = 1024
"""Elements of a program of the gate kernel. More elements make fewer programs, and one token needs many programs."""
_WARP_ELEMENTS = 512
"""Elements of a row per warp. Fewer elements shorten the kernel for one token."""
_MAX_HEAD_ELEMENTS = 2048
"""Elements of a tile of heads. A tile has up to 16 tokens."""

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """An RMSNorm with weights `[width]`. Gemma's norms add 1 to their weights."""

    weight: Tensor
    epsilon: float
    adds_one: bool = False


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotary embedding of queries and keys.

    Attributes:
        cos, sin: `[1, tokens, rotary_dim]`. The rest of a head is not rotated.
        pairs_adjacent: elements 2i and 2i + 1 are rotated together. Otherwise i and i + rotary_dim / 2 are.
    """

    cos: Tensor
    sin: Tensor
    pairs_adjacent: bool = False


def add_norm(
    x: Tensor, *, residual: Tensor | None = None, before: Norm | None = None, after: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Return `h = residual + before(x)` and `after(h)` of `x [tokens, width]`, in one launch.

    A norm that is None changes nothing. Then both results may be the same tensor.
    """
    num_tokens, width = x.shape
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1), "rows are contiguous"
    changes = residual is not None or before is not None
    hidden = torch.empty(x.shape, dtype=x.dtype, device=x.device) if changes else x
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if after is not None else hidden
    with torch.cuda.device_of(x):
        norm_kernel[num_tokens,](
            *(x, residual, hidden if changes else None, normed if after is not None else None),
            *(None if norm is None else norm.weight for norm in (before, after)),
            *(0.0 if norm is None else norm.epsilon for norm in (before, after)),
            *(x.stride(0), 0 if residual is None else residual.stride(0), width),
            adds_one=any(norm is not None and norm.adds_one for norm in (before, after)),
            padded_width=padded(width),
            num_warps=num_warps(width),
        )
    return hidden, normed


def rotate(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotation: Rotation | None,
    *,
    norms: tuple[Norm | None, Norm | None] = (None, None),
    slots: KvSlots | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply norms and rotary embedding to queries and keys, and store keys and values, in one launch.

    Args:
        qkv: `[tokens, (num_heads + 2 * num_kv_heads) * head_dim]`.
        rotation: None for layers without a rotary embedding.
        norms: of the heads of queries and of keys, with weights `[head_dim]`.
        slots: where the tokens' keys and values are stored. None to store nothing.

    Returns:
        Queries, keys and values, views `[heads, tokens, head_dim]`.
    """
    num_tokens, num_rotated = len(qkv), num_heads + num_kv_heads
    assert qkv.is_contiguous(), "heads are adjacent"
    dim = qkv.shape[1] // (num_rotated + num_kv_heads)
    rotated = torch.empty(num_tokens, num_rotated, dim, dtype=qkv.dtype, device=qkv.device)
    cos = sin = None
    if rotation is not None:
        cos, sin = rotation.cos[0], rotation.sin[0]
        assert cos.is_contiguous() and sin.is_contiguous(), "the kernel reads them as arrays"
    keys = values = blocks = offsets = None
    strides: tuple[int, ...] = (0, 0, 0)
    if slots is not None:
        keys, values, blocks, offsets = slots.kv.keys, slots.kv.values, slots.blocks, slots.offsets
        assert keys.stride() == values.stride() and keys.stride(3) == 1, "keys and values have the same layout"
        strides = keys.stride()[:3]
    tile = max(1, min(16, _MAX_HEAD_ELEMENTS // padded(dim)))
    q_norm, k_norm = norms
    with torch.cuda.device_of(qkv):
        rotate_kernel[triton.cdiv(num_tokens, tile), num_rotated + (0 if slots is None else num_kv_heads)](
            *(qkv, rotated, cos, sin, keys, values, blocks, offsets),
            *(None if norm is None else norm.weight for norm in norms),
            *(0.0 if norm is None else norm.epsilon for norm in norms),
            *(num_tokens, num_heads, num_kv_heads, *strides),
            dim=dim,
            rotary_dim=0 if cos is None else cos.shape[-1],
            pairs_adjacent=rotation is not None and rotation.pairs_adjacent,
            adds_one=any(norm is not None and norm.adds_one for norm in (q_norm, k_norm)),
            width=padded(dim),
            tile=tile,
        )
    heads = rotated.transpose(0, 1)
    return heads[:num_heads], heads[num_heads:], qkv.view(num_tokens, -1, dim)[:, num_rotated:].transpose(0, 1)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up` `[tokens, inner]` of `gate_up [tokens, 2 * inner]`."""
    num_tokens, inner = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), "the kernel reads it as an array"
    out = torch.empty(num_tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    with torch.cuda.device_of(gate_up):
        gate_kernel[num_tokens, triton.cdiv(inner, _GATE_COLUMNS)](
            *(gate_up, out, inner),
            is_silu=activation == "silu",
            columns=min(_GATE_COLUMNS, padded(inner)),
        )
    return out


def num_warps(width: int) -> int:
    return max(1, min(16, padded(width) // _WARP_ELEMENTS))


@triton.jit
def normalised(
    x: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, num_columns: tl.tensor, adds_one: tl.constexpr
) -> tl.tensor:
    """Apply an RMSNorm to the rows of a tile, whose padding is 0."""
    weight = weight.to(tl.float32)
    if adds_one:
        weight += 1.0
    scale = tl.rsqrt(tl.sum(x * x, 1) / num_columns + epsilon)
    return x * scale[:, None] * weight


@triton.jit
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor | None,
    hidden: tl.tensor | None,
    normed: tl.tensor | None,
    before: tl.tensor | None,
    after: tl.tensor | None,
    before_epsilon: tl.tensor,
    after_epsilon: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    num_columns: tl.tensor,
    adds_one: tl.constexpr,
    padded_width: tl.constexpr,
) -> None:
    """Add a row to its residual, with a norm of the row before and of the sum after the addition."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded_width)[None, :]
    inside = column < num_columns
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if before is not None:
        weight = tl.load(before + column, mask=inside, other=0.0)
        values = normalised(values, weight, before_epsilon, num_columns, adds_one)
    if residual is not None:
        values += tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    if hidden is not None:
        rounded = values.to(hidden.dtype.element_ty)
        tl.store(hidden + row * num_columns + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if normed is not None:
        weight = tl.load(after + column, mask=inside, other=0.0)
        values = normalised(values, weight, after_epsilon, num_columns, adds_one)
        tl.store(normed + row * num_columns + column, values.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def partners(
    column: tl.tensor, rotary_dim: tl.constexpr, pairs_adjacent: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return for each element its partner in the rotation, the index of their angle, and if it is the first of both."""
    if pairs_adjacent:
        is_first = column % 2 == 0
        partner, angle = tl.where(is_first, column + 1, column - 1), column // 2
    else:
        is_first = column < rotary_dim // 2
        partner, angle = tl.where(is_first, column + rotary_dim // 2, column - rotary_dim // 2), column
    return tl.where(column < rotary_dim, partner, column), angle, is_first


@triton.jit
def head_weight(
    q_weight: tl.tensor, k_weight: tl.tensor, is_query: tl.tensor, column: tl.tensor, dim: tl.constexpr
) -> tl.tensor:
    """Load the weights of the norm of query heads or of key heads."""
    of_query = tl.load(q_weight + column, mask=column < dim, other=0.0)
    of_key = tl.load(k_weight + column, mask=column < dim, other=0.0)
    return tl.where(is_query, of_query, of_key).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_kernel(
    qkv: tl.tensor,
    rotated: tl.tensor,
    cos: tl.tensor | None,
    sin: tl.tensor | None,
    keys: tl.tensor | None,
    values: tl.tensor | None,
    blocks: tl.tensor | None,
    offsets: tl.tensor | None,
    q_weight: tl.tensor | None,
    k_weight: tl.tensor | None,
    q_epsilon: tl.tensor,
    k_epsilon: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    kv_block: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    pairs_adjacent: tl.constexpr,
    adds_one: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Apply the norm and the rotary embedding to one head of a tile of tokens.

    Keys and values are stored in the slots of the tokens. Tokens of blocks below 0 are not stored.
    """
    token = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    head = tl.program_id(1).to(tl.int64)
    num_rotated = num_heads + num_kv_heads
    column = tl.arange(0, width)
    in_rows = token < num_tokens
    whole = in_rows[:, None] & (column < dim)[None, :]
    row_at = token * (num_rotated + num_kv_heads) * dim + head * dim
    x = tl.load(qkv + row_at[:, None] + column[None, :], mask=whole, other=0.0)
    if head < num_rotated:
        is_query = head < num_heads
        partner, angle, is_first = partners(column, rotary_dim, pairs_adjacent)
        result = x.to(tl.float32)
        y = tl.load(qkv + row_at[:, None] + partner[None, :], mask=whole, other=0.0).to(tl.float32)
        if q_weight is not None:  # both have norms, or neither
            epsilon, one = tl.where(is_query, q_epsilon, k_epsilon), 1.0 if adds_one else 0.0
            scale = tl.rsqrt(tl.sum(result * result, 1) / dim + epsilon)[:, None]
            result *= scale * (head_weight(q_weight, k_weight, is_query, column, dim) + one)[None, :]
            y *= scale * (head_weight(q_weight, k_weight, is_query, partner, dim) + one)[None, :]
        if rotary_dim:
            at = token[:, None] * rotary_dim + angle[None, :]
            turned = whole & (column < rotary_dim)[None, :]
            cosines = tl.load(cos + at, mask=turned, other=1.0).to(tl.float32)
            sines = tl.load(sin + at, mask=turned, other=0.0).to(tl.float32)
            result = result * cosines + tl.where(is_first[None, :], -y, y) * sines
        x = result.to(rotated.dtype.element_ty)
        tl.store(rotated + (token * num_rotated + head)[:, None] * dim + column[None, :], x, mask=whole)
    if keys is not None:
        block = tl.load(blocks + token, mask=in_rows, other=-1)
        offset = tl.load(offsets + token, mask=in_rows, other=0)
        stored = whole & (block >= 0)[:, None]
        is_key, is_value = (head >= num_heads) & (head < num_rotated), head >= num_rotated
        own = head - tl.where(is_key, num_heads, num_rotated)
        slot = (block * kv_block + own * kv_head + offset * kv_row)[:, None] + column[None, :]
        tl.store(keys + slot, x, mask=stored & is_key)
        tl.store(values + slot, x, mask=stored & is_value)


@triton.jit
def gate_kernel(
    gate_up: tl.tensor, out: tl.tensor, inner: tl.tensor, is_silu: tl.constexpr, columns: tl.constexpr
) -> None:
    """Multiply a piece of a row by its activated gate."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    if is_silu:
        active = gate / (1.0 + tl.exp(-gate))
    else:
        argument = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * argument) + 1.0))  # gate * (1 + tanh(argument)) / 2
    tl.store(out + row * inner + column, (active * up).to(out.dtype.element_ty), mask=inside)
