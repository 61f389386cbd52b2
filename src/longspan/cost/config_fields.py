"""Reads the kinds of layers from a config.json, and refuses layers whose cost is not modelled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
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
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "first_k_dense_replace": ("first_k_dense_replace", "moe_layer_start_index"),
    "decoder_sparse_step": ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"),
    "num_experts_per_tok": ("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
}
_LINEAR_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "lightning_attention"}
_LINEAR_FIELDS = (
    *("linear_num_key_heads", "linear_attn_config", "mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size"),
    *("state_size", "hybrid_override_pattern", "attn_type_list", "lru_width", "time_step_rank"),
)
_LINEAR_TYPES = {"mamba", "mamba2", "rwkv", "falcon_mamba", "recurrent_gemma", "jamba", "bamba"}
_NOT_MODELLED = {
    "index_topk": "sparse attention with an indexer",
    "attention_chunk_size": "attention in chunks",
    "swa_num_key_value_heads": "other KV heads in layers with windows",
    "num_global_key_value_heads": "other KV heads in layers with windows",
    "global_head_dim": "another head size in layers with windows",
    "intermediate_size_mlp": "a shared expert that its config does not state",
}
_OF_EXPERTS = re.compile("expert|moe|shared")
_NO_SIZE = re.compile("capacity|group|loss|coef|token_id")
"""Parts of names of numbers that do not change the weights of experts or their number."""
_ALL_WINDOWS = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Model types with windows in all layers, if their config states a window and no kinds of layers."""
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Model types of which every nth layer has no window, unless sliding_window_pattern states another number."""


def size(config: Mapping[str, Any], field: str, name: str, default: int | None = None, least: int = 1) -> int:
    """Return a field under any of its names. Raise ValueError if it is missing, or no whole number from `least` on."""
    names = _OTHER_NAMES.get(field, (field,))
    field, value = next(((key, config[key]) for key in names if config.get(key) is not None), (field, default))
    if value is None:
        raise ValueError(f"the config of {name} has no {field}: add it")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise wrong(field, name, "a positive whole number" if least == 1 else f"a whole number from {least}", value)
    return value


def table(config: Mapping[str, Any], field: str, name: str) -> Mapping[str, Any]:
    """Return a nested object, which is empty if the config has none. Raise ValueError for another value."""
    value = config.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise wrong(field, name, "an object", value)
    return value or {}


def _list(config: Mapping[str, Any], field: str, kind: type, name: str) -> list[Any]:
    """Return a list of texts or whole numbers, empty if the config has none. Raise ValueError for another value."""
    value = config.get(field) or []
    if not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
        raise wrong(field, name, f"a list of {'texts' if kind is str else 'whole numbers'}", value)
    return list(value)


def wrong(field: str, name: str, kind: str, value: object) -> ValueError:
    return ValueError(f"{field} of {name} must be {kind}, but {value!r} given")


def check_layers(config: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for a model whose layers are not modelled, with the field that shows it."""
    field = next((field for field in _LINEAR_FIELDS if config.get(field)), None)
    types = _layer_types(config, name)
    if field is None and (str(config.get("model_type")) in _LINEAR_TYPES or _LINEAR_LAYERS & set(types)):
        field = "layer_types" if types else "model_type"
    if field is not None:
        raise ValueError(f"{name} has linear attention or a state space ({field}), whose cost is not modelled")
    for field, what in _NOT_MODELLED.items():
        if config.get(field):
            raise ValueError(f"{name} has {what} ({field}), whose cost is not modelled")
    read = {"moe_layer_freq", "mlp_only_layers", "moe_layer_end_index", *chain(*_OTHER_NAMES.values())}
    for field, value in config.items():
        is_size = isinstance(value, int | list) and not isinstance(value, bool) and value not in (0, [])
        if is_size and field not in read and _OF_EXPERTS.search(field) and not _NO_SIZE.search(field):
            problem = f"{value!r}, a field of experts that is not read: use the usual name, or leave it out"
            raise ValueError(f"the config of {name} has {field} = {problem}")


def read_experts(config: Mapping[str, Any], name: str, intermediate_size: int) -> Experts | None:
    """Read the mixture of experts. None if no layer has one.

    Args:
        intermediate_size: of dense layers, and of experts if the config states no other.
    """
    if all(config.get(key) in (None, 0, 1) for key in _OTHER_NAMES["num_experts"]):
        return None
    number = size(config, "num_experts", name)
    width = size(config, "moe_intermediate_size", name, default=intermediate_size)
    num_shared = size(config, "n_shared_experts", name, default=0, least=0)
    shared = size(config, "shared_expert_intermediate_size", name, default=0, least=0) or num_shared * width
    layers = _sparse_layers(config, name)
    per_token = size(config, "num_experts_per_tok", name)
    if per_token > number:
        raise ValueError(f"num_experts_per_tok of {name} must be at most {number}, but {per_token} given")
    return Experts(number=number, per_token=per_token, intermediate_size=width, shared_size=shared, layers=layers)


