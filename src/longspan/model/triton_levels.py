"""Products with quantised weights on CUDA devices, whose memory has levels and no bfloat16 weights.

For few tokens a Triton kernel turns levels into bfloat16 as it reads them. For more tokens the weights of one product
are dequantised before PyTorch's product. Both compute with exactly `quantization.Levels.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import linear

from longspan.attn.backends.triton_paged import must_widen, padded, product
from longspan.model.quantization import GROUP, Levels, map_levels
from longspan.model.shard import Shard
from longspan.model.sharding import pieces

OUTPUTS, GROUPS = 32, 4
"""Outputs and groups of a tile. 4,096 outputs make 128 programs, and large GPUs have 132 to 148 multiprocessors."""
NUM_STAGES = 4
"""Tiles are copied up to three tiles ahead."""
_MAX_TOKENS = 64
"""Tokens of a product by the kernel. With more tokens, a product takes longer than a dequantisation."""
_CHECKED = 256
"""Outputs of the first matrix that are compared. An output head has too many for temporary tensors."""
_MAX_ERROR = 0.01
"""Maximum relative error of a product: a few roundings to bfloat16."""


class LevelsLinear(nn.Linear):
    """A linear layer whose weights are levels. Only `functional_call` sets its parameter `weight`."""

    numbers: Tensor
    grid: Tensor

    def __init__(self, levels: Levels, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = len(levels.grid), levels.grid.shape[1] * GROUP
        self.register_parameter("weight", None)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.numbers, self.grid = (nn.Buffer(part, persistent=False) for part in (levels.numbers, levels.grid))

    @property
    def levels(self) -> Levels:
        return Levels(numbers=self.numbers, grid=self.grid)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of PyTorch
        if (weight := self._parameters["weight"]) is not None:
            return linear(input, weight, self.bias)
        return multiply(input.flatten(0, -2), self.levels, self.bias).view(*input.shape[:-1], self.out_features)


def levels_of(stored: Mapping[str, Tensor], shard: Shard) -> dict[str, Levels]:
    """Map a rank's share of the levels by the names of the weights, except for shares that would cut a group."""
    shares = {name: cut_levels(shard, name, levels) for name, levels in map_levels(stored).items()}
    return {name: share for name, share in shares.items() if share is not None}


