"""The facts that the rest of longspan must know about a model, without its weights and without transformers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from longspan.attn.spec import AttnSpec
from longspan.cost.architecture import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The facts that are stored with a model's weights.

    `context_length` is in tokens (prompt and output together); `specs` has one entry per layer; `hidden_size` is the
    width of hidden states, and `layer_weights` how many elements a layer has, on average.
    `passed_width` counts the numbers of a token that pass from layer to layer: several hidden states in some models.
    `reads_tokens` says that layers behind the first are handed something that depends on tokens, besides hidden states.
    `rope_switch_length` is set for longrope models: a request whose length (tokens) is above it uses the long
    factors, for all of its tokens.
    `layers_return_tuples` says that hidden states are the first of what each layer returns.
    """

    num_layers: int
    vocab_size: int
    hidden_size: int
    layer_weights: float
    context_length: int
    eos_token_ids: tuple[int, ...]
    specs: tuple[AttnSpec, ...]
    rope_switch_length: int | None
    layers_return_tuples: bool
    passed_width: int
    reads_tokens: bool

    @property
    def head_layers(self) -> float:
        """The weights of the output head, in layers."""
        return self.vocab_size * self.hidden_size / self.layer_weights

    @property
    def sizes(self) -> str:
        """A hash of what the layers compute, which tells models of different times apart."""
        sizes = (self.num_layers, self.vocab_size, self.hidden_size, self.layer_weights, self.specs)
        return hashlib.sha256(msgspec.json.encode(sizes)).hexdigest()[:12]

    def shape(self, bytes_per_element: int) -> ModelShape:
        """Returns its sizes, of the first layer if they differ."""
        spec = self.specs[0]
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bytes_per_element=bytes_per_element,
        )

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> ModelInfo:
        return msgspec.json.decode(text, type=cls)
