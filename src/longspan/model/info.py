"""The facts about a model that other packages need, without its weights and without transformers."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

import msgspec

from longspan.attn.spec import AttnSpec
from longspan.cost.shape import ModelShape
from longspan.model.roles import LayerRoles


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The facts that are stored with a model's weights.

    Attributes:
        layer_weights: the mean number of weights of a layer.
        context_length: in tokens, prompt and output together.
        rope_switch_length: set for longrope models. A longer request, in tokens, uses the long factors for all tokens.
        layers_return_tuples: each layer returns a tuple that begins with the hidden states.
        passed_width: elements per token between layers. Some models pass several hidden states.
        reads_tokens: layers after the first have arguments, besides hidden states, that depend on tokens.
        layers_path: the path of the list of layers in the model.
        roles: in each layer, the roles of its matrices. Empty if they were not observed.
        attends_by_cache: attention is reached by the KV cache, see `model.cache_interface`.
        left_out: the paths of the modules of a multimodal model that text does not need.
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
    layers_path: str = "model.layers"
    roles: tuple[LayerRoles, ...] = ()
    attends_by_cache: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def head_layers(self) -> float:
        """The weights of the output head, in layers."""
        return self.vocab_size * self.hidden_size / self.layer_weights

    @property
    def sizes(self) -> str:
        """A hash of the sizes that decide how long a step takes. Sinks take no time worth a measurement.

        Without chunks, it is the hash of versions that knew none, so that their profiles are found.
        """
        specs = [asdict(spec) for spec in self.specs]
        for spec in specs:
            del spec["has_sinks"]
            if spec["chunk"] is None:
                del spec["chunk"]
        sizes = (self.num_layers, self.vocab_size, self.hidden_size, self.layer_weights, specs)
        return hashlib.sha256(msgspec.json.encode(sizes)).hexdigest()[:12]

    def shape(self, bytes_per_element: int) -> ModelShape:
        """Return the sizes for the cost model, which takes all layers for copies of the first."""
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
