"""Attention of classes that do not hand arguments to transformers' attention interface, reached by their KV cache.

A class that decodes hands the keys and values of each layer to `update` of a KV cache. Such a class is called with a
`KvInterface` instead of a cache, which returns stand-ins for keys and values. These have shapes, and no memory. The
class hands them to the attention interface, or computes attention itself from them: scores, softmax, and the product
with values. `Attend` computes that product, for causal attention. Any other operation on stand-ins is refused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from longspan.attn.spec import AttnSpec
from longspan.attn.spec_reader import UnsupportedAttentionError
from longspan.model.step import Attend

_Role = Literal["keys", "values", "scores", "weights"]

_FACTS = {"__get__", "size", "dim", "numel", "is_floating_point"}
_SAME = {"view", "reshape", "contiguous", "to", "float", "type"}
"""Operations that change neither the elements nor their order."""
_SCALES = {"mul", "div"}
_IN_PLACE = {"mul_", "div_"}
_PRODUCTS = {"matmul", "bmm", "baddbmm"}
_DEVICE = Tensor.device.__get__
_FEWEST_DIMS, _NUM_OF_WHERE = 3, 3
_MASKED = -1e9
"""The largest score that takes no part in a softmax of float32."""


class KvInterface(ABC):
    """Takes the place of a model's KV cache in one call.

    Attributes:
        attend: for modules that get this object and call `Attend` themselves.
        device: the device that stand-ins claim. On the meta device, tensors that a class makes for scores need no
            memory. On the CPU they can be read.
    """

    attend: Attend | None = None
    device: torch.device

    @abstractmethod
    def num_kv_heads(self, layer: int, keys: Tensor, values: Tensor) -> int:
        """Return the number of KV heads that differ. Some classes repeat heads before they hand them over."""

    @abstractmethod
    def window(self, layer: int, mask: Tensor, masked: Tensor) -> int | None:
        """Return the sliding window of a layer that replaces scores outside of `mask` by `masked`."""

    @abstractmethod
    def attend_with(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec | None) -> Tensor:
        """Compute attention as `Attend` does.

        `spec` is the attention of a class that computes it itself. None: the class called the attention interface.
        """

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, ...]:
        """Return stand-ins for the keys and values `[1, heads, tokens, head_dim]` of a layer."""
        repeats = keys.shape[1] // self.num_kv_heads(layer_idx, keys, values)
        keys_of, values_of = keys[0, ::repeats], values[0, ::repeats]
        handed = HandedKv(layer=layer_idx, keys=keys_of, values=values_of, interface=self)
        empty = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (keys, values)]
        roles: tuple[_Role, _Role] = ("keys", "values")
        states = [_State(role=role, handed=handed) for role in roles]
        return tuple(map(StandIn.of, empty, states))

    def get_seq_length(self, *_: object) -> int:
        """Return 0: keys of earlier calls are in the pool."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: object) -> tuple[int, int]:
        """Return the number of keys, and the index of the first."""
        return query_length, 0


@dataclass(frozen=True, kw_only=True)
class HandedKv:
    """The keys and values `[kv_heads, tokens, head_dim]` of one layer in one call."""

    layer: int
    keys: Tensor
    values: Tensor
    interface: KvInterface

    def attend(self, query: Tensor, spec: AttnSpec | None = None) -> Tensor:
        """Compute attention for queries `[heads, tokens, head_dim]`."""
        return self.interface.attend_with(self.layer, query.to(self.keys.dtype), self.keys, self.values, spec)


def hand_by_cache(attend: Attend | None, specs: Sequence[AttnSpec]) -> Mapping[str, object]:
    """Return the arguments that hand `attend` to a model of layers with `specs`."""
    return {"past_key_values": _Serving(attend, specs)}