def cut_levels(shard: Shard, name: str, levels: Levels) -> Levels | None:
    """Return this rank's share of quantised weights. None if it would cut a group of levels."""
    outputs, groups = levels.grid.shape[:2]
    cut = pieces(shard, name, torch.Size([outputs, groups * GROUP]))
    if cut is None:
        return levels
    dim, ranges = cut
    unit = GROUP if dim else 1
    if any(end % unit for own in ranges for end in (own.start, own.stop)):
        return None

    def share(whole: Tensor) -> Tensor:
        return torch.cat([whole.narrow(dim, own.start // unit, len(own) // unit) for own in ranges], dim)

    numbers = share(levels.numbers.unflatten(1, (groups, -1))).flatten(1)
    return Levels(numbers=numbers, grid=share(levels.grid))


def put_levels(model: nn.Module, levels: Mapping[str, Levels], device: torch.device) -> int:
    """Replace the linear layers whose weights have levels by the names of their weights. Return the copied bytes.

    Raise RuntimeError if the kernels compute something else on this device.
    """
    num_bytes, checked = 0, set[int]()
    for name in [name for name, _ in model.named_parameters(remove_duplicate=False) if name in levels]:
        path = name.rpartition(".")[0]
        own = Levels(numbers=levels[name].numbers.to(device), grid=levels[name].grid.to(device))
        if own.bits not in checked:
            _check(Levels(numbers=own.numbers[:_CHECKED], grid=own.grid[:_CHECKED]))
            checked.add(own.bits)
        num_bytes += own.numbers.nbytes + own.grid.nbytes
        bias: Any = model.get_submodule(path).bias
        model.set_submodule(path, LevelsLinear(own, bias))
    return num_bytes


def _check(levels: Levels) -> None:
    exact, numbers = levels.weights(), torch.Generator().manual_seed(0)
    x = torch.randn(_MAX_TOKENS, exact.shape[1], generator=numbers).to(exact)
    wanted, found = linear(x, exact).float(), multiply(x, levels).float()
    if not torch.equal(weights(levels), exact) or not (found - wanted).norm() <= _MAX_ERROR * wanted.norm():
        raise RuntimeError(f"kernels for {levels.bits}-bit weights are wrong on this device: leave out `quantization`")


def join_levels(linears: Sequence[LevelsLinear], bias: Tensor | None) -> LevelsLinear:
    """Join the outputs of layers with the same inputs. Their levels become views of the joined levels."""
    if len({own.levels.bits for own in linears}) > 1:
        raise ValueError("its projections have levels of different bits")
    numbers, grid = (torch.cat([getattr(own, name) for own in linears]) for name in ("numbers", "grid"))
    sizes = [own.out_features for own in linears]
    for own, *views in zip(linears, numbers.split(sizes), grid.split(sizes), strict=True):
        own.numbers, own.grid = views
    return LevelsLinear(Levels(numbers=numbers, grid=grid), bias)


def multiply(x: Tensor, levels: Levels, bias: Tensor | None = None) -> Tensor:
    """Return the product `[tokens, outputs]` of `x [tokens, inputs]` in bfloat16 and the weights of the levels."""
    num_tokens, (num_outputs, num_groups) = len(x), levels.grid.shape[:2]
    if num_tokens > _MAX_TOKENS:
        return linear(x, weights(levels), bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device)
    tokens = min(_MAX_TOKENS, padded(num_tokens))
    with torch.cuda.device_of(x):
        product_kernel[triton.cdiv(num_outputs, OUTPUTS),](
            *(x, levels.numbers, _pairs(levels), bias, out, num_tokens, num_outputs, num_groups, x.stride(0)),
            bits=levels.bits,
            group_size=GROUP,
            outputs=OUTPUTS,
            groups=GROUPS,
            tokens=tokens,
            widen=must_widen(x),
            num_stages=NUM_STAGES,
        )
    return out


def weights(levels: Levels) -> Tensor:
    """Return the dequantised weights `[outputs, inputs]`, as `Levels.weights` does, in one launch."""
    num_outputs, num_groups = levels.grid.shape[:2]
    out = torch.empty(num_outputs, num_groups * GROUP, dtype=torch.bfloat16, device=levels.grid.device)
    with torch.cuda.device_of(out):
        weights_kernel[triton.cdiv(num_outputs, OUTPUTS), triton.cdiv(num_groups, GROUPS)](
            *(levels.numbers, _pairs(levels), out, num_outputs, num_groups),
            bits=levels.bits,
            group_size=GROUP,
            outputs=OUTPUTS,
            groups=GROUPS,
            widen=must_widen(out),
        )
    return out


def _pairs(levels: Levels) -> Tensor:
    """View the step and the base of each group as one number, the step in its low half."""
    return levels.grid.view(torch.int32)


@triton.jit
def load_levels(
    numbers: tl.tensor,
    grid: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    num_outputs: tl.tensor,
    num_groups: tl.tensor,
    num_bytes: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load the bytes of groups `[outputs, groups, num_bytes]`, and their steps and bases `[outputs, groups, 1]`."""
    there = (row < num_outputs)[:, None] & (group < num_groups)[None, :]
    at = row.to(tl.int64)[:, None] * num_groups + group[None, :]
    pair = tl.load(grid + at, mask=there, other=0)
    byte = tl.arange(0, num_bytes)
    levels = tl.load(numbers + at[:, :, None] * num_bytes + byte[None, None, :], mask=there[:, :, None], other=0)
    step, base = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    return levels, step[:, :, None], base[:, :, None]


@triton.jit
def dequantised(
    levels: tl.tensor, step: tl.tensor, base: tl.tensor, half: tl.constexpr, bits: tl.constexpr, widen: tl.constexpr
) -> tl.tensor:
    """Return the bfloat16 weights of all levels, or with 4 bits of the levels in one half of the bytes."""
    if bits == 4:
        levels = (levels >> (4 * half)) & 15
    exact = levels.to(tl.float32) * step + base
    if widen:  # Triton's interpreter cuts off bits
        word = exact.to(tl.int32, bitcast=True)
        exact = ((word + 0x7FFF + ((word >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return exact.to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    grid: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    num_groups: tl.tensor,
    x_row: tl.tensor,
    bits: tl.constexpr,
    group_size: tl.constexpr,
    outputs: tl.constexpr,
    groups: tl.constexpr,
    tokens: tl.constexpr,
    widen: tl.constexpr,
) -> None:
    """Compute a tile of outputs for all tokens, group by group of the inputs."""
    num_bytes: tl.constexpr = group_size * bits // 8
    row = tl.program_id(0) * outputs + tl.arange(0, outputs)
    token, byte = tl.arange(0, tokens), tl.arange(0, num_bytes)
    in_tokens = token < num_tokens
    total = tl.zeros((tokens, outputs), tl.float32)
    for first in range(0, num_groups, groups):
        group = first + tl.arange(0, groups)
        levels, step, base = load_levels(numbers, grid, row, group, num_outputs, num_groups, num_bytes)
        seen = in_tokens[:, None, None] & (group < num_groups)[None, :, None]
        for half in tl.static_range(8 // bits):
            column = (group * group_size + half * num_bytes)[:, None] + byte[None, :]
            x_at = x + token.to(tl.int64)[:, None, None] * x_row + column[None, :, :]
            values = tl.reshape(tl.load(x_at, mask=seen, other=0.0), (tokens, groups * num_bytes))
            own = tl.reshape(dequantised(levels, step, base, half, bits, widen), (outputs, groups * num_bytes))
            total += product(values, tl.trans(own), widen)
    in_outputs = row < num_outputs
    if bias is not None:
        total += tl.load(bias + row, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    out_at = out + token.to(tl.int64)[:, None] * num_outputs + row[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=in_tokens[:, None] & in_outputs[None, :])


@triton.jit
def weights_kernel(
    numbers: tl.tensor,
    grid: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    num_groups: tl.tensor,
    bits: tl.constexpr,
    group_size: tl.constexpr,
    outputs: tl.constexpr,
    groups: tl.constexpr,
    widen: tl.constexpr,
) -> None:
    """Compute a tile of dequantised weights."""
    num_bytes: tl.constexpr = group_size * bits // 8
    row = tl.program_id(0) * outputs + tl.arange(0, outputs)
    group, byte = tl.program_id(1) * groups + tl.arange(0, groups), tl.arange(0, num_bytes)
    levels, step, base = load_levels(numbers, grid, row, group, num_outputs, num_groups, num_bytes)
    there = (row < num_outputs)[:, None, None] & (group < num_groups)[None, :, None]
    for half in tl.static_range(8 // bits):
        column = (group * group_size + half * num_bytes)[:, None] + byte[None, :]
        at = row.to(tl.int64)[:, None, None] * num_groups * group_size + column[None, :, :]
        tl.store(out + at, dequantised(levels, step, base, half, bits, widen), mask=there)
