"""Decoder layers computed by our own kernels: two calls in place of some thirty operators.

A layer of Llama's form (norm, attention, residual, norm, gated feed-forward, residual) is taken over as a whole: its
module stays, and its forward is replaced. That needs a class whose forward is known, see `check_known`. Then both
compute the same random input at positions up to the context length. A layer keeps its own forward if results differ.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.attn.spec import AttnSpec
from longspan.model.quantization import Levels
from longspan.model.step import Reduce
from longspan.native.chain import Chain, LinearArgs

_log = logging.getLogger("longspan")
MAX_ERROR = 0.02
"""The largest difference from a module's own results, relative to them: some roundings to bfloat16."""
_MAX_ROW_ERROR = 0.04
"""The largest difference at one position. Roundings vary from token to token."""
_FEW = 16
"""Positions by which a layer is checked if one before it was checked by all. The kernels compute 16 tokens at once."""
_FAMILIES = {"cwm", "llama", "ministral", "mistral", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"}
"""The models of transformers whose modules have the forward of Llama's, Qwen3's or Phi-3's; their code was compared."""
COST = "a decode step can take twice as long"
"""The cost of PyTorch's operators, which took half of a decode step of the default model (`docs/design.md`)."""
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines `[1, tokens, rotary_dim]`."""
LevelsOf = Mapping[int, Levels]
"""The levels of quantised parameters, by their addresses."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The weights `[outputs, inputs]` and the bias `[outputs]` of a linear layer, or of some of its outputs.

    Attributes:
        is_rotated: its heads get their rotary embedding.
        head_norm: weights `[head_dim]` of an RMSNorm that each head gets before.
        levels: what the weights are read from, if they are quantised.
    """

    weight: Tensor
    bias: Tensor | None = None
    levels: Levels | None = None
    is_rotated: bool = False
    head_norm: Tensor | None = None


class Product:
    """Products of the same tokens with up to three matrices, in one call.

    Args:
        norm: weights `[inputs]` of an RMSNorm of the tokens before; None for none.
        is_gated: the only output is that of the second matrix, times SiLU of that of the first.
        head_dim: of what is rotated.

    Attributes:
        problem: the arguments of the kernel.

    Raises:
        ValueError: for shapes that the kernel does not know.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        is_gated: bool = False,
        head_dim: int = 0,
    ) -> None:
        for matrix in matrices:
            num_outputs, num_inputs = matrix.weight.shape
            if (matrix.levels is None) != (matrices[0].levels is None):
                raise ValueError("some of the matrices are quantised, others are not")
            if is_gated and matrix.levels and matrices[0].levels and matrix.levels.bits != matrices[0].levels.bits:
                raise ValueError("a gate and what it gates have levels of different bits")
            if num_inputs % 32 or num_outputs % 16 or matrix.weight.dtype != torch.bfloat16:
                raise ValueError(f"a layer has {num_inputs} inputs and {num_outputs} outputs of {matrix.weight.dtype}")
        if head_dim % 32:
            raise ValueError(f"heads have {head_dim} numbers")
        self._held = matrices, norm  # the kernel knows their addresses only
        self._widths = [len(matrix.weight) for matrix in matrices[: 1 if is_gated else None]]
        self.problem = problem = LinearArgs(
            inputs=matrices[0].weight.shape[1],
            norm=_address(norm),
            epsilon=epsilon,
            number=len(matrices),
            gated=is_gated,
            head_dim=head_dim,
        )
        for own, matrix in zip(problem.matrices, matrices, strict=False):
            own.weight, own.bias, own.head_norm = map(_address, (matrix.weight, matrix.bias, matrix.head_norm))
            own.outputs, own.row, own.rotated = len(matrix.weight), matrix.weight.stride(0), matrix.is_rotated
            own.out_row = own.outputs
            if (levels := matrix.levels) is not None:
                own.levels, own.grid, own.bits = _address(levels.numbers), _address(levels.grid), levels.bits
        self._outs = [problem.matrices[index] for index in range(len(self._widths))]
        self._alone = Chain(problem)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, rotary: Rotary | None = None) -> list[Tensor]:
        """Returns `[tokens, outputs]` of each matrix for `x [tokens, inputs]`; a residual is added to the first."""
        outs = self.prepare(x, residual=residual, rotary=rotary)
        self._alone.run()
        return outs

    def prepare(self, x: Tensor, *, residual: Tensor | None = None, rotary: Rotary | None = None) -> list[Tensor]:
        """Returns room for what is computed when this is a link of a `Chain`; until then all of it must stay."""
        problem, num_tokens = self.problem, x.shape[0]
        problem.x, problem.tokens, problem.x_row = x.data_ptr(), num_tokens, x.stride(0)
        problem.residual = _address(residual)
        if residual is not None:
            problem.residual_row = residual.stride(0)
        if rotary is not None:
            cos, sin = rotary
            assert cos.is_contiguous() and sin.is_contiguous(), "the kernel reads them as arrays"
            problem.cos, problem.sin, problem.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        outs = [torch.empty(num_tokens, width, dtype=torch.bfloat16) for width in self._widths]
        for own, out in zip(self._outs, outs, strict=True):
            own.out = out.data_ptr()  # the kernel writes all of it
        return outs