class _Serving(KvInterface):
    """Calls `attend`. Attention other than `specs` is refused."""

    device = torch.device("meta")

    def __init__(self, attend: Attend | None, specs: Sequence[AttnSpec]) -> None:
        self.attend, self._specs = attend, specs

    def num_kv_heads(self, layer: int, keys: Tensor, values: Tensor) -> int:
        del keys, values
        return self._specs[layer].num_kv_heads

    def window(self, layer: int, mask: Tensor, masked: Tensor) -> int | None:
        del mask, masked  # they do not depend on the positions of the tokens
        return self._specs[layer].window

    def attend_with(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec | None) -> Tensor:
        assert self.attend is not None, "a call that computes only the head calls no layer"
        expected = self._specs[layer]
        if spec is not None and (spec.scale, spec.window) != (expected.scale, expected.window):
            raise UnsupportedAttentionError(f"layer {layer} computes {spec} instead of {expected}")
        return self.attend(layer, q, k, v)


class RecordingKv(KvInterface):
    """Records the attention of each layer in `specs`, and computes zeros.

    Args:
        stated_kv_heads: the number of KV heads in the configuration, if any.
        context_length: the number of positions in the configuration, if any.
    """

    device = torch.device("cpu")

    def __init__(self, specs: dict[int, AttnSpec], *, stated_kv_heads: int | None, context_length: int | None) -> None:
        self._specs, self._stated, self._context_length = specs, stated_kv_heads, context_length

    def num_kv_heads(self, layer: int, keys: Tensor, values: Tensor) -> int:
        del layer
        heads, stated = keys.shape[1], self._stated
        if stated is None or heads % stated:
            return heads
        repeats = heads // stated
        repeated = (own[:, ::repeats].repeat_interleave(repeats, 1) for own in (keys, values))
        return stated if keys.is_meta or all(map(torch.equal, repeated, (keys, values))) else heads

    def window(self, layer: int, mask: Tensor, masked: Tensor) -> int | None:
        """Return the window of a mask that is cut from a mask of all positions."""
        del layer
        whole = mask if mask._base is None else mask._base  # noqa: SLF001 - the only way to the buffer
        size = whole.shape[-1]
        if mask.is_meta:
            return None
        if size >= (self._context_length or math.inf) and whole.numel() == size**2 and masked <= _MASKED:
            square = whole.view(size, size)
            window = int(square[-1].sum())
            ahead = torch.arange(size)[:, None] - torch.arange(size)
            if torch.equal(square.cpu(), (ahead >= 0) & (ahead < window)):
                return None if window == size else window
        raise UnsupportedAttentionError("computes attention in a form unknown to longspan: where of its scores")

    def attend_with(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec | None) -> Tensor:
        del k, v
        assert spec is not None, "the probe reads the attention of the interface, too"
        if layer in self._specs:
            raise UnsupportedAttentionError("has attention layers without a number of their own")
        self._specs[layer] = spec
        return torch.zeros_like(q)


@dataclass(frozen=True, kw_only=True)
class _State:
    """The meaning of a stand-in.

    Attributes:
        scale: the factor of scores.
        window: the sliding window of scores.
        query: `[..., heads, tokens, head_dim]`, of scores and weights.
    """

    role: _Role
    handed: HandedKv
    scale: float = 1.0
    window: int | None = None
    query: Tensor | None = None

    def attended(self) -> Tensor:
        handed, query = self.handed, self.query
        assert query is not None, "only weights are multiplied by values"
        query = query.reshape(-1, *query.shape[-2:])
        spec = AttnSpec(
            num_heads=len(query),
            num_kv_heads=len(handed.keys),
            head_dim=query.shape[-1],
            scale=self.scale,
            window=self.window,
            softcap=None,
        )
        return handed.attend(query, spec).contiguous()


