"""The sizes of a decoder-only model that determine its costs, from its config.json in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspan.core.runs import Run
from longspan.cost.config_fields import check_layers, read_experts, read_latent, read_windows, size, table, wrong
from longspan.cost.layer_kinds import Experts
from longspan.cost.precision import HALF, Precision
from longspan.cost.shape import ModelShape

_NO_ROTARY = {"gpt2", "opt", "bloom", "mpt", "gpt_bigcode"}
_TWO_MATRICES = {"falcon", "gpt_neox", "gptj", "phi", "starcoder2", "nemotron"} | _NO_ROTARY
_LAYER_NORM = _TWO_MATRICES - {"nemotron"} | {"stablelm", "cohere"}
_TIED = _NO_ROTARY | {"falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "starcoder2"}
"""Model types whose output head is the embedding, unless the config states otherwise."""
_NESTED = {
    "ffn_config": {"ffn_hidden_size": "intermediate_size", "moe_num_experts": "num_local_experts"},
    "attn_config": {"kv_n_heads": "num_key_value_heads"},
}
"""Fields that MPT and DBRX have in nested objects, and their usual names."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a model that determine its costs.

    Attributes:
        attention: the sizes of attention.
        intermediate_size: of dense feed-forward layers.
        precision: the format of each kind of tensor.
        experts: the mixture of experts that replaces dense feed-forward layers, if any.
        gated: feed-forward layers have three matrices instead of two.
        tied: whether the output head is the embedding.
        rms_norm: RMS norms instead of layer norms.
        rotary: rotary position embeddings.
        parallel: attention and feed-forward layers read the same norm, and their outputs are added together.
    """

    name: str
    attention: ModelShape
    intermediate_size: int
    vocab_size: int
    precision: Precision
    gated: bool = True
    tied: bool = False
    rms_norm: bool = True
    rotary: bool = True
    parallel: bool = False
    experts: Experts | None = None

    @property
    def ffn_weights(self) -> int:
        """Elements of the matrices of a dense feed-forward layer."""
        return self.matrices_of(self.intermediate_size)

    def matrices_of(self, intermediate_size: int) -> int:
        """Return the elements of the feed-forward matrices of this size."""
        return (3 if self.gated else 2) * self.attention.hidden_size * intermediate_size

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.attention.hidden_size

    @property
    def head_bytes(self) -> float:
        return self.head_weights * self.precision.activation_bytes

    @property
    def num_parameters(self) -> int:
        """Elements of all matrices, without norms and biases."""
        return self._layer_parameters(0 if self.experts is None else self.experts.number) + self._num_heads_weights

    @property
    def active_parameters(self) -> int:
        """Elements of the matrices that compute one token."""
        return self._layer_parameters(0 if self.experts is None else self.experts.per_token) + self._num_heads_weights

    @property
    def _num_heads_weights(self) -> int:
        return self.head_weights * (1 if self.tied else 2)

    def _layer_parameters(self, num_routed: int) -> int:
        """Return the elements of all layers, with `num_routed` experts."""
        num_layers, num_sparse, sparse = self.attention.num_layers, 0, 0
        if self.experts is not None:
            num_sparse, sparse = len(self.experts.layers), self.router_weights + self._expert_weights(num_routed)
        dense = (num_layers - num_sparse) * self.ffn_weights
        return num_layers * self.attention.attention_weights + dense + num_sparse * sparse

    def _expert_weights(self, num_routed: int) -> int:
        assert self.experts is not None
        return self.matrices_of(num_routed * self.experts.intermediate_size + self.experts.shared_size)

    @property
    def router_weights(self) -> int:
        """Elements of the router of a layer with experts, of which every tensor-parallel rank has a copy."""
        return 0 if self.experts is None else self.attention.hidden_size * self.experts.number

    @property
    def head_layers(self) -> float:
        """The weights of the output head, as a multiple of a layer's mean weights."""
        return self.head_weights * self.attention.num_layers / (self.num_parameters - self._num_heads_weights)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all matrices in their precisions."""
        return self.stage_bytes(range(self.attention.num_layers))

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the operations of a prompt: two per weight of its layers and token, and causal attention.

        The embedding is left out, and so is the output head, which only one token needs.
        """
        shape = self.attention
        pairs = num_tokens**2 / 2 if shape.windows is None else shape.pairs(Run(0, num_tokens))
        return self.products_flops(num_tokens) + shape.num_layers * shape.pair_flops * pairs

    def products_flops(self, tokens: float, sampled: float = 0) -> float:
        """Return the operations of products with weights: of layers for `tokens`, of the output head for `sampled`."""
        weights = self.active_parameters - self._num_heads_weights
        return 2.0 * (weights * tokens + self.head_weights * sampled)

    def stage_bytes(self, layers: range) -> float:
        """Return the bytes of some layers. The first layer includes the embedding, the last the output head."""
        shape = self.attention
        ends = [layers.start == 0, layers.stop == shape.num_layers]
        num_ends = 1 if self.tied and all(ends) else sum(ends)
        projections = len(layers) * shape.attention_weights * self.precision.weight_bytes
        num_sparse = self.num_sparse(layers)
        feed_forward = (len(layers) - num_sparse) * self.ffn_weights * self.precision.ffn_bytes
        if num_sparse and self.experts is not None:
            experts = self._expert_weights(self.experts.number) * self.precision.ffn_bytes
            feed_forward += num_sparse * (experts + self.router_weights * self.precision.activation_bytes)
        return projections + feed_forward + num_ends * self.head_bytes

    def read_bytes(self, tokens: float) -> float:
        """Return the bytes of the matrices that compute `tokens` tokens, with the expected number of experts."""
        embedding = 0.0 if self.tied else self.head_bytes
        if self.experts is None:
            return self.weight_bytes - embedding
        unused = self.matrices_of(self.experts.intermediate_size) * (self.experts.number - self.experts.active(tokens))
        return self.weight_bytes - embedding - len(self.experts.layers) * unused * self.precision.ffn_bytes

    def copied_bytes(self, layers: range) -> float:
        """Return the bytes of some layers of which every tensor-parallel rank has a copy."""
        latent, shape = self.attention.latent, self.attention
        down = 0 if latent is None else latent.down_weights(shape.hidden_size)
        routers = self.num_sparse(layers) * self.router_weights * self.precision.activation_bytes
        return len(layers) * down * self.precision.weight_bytes + routers

    def rank_bytes(self, layers: range, tp: int) -> float:
        """Return the bytes of some layers on the fullest of `tp` ranks."""
        copied = self.copied_bytes(layers)
        even = copied + (self.stage_bytes(layers) - copied) / tp
        if (experts := self.experts) is None or not experts.are_whole:
            return even
        more = self.num_sparse(layers) * (experts.per_rank(tp) - experts.number / tp)
        return even + more * self.matrices_of(experts.intermediate_size) * self.precision.ffn_bytes

    def num_sparse(self, layers: range) -> int:
        """Return the number of layers with experts among some layers."""
        return 0 if self.experts is None else sum(layer in layers for layer in self.experts.layers)