class FusedLayer:
    """The forward of one decoder layer.

    Args:
        layer: the module, whose own forward goes on to serve steps with layerwise exchanges.
        spec: its attention.
        reduce: sums outputs over the ranks of an instance; None on a rank that has whole layers.
        levels: of quantised weights, by the address of a parameter.

    Attributes:
        products: in the order in which they are computed; attention comes behind the first.
        inner_size: numbers of a token between the last two.

    Raises:
        ValueError: for a layer of another form.
    """

    def __init__(self, layer: nn.Module, spec: AttnSpec, reduce: Reduce | None, levels: LevelsOf) -> None:
        parts = {name: part for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
        if parts.keys() != _PARTS:
            raise ValueError(f"{type(layer).__name__} has other parts than the layers of Llama")
        check_known(layer, *parts.values())
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self._own, self.spec, self._reduce, self._index = layer.forward, spec, reduce, attention.layer_idx
        norm, epsilon = norm_of(layer.input_layernorm)
        self._qkv = Product(_projections(attention, spec, levels), norm=norm, epsilon=epsilon, head_dim=spec.head_dim)
        self._out = Product([_matrix(attention.o_proj, levels)])
        norm, epsilon = norm_of(layer.post_attention_layernorm)
        self._gate_up = Product(_gate_and_up(mlp, levels), norm=norm, epsilon=epsilon, is_gated=True)
        self._down = Product([_matrix(mlp.down_proj, levels)])
        self.products = (self._qkv, self._out, self._gate_up, self._down)
        self.inner_size = self._down.problem.inputs
        self._rest = Chain(self._out.problem, self._gate_up.problem, self._down.problem)

    def __call__(self, hidden_states: Tensor, *others: object, **arguments: Any) -> Tensor:  # noqa: ANN401
        """Returns hidden states `[1, tokens, hidden]`, as transformers' layers do."""
        attend = arguments["attend"]
        if getattr(attend, "num_alone", None) is not None:
            return self._own(hidden_states, *others, **arguments)  # type: ignore[no-any-return]
        hidden, dim = hidden_states[0], self.spec.head_dim
        q, k, v = self._qkv(hidden, rotary=arguments["position_embeddings"])
        num_tokens = q.shape[0]
        q, k, v = [x.view(num_tokens, -1, dim).transpose(0, 1) for x in (q, k, v)]
        out = attend(self._index, q, k, v).transpose(0, 1).reshape(num_tokens, -1)
        if self._reduce is not None:
            hidden = hidden + self._reduce(self._out(out)[0][None])[0]
            (inner,) = self._gate_up(hidden)
            return (hidden + self._reduce(self._down(inner)[0][None])[0])[None]
        (between,) = self._out.prepare(out, residual=hidden)
        (inner,) = self._gate_up.prepare(between)
        (behind,) = self._down.prepare(inner, residual=between)
        self._rest.run()  # all of them are still here
        return behind[None]


def fuse_layers(
    layers: Mapping[int, nn.Module],
    specs: Sequence[AttnSpec],
    reduce: Reduce | None,
    rotary: Callable[[Tensor], Rotary],
    levels: LevelsOf,
    positions: Sequence[int],
) -> dict[int, FusedLayer]:
    """Replaces the forward of each layer that the kernels know, by its number, and logs which they do not.

    `rotary` gives cosines and sines for positions `[tokens]`. The first layer of each kind is checked at all of
    `positions`, the others at a few of them. Returns the replaced forwards.
    """
    known: dict[int, FusedLayer] = {}
    others: dict[str, list[int]] = {}
    checked: set[tuple[AttnSpec, tuple[object, ...]]] = set()
    for index, layer in layers.items():
        try:
            fused = FusedLayer(layer, specs[index], reduce, levels)
            kind = specs[index], tuple(sorted(_settings(layer)))
            _check(fused, layer, rotary, spread(positions, _FEW) if kind in checked else positions)
            checked.add(kind)
        except ValueError as error:
            others.setdefault(str(error), []).append(index)
        else:
            layer.forward = known[index] = fused
    for reason, indices in others.items():
        _log.info("layers %s are computed by PyTorch's operators, so %s: %s", indices, COST, reason)
    return known


def check_known(*modules: nn.Module) -> None:
    """Raises ValueError unless transformers has these modules, in one of the models whose forward is known.

    A class of the same name in code that came with a model is another class.
    """
    for module in modules:
        kind = type(module)
        family = kind.__module__.rpartition(".modeling_")[2]
        if family not in _FAMILIES or kind.__module__ != f"transformers.models.{family}.modeling_{family}":
            raise ValueError(f"the forward of {kind.__name__} is not one that the kernels stand for")


def spread(positions: Sequence[int], number: int) -> Sequence[int]:
    """Returns at most `number` of the positions at equal distances, with the first and the last."""
    if len(positions) <= number:
        return positions
    return [positions[index * (len(positions) - 1) // (number - 1)] for index in range(number)]


def fuse_head(head: Any, levels: LevelsOf) -> Product | None:  # noqa: ANN401 - a module, whatever its class
    """Replaces the forward of an output head, and returns what computes it, if the kernels know it."""
    try:
        product = Product([_matrix(head, levels)])
    except ValueError as error:
        _log.info("the output head is computed by PyTorch: %s", error)
        return None
    head.forward = lambda hidden: product(hidden[0])[0][None]
    return product


def _settings(layer: nn.Module) -> Iterator[str]:
    """Yields the settings by which layers of one class differ, such as whether attention has RoPE."""
    for name, module in layer.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, bool | float | str | None):
                yield f"{name}.{key}={value}"


def _check(fused: FusedLayer, layer: Any, rotary: Callable[[Tensor], Rotary], probe: Sequence[int]) -> None:  # noqa: ANN401
    """Raises ValueError unless a layer computes the same as its module, at each of some positions."""
    numbers = torch.Generator().manual_seed(0)
    width = len(layer.input_layernorm.weight)
    hidden = torch.randn(1, len(probe), width, generator=numbers).to(torch.bfloat16)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_readers = len(q) // len(k)
        return q + k.repeat_interleave(num_readers, 0) * v.repeat_interleave(num_readers, 0)

    positions = torch.tensor(probe)
    cos, sin = rotary(positions)
    if cos.shape[-1] % 32 or cos.dtype != torch.bfloat16:
        raise ValueError(f"the rotary embedding is of {cos.shape[-1]} numbers of {cos.dtype}")
    arguments = {
        "position_embeddings": (cos, sin),
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
        "attend": attend,
    }
    with torch.no_grad():
        # Not the module's call: at the edge of a stage it takes hidden states from another.
        own, found = layer.forward(hidden, **arguments), fused(hidden, **arguments)
    if not isinstance(own, Tensor):
        raise ValueError("its layers return several things")
    check_rows(found[0], own[0], probe, scale=(own - hidden)[0])


def check_rows(found: Tensor, own: Tensor, positions: Sequence[int], *, scale: Tensor) -> None:
    """Raises ValueError at the first position whose row of `[rows, width]` differs by more than roundings.

    Errors are relative to the norm of the row of `scale`. A row that is nearly zero there counts as an average one.
    """
    norms = scale.float().norm(dim=-1)
    errors = (found.float() - own.float()).norm(dim=-1) / norms.clamp_min(norms.mean())
    for position, error in zip(positions, errors.tolist(), strict=True):
        if not error <= _MAX_ROW_ERROR:
            raise ValueError(f"results would differ at position {position}")
    if not errors.square().mean().sqrt() <= MAX_ERROR:
        raise ValueError("results would differ")


def _projections(attention: Any, spec: AttnSpec, levels: LevelsOf) -> list[Matrix]:  # noqa: ANN401 - a module, whatever its class
    """Returns the matrices of queries, keys and values, which may be one in the model."""
    if hasattr(attention, "qkv_proj"):
        sizes = [number * spec.head_dim for number in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        q, k, v = _split(attention.qkv_proj, sizes, levels)
    else:
        q, k, v = (_matrix(one, levels) for one in (attention.q_proj, attention.k_proj, attention.v_proj))
    norms = [norm and norm.weight for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))]
    return [replace(one, is_rotated=True, head_norm=norm) for one, norm in zip((q, k), norms, strict=True)] + [v]


def _gate_and_up(mlp: Any, levels: LevelsOf) -> list[Matrix]:  # noqa: ANN401 - a module, whatever its class
    if hasattr(mlp, "gate_up_proj"):
        return _split(mlp.gate_up_proj, [len(mlp.gate_up_proj.weight) // 2] * 2, levels)
    if not hasattr(mlp, "gate_proj"):
        raise ValueError(f"{type(mlp).__name__} has no gate")
    return [_matrix(mlp.gate_proj, levels), _matrix(mlp.up_proj, levels)]


def _matrix(linear: nn.Module, levels: LevelsOf) -> Matrix:
    if type(linear) is not nn.Linear:
        raise ValueError(f"it has a {type(linear).__name__}")
    return Matrix(weight=linear.weight, bias=linear.bias, levels=levels.get(linear.weight.data_ptr()))


def _split(linear: nn.Module, sizes: list[int], levels: LevelsOf) -> list[Matrix]:
    """Returns the matrices of a layer whose outputs are those of several."""
    whole, stops = _matrix(linear, levels), list(itertools.accumulate(sizes))
    found = []
    for rows in (slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)):
        of_rows = None
        if whole.levels is not None:
            of_rows = Levels(numbers=whole.levels.numbers[rows], grid=whole.levels.grid[rows])
        bias = None if whole.bias is None else whole.bias[rows]
        found.append(Matrix(weight=whole.weight[rows], bias=bias, levels=of_rows))
    return found


def norm_of(module: Any) -> tuple[Tensor, float]:  # noqa: ANN401 - a module, whatever its class
    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if epsilon is None or not isinstance(getattr(module, "weight", None), Tensor):
        raise ValueError(f"{type(module).__name__} is not an RMSNorm that is known")
    return module.weight, float(epsilon)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