class StandIn(Tensor):
    """Keys, values, scores or weights of a layer's attention: a tensor on the meta device."""

    state: _State

    @staticmethod
    def of(shape: Tensor, state: _State) -> StandIn:
        new = shape.as_subclass(StandIn)
        new.state = state
        return new

    @property
    def handed(self) -> HandedKv:
        return self.state.handed

    def scaled(self, factor: float, window: int | None) -> StandIn:
        """Return scores times a factor, inside a sliding window."""
        scale = self.state.scale * factor
        return StandIn.of(_on_meta(Tensor.mul, (self, 1.0), {}), replace(self.state, scale=scale, window=window))

    def __add__(self, other: object) -> Tensor:
        """Some classes add the mask without a check, and there is none."""
        return self if other is None else super().__add__(other)  # type: ignore[operator]  # refused below

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - the result of that function
        kwargs = kwargs or {}
        own = next(value for value in (*args, *kwargs.values()) if isinstance(value, StandIn))
        if function == _DEVICE:
            return own.handed.interface.device
        name = function.__name__
        if name in _FACTS and not isinstance(fact := _on_meta(function, args, kwargs), Tensor):
            return fact
        if name in _IN_PLACE and args[0] is own:
            changed = _followed(own.state, name[:-1], function, args, kwargs)
            if changed is not None:
                own.state = changed.state
                return own
        result = (_product if name in _PRODUCTS else _followed)(own.state, name, function, args, kwargs)
        if result is None:
            problem = f"computes attention in a form unknown to longspan: {name} of its {own.state.role}"
            raise UnsupportedAttentionError(problem)
        return result


def _followed(
    state: _State, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> StandIn | None:
    """Return the result of an operation on one stand-in, or None if the operation is unknown."""
    own, *others = args or (None,)
    if name == "where" and state.role == "scores" and len(args) == _NUM_OF_WHERE and isinstance(args[1], StandIn):
        window = state.handed.interface.window(state.handed.layer, args[0], args[2])
        return args[1].scaled(1.0, window)
    if not isinstance(own, StandIn):
        return None
    if name in _SAME or (name == "transpose" and state.role == "keys"):
        result, last = _on_meta(function, args, kwargs), own.shape[-2:]
        is_known = result.shape[-2:] == (last if name in _SAME else last[::-1]) and result.is_floating_point()
        return StandIn.of(result, state) if is_known else None
    if state.role == "scores":
        if name in _SCALES and not kwargs and type(others[0]) in (int, float):
            return own.scaled(others[0] if "mul" in name else 1 / others[0], state.window)
        if name == "softmax" and kwargs.get("dim", *others[:1]) in (-1, own.ndim - 1):
            return StandIn.of(_on_meta(function, args, kwargs), replace(state, role="weights"))
    is_kept = state.role == "weights" and name == "dropout" and not _drops(*others, **kwargs)
    return own if is_kept else None


def _product(
    _state: _State, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Follow the product of queries and keys. Compute the product of weights and values."""
    named = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | dict(kwargs)
    left, right = (named.get("batch1"), named.get("batch2")) if name == "baddbmm" else args[:2]
    result = _on_meta(function, args, kwargs)
    if not isinstance(right, StandIn) or result.ndim < _FEWEST_DIMS:
        return None
    state, num_tokens = right.state, right.handed.keys.shape[1]
    if state.role == "keys" and not isinstance(left, StandIn) and result.shape[-2:] == (num_tokens, num_tokens):
        added = named["input"] if name == "baddbmm" else None
        if added is not None and not _is_zero(added, state.handed.interface.device):
            return None
        return StandIn.of(result, replace(state, role="scores", query=left, scale=named.get("alpha", 1.0)))
    if state.role == "values" and isinstance(left, StandIn) and left.state.role == "weights" and name != "baddbmm":
        if left.handed is not right.handed:
            return None
        return left.state.attended().reshape(result.shape).to(result.dtype)
    return None


def _is_zero(added: Tensor, device: torch.device) -> bool:
    """Return whether a tensor that a class made for scores is zero. The probe has read it before it has no memory."""
    return not isinstance(added, StandIn) and added.device == device and (added.is_meta or not added.any())


def _drops(p: float = 0.5, training: bool = True, *_: object, **__: object) -> bool:
    return training and p > 0


def _on_meta(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Call a function with shapes only."""

    def shape(value: object) -> object:
        if isinstance(value, StandIn):
            return value.as_subclass(Tensor)
        return value.to("meta") if isinstance(value, Tensor) else value

    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as `Tensor.__torch_function__` does
        return function(*map(shape, args), **{name: shape(value) for name, value in kwargs.items()})