def _sparse_layers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the layers with experts."""
    num_layers = size(config, "num_hidden_layers", name)
    if isinstance(config.get("moe_layer_freq"), list | tuple):
        flags = _list(config, "moe_layer_freq", int, name)
        if len(flags) < num_layers:
            raise wrong("moe_layer_freq", name, f"a list with a number for each of the {num_layers} layers", flags)
        return tuple(layer for layer in range(num_layers) if flags[layer])
    every = size(config, "moe_layer_freq", name, default=1)
    step = size(config, "decoder_sparse_step", name, default=1)
    first = size(config, "first_k_dense_replace", name, default=0, least=0)
    dense = _list(config, "mlp_only_layers", int, name)
    last = size(config, "moe_layer_end_index", name, default=-1, least=-1)
    layers = range(first, num_layers if last < 0 else min(num_layers, last + 1))
    return tuple(layer for layer in layers if layer % every == 0 and (layer + 1) % step == 0 and layer not in dense)


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
    pattern = config.get("sliding_window_pattern")
    if types := _layer_types(config, name):
        number = sum(layer == "sliding_attention" for layer in types[:layers])
    elif isinstance(pattern, str) and pattern:  # of EXAONE, such as LLLG: local and global layers, repeated
        if set(pattern) - {"L", "G"}:
            raise wrong("sliding_window_pattern", name, "a number, or letters L (local) and G (global)", pattern)
        number = sum(pattern[layer % len(pattern)] == "L" for layer in range(layers))
    elif every := size(config, "sliding_window_pattern", name, default=0, least=0) or _FULL_EVERY.get(kind):
        number = layers - layers // every
    elif kind in _ALL_WINDOWS:
        number = layers
    elif config.get("use_sliding_window"):
        number = max(0, layers - size(config, "max_window_layers", name, default=0, least=0))
    return Windows(size=width, num_layers=number) if number else None


def _layer_types(config: Mapping[str, Any], name: str) -> list[str]:
    return _list(config, "layer_types" if config.get("layer_types") else "layers_block_type", str, name)


def stored_formats(config: Mapping[str, Any]) -> tuple[Format, Format] | None:
    """Return the formats of quantised weights, of attention and of feed-forward layers. None without quantisation."""
    if not (stored := _quantization(config)):
        return None
    method = str(stored.get("quant_method") or "an unnamed method")
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
        "float 8 bits in blocks": "fp8_block",
        "8 bits": "int8",
        "8 bits with inputs": "w8a8",
        "4 bits": "int4",
        "float 4 bits": "nvfp4",
        "nvfp4": "nvfp4",
    }
    if kind not in formats:
        what = "" if kind is None else f" ({kind})"
        problem = f"auto: weights stored by {method}{what} are not modelled, so name their format"
        raise ParameterError("dtype", problem, "auto")
    return formats[kind], formats[kind]


def stored_kv(config: Mapping[str, Any]) -> Format | None:
    """Return the format of keys and values that a quantised checkpoint states. None if it states none."""
    stored = _quantization(config)
    scheme = table(stored, "kv_cache_scheme", "quantization_config")
    algorithm = stored.get("kv_cache_quant_algo")
    stated = f"{scheme.get('type')} {scheme.get('num_bits')} bits" if scheme else str(algorithm or "").lower()
    if stated and stated not in ("fp8", "float 8 bits"):
        field = "kv_cache_scheme" if scheme else "kv_cache_quant_algo"
        problem = f"auto: keys and values in {stated} ({field}) are not modelled, so name their format"
        raise ParameterError("kv_cache_dtype", problem, "auto")
    return "fp8" if stated else None


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = (config, table(config, "text_config", "the config"))
    found = (table(part, "quantization_config", "the config") for part in parts)
    return next((stored for stored in found if stored), {})


def _compressed(stored: Mapping[str, Any]) -> str:
    """Describe the first group of compressed-tensors."""
    groups = table(stored, "config_groups", "quantization_config")
    group = table(groups, next(iter(groups), ""), "config_groups")
    weights = table(group, "weights", "config_groups")
    kind = weights.get("type")
    blocks = " in blocks" if weights.get("strategy") == "block" else ""
    inputs = " with inputs" if kind == "int" and group.get("input_activations") else ""
    return f"{'' if kind == 'int' else f'{kind} '}{weights.get('num_bits')} bits{blocks}{inputs}"
