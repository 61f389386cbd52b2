"""The sizes of a decoder-only model that determine its costs, from its config.json in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspan.cost.precision import HALF, Precision


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model that determine the operations and messages of its attention.

    Attributes:
        bytes_per_element: of queries and hidden states, and of keys and values in messages. 2 for bfloat16.
        kv_element_bytes: of stored keys and values. `bytes_per_element` if None.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_element: float
    kv_element_bytes: float | None = None

    @property
    def bytes_per_kv_element(self) -> float:
        return self.bytes_per_element if self.kv_element_bytes is None else self.kv_element_bytes

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per token and layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_kv_element

    def block_bytes(self, num_tokens: int) -> float:
        """Return the bytes of a KV block of `num_tokens` tokens, with all layers and heads."""
        return num_tokens * self.kv_bytes * self.num_layers

    @property
    def attention_weights(self) -> int:
        """Elements of the four projections of one layer."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Compute speed of an instance, and link speed between instances.

    Use achieved speeds instead of peaks. Give both per device or both per instance, since the rules use their ratio.

    Attributes:
        flops_per_s: operations per second of one instance in attention.
        bytes_per_s: bytes per second from one instance to another, one way.
    """

    flops_per_s: float
    bytes_per_s: float


def typical_hardware(device: str, threads: int) -> Hardware:
    """Return rough speeds for a machine without a profile.

    CPU: threads that attend in float32, and messages between processes. CUDA: accelerators of 2023, and their links.
    """
    if device == "cuda":
        return Hardware(flops_per_s=4e14, bytes_per_s=5e10)
    return Hardware(flops_per_s=6e10 * threads, bytes_per_s=1.5e9)


_OTHER_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
}
_NO_ROTARY = {"gpt2", "opt", "bloom", "mpt", "gpt_bigcode"}
_TWO_MATRICES = {"falcon", "gpt_neox", "gptj", "phi", "starcoder2", "nemotron"} | _NO_ROTARY
_LAYER_NORM = _TWO_MATRICES - {"nemotron"} | {"stablelm", "cohere"}
_TIED = _NO_ROTARY | {"falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "starcoder2"}
"""Model types whose output head is the embedding, unless the config states otherwise."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NESTED = {"ffn_config": ("ffn_hidden_size", "intermediate_size"), "attn_config": ("kv_n_heads", "num_key_value_heads")}
"""Fields that MPT and DBRX have in nested objects, and their usual names."""
_LATENT = "kv_lora_rank"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a model that determine its costs.

    Attributes:
        attention: the sizes of attention.
        precision: the format of each kind of tensor.
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

    @property
    def ffn_weights(self) -> int:
        """Elements of the feed-forward matrices of one layer."""
        return (3 if self.gated else 2) * self.attention.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.attention.hidden_size

    @property
    def head_bytes(self) -> float:
        return self.head_weights * self.precision.activation_bytes

    @property
    def num_parameters(self) -> int:
        """Elements of all matrices, without norms and biases."""
        layers = self.attention.num_layers * (self.attention.attention_weights + self.ffn_weights)
        return layers + self.head_weights * (1 if self.tied else 2)

    @property
    def head_layers(self) -> float:
        """The weights of the output head, as a multiple of a layer's weights."""
        return self.head_weights / (self.attention.attention_weights + self.ffn_weights)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all matrices in their precisions."""
        return self.stage_bytes(range(self.attention.num_layers))

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the operations of a prompt: two per weight of its layers and token, and causal attention.

        The embedding is left out, and so is the output head, which only one token needs.
        """
        shape = self.attention
        weights = shape.num_layers * (shape.attention_weights + self.ffn_weights)
        attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2 / 2
        return 2.0 * weights * num_tokens + attention

    def stage_bytes(self, layers: range) -> float:
        """Return the bytes of some layers. The first layer includes the embedding, the last the output head."""
        shape = self.attention
        layer = shape.attention_weights * self.precision.weight_bytes + self.ffn_weights * self.precision.ffn_bytes
        ends = [layers.start == 0, layers.stop == shape.num_layers]
        num_ends = 1 if self.tied and all(ends) else sum(ends)
        return len(layers) * layer + num_ends * self.head_bytes


def from_config(config: Mapping[str, Any], *, name: str, precision: Precision = HALF) -> Architecture:
    """Parse a config.json, which may nest the language model under `text_config`.

    Raises:
        ValueError: a field is missing or not a positive number, or the model has mixtures of experts, latent attention,
            or sizes in nested objects that are not read.
    """
    config = config.get("text_config", config)
    nested = {key: config.get(key) or {} for key in _NESTED}
    for key, value in nested.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} of {name} must be an object, but {value!r} given")
    if any(part.get(key) not in (None, 0, 1) for part in (config, nested["ffn_config"]) for key in _EXPERTS):
        raise ValueError(f"the config of {name} has experts in its feed-forward layers, whose cost is not modelled")
    if config.get(_LATENT):
        raise ValueError(f"the config of {name} has latent attention ({_LATENT}), whose cost is not modelled")
    for key, (field, usual) in _NESTED.items():
        if nested[key].get(field) is not None:
            raise ValueError(f"the config of {name} has {field} in {key}, which is not read: name it {usual}, outside")
    kind = str(config.get("model_type", ""))
    hidden_size = _size(config, "hidden_size", name)
    num_heads = _size(config, "num_attention_heads", name)
    shape = ModelShape(
        num_layers=_size(config, "num_hidden_layers", name),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, name),
        head_dim=_size(config, "head_dim", name, default=hidden_size // num_heads),
        bytes_per_element=precision.activation_bytes,
        kv_element_bytes=None if precision.kv == precision.activations else precision.kv_bytes,
    )
    return Architecture(
        name=name,
        attention=shape,
        intermediate_size=_size(config, "intermediate_size", name, default=4 * hidden_size),
        vocab_size=_size(config, "vocab_size", name),
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
    return _size(config, "num_key_value_heads", name, default=num_heads)


def _size(config: Mapping[str, Any], field: str, name: str, default: int | None = None) -> int:
    size = next((config[key] for key in _OTHER_NAMES[field] if config.get(key) is not None), default)
    if size is None:
        raise ValueError(f"the config of {name} has no {field}: add it")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{field} of {name} must be a positive whole number, but {size!r} given")
    return size
