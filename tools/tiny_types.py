"""Tiny random configurations of every causal language model type of the installed transformers.

A configuration keeps the features of its class and shrinks its sizes. `SIZES` has the values by field name, and
`CHANGES` by type. Layer types alternate, so that each kind of layer is on both sides of a cut between pipeline stages.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Fields = dict[str, Any]

VOCABULARY = 199
_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 4, 64, 4, 2, 16, 96
_WINDOW = 24
"""Tokens. Shorter than most prompts, longer than a block."""
_ORIGINAL_LENGTH = 32
"""Tokens of RoPE before it is scaled. Most positions are larger."""

_WIDTHS = ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim", "lru_width")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")
"""Window sizes. If a class's default is None, it stays None."""
_GROWING = {
    *(*_WIDTHS, *_QUERY_HEADS, *_KEY_HEADS),
    *("kv_n_heads", "num_attention_heads_per_layer", "swa_num_attention_heads", "swa_num_key_value_heads"),
}

SIZES: Fields = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(_WIDTHS, _WIDTH),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers"), _LAYERS
    ),
    **dict.fromkeys(_QUERY_HEADS, _HEADS),
    **dict.fromkeys(_KEY_HEADS, _KV_HEADS),
    **dict.fromkeys(("head_dim", "d_head", "kv_channels", "dim_head", "attention_head_size"), _HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), _INNER),
    **dict.fromkeys(("d_inner", "dff", "dim_ff", "feed_forward_size", "dense_intermediate_size"), _INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(_WINDOWS, _WINDOW),
    # Encoders of encoder-decoder models.
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), _HEADS),
    "encoder_ffn_dim": _INNER,
    # Mixtures of experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    "index_n_heads": 4,
    "index_topk": 16,
    # Linear attention and state spaces.
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_dt_rank", "time_step_rank"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    # Further parts.
    "attention_chunk_size": _WINDOW,
    "floor_scale": 10,
    "intermediate_size_mlp": _INNER,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
    "global_head_dim": 2 * _HEAD_DIM,
    "query_pre_attn_scalar": 24,
    "laurel_rank": 8,
    "keep_window_size": _WINDOW,
    "no_rope_layer_interval": 2,
    "mlp_only_layers": [1],
    "is_decoder": True,
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "image_size": 32,
}
"""Fields that exist under these names in any configuration, or in a configuration inside of it."""

_TOKENS: Fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")

