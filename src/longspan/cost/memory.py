"""Whether a model and a prompt fit into the devices' memory, with the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.cost.channels import Channel
from longspan.cost.layer import Layer

_GIB = 2**30
_RESERVED_BYTES = 1.5 * _GIB
"""Of each device, for the driver's context, libraries' workspaces and buffers of links."""
_HIDDEN_COPIES = 6
"""Hidden states held at once: residual, normed, queries, attention's output, projected, sum."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device.

    Attributes:
        scores: of attention without fusion.
        activations: hidden states, and those in the feed-forward layers as far as they exceed the scores.
        capacity: of the device.
    """

    weights: float
    kv: float
    scores: float
    activations: float
    capacity: float

    @property
    def used(self) -> float:
        """Of all."""
        return self.weights + self.kv + self.scores + self.activations + _RESERVED_BYTES

    @property
    def fits(self) -> bool:
        """Whether it is no more than there is."""
        return self.used <= self.capacity

    @property
    def arithmetic(self) -> str:
        """The sum, in GiB."""
        parts = (
            (self.weights, "weights"),
            (self.kv, "KV"),
            (self.scores, "scores"),
            (self.activations, "activations"),
            (_RESERVED_BYTES, "reserved"),
        )
        terms = " + ".join(f"{size / _GIB:.1f} {name}" for size, name in parts if size)
        relation = "<=" if self.fits else ">"
        return f"{terms} = {self.used / _GIB:.1f} GiB per GPU {relation} {self.capacity / _GIB:.1f} GiB"


def memory(layer: Layer, channel: Channel, tokens: float) -> Memory:
    """Of the fullest rank, when its group has computed a channel's queries and holds all its keys.

    Args:
        tokens: that the busiest instance computes at once.
    """
    shape, attention = layer.model.attention, layer.chip.attention
    held = max(channel.shares.held)
    copies = 1
    gathered = len(channel.group) > 1 and channel.exchange in ("gather_kv", "gather_kv_dense", "chain")
    if attention.unfused and gathered:
        held, copies = max(held, channel.keys if channel.exchange != "chain" else 0.0), attention.kv_copies
    scores = max(channel.shares.scores) * layer.heads * attention.score_buffer_bytes
    hidden = _HIDDEN_COPIES * tokens * shape.hidden_size * layer.chip.bytes_per_element
    matrices = 4 if layer.model.gated else 2
    wide = matrices * tokens * layer.model.intermediate_size / layer.tp * layer.chip.bytes_per_element
    return Memory(
        weights=layer.model.weight_bytes / layer.tp,
        kv=copies * held * layer.kv_bytes * shape.num_layers,
        scores=scores,
        activations=hidden + max(0.0, wide - scores),
        capacity=layer.chip.device.memory_bytes,
    )
