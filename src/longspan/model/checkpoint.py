"""Write the weight file of a model from its checkpoint by transformers, see `model.store`."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, set_seed
from transformers.initialization import no_init_weights

from longspan.model.dequantise import WeightFormat, weight_format
from longspan.model.files import ModelError, Quantization, cache_root, one_line
from longspan.model.folder import stored_types, weight_files
from longspan.model.info import ModelInfo
from longspan.model.probe import NoProducts, gather_info
from longspan.model.quantization import is_quantised, quantise
from longspan.model.skeleton import (
    BUILT_WITH,
    build_skeleton,
    causal_class,
    left_out,
    load_config,
    quiet_transformers,
    text_config,
)
from longspan.model.store import DTYPES, GRID, NOTES, NUMBERS, Matrices, WeightForm, named_tensors

_MATRIX = 2
"""The minimum number of dimensions of a matrix, or of a stack of matrices."""
_DEVIATION = 0.02
"""The standard deviation of new weights if the configuration states none."""
_LOAD_ERRORS = (
    *(OSError, RuntimeError, ValueError, TypeError, KeyError, EOFError),
    *(pickle.UnpicklingError, SafetensorError),
)
"""The errors that transformers and PyTorch raise for files without valid weights."""
_SCALES = re.compile(
    r"(^|[._])(weight|input|act|activation|proj)_(scales?|scale_inv|scale_\d|scale_ub|global_scale|zero_point|packed|g_idx|blocks)$"
    r"|(^|\.)(scale_inv|qweight|qzeros|qscales?|scales|g_idx|SCB|W_q|codebooks?|absmax|quant_map)$"
    r"|\.(nested_absmax|nested_quant_map|quant_state)(\.|$)|(weight|input|output)_quantizer\."
)
"""The names of scales and packed weights in common quantisation formats, without scales of KV."""
_NUM_NAMED = 3
_WEIGHTS = ("weight", "_proj")
_PLAIN_TYPES = ("F16", "F32", "F64", "BF16", "F8")
"""Types of plain weights. float8 is one of them unless there are scales."""
_DEQUANTISED = "F32"
"""The type of de-quantised weights in such a list of types."""


def write_weights(config_dir: Path, path: Path, form: WeightForm) -> None:
    """Write the file `path` for the model in `config_dir`. Raise errors as `ensure_weights`."""
    if form.drawn:
        assert form.dummy_seed is not None and form.quantization is None, "drawn matrices are random, not quantised"
        _write_drawn(config_dir, path, form, form.dummy_seed)
        return
    notes: list[str] = []
    with quiet_transformers():
        if form.dummy_seed is None:
            model, notes = _load(config_dir, form)
        else:
            model = _initialise(config_dir, form, form.dummy_seed)
    levels = {} if form.quantization is None else _quantise(model, form.quantization)
    _write(model, _info(model, config_dir), path, levels, notes=notes)


def _info(model: PreTrainedModel, config_dir: Path) -> ModelInfo:
    info = gather_info(model, config_dir)
    try:
        return ModelInfo.from_json(info.to_json())
    except msgspec.ValidationError as error:
        problem = f"{config_dir}: config.json or generation_config.json has a value of another type than it must have"
        raise ModelError(f"{problem} ({one_line(error)})") from error


def _initialise(config_dir: Path, form: WeightForm, seed: int) -> PreTrainedModel:
    config = load_config(config_dir, form.trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        set_seed(seed)
        return _new_model(config, form)


def _new_model(config: PreTrainedConfig, form: WeightForm) -> PreTrainedModel:
    model: PreTrainedModel = causal_class(config).from_config(
        config, dtype=DTYPES[form.dtype], attn_implementation=BUILT_WITH, trust_remote_code=form.trust_remote_code
    )
    return model.eval()


def _load(config_dir: Path, form: WeightForm) -> tuple[PreTrainedModel, list[str]]:
    """Load the weights. Return the model and its notes, see `NOTES`."""
    files = weight_files(config_dir)
    if not files:
        raise ModelError(f"{config_dir} has no weights: it needs a model.safetensors, or an index of shards")
    types, stored = stored_types(files), weight_format(config_dir)
    config = load_config(config_dir, form.trust_remote_code)
    options: dict[str, Any] = {"config": config, "trust_remote_code": form.trust_remote_code}
    auto, source = causal_class(config), config_dir
    if stored is not None:
        sources = stored.sources(types)
        types = {name: types[parts[0]] if len(parts) == 1 else _DEQUANTISED for name, parts in sources.items()}
        config = _plain_config(config_dir, form.trust_remote_code)
        auto, source = type(build_skeleton(config, form.trust_remote_code)), None
        options = {"config": config, "state_dict": _readers(files, sources, stored, DTYPES[form.dtype])}
    try:
        model, report = auto.from_pretrained(
            source,
            dtype=DTYPES[form.dtype],
            attn_implementation=BUILT_WITH,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
    except _LOAD_ERRORS as error:
        raise ModelError(f"{config_dir}: its weights cannot be loaded ({one_line(error)})") from error
    removed = tuple(f"{path}." for path in left_out(model))
    unused = {name for name in report["unexpected_keys"] if not name.startswith(removed)}
    _check_plain(config_dir, model, types, unused, stored)
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise ModelError(
            f"{config_dir}: {len(wrong)} of its weights have other shapes than its config.json states, e.g. {name} "
            f"{tuple(stored)} and not {tuple(expected)}: use the config.json that belongs to them"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{config_dir}: its files lack {len(missing)} of the model's weights, e.g. {missing[0]}: fetch them again, "
            "or use the config.json that belongs to them"
        )
    notes = []
    if unused:
        notes.append(
            f"the model has no place for tensors of this checkpoint, which are left out: {_some(unused)}. If the "
            "config.json lost an option, such as a bias or a number of layers, answers are wrong; extra layers that "
            "only draft tokens do no harm"
        )
    if stored is not None:
        notes.append(
            f"longspan computes with de-quantised weights: those stored by {stored.method} are now {form.dtype}. "
            "Activations are not quantised"
        )
    if narrow := {name for name, kind in types.items() if kind.startswith("F8") and name not in unused}:
        notes.append(f"tensors are float8 without scales, and taken as they are: {_some(narrow)}")
    return model, notes


def _plain_config(config_dir: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the configuration of a model whose weights are no longer quantised."""
    config = load_config(config_dir, trust_remote_code)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


