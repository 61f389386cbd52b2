"""Convert a GGUF file to a folder in Hugging Face's format, as transformers reads it. Nothing may be lost silently."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from longspan.attn.spec_reader import rope_dicts
from longspan.model.files import ModelError, check_whole, one_line
from longspan.model.skeleton import quiet_transformers

_READ_ERRORS = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, struct.error)
"""The errors that `gguf` and transformers raise for damaged files and for models that they do not know."""
_HEAD_DIMS = ("attention.key_length", "attention.value_length")
_FACTS = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    **dict.fromkeys(_HEAD_DIMS, ("head_dim",)),
    "attention.sliding_window": ("sliding_window",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
}
"""The names in a configuration of a file's values. RoPE is compared apart."""
_SCALING = {
    "type": "rope_type",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
}
"""The names in a configuration of the values of RoPE's scaling."""
_FLOAT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes of files in which no tensor is quantised. All other files are de-quantised to float32."""
_DIGITS = {"smollm", "starcoder", "refact", "command-r"}
"""Names of tokenizers that split each digit off, which transformers does not read."""
_BYTE_LEVEL, _GPT2 = "gpt2", {"gpt-2", "gpt2", None}
_LONG = re.compile(r"tokenizer\.ggml\.(tokens|token_type|merges|scores)$")
"""Values of one entry per token, which take seconds to read."""
_PART = re.compile(r"-\d{5}-of-(\d{5})$")

_log = logging.getLogger("longspan")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder.

    Raise ModelError for a damaged file, a part of a model, and a model that transformers does not read, or not wholly.
    """
    check_whole(gguf)
    if part := _PART.search(gguf.stem):
        raise ModelError(_split(gguf, int(part[1])))
    try:
        reader = GGUFReader(gguf)
    except _READ_ERRORS as error:
        raise ModelError(f"{gguf} is damaged, or no GGUF file ({one_line(error)}): fetch it again") from error
    facts = {name: field.contents() for name, field in reader.fields.items() if not _LONG.match(name)}
    if (count := int(facts.get("split.count") or 1)) > 1:
        raise ModelError(_split(gguf, count))
    with quiet_transformers():
        config = _config(gguf, facts, [tensor.name for tensor in reader.tensors])
        _load(gguf, config, reader).save_pretrained(folder)
        _tokenizer(gguf, config, facts).save_pretrained(folder)


def _split(gguf: Path, count: int) -> str:
    return f"{gguf} is one of {count} parts of a model: merge them by llama-gguf-split --merge, and give that file"


def _unread(gguf: Path, reason: str) -> ModelError:
    return ModelError(f"{gguf}: transformers does not read this model from GGUF ({reason}): use its safetensors files")


def _config(gguf: Path, facts: dict[str, Any], tensors: list[str]) -> PreTrainedConfig:
    """Read the configuration, with the values of the file that transformers leaves at their defaults."""
    kind = facts.get("general.type", "model")
    if kind != "model":
        raise _unread(gguf, f"it is of type {kind}")
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except _READ_ERRORS as error:
        raise _unread(gguf, one_line(error)) from error
    prefix = f"{facts['general.architecture']}."
    own = {name.removeprefix(prefix): _decimal(value) for name, value in facts.items() if name.startswith(prefix)}
    if lost := sorted({*_lost(config, own), *(name for name in tensors if name.startswith("rope_f"))}):
        raise _unread(gguf, f"it ignores {', '.join(lost)}")
    for name, value in own.items():
        attribute = next((attribute for attribute in _FACTS.get(name, ()) if hasattr(config, attribute)), None)
        if attribute is not None and getattr(config, attribute) != value:
            setattr(config, attribute, value)
    return config


def _decimal(value: object) -> object:
    """Return the shortest decimal of a float32: GGUF holds 1e-5 as 9.9999997e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _lost(config: PreTrainedConfig, own: dict[str, Any]) -> Iterator[str]:
    """Yield the file's values that the configuration has no place for, or other values than the file."""
    ropes = list(rope_dicts(config))
    usual = config.hidden_size // config.num_attention_heads
    head_dim = own.get("attention.key_length", usual)
    if getattr(config, "query_pre_attn_scalar", head_dim) != head_dim:
        yield "the scale of attention, which no GGUF file has"
    scales = own.get("rope.scaling.type", "linear") != "none"
    for name, value in own.items():
        if name.startswith("rope.scaling."):
            key = name.removeprefix("rope.scaling.")
            is_kept = not scales or any(rope.get(_SCALING.get(key, key)) == value for rope in ropes)
        elif name == "rope.freq_base":
            is_kept = any(rope.get("rope_theta") == value for rope in ropes)
        elif name == "rope.dimension_count":
            is_kept = any(int(head_dim * rope.get("partial_rotary_factor", 1.0)) == value for rope in ropes)
        elif name in _HEAD_DIMS:
            is_kept = hasattr(config, "head_dim") or value == usual
        else:
            is_kept = any(hasattr(config, attribute) for attribute in _FACTS.get(name, ()))
        if not is_kept:
            yield name


def _load(gguf: Path, config: PreTrainedConfig, reader: GGUFReader) -> PreTrainedModel:
    types = {tensor.tensor_type.name for tensor in reader.tensors}
    plain = types <= {"F32", *_FLOAT_TYPES}
    dtype = next((dtype for name, dtype in _FLOAT_TYPES.items() if plain and name in types), torch.float32)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            config=config,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    except _READ_ERRORS as error:
        raise _unread(gguf, one_line(error)) from error
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, report[problem])):
            raise _unread(gguf, f"{len(names)} {problem.replace('_', ' ')}, e.g. {names[0]}")
    stored, loaded = (sum(int(count) for count in counts) for counts in _sizes(reader, model))
    if stored != loaded:
        raise _unread(gguf, f"it has {stored} weights, and the model {loaded}")
    return model


def _sizes(reader: GGUFReader, model: PreTrainedModel) -> tuple[Iterator[int], Iterator[int]]:
    return (tensor.n_elements for tensor in reader.tensors), (weight.numel() for weight in model.parameters())


def _tokenizer(gguf: Path, config: PreTrainedConfig, facts: dict[str, Any]) -> TokenizersBackend:
    try:
        tokenizer: TokenizersBackend = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except _READ_ERRORS as error:
        raise ModelError(f"{gguf}: transformers does not read its tokenizer ({one_line(error)})") from error
    kind = facts.get("tokenizer.ggml.pre")
    if kind in _DIGITS:
        split_digits(tokenizer)
    is_gpt2 = isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
    if is_gpt2 and facts.get("tokenizer.ggml.model") == _BYTE_LEVEL and kind not in _GPT2:
        _log.warning("%s: transformers splits text as GPT-2, and not as %s: tokens may differ", gguf, kind)
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer


def split_digits(tokenizer: TokenizersBackend) -> None:
    """Restore the first step of the tokenizer, which the conversion of GGUF files loses: each digit is one piece."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
