"""Which models longspan can serve, decided from the configuration alone, before any worker starts."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from longspan.attn.interface import LAYER_TYPES
from longspan.model.files import ModelError, one_line
from longspan.model.quiet import quiet_transformers
from longspan.model.rope import rope_types


def check_supported(config_dir: Path, trust_remote_code: bool) -> None:
    """Raise ModelError, with the first reason found, unless longspan can serve the model of this folder."""
    config = load_config(config_dir, trust_remote_code)
    for problem in _config_problems(config):
        raise ModelError(f"{config.model_type} is not supported: {problem}")
    for problem in _class_problems(build_skeleton(config, trust_remote_code)):
        raise ModelError(f"{config.model_type} is not supported: {problem}")


def load_config(config_dir: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the configuration; ModelError when transformers does not know it."""
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(config_dir, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{config_dir}/config.json cannot be used: {one_line(error)}") from error


def build_skeleton(config: PreTrainedConfig, trust_remote_code: bool, **options: object) -> PreTrainedModel:
    """Build the causal language model of a configuration on the meta device: modules, no numbers.

    `options` go to `from_config` (`dtype`, `attn_implementation`). Raises ModelError when there is no such model.
    """
    try:
        with torch.device("meta"), quiet_transformers():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, **options
            )
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ModelError(
            f"{config.model_type} is not supported: transformers builds no causal language model from its "
            f"configuration ({one_line(error)})"
        ) from error
    return model.eval()


def _config_problems(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; longspan serves decoder-only ones"
    if config.get_text_config() is not config:
        yield "it is a multimodal model; use its text-only checkpoint"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised; use the unquantised checkpoint"
    if odd := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        yield f"it has layers of type {', '.join(odd)}; longspan serves full and sliding-window attention"
    if getattr(config, "kv_lora_rank", None):
        yield "it compresses keys and values (multi-head latent attention)"
    if any("dynamic" in kind for kind in rope_types(config)):
        yield "dynamic RoPE makes a request's result depend on earlier requests; use yarn or longrope scaling"
    if "longrope" in rope_types(config) and "rope_type" not in config.rope_parameters:
        yield "it uses longrope in some layers only"


def _class_problems(model: PreTrainedModel) -> Iterator[str]:
    if getattr(model, "_is_stateful", False):
        yield "it has recurrent (Mamba or linear-attention) layers; longspan serves attention only"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its class does not use transformers' attention interface"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        yield "its class cannot compute the logits of chosen tokens (logits_to_keep)"
    modules = list(model.modules())
    if any(_is_sink(module) for module in modules):
        yield "its attention has learned sinks"
    if any(getattr(module, "is_causal", None) is False for module in modules):
        yield "its attention is bidirectional; longspan serves decoder-only causal language models"


def _is_sink(module: nn.Module) -> bool:
    sinks: Any = getattr(module, "sinks", None)
    return isinstance(sinks, torch.Tensor)
