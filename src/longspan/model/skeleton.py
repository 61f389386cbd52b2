"""Models as transformers builds them, without weights.

Importing transformers' models takes a second or two, so this module is imported only to build one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from longspan.model.files import ModelError, one_line

BUILT_WITH = "eager"
"""The name of the attention function in transformers with which models are built. Some classes choose modules by it.
The name is changed afterwards."""
_NUMBERS = ("layer_idx", "layer_id")
"""Attributes of attention modules with the number of their layer."""
_CONFIG_ERRORS = (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)
"""The errors that transformers raises for invalid values in a configuration."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers log errors only, and draw no progress bars, inside the block."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def load_config(config_dir: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the configuration. Raise ModelError if transformers does not know it."""
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(config_dir, trust_remote_code=trust_remote_code)
    except (*_CONFIG_ERRORS, OSError, StrictDataclassError) as error:
        raise ModelError(f"{config_dir}/config.json cannot be used: {one_line(error)}") from error


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the language model, which the configuration of a multimodal model contains.

    Raise ModelError if there are several.
    """
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ModelError(f"{config.model_type} is not supported: it has several language models") from error


def causal_class(config: PreTrainedConfig) -> Any:  # noqa: ANN401 - a class of transformers, typed loosely
    """Return the class that builds and loads the model, by `from_config` and `from_pretrained`."""
    if text_config(config) is not config:
        from longspan.model.text_part import text_class  # noqa: PLC0415 - for multimodal models alone

        if (own := text_class(config)) is not None:
            return own
    return AutoModelForCausalLM


def build_skeleton(
    config: PreTrainedConfig, trust_remote_code: bool, *, device: str = "meta", **options: object
) -> PreTrainedModel:
    """Build the causal language model of a configuration. On the meta device it has no weights.

    `options` go to `from_config` (`dtype`, `attn_implementation`). Raise ModelError if there is no such model.
    """
    try:
        with torch.device(device), quiet_transformers():
            model: PreTrainedModel = causal_class(config).from_config(
                config, trust_remote_code=trust_remote_code, **options
            )
    except ModelError:
        raise
    except torch.OutOfMemoryError:
        raise
    except (
        *_CONFIG_ERRORS,
        RuntimeError,
        IndexError,
        ImportError,
        AssertionError,
    ) as error:  # asserted sizes, packages
        raise ModelError(
            f"{config.model_type} is not supported: transformers builds no causal language model from its "
            f"configuration ({one_line(error)})"
        ) from error
    return model.eval()


def left_out(model: PreTrainedModel) -> Mapping[str, frozenset[str]]:
    """Return the modules that a multimodal model has lost, by path, with the names of their tensors."""
    removed: Mapping[str, frozenset[str]] = vars(model).get("left_out", {})
    return removed


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of layers, whose attention modules have the layers' indices. Raise ModelError if none exists."""
    config = text_config(model.config)
    size: int = config.num_hidden_layers
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == size and all(map(_has_index, module, range(size)))
    ]
    # a tower for other inputs than text may have as many layers
    own = [layers for layers in lists if any(getattr(part, "config", None) is config for part in layers.modules())]
    for layers in own or lists:
        return layers
    raise ModelError(f"{type(model).__name__} does not keep its layers in a list: this architecture is not supported")


def layer_kind(layer: nn.Module) -> Iterator[object]:
    """Yield the facts by which layers differ, apart from the values of their weights."""
    for name, module in layer.named_modules():
        yield name, type(module)
        yield from (
            (key, value)
            for key, value in vars(module).items()
            if key not in ("training", "layer_idx")
            and (isinstance(value, str) or (isinstance(value, int) and value in (0, 1)))
        )
    for name, weight in layer.named_parameters():
        yield name, tuple(weight.shape)


def layers_path(model: PreTrainedModel) -> str:
    layers = decoder_layers(model)
    path: str = next(path for path, module in model.named_modules() if module is layers)
    return path


def trunk_path(model: PreTrainedModel) -> str:
    """Return the path of the module that calls the layers. The output head reads its output."""
    return layers_path(model).rpartition(".")[0]


def trunk_base(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes everything but the head, or the whole model if there is none.

    Not every class states its name in `base_model_prefix`.
    """
    first = trunk_path(model).partition(".")[0]
    base: nn.Module = getattr(model, model.base_model_prefix, None) or model.get_submodule(first)
    head = model.get_output_embeddings()
    return model if any(part is head for part in base.modules()) else base


def _has_index(layer: nn.Module, index: int) -> bool:
    return any(index in (getattr(module, name, None) for name in _NUMBERS) for module in layer.modules())
