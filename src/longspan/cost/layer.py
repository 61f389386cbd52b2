"""Seconds of one transformer layer on one rank, without attention and what is exchanged for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from longspan.cost.architecture import Architecture
from longspan.cost.operators import Chip

_NORM_BYTES = 30
"""Traffic per element of a norm of single operators: to float32, square, mean, scale, back, times the weight."""
_ROTARY_BYTES = 18
"""The same for a rotary embedding: two products, a turned copy in two operators, a sum."""


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Of all that is computed for some tokens before attention, and behind it."""

    linear_s: float
    elementwise_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.linear_s + self.elementwise_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer of a model whose heads and feed-forward layers are split between `tp` ranks."""

    model: Architecture
    chip: Chip
    tp: int
    _before: dict[float, LayerSeconds] = field(default_factory=dict, repr=False)
    _behind: dict[float, LayerSeconds] = field(default_factory=dict, repr=False)

    @cached_property
    def heads(self) -> float:
        """Query heads of a rank."""
        return self.model.attention.num_heads / self.tp

    @cached_property
    def kv_heads(self) -> float:
        """KV heads of a rank: where there are fewer than ranks, several ranks have the same one."""
        return max(1.0, self.model.attention.num_kv_heads / self.tp)

    @cached_property
    def kv_bytes(self) -> float:
        """Keys and values of one token on one rank."""
        return 2 * self.kv_heads * self.model.attention.head_dim * self.chip.bytes_per_element

    def before(self, tokens: float) -> LayerSeconds:
        """Norm, projections to queries, keys and values, rotary embedding."""
        if tokens not in self._before:
            self._before[tokens] = self._compute_before(tokens)
        return self._before[tokens]

    def behind(self, tokens: float) -> LayerSeconds:
        """Output projection, norm, feed-forward layers."""
        if tokens not in self._behind:
            self._behind[tokens] = self._compute_behind(tokens)
        return self._behind[tokens]

    def head_s(self, tokens: float) -> float:
        """The output head and the last norm."""
        shape = self.model.attention
        outputs = self.model.vocab_size / self.tp
        return self.chip.linear_s(tokens, shape.hidden_size, outputs, shape.bytes_per_element) + self._norm_s(tokens)

    @cached_property
    def num_launches(self) -> int:
        """Operators of the layer, attention included: what the host has to start."""
        model = self.model
        norms = 1 if model.parallel else 2
        if not self.chip.attention.unfused:
            return norms + 10
        fewer_kv_heads = model.attention.num_kv_heads < model.attention.num_heads
        norm = 8 if model.rms_norm else 1
        rotary = 12 if model.rotary else 2
        attention = 8 + 2 + (2 if fewer_kv_heads else 0)
        return norms * norm + rotary + attention + 4 + (5 if model.gated else 3) + 2

    def _compute_before(self, tokens: float) -> LayerSeconds:
        shape, chip = self.model.attention, self.chip
        heads, kv_heads = self.heads, self.kv_heads
        linear_s = chip.linear_s(
            tokens, shape.hidden_size, (heads + 2 * kv_heads) * shape.head_dim, shape.bytes_per_element
        )
        elementwise_s = self._norm_s(tokens)
        if self.model.rotary and tokens:
            elements = tokens * (heads + kv_heads) * shape.head_dim
            curve = chip.efficiency.stream
            unfused = chip.attention.unfused
            per_element = _ROTARY_BYTES if unfused else 2 * chip.bytes_per_element
            elementwise_s += chip.stream_s(elements * per_element, None if unfused else curve.rotary)
        return LayerSeconds(linear_s=linear_s, elementwise_s=elementwise_s)

    def _compute_behind(self, tokens: float) -> LayerSeconds:
        model, shape, chip = self.model, self.model.attention, self.chip
        if not tokens:
            return LayerSeconds(linear_s=0.0, elementwise_s=0.0)
        width, wide = model.intermediate_size / self.tp, 2 if model.gated else 1
        linear_s = (
            chip.linear_s(tokens, self.heads * shape.head_dim, shape.hidden_size, shape.bytes_per_element)
            + chip.linear_s(tokens, shape.hidden_size, wide * width, model.ffn_bytes)
            + chip.linear_s(tokens, width, shape.hidden_size, model.ffn_bytes)
        )
        curve, element = chip.efficiency.stream, chip.bytes_per_element
        # Norms are not limited by the memory, and take the addition before them along.
        added = 3 * tokens * shape.hidden_size * element
        add_s = 2 * chip.stream_s(added) if chip.attention.unfused else 0.0
        touched = 5 if chip.attention.unfused and model.gated else 1 + wide
        activation = None if chip.attention.unfused else curve.activation
        activation_s = chip.stream_s(touched * tokens * width * element, activation)
        norm_s = 0.0 if model.parallel else self._norm_s(tokens)
        return LayerSeconds(linear_s=linear_s, elementwise_s=add_s + activation_s + norm_s)

    def _norm_s(self, tokens: float) -> float:
        if not tokens:
            return 0.0
        chip, curve = self.chip, self.chip.efficiency.stream
        unfused = chip.attention.unfused and self.model.rms_norm
        per_element = _NORM_BYTES if unfused else 2 * chip.bytes_per_element
        elements = tokens * self.model.attention.hidden_size
        return chip.stream_s(elements * per_element, None if unfused else curve.norm)
