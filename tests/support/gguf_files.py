"""GGUF files of tiny checkpoints, written as llama.cpp converts them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NAMES = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: str = "F32",
    facts: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
) -> Path:
    """Write a checkpoint's weights, with matrices of a GGML type, a configuration and a tokenizer of single bytes.

    `facts` and `tensors` are added, or replace values of the checkpoint. A value of None removes one.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    arch = config.model_type
    writer = GGUFWriter(path, arch)
    values: dict[str, Any] = {f"{arch}.{key}": getattr(config, name, None) for name, key in NAMES.items()}
    values |= {
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{arch}.rope.dimension_count": config.head_dim,
    }
    values |= _tokenizer(config.vocab_size) | dict(facts or {})
    for key, value in values.items():
        _add(writer, key, value)
    for name, weight in (_tensors(checkpoint, arch, config) | dict(tensors or {})).items():
        if weight is not None:
            stored = GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
            writer.add_tensor(name, quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _tokenizer(size: int) -> dict[str, Any]:
    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<pad>", "<bos>", "<eos>", "12", "ab", *alphabet][:size]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token[0] == "<" and len(token) > 1 else 1 for token in tokens],
        "tokenizer.ggml.merges": ["1 2", "a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _tensors(checkpoint: Path, arch: str, config: Any) -> dict[str, np.ndarray[Any, Any]]:
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        stored = weight.to(torch.float32)
        if arch == "llama" and heads is not None:  # the two halves of RoPE alternate
            stored = stored.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        if arch == "gemma2" and name.endswith("norm.weight"):
            stored = stored + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = stored.numpy()
    return tensors