_MIXED = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
_LATENT = {"num_key_value_heads": _HEADS}
"""Latent attention has as many KV heads as query heads."""
_DOTS3 = _LATENT | {
    "swa_num_attention_heads": _HEADS,
    "swa_num_key_value_heads": _HEADS,
    "swa_head_dim": 2 * _HEAD_DIM,
    **dict.fromkeys(("swa_kv_lora_rank", "swa_q_lora_rank"), 32),
    **dict.fromkeys(("swa_qk_nope_head_dim", "swa_qk_rope_head_dim", "swa_v_head_dim"), _HEAD_DIM),
}
_GEMMA4 = {"global_head_dim": 2 * _HEAD_DIM}
_NO_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_ASSISTANT = {
    "backbone_hidden_size": _WIDTH,
    "text_config": _GEMMA4 | _NO_INPUTS | {"num_kv_shared_layers": _LAYERS},
}
_INKLING = {
    "swa_num_attention_heads": _HEADS,
    "swa_num_key_value_heads": _KV_HEADS,
    "swa_head_dim": _HEAD_DIM,
    "rel_extent": 64,
    "log_scaling_n_floor": _ORIGINAL_LENGTH,
    "unpadded_vocab_size": VOCABULARY,
}
_QWEN4 = {
    "indexer_n_heads": _HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": _HEAD_DIM,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 200,
    "split_ngram_parts": 1,
    "hc_lowrank": 16,
}
_MAMBA = ["linear_attention", "full_attention"] * (_LAYERS // 2)
_IMAGE_TOKEN = 7
"""A token of images that prompts of text contain, too."""
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_QWEN_TOWER = {"depth": 2, "embed_dim": 96, "out_hidden_size": _WIDTH, "num_position_embeddings": 16}
_GEMMA4_TOKENS = {
    "image_token_id": _IMAGE_TOKEN,
    "video_token_id": _IMAGE_TOKEN + 1,
    "audio_token_id": _IMAGE_TOKEN + 2,
}

CHANGES: dict[str, Fields] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT,
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 200},
    "codegen": {"rotary_dim": _HEAD_DIM // 2},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0, "num_shared_experts": 1},
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": _KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": _WIDTH, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": {"o_lora_rank": 16, "o_groups": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "layer_types": _MIXED},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": _WIDTH, "adapter_out_dim": _WIDTH},
        "audio_config": {"adapter_input_size": _WIDTH, "adapter_out_dim": _WIDTH},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 128},
    "emu3": {
        "vocabulary_map": {"<image>": _IMAGE_TOKEN},
        "vq_config": {"base_channels": 32, "codebook_size": 64, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    },
    "gemma3": {"image_token_index": _IMAGE_TOKEN},
    "gemma3n": {
        "vision_config": {"vocab_offset": 150, "vocab_size": 30},
        "audio_config": {
            "vocab_offset": 180,
            "vocab_size": VOCABULARY - 180,
            "conf_num_attention_heads": 4,
            "conf_num_hidden_layers": 2,
        },
    },
    "gemma4": {"text_config": _GEMMA4, **_GEMMA4_TOKENS},
    "gemma4_assistant": _ASSISTANT,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {
        "text_config": _GEMMA4,
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "patch_size": 4, "output_proj_dims": 32},
        **_GEMMA4_TOKENS,
    },
    "gemma4_unified_assistant": _ASSISTANT,
    "gemma4_unified_text": _GEMMA4,
    "glm4_moe_lite": _LATENT,
    "glm4v": {"vision_config": _QWEN_TOWER, "text_config": {"rope_parameters": _MROPE}},
    "glm_moe_dsa": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], _LAYERS // 2]]},
    "gptj": {"rotary_dim": _HEAD_DIM // 2},
    "granitemoehybrid": {"layer_types": _MAMBA},
    "inkling2_text": _INKLING,
    "inkling_text": _INKLING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LATENT,
    "laguna": {"layer_types": _MIXED, "num_attention_heads_per_layer": [4, 4, 6, 6]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (_LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (_LAYERS // 2)},
    "longcat_flash": _LATENT | {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": _MIXED, "mlp_layer_types": ["sparse", "dense"] * (_LAYERS // 2)},
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {"rotary_dim": _HEAD_DIM // 2},
    "ministral": {"layer_types": _MIXED},
    "qwen2_vl": {"vision_config": _QWEN_TOWER, "text_config": {"rope_parameters": _MROPE}},
    "qwen2_5_vl": {"vision_config": _QWEN_TOWER, "text_config": {"rope_parameters": _MROPE}},
    "qwen3_vl": {"vision_config": _QWEN_TOWER, "text_config": {"rope_parameters": _MROPE}},
    "qwen3_vl_moe": {"vision_config": _QWEN_TOWER, "text_config": {"rope_parameters": _MROPE}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {"shape_vocab_size": 50, "shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of a type that replace wrong values of `SIZES`. None removes a field, so that the class's default applies."""

_FULL_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": _ORIGINAL_LENGTH}
_LONGROPE = _FULL_ROPE | {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(_HEAD_DIM // 2)],
    "long_factor": [2.0 + 1.5 * pair for pair in range(_HEAD_DIM // 2)],
}
_LLAMA4_SCALING = _FULL_ROPE | {"rope_type": "default", "llama_4_scaling_beta": 1.0}
_QWEN_WINDOWS: Fields = {"use_sliding_window": True, "max_window_layers": 2, "layer_types": _MIXED}

VARIANTS: dict[str, dict[str, Fields]] = {
    "falcon": {
        "several KV heads": {"new_decoder_architecture": True},
        "ALiBi": {"alibi": True},
        "sequential": {"parallel_attn": False, "bias": True, "multi_query": False, "num_kv_heads": _HEADS},
    },
    "gemma3": {"image token outside of the vocabulary": {"image_token_index": VOCABULARY + 1}},
    "gemma3n_text": {"no shared KV": {"num_kv_shared_layers": 0}},
    "gemma4_text": {
        "no shared KV": {"num_kv_shared_layers": 0},
        "wide layers with shared KV": {"use_double_wide_mlp": True},
        "neither": {"num_kv_shared_layers": 0, **_NO_INPUTS},
        "keys as values": {
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            **_NO_INPUTS,
        },
        "experts": {
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            **_NO_INPUTS,
        },
    },
    "gemma4_unified_text": {"no shared KV": {"num_kv_shared_layers": 0}},
    "glm4_moe": {"norms of heads": {"use_qk_norm": True}},
    "gpt2": {"scales of layers": {"scale_attn_by_inverse_layer_idx": True}},
    "gpt_bigcode": {"several KV heads": {"multi_query": False}},
    "gpt_oss": {"no window": {"layer_types": ["full_attention"] * _LAYERS, "attention_bias": False}},
    "granite_swa": {
        "RoPE by layer": {"layer_rope_theta": [0, 10000.0, 500000.0, 0]},
        "longrope by layer": {"layer_rope_theta": [0, 10000.0, 500000.0, 0], "rope_parameters": _LONGROPE},
    },
    "gpt_neox": {"sequential": {"use_parallel_residual": False}},
    "llama4": {
        "full attention": {
            "text_config": {"layer_types": ["full_attention"] * _LAYERS, "attn_temperature_tuning": False}
        }
    },
    "llama": {
        "biases": {"attention_bias": True, "mlp_bias": True},
        "yarn": {"rope_parameters": _FULL_ROPE | {"rope_type": "yarn", "factor": 16.0}},
        "longrope": {"rope_parameters": _LONGROPE},
        "dynamic": {"rope_parameters": _FULL_ROPE | {"rope_type": "dynamic", "factor": 16.0}},
    },
    "llama4_text": {
        "dense layers": {"interleave_moe_layer_step": 2, "use_qk_norm": False},
        "RoPE in full layers": {"no_rope_layers": [1] * _LAYERS},
        "no RoPE in chunked layers": {"no_rope_layers": [1, 0, 0, 1], "attn_temperature_tuning": True},
    },
    "mimo_v2_flash": {
        "narrow values": {"head_dim": 24},
        "no sinks": {"layer_types": ["full_attention"] * _LAYERS, "mlp_layer_types": ["dense"] * _LAYERS},
    },
    "minimax_m3_vl_text": {"sparse layers": {"layer_types": ["full_attention", "minimax_m3_sparse"] * (_LAYERS // 2)}},
    "mistral": {"no window": {"sliding_window": None}},
    "mistral3": {"Ministral 3": {"text_config": {"model_type": "ministral3", "rope_parameters": _LLAMA4_SCALING}}},
    "olmo": {"clipped": {"clip_qkv": 0.5}},
    "opt": {"narrow embedding": {"word_embed_proj_dim": _WIDTH // 2, "do_layer_norm_before": False}},
    "phi3": {"longrope": {"original_max_position_embeddings": _ORIGINAL_LENGTH, "rope_parameters": _LONGROPE}},
    "qwen2": {"windows": _QWEN_WINDOWS},
    "qwen2_vl": {
        "windows": {"vision_config": _QWEN_TOWER, "text_config": {"rope_parameters": _MROPE, **_QWEN_WINDOWS}},
    },
    "qwen3": {"windows": _QWEN_WINDOWS},
    "qwen3_moe": {"narrow experts": {"moe_intermediate_size": 12}},
    "stablelm": {"norms of heads": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}},
}
"""Further configurations of a type, as in published models, by their names in the table."""


MULTIMODAL: tuple[str, ...] = (
    "aya_vision",
    "cohere2_vision",
    "glm4v",
    "idefics3",
    "internvl",
    "llava",
    "mistral3",
    "paligemma",
)
MULTIMODAL += ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral")
"""Types with a language model that transformers does not list as causal language models."""


def causal_types() -> tuple[str, ...]:
    """Return all types, in the order of their names."""
    return tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL}))


def tiny_fields(kind: str, variant: str = "", *, even: bool = True) -> Fields:
    """Return the arguments of a type's configuration class. See `tiny_config`."""
    changes = CHANGES.get(kind, {}) | (VARIANTS[kind][variant] if variant else {})
    fields = _shrunken(CONFIG_MAPPING[kind], changes)
    return fields if even else _uneven(fields)


def tiny_config(kind: str, variant: str = "", *, even: bool = True) -> PreTrainedConfig:
    """Return the configuration of a type. Errors of its class are raised.

    If `even`, two ranks have equal numbers of heads. Otherwise there are 6 query heads and 3 KV heads, and the ranks
    have 4 and 2 query heads.
    """
    return CONFIG_MAPPING[kind](**tiny_fields(kind, variant, even=even))


def _shrunken(of: type[PreTrainedConfig], changes: Mapping[str, Any]) -> Fields:
    """Return the small fields of a class and of its nested classes, with `changes` by the same names."""
    specs = of.sub_configs_defaults
    defaults: Fields = {field.name: getattr(of, field.name, None) for field in dataclasses.fields(of)} | _defaults(of)
    fields: Fields = {name: SIZES[name] for name in defaults if name in SIZES}
    fields |= {name: None for name in _WINDOWS if name in fields and defaults[name] is None}
    fields |= {name: _TOKENS[name] for name in defaults if name in _TOKENS}
    fields |= {name: _alternating(kinds) for name in _KINDS if (kinds := defaults.get(name))}
    if ropes := defaults.get("rope_parameters"):
        fields["rope_parameters"] = _short_ropes(ropes)
    for name, spec in specs.items():
        inner = spec.config_class if spec.model_type is None else CONFIG_MAPPING[spec.model_type]
        fields[name] = {"model_type": inner.model_type, **_shrunken(inner, changes.get(name) or {})}
    fields |= {name: value for name, value in changes.items() if name not in specs}
    return {name: copy.deepcopy(value) for name, value in fields.items() if value is not None}


def _defaults(of: type[PreTrainedConfig]) -> Fields:
    """Return the fields of a class's default configuration, or none if the class requires arguments."""
    try:
        fields: Fields = of().to_dict()
    except (ValueError, TypeError, StrictDataclassError):
        return {}
    return fields


def _uneven(fields: Fields) -> Fields:
    """Multiply the numbers of heads, and the widths that depend on them, by 1.5."""
    changed: Fields = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            changed[name] = _uneven(value)
        elif name in _GROWING and isinstance(value, list):
            changed[name] = [number * 3 // 2 for number in value]
        elif name in _GROWING and value > 1:
            changed[name] = value * 3 // 2
        else:
            changed[name] = value
    return changed


def _alternating(kinds: list[str]) -> list[str]:
    """Return a kind for each layer. Kinds alternate in the order of their first appearance."""
    different = list(dict.fromkeys(kinds))
    return [different[layer % len(different)] for layer in range(_LAYERS)]


def _short_ropes(parameters: Mapping[str, Any]) -> Fields:
    """Reduce the length beyond which RoPE is scaled, in a set of parameters or in a set per layer type."""
    short = {name: _short_ropes(value) if isinstance(value, Mapping) else value for name, value in parameters.items()}
    if "original_max_position_embeddings" in short:
        short["original_max_position_embeddings"] = _ORIGINAL_LENGTH
    return short
