"""Reads the kinds of layers from a config.json, and refuses layers whose cost is not modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longspan.cost.layer_kinds import Experts, Latent, Windows
from longspan.cost.precision import Format
from longspan.errors import ParameterError

_OTHER_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
}
_LINEAR_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "lightning_attention"}
_LINEAR_FIELDS = (
    "linear_num_key_heads",
    "linear_attn_config",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "hybrid_override_pattern",
    "attn_type_list",
    "lru_width",
    "time_step_rank",
)
_LINEAR_TYPES = {"mamba", "mamba2", "rwkv", "falcon_mamba", "recurrent_gemma", "jamba", "bamba"}
_NOT_MODELLED = {
    "index_topk": "sparse attention with an indexer",
    "attention_chunk_size": "attention in chunks",
    "swa_num_key_value_heads": "other KV heads in layers with windows",
    "num_global_key_value_heads": "other KV heads in layers with windows",
    "global_head_dim": "another head size in layers with windows",
}
_ALL_WINDOWS = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Model types with windows in all layers, if their config states a window and no kinds of layers."""
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Model types of which every nth layer has no window, unless sliding_window_pattern states another number."""


def size(config: Mapping[str, Any], field: str, name: str, default: int | None = None) -> int:
    """Return a field under any of its names.

    Raises:
        ValueError: the field is missing, or not a positive whole number.
    """
    names = _OTHER_NAMES.get(field, (field,))
    value = next((config[key] for key in names if config.get(key) is not None), default)
    if value is None:
        raise ValueError(f"the config of {name} has no {field}: add it")
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} of {name} must be a positive whole number, but {value!r} given")
    return value


def check_layers(config: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for a model whose layers are not modelled, with the field that shows it."""
    field = next((field for field in _LINEAR_FIELDS if config.get(field)), None)
    if field is None and (config.get("model_type") in _LINEAR_TYPES or _LINEAR_LAYERS & set(_layer_types(config))):
        field = "layer_types" if _layer_types(config) else "model_type"
    if field is not None:
        raise ValueError(f"{name} has linear attention or a state space ({field}), whose cost is not modelled")
    for field, what in _NOT_MODELLED.items():
        if config.get(field):
            raise ValueError(f"{name} has {what} ({field}), whose cost is not modelled")


def read_experts(config: Mapping[str, Any], name: str, intermediate_size: int) -> Experts | None:
    """Read the mixture of experts. None if no layer has one.

    Args:
        intermediate_size: of dense layers, and of experts if the config states no other.
    """
    if all(config.get(key) in (None, 0, 1) for key in _OTHER_NAMES["num_experts"]):
        return None
    number = size(config, "num_experts", name)
    width = size(config, "moe_intermediate_size", name, default=intermediate_size)
    num_shared = config.get("n_shared_experts", config.get("num_shared_experts", config.get("moe_num_shared_experts")))
    shared = config.get("shared_expert_intermediate_size") or (num_shared or 0) * width
    layers = tuple(layer for layer in range(size(config, "num_hidden_layers", name)) if _has_experts(config, layer))
    per_token = size(config, "num_experts_per_tok", name)
    if per_token > number:
        raise ValueError(f"num_experts_per_tok of {name} must be at most {number}, but {per_token} given")
    return Experts(number=number, per_token=per_token, intermediate_size=width, shared_size=shared, layers=layers)


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, Sequence):
        return bool(frequency[layer])
    if layer < (config.get("first_k_dense_replace") or config.get("moe_layer_start_index") or 0):
        return False
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return layer % frequency == 0 and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def read_latent(config: Mapping[str, Any], name: str) -> Latent | None:
    """Read the sizes of latent attention. None for a model with plain heads."""
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        rank=size(config, "kv_lora_rank", name),
        rotary_dim=size(config, "qk_rope_head_dim", name),
        plain_dim=size(config, "qk_nope_head_dim", name),
        value_dim=size(config, "v_head_dim", name),
        q_rank=size(config, "q_lora_rank", name) if config.get("q_lora_rank") else 0,
    )


def read_windows(config: Mapping[str, Any], name: str) -> Windows | None:
    """Read the sliding windows. None for a model whose layers all attend to all tokens before."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return None
    width, layers = size(config, "sliding_window", name), size(config, "num_hidden_layers", name)
    number, kind = 0, str(config.get("model_type", ""))
    if types := _layer_types(config):
        number = sum(layer == "sliding_attention" for layer in types[:layers])
    elif every := config.get("sliding_window_pattern") or _FULL_EVERY.get(kind):
        number = layers - layers // every
    elif kind in _ALL_WINDOWS:
        number = layers
    elif config.get("use_sliding_window"):
        number = max(0, layers - (config.get("max_window_layers") or 0))
    return Windows(size=width, num_layers=number) if number else None


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    return list(config.get("layer_types") or config.get("layers_block_type") or ())


def stored_formats(config: Mapping[str, Any]) -> tuple[Format, Format] | None:
    """Return the formats of quantised weights, of attention and of feed-forward layers. None without quantisation.

    Raises:
        ParameterError: for a quantisation that is not modelled.
    """
    parts = (config, config.get("text_config") or {})
    stored = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if stored is None:
        return None
    method = str(stored.get("quant_method"))
    if method == "mxfp4":  # as of gpt-oss: experts only
        return "bfloat16", "mxfp4"
    kind = {
        "fp8": "fp8 in blocks" if stored.get("weight_block_size") else "fp8",
        "awq": f"{stored.get('bits', 4)} bits",
        "gptq": f"{stored.get('bits', 4)} bits",
        "modelopt": str(stored.get("quant_algo", "fp8")).lower(),
        "compressed-tensors": _compressed(stored),
    }.get(method)
    formats: dict[str | None, Format] = {
        "fp8 in blocks": "fp8_block",
        "fp8": "fp8",
        "float 8 bits": "fp8",
        "8 bits": "int8",
        "int 8 bits": "int8",
        "int 8 bits with inputs": "w8a8",
        "4 bits": "int4",
        "int 4 bits": "int4",
        "float 4 bits": "nvfp4",
        "nvfp4": "nvfp4",
    }
    if kind not in formats:
        problem = f"auto: weights stored by {method} ({kind}) are not modelled, so name their format"
        raise ParameterError("dtype", problem, "auto")
    return formats[kind], formats[kind]


def _compressed(stored: Mapping[str, Any]) -> str:
    """Describe the first group of compressed-tensors."""
    group: Mapping[str, Any] = next(iter((stored.get("config_groups") or {}).values()), {})
    weights = group.get("weights") or {}
    kind, bits = weights.get("type"), weights.get("num_bits")
    return f"{kind} {bits} bits" + (" with inputs" if kind == "int" and group.get("input_activations") else "")