class _Reader:
    """A weight that is de-quantised when transformers reads it, as a slice of a safetensors file is."""

    def __init__(self, parts: Sequence[Any], stored: WeightFormat, dtype: torch.dtype) -> None:
        self._parts, self._stored, self._dtype = parts, stored, dtype

    def __getitem__(self, index: object) -> Tensor:
        weight = self._stored.dequantise([part[...] for part in self._parts], self._dtype)
        return weight[index]  # type: ignore[index]  # transformers passes an ellipsis


def _readers(
    files: dict[str, Path], sources: Mapping[str, Sequence[str]], stored: WeightFormat, dtype: torch.dtype
) -> dict[str, Any]:
    """Return an object for each tensor whose item `[...]` reads it, and de-quantises it if it has several sources."""
    slices: dict[str, Any] = {}
    for path in (path for name, path in files.items() if name.endswith(".safetensors")):
        with safe_open(path, framework="pt") as file:
            slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {
        name: slices[parts[0]] if len(parts) == 1 else _Reader([slices[part] for part in parts], stored, dtype)
        for name, parts in sources.items()
    }


def _some(names: Collection[str]) -> str:
    """Return the first names, and the number of further names."""
    shown = sorted(names)[:_NUM_NAMED]
    num_more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {num_more} more" if num_more else "")


def _check_plain(
    config_dir: Path,
    model: PreTrainedModel,
    types: dict[str, str],
    unused: AbstractSet[str],
    stored: WeightFormat | None,
) -> None:
    """Raise ModelError for quantised weights, which need their scales, in no format that the configuration states."""
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ("$^",)))  # noqa: SLF001
    own = {_leaf(name) for name in (*model.state_dict(), *chain(*left_out(model).values()))}
    names = {*unused, *(name for name in types if not ignored.search(name))}
    scales = {name for name in names if _SCALES.search(name) and _leaf(name) not in own}
    weights = {name for name, kind in types.items() if name.endswith(_WEIGHTS) and not kind.startswith(_PLAIN_TYPES)}
    if quantised := scales | (weights & names):
        lack = "no quantization_config that states the" if stored is None else f"{stored.method}, which is not their"
        raise ModelError(
            f"{config_dir}: its weights are quantised ({_some(quantised)}), but its config.json has {lack} format: "
            "use the unquantised checkpoint"
        )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _write_drawn(config_dir: Path, path: Path, form: WeightForm, seed: int) -> None:
    """Describe the matrices of a new model without touching their memory."""
    config = load_config(config_dir, form.trust_remote_code)
    config._experts_implementation = "eager"  # noqa: SLF001 - `NoProducts` skips their products then
    with quiet_transformers(), no_init_weights():
        model = _new_model(config, form)
    model.tie_weights()
    models: dict[str, PreTrainedModel] = {}  # the language model of a multimodal one has its own `_init_weights`
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        models[name] = module if isinstance(module, PreTrainedModel) else models[parent]
        own = [*module.parameters(recurse=False)]
        vectors = [weight for weight in own if weight.ndim < _MATRIX]
        if len(vectors) == len(own):
            models[name]._init_weights(module)  # noqa: SLF001 - as transformers initialises norms
        for bias in vectors if len(vectors) < len(own) else ():
            bias.detach().zero_()
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.ndim >= _MATRIX}
    matrices = Matrices(
        seed=seed,
        dtype=form.dtype,
        deviation=getattr(text_config(config), "initializer_range", _DEVIATION),
        shapes=shapes,
    )
    with NoProducts():
        info = _info(model, config_dir)
    _write(model, info, path, {}, matrices)


def _quantise(model: PreTrainedModel, quantization: Quantization) -> dict[str, Tensor]:
    """Replace weights by the dequantised ones. Return the levels by their names in the file.

    An output head that is tied to the embedding gets weights of its own.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        if is_quantised(name, weight):
            levels = quantise(name, weight, quantization)
            tensors |= {name + NUMBERS: levels.numbers, name + GRID: levels.grid}
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(levels.weights(), requires_grad=False))
    return tensors


def _write(
    model: nn.Module,
    info: ModelInfo,
    path: Path,
    levels: dict[str, Tensor],
    matrices: Matrices | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write a model's tensors. Of `matrices` only the description is written."""
    own, aliases = named_tensors(model)
    described = {} if matrices is None else matrices.shapes
    tensors = {name: tensor.detach().contiguous() for name, tensor in own.items() if name not in described} | levels
    metadata = {"info": info.to_json(), "aliases": json.dumps(aliases), NOTES: json.dumps(notes)}
    if matrices is not None:
        metadata["matrices"] = msgspec.json.encode(matrices).decode()
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(path.parent).free
    if needed > free:
        problem = f"the converted weights need {needed / 1e9:.2f} GB in {cache_root()}, but {free / 1e9:.2f} are free"
        raise ModelError(f"{problem}: free some space, or set LONGSPAN_CACHE to another folder")
    save_file(tensors, path, metadata=metadata)
