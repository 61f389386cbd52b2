"""Writes the weight file of a model from its checkpoint, see `model.store`, by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from longspan.model.files import ModelError, one_line
from longspan.model.info import ModelInfo
from longspan.model.quantization import GRID, NUMBERS, Quantization, is_quantised, quantise
from longspan.model.skeleton import PROBE, gather_info, load_config, quiet_transformers


def write_weights(
    config_dir: Path,
    path: Path,
    *,
    dtype: torch.dtype,
    dummy_seed: int | None,
    quantization: Quantization | None,
    trust_remote_code: bool,
) -> None:
    """Writes the file `path` for the model in `config_dir`; raises as `ensure_weights` does."""
    with quiet_transformers():
        model = _load(config_dir, dtype, dummy_seed, trust_remote_code)
    levels = {} if quantization is None else _quantise(model, quantization)
    _write(model, gather_info(model, config_dir), path, levels)


def _load(config_dir: Path, dtype: torch.dtype, dummy_seed: int | None, trust_remote_code: bool) -> PreTrainedModel:
    if dummy_seed is not None:
        config = load_config(config_dir, trust_remote_code)
        with torch.random.fork_rng(devices=[]):
            set_seed(dummy_seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=PROBE, trust_remote_code=trust_remote_code
            )
        return model.eval()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            config_dir,
            dtype=dtype,
            attn_implementation=PROBE,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{config_dir}: its weights cannot be loaded ({one_line(error)})") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{config_dir}: its files lack {len(missing)} of the model's weights, e.g. {missing[0]}")
    return model


def _quantise(model: PreTrainedModel, quantization: Quantization) -> dict[str, Tensor]:
    """Replaces weights by those that their levels stand for; returns the levels by their names in the file.

    An output head that is tied to the embedding gets weights of its own.
    """
    found: dict[str, Tensor] = {}
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        if is_quantised(name, weight):
            levels = quantise(name, weight, quantization)
            found |= {name + NUMBERS: levels.numbers, name + GRID: levels.grid}
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(levels.weights(), requires_grad=False))
    return found


def _write(model: nn.Module, info: ModelInfo, path: Path, levels: dict[str, Tensor]) -> None:
    first_name: dict[int, str] = {}
    tensors: dict[str, Tensor] = dict(levels)
    aliases: dict[str, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        owner = first_name.setdefault(id(tensor), name)
        if owner == name:
            tensors[name] = tensor.detach().contiguous()
        else:
            aliases[name] = owner
    save_file(tensors, path, metadata={"info": info.to_json(), "aliases": json.dumps(aliases)})
