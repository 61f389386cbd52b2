"""Writes the weight file of a model from its checkpoint, see `model.store`, by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.initialization import no_init_weights

from longspan.model.files import ModelError, one_line
from longspan.model.info import ModelInfo
from longspan.model.quantization import GRID, NUMBERS, Quantization, is_quantised, quantise
from longspan.model.skeleton import PROBE, gather_info, load_config, quiet_transformers
from longspan.model.store import DTYPES, Matrices

_MATRIX = 2
"""Parameters with so many dimensions or more are matrices, or stacks of them."""
_DEVIATION = 0.02
"""The usual standard deviation of new weights, of models whose configuration names none."""


def write_weights(
    config_dir: Path,
    path: Path,
    *,
    dtype: torch.dtype,
    dummy_seed: int | None,
    drawn: bool,
    quantization: Quantization | None,
    trust_remote_code: bool,
) -> None:
    """Writes the file `path` for the model in `config_dir`; raises as `ensure_weights` does."""
    if drawn:
        assert dummy_seed is not None and quantization is None, "what is drawn is made up, and not rounded"
        _write_drawn(config_dir, path, dtype, dummy_seed, trust_remote_code)
        return
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


def _write_drawn(config_dir: Path, path: Path, dtype: torch.dtype, seed: int, trust_remote_code: bool) -> None:
    """Describes the matrices of a new model, which is never filled: their memory is not touched."""
    config = load_config(config_dir, trust_remote_code)
    config._experts_implementation = "eager"  # noqa: SLF001 - experts by products that `_NoProducts` leaves out
    with quiet_transformers(), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=PROBE, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        vectors = [weight for weight in own if weight.ndim < _MATRIX]
        if len(vectors) == len(own):
            model._init_weights(module)  # noqa: SLF001 - as transformers initialises norms
        for bias in vectors if len(vectors) < len(own) else ():
            bias.detach().zero_()
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.ndim >= _MATRIX}
    matrices = Matrices(
        seed=seed,
        dtype=next(name for name, one in DTYPES.items() if one == dtype),
        deviation=getattr(config, "initializer_range", _DEVIATION),
        shapes=shapes,
    )
    with _NoProducts():
        info = gather_info(model.eval(), config_dir)
    _write(model, info, path, {}, matrices)


class _NoProducts(TorchFunctionMode):
    """Leaves out products with matrices, which say nothing about a model and read all of its weights."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what that function returns
        if function is functional.linear:
            given, weight = args[:2]
            return given.new_zeros(*given.shape[:-1], len(weight))
        return function(*args, **(kwargs or {}))


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


def _write(
    model: nn.Module, info: ModelInfo, path: Path, levels: dict[str, Tensor], matrices: Matrices | None = None
) -> None:
    """Writes a model's tensors, but for the `matrices` that are only described."""
    first_name: dict[int, str] = {}
    tensors: dict[str, Tensor] = dict(levels)
    aliases: dict[str, str] = {}
    described = {} if matrices is None else matrices.shapes
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        owner = first_name.setdefault(id(tensor), name)
        if owner != name:
            aliases[name] = owner
        elif name not in described:
            tensors[name] = tensor.detach().contiguous()
    metadata = {"info": info.to_json(), "aliases": json.dumps(aliases)}
    if matrices is not None:
        metadata["matrices"] = msgspec.json.encode(matrices).decode()
    save_file(tensors, path, metadata=metadata)
