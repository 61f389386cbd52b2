"""Decoder layers computed by our own kernels: two calls instead of about thirty operators.

A layer of Llama's form (norm, attention, residual, norm, gated feed-forward, residual) keeps its module, and its
forward is replaced. The forward of its class must be known, see `check_known`. Then both forwards compute the same
random input at positions up to the context length. A layer keeps its own forward if the results differ.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longspan.attn.spec import AttnSpec
from longspan.model.quantization import Levels
from longspan.model.step import Reduce
from longspan.native.chain import Chain, LinearArgs

_log = logging.getLogger("longspan")
MAX_ERROR = 0.02
"""The largest relative difference from a module's own results: a few roundings to bfloat16."""
_MAX_ROW_ERROR = 0.04
"""The largest relative difference at one position. Roundings vary from token to token."""
_FEW = 16
"""Checked positions of a layer if an earlier layer of its kind passed at all positions. Kernels compute 16 at once."""
FAMILIES = {"cwm", "llama", "ministral", "mistral", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"}
"""The models of transformers with the forward of Llama, Qwen3 or Phi-3. Their code was compared."""
COST = "a decode step can take twice as long"
"""The cost of PyTorch's operators: half of a decode step of the default model (`docs/design.md`)."""
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines `[1, tokens, rotary_dim]`."""
LevelsOf = Mapping[int, Levels]
"""The levels of quantised parameters, by the address of the parameter."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The weights `[outputs, inputs]` and the bias `[outputs]` of a linear layer, or of some of its outputs.

    Attributes:
        is_rotated: the kernel applies the rotary embedding to the heads.
        head_norm: weights `[head_dim]` of an RMSNorm of each head, before the rotary embedding.
        levels: the kernel reads these instead of the weights, if the weights are quantised.
    """

    weight: Tensor
    bias: Tensor | None = None
    levels: Levels | None = None
    is_rotated: bool = False
    head_norm: Tensor | None = None


class Product:
    """Products of the same tokens with up to three matrices, in one call of the kernel with the arguments `problem`.

    Args:
        matrices: raise ValueError for shapes that the kernel does not support.
        norm: weights `[inputs]` of an RMSNorm of the tokens before the products; None for no norm.
        is_gated: the only output is the second product times SiLU of the first.
        head_dim: the head size of rotated outputs.
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
                raise ValueError("only some of the matrices are quantised")
            if is_gated and matrix.levels and matrices[0].levels and matrix.levels.bits != matrices[0].levels.bits:
                raise ValueError("the levels of gate and up projection have different bits")
            if num_inputs % 32 or num_outputs % 16 or matrix.weight.dtype != torch.bfloat16:
                raise ValueError(f"a layer has {num_inputs} inputs and {num_outputs} outputs of {matrix.weight.dtype}")
        if head_dim % 32:
            raise ValueError(f"heads have {head_dim} numbers")
        self._tensors = matrices, norm  # keeps the memory: the kernel has addresses only
        self._widths = [len(matrix.weight) for matrix in matrices[: 1 if is_gated else None]]
        sizes = {"inputs": matrices[0].weight.shape[1], "number": len(matrices), "head_dim": head_dim}
        self.problem = problem = LinearArgs(**sizes, norm=_address(norm), epsilon=epsilon, gated=is_gated)
        for own, matrix in zip(problem.matrices, matrices, strict=False):
            own.weight, own.bias, own.head_norm = map(_address, (matrix.weight, matrix.bias, matrix.head_norm))
            own.outputs, own.row, own.rotated = len(matrix.weight), matrix.weight.stride(0), matrix.is_rotated
            own.out_row = own.outputs
            if (levels := matrix.levels) is not None:
                own.levels, own.grid, own.bits = _address(levels.numbers), _address(levels.grid), levels.bits
        self._outs = [problem.matrices[index] for index in range(len(self._widths))]
        self._alone = Chain(problem)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, rotary: Rotary | None = None) -> list[Tensor]:
        """Compute `[tokens, outputs]` of each matrix for `x [tokens, inputs]`. Add the residual to the first."""
        outs = self.prepare(x, residual=residual, rotary=rotary)
        self._alone.run()
        return outs

    def prepare(self, x: Tensor, *, residual: Tensor | None = None, rotary: Rotary | None = None) -> list[Tensor]:
        """Set the kernel's arguments, and return the outputs. The caller keeps all tensors until a `Chain` has run."""
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
            own.out = out.data_ptr()  # the kernel writes every element
        return outs


class ReplacedForward(ABC):
    """The forward of one decoder layer by kernels of our own."""

    @abstractmethod
    def __call__(self, hidden_states: Tensor, *others: object, **arguments: Any) -> Tensor:  # noqa: ANN401
        """Compute hidden states `[1, tokens, hidden]`, as transformers' layers do."""


Fused = TypeVar("Fused", bound=ReplacedForward)