def from_config(config: Mapping[str, Any], *, name: str, precision: Precision = HALF) -> Architecture:
    """Parse a config.json, which may nest the language model under `text_config`.

    Raises:
        ValueError: a field is missing or not a positive number. Or the model has layers that are not modelled, or
            sizes in nested objects that are not read.
    """
    config = table(config, "text_config", name) or config
    for key, fields in _NESTED.items():
        nested = table(config, key, name)
        for field, usual in fields.items():
            number = nested.get(field)
            if number is not None and not (usual == "num_local_experts" and number == 1):
                problem = f"the config of {name} has {field} in {key}, which is not read: name it {usual}, outside"
                raise ValueError(problem)
    check_layers(config, name)
    kind = str(config.get("model_type", ""))
    hidden_size = size(config, "hidden_size", name)
    num_heads = size(config, "num_attention_heads", name)
    latent, intermediate_size = read_latent(config, name), size(config, "intermediate_size", name, 4 * hidden_size)
    shape = ModelShape(
        num_layers=size(config, "num_hidden_layers", name),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=1 if latent else _kv_heads(config, num_heads, name),
        head_dim=latent.stored_dim if latent else size(config, "head_dim", name, default=hidden_size // num_heads),
        bytes_per_element=precision.activation_bytes,
        kv_element_bytes=None if precision.kv == precision.activations else precision.kv_bytes,
        latent=latent,
        windows=read_windows(config, name),
    )
    return Architecture(
        name=name,
        attention=shape,
        intermediate_size=intermediate_size,
        experts=read_experts(config, name, intermediate_size),
        vocab_size=size(config, "vocab_size", name),
        precision=precision,
        gated=kind not in _TWO_MATRICES,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        rms_norm=kind not in _LAYER_NORM,
        rotary=kind not in _NO_ROTARY and not config.get("alibi", False),
        parallel=bool(config.get("parallel_attn", kind in ("gpt_neox", "gptj", "phi", "cohere"))),
    )


def _kv_heads(config: Mapping[str, Any], num_heads: int, name: str) -> int:
    """Return the number of KV heads. A flag of Falcon and GPT-BigCode means one KV head, whatever number is given."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    if config.get("model_type") == "falcon" and not config.get("new_decoder_architecture"):
        return num_heads
    number = size(config, "num_key_value_heads", name, default=num_heads)
    if num_heads % number:
        raise wrong("num_key_value_heads", name, f"a divisor of num_attention_heads, {num_heads}", number)
    return number