class FusedLayer(ReplacedForward):
    """The forward of one decoder layer on CPUs.

    Args:
        layer: the module. Its own forward still computes steps with layerwise exchanges. Raise ValueError for another
            form than Llama's.
        reduce: sums outputs over the ranks of tensor parallelism; None for whole layers.

    Attributes:
        products: in the order of computation. Attention runs between the first and the second.
        inner_size: the width of a token between the last two products.
    """

    def __init__(self, layer: nn.Module, spec: AttnSpec, reduce: Reduce | None, levels: LevelsOf) -> None:
        parts = {name: part for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
        if parts.keys() != _PARTS:
            raise ValueError(f"{type(layer).__name__} does not have the parts of a layer of Llama")
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
        """Compute hidden states `[1, tokens, hidden]`, as transformers' layers do."""
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
        (attended,) = self._out.prepare(out, residual=hidden)
        (inner,) = self._gate_up.prepare(attended)
        (result,) = self._down.prepare(inner, residual=attended)
        self._rest.run()  # the buffers are still alive here
        return result[None]


def fuse_layers(
    layers: Mapping[int, nn.Module],
    specs: Sequence[AttnSpec],
    reduce: Reduce | None,
    rotary: Callable[[Tensor], Rotary],
    levels: LevelsOf,
    positions: Sequence[int],
    *,
    log: Callable[[str], object] = _log.info,
) -> dict[int, FusedLayer]:
    """Replace the forward of each layer that the kernels know, and log the other layers.

    `rotary` computes cosines and sines for positions `[tokens]`. The first layer of each kind is checked at all
    `positions`, later layers at a few of them. Return the replaced forwards by the layers' numbers.
    """
    checked: set[tuple[AttnSpec, tuple[object, ...]]] = set()

    def make(index: int, layer: nn.Module) -> FusedLayer:
        fused = FusedLayer(layer, specs[index], reduce, levels)
        kind = specs[index], tuple(sorted(settings_of(layer)))
        _check(fused, layer, rotary, few_positions(positions) if kind in checked else positions)
        checked.add(kind)
        return fused

    return replace_forwards(layers, make, cost=COST, log=log)


def replace_forwards(
    layers: Mapping[int, nn.Module],
    make: Callable[[int, nn.Module], Fused],
    *,
    cost: str,
    log: Callable[[str], object],
) -> dict[int, Fused]:
    """Replace the forward of each layer by `make(number, layer)`, which raises ValueError to keep the layer's own.

    Log the layers that keep their own, the reason, and its `cost`. Return the replaced forwards by number.
    """
    fused_layers: dict[int, Fused] = {}
    refused: dict[str, list[int]] = {}
    for index, layer in layers.items():
        try:
            layer.forward = fused_layers[index] = make(index, layer)
        except ValueError as error:
            refused.setdefault(str(error), []).append(index)
    for reason, indices in refused.items():
        log(f"layers {indices} are computed by PyTorch's operators, so {cost}: {reason}")
    return fused_layers


def check_known(*modules: nn.Module, families: Collection[str] = FAMILIES) -> None:
    """Raise ValueError unless these modules are classes of transformers from a model of known `families`.

    A class of the same name in code that came with a checkpoint is refused.
    """
    for module in modules:
        kind = type(module)
        family = kind.__module__.rpartition(".modeling_")[2]
        if family not in families or kind.__module__ != f"transformers.models.{family}.modeling_{family}":
            raise ValueError(f"the forward of {kind.__name__} is not known to the kernels")


def spread(positions: Sequence[int], number: int) -> Sequence[int]:
    """Return at most `number` of the positions at equal distances, with the first and the last."""
    if len(positions) <= number:
        return positions
    return [positions[index * (len(positions) - 1) // (number - 1)] for index in range(number)]


def few_positions(positions: Sequence[int]) -> Sequence[int]:
    """Return the positions at which a layer is checked if an earlier layer of its kind passed at all `positions`."""
    return spread(positions, _FEW)


def fuse_head(head: Any, levels: LevelsOf, log: Callable[[str], object] = _log.info) -> Product | None:  # noqa: ANN401
    """Replace the forward of an output head by a product, which is returned, if the kernels know the head."""
    try:
        product = Product([_matrix(head, levels)])
        hidden = torch.randn(_FEW, head.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        with torch.no_grad():
            own = head.forward(hidden)
        check_rows(product(hidden)[0], own, range(_FEW), scale=own)
    except ValueError as error:
        log(f"the output head is computed by PyTorch: {error}")
        return None
    head.forward = lambda hidden: product(hidden[0])[0][None]
    return product


def settings_of(layer: nn.Module) -> Iterator[str]:
    """Yield the settings by which layers of one class differ, for example whether attention has RoPE."""
    for name, module in layer.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, bool | float | str | None):
                yield f"{name}.{key}={value}"


def _check(fused: FusedLayer, layer: Any, rotary: Callable[[Tensor], Rotary], probe: Sequence[int]) -> None:  # noqa: ANN401
    """Raise ValueError unless a fused layer agrees with its module at each position of `probe`."""
    positions = torch.tensor(probe)
    cos, sin = rotary(positions)
    if cos.shape[-1] % 32 or cos.dtype != torch.bfloat16:
        raise ValueError(f"the rotary embedding has {cos.shape[-1]} elements of {cos.dtype}")
    arguments = {
        "position_embeddings": (cos, sin),
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
    }
    compare(fused, layer, arguments, probe)


def compare(
    fused: Callable[..., Tensor],
    layer: Any,  # noqa: ANN401 - a module, whatever its class
    arguments: Mapping[str, Any],
    probe: Sequence[int],
) -> None:
    """Raise ValueError unless `fused` agrees with its layer on random hidden states, one for each position.

    The layer gets `arguments` in addition to hidden states and `attend`.
    """
    numbers = torch.Generator().manual_seed(0)
    weight = layer.input_layernorm.weight
    hidden = torch.randn(1, len(probe), len(weight), generator=numbers).to(weight)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_readers = len(q) // len(k)
        return q + k.repeat_interleave(num_readers, 0) * v.repeat_interleave(num_readers, 0)

    arguments = {**arguments, "attend": attend}
    with torch.no_grad():
        # `forward` and not the module's call, whose hooks at the edge of a stage replace the hidden states.
        own, result = layer.forward(hidden, **arguments), fused(hidden, **arguments)
    if not isinstance(own, Tensor):
        raise ValueError("its layers return tuples")
    check_rows(result[0], own[0], probe, scale=(own - hidden)[0])


def check_rows(result: Tensor, own: Tensor, positions: Sequence[int], *, scale: Tensor) -> None:
    """Raise ValueError for the first position whose row of `[rows, width]` differs by more than roundings.

    Errors are relative to the norm of the row of `scale`, or to the mean norm if that is larger.
    """
    norms = scale.float().norm(dim=-1)
    errors = (result.float() - own.float()).norm(dim=-1) / norms.clamp_min(norms.mean())
    for position, error in zip(positions, errors.tolist(), strict=True):
        if not error <= _MAX_ROW_ERROR:
            raise ValueError(f"results would differ at position {position}")
    if not errors.square().mean().sqrt() <= MAX_ERROR:
        raise ValueError("results would differ")


def _projections(attention: Any, spec: AttnSpec, levels: LevelsOf) -> list[Matrix]:  # noqa: ANN401 - a module, whatever its class
    """Return the matrices of queries, keys and values, which the model may store as one."""
    if hasattr(attention, "qkv_proj"):
        sizes = [number * spec.head_dim for number in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        q, k, v = _split(attention.qkv_proj, sizes, levels)
    else:
        q, k, v = (_matrix(linear, levels) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    norms = [norm and norm.weight for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))]
    return [replace(matrix, is_rotated=True, head_norm=norm) for matrix, norm in zip((q, k), norms, strict=True)] + [v]


def _gate_and_up(mlp: Any, levels: LevelsOf) -> list[Matrix]:  # noqa: ANN401 - a module, whatever its class
    if hasattr(mlp, "gate_up_proj"):
        return _split(mlp.gate_up_proj, [len(mlp.gate_up_proj.weight) // 2] * 2, levels)
    if not hasattr(mlp, "gate_proj"):
        raise ValueError(f"{type(mlp).__name__} has no gate")
    return [_matrix(mlp.gate_proj, levels), _matrix(mlp.up_proj, levels)]


def _matrix(linear: nn.Module, levels: LevelsOf) -> Matrix:
    if type(linear) is not nn.Linear:
        raise ValueError(f"it has a {type(linear).__name__} where a plain Linear is needed")
    return Matrix(weight=linear.weight, bias=linear.bias, levels=levels.get(linear.weight.data_ptr()))


def _split(linear: nn.Module, sizes: list[int], levels: LevelsOf) -> list[Matrix]:
    """Split a linear layer that joins several projections into their matrices."""
    whole, stops = _matrix(linear, levels), list(itertools.accumulate(sizes))
    matrices = []
    for rows in (slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)):
        row_levels = None
        if whole.levels is not None:
            row_levels = Levels(numbers=whole.levels.numbers[rows], grid=whole.levels.grid[rows])
        bias = None if whole.bias is None else whole.bias[rows]
        matrices.append(Matrix(weight=whole.weight[rows], bias=bias, levels=row_levels))
    return matrices


def norm_of(module: Any) -> tuple[Tensor, float]:  # noqa: ANN401 - a module, whatever its class
    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if epsilon is None or not isinstance(getattr(module, "weight", None), Tensor):
        raise ValueError(f"{type(module).__name__} is not a known form of RMSNorm")
    return module.weight, float(epsilon)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
