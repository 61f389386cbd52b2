"""Load a checkpoint into a model of transformers with the memory of a few tensors, whatever the checkpoint's size.

Tensors whose names and dtypes agree with the model's stay views of the mapped checkpoint. All other tensors are
converted by transformers' own code, in batches that are written to the store at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, _is_on_hf_mount, load_state_dict, str_to_torch_dtype
from transformers.utils.loading_report import LoadStateDictInfo

from longspan.model.files import Quantization
from longspan.model.mapped import Place, TensorWriter
from longspan.model.quantization import GROUP, is_quantised, quantise
from longspan.model.skeleton import BUILT_WITH, build_skeleton
from longspan.model.store import DTYPES, GRID, NUMBERS, WeightForm

_BATCH_BYTES = 2**27
"""Bytes that are converted in memory at once, unless one tensor of the model needs more. Larger batches are not faster,
since each tensor is converted by itself."""
_NUM_LENGTH_BYTES = 8
"""The length of a safetensors header, before it."""

log = logging.getLogger("longspan")


@dataclass(frozen=True)
class _Group:
    """The tensors of a checkpoint that make one tensor of the model, or several ones of which it is the first.

    Attributes:
        num_bytes: the size after conversion, 0 if the file can be mapped.
    """

    names: list[str]
    num_bytes: int


def load_model(
    config_dir: Path, config: PreTrainedConfig, tensors: Mapping[str, Any], form: WeightForm, writer: TensorWriter
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model as `from_pretrained` does. Return its report of keys as well.

    All parameters are views of mapped files.

    Args:
        tensors: of the checkpoint, by name. Another object than a tensor computes one when it is read, by `[...]`.
    """
    dtype = DTYPES[form.dtype]
    config._experts_implementation = "eager"  # noqa: SLF001 - `NoProducts` skips their products then
    model = build_skeleton(config, form.trust_remote_code, dtype=dtype, attn_implementation=BUILT_WITH)
    if type(model).from_pretrained.__func__ is not PreTrainedModel.from_pretrained.__func__:
        return _load_by_own_code(config_dir, form)
    load = LoadStateDictConfig(
        pretrained_model_name_or_path=str(config_dir),
        ignore_mismatched_sizes=True,  # the caller reports them
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),  # noqa: SLF001 - as `from_pretrained`
        weight_mapping=get_model_conversion_mapping(model),
    )
    groups = _groups(model, tensors, writer, form.quantization)
    writer.check_space(sum(group.num_bytes for group in groups))
    reports = list[LoadStateDictInfo]()
    for names in _batches(groups):
        state = {name: tensors[name] for name in names}
        report, _ = convert_and_load_state_dict_in_model(model=model, state_dict=state, load_config=load)
        loaded = {*model.state_dict()} - report.missing_keys
        if form.quantization is not None:
            tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
            quantise_parameters(model, loaded - tied, form.quantization, writer)
        _write(model, loaded, writer)
        reports.append(report)
    report = model._finalize_model_loading(model, load, _joined(reports))  # noqa: SLF001 - as `from_pretrained`
    return model.eval(), report.to_dict()


def _load_by_own_code(config_dir: Path, form: WeightForm) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model whose trusted code has a `from_pretrained` of its own."""
    log.info("the code of %s loads its weights by itself: this takes memory for all of them", config_dir)
    model, report = AutoModelForCausalLM.from_pretrained(
        config_dir,
        dtype=DTYPES[form.dtype],
        attn_implementation=BUILT_WITH,
        trust_remote_code=form.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model, report


def checkpoint_tensors(files: Mapping[str, Path], writer: TensorWriter) -> dict[str, Tensor]:
    """Return views of the tensors of a checkpoint. The last file with a name counts, as in transformers."""
    tensors: dict[str, Tensor] = {}
    for name, path in files.items():
        if name.endswith(".safetensors") and not _is_on_hf_mount(path):
            mapped = writer.map_checkpoint(path, name)
            tensors |= {key: mapped.tensor(place) for key, place in _header(path, name).items()}
        elif name.endswith((".safetensors", ".bin")):
            size_gb = path.stat().st_size / 1e9
            log.info("%s cannot be mapped: its conversion takes up to %.1f GB of memory", path, size_gb)
            loaded = load_state_dict(path)
            if not isinstance(loaded, dict):
                raise TypeError(f"{name} holds {type(loaded).__name__} where a dict of tensors is needed")
            tensors |= {key: value for key, value in loaded.items() if isinstance(value, Tensor)}
    return tensors


def _header(path: Path, name: str) -> dict[str, Place]:
    """Read the places of the tensors in a safetensors file, whose header safetensors has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_NUM_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        # Tensors of types that PyTorch lacks are bytes. Models have no place for these.
        dtype, shape = str_to_torch_dtype.get(entry["dtype"], torch.uint8), tuple(entry["shape"])
        if entry["dtype"] not in str_to_torch_dtype:
            shape = (end - begin,)
        offset = _NUM_LENGTH_BYTES + length + begin
        places[key] = Place(file=name, offset=offset, dtype=str(dtype).removeprefix("torch."), shape=shape)
    return places


def _groups(
    model: PreTrainedModel, tensors: Mapping[str, Any], writer: TensorWriter, quantization: Quantization | None
) -> list[_Group]:
    """Group the tensors of a checkpoint as transformers combines them, in its order.

    Of two equal tensors that the model ties, only one is in a group.
    """
    targets: dict[str, Tensor] = model.state_dict()
    mapping, prefix = get_model_conversion_mapping(model), model.base_model_prefix
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names: dict[str, list[str]] = {}
    converted = set[str]()
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if target not in targets and name in targets:
            target, pattern = rename_source_key(name, [], [], prefix, targets)
        names.setdefault(target, []).append(name)
        converted |= {target} if pattern is not None else set()
    for target, source in model.all_tied_weights_keys.items():
        if {target, source} <= names.keys() - converted:
            one, other = tensors[names[target][-1]], tensors[names[source][-1]]
            is_tensor = isinstance(one, Tensor) and isinstance(other, Tensor)
            if is_tensor and one.dtype == other.dtype and torch.equal(one, other):
                del names[target]

    def num_bytes(target: str) -> int:
        if target not in targets:
            return 0
        made = targets[target]
        own = [tensor for name in names[target] if isinstance(tensor := tensors[name], Tensor)]
        if quantization is not None and is_quantised(target, made):
            return made.numel() * (made.itemsize + 1) + made.numel() // GROUP * 4
        if own and target not in converted and own[-1].dtype == made.dtype and writer.place(own[-1]) is not None:
            return 0
        return (sum(tensor.numel() for tensor in own) or made.numel()) * made.itemsize

    return [_Group(names[target], num_bytes(target)) for target in names]


def _batches(groups: Collection[_Group]) -> Iterator[list[str]]:
    """Yield names of tensors that are converted at once. There is at least one batch."""
    names, num_bytes = list[str](), 0
    for group in groups:
        if num_bytes and num_bytes + group.num_bytes > _BATCH_BYTES:
            yield names
            names, num_bytes = [], 0
        names += group.names
        num_bytes += group.num_bytes
    yield names


def _write(model: PreTrainedModel, names: Collection[str], writer: TensorWriter) -> None:
    """Write converted tensors, and replace them by views of the written ones."""
    tensors = [model.get_parameter_or_buffer(name) for name in sorted(names)]
    fresh = [tensor for tensor in tensors if not tensor.is_meta and writer.place(tensor) is None]
    for tensor, written in zip(fresh, writer.add(fresh), strict=True):
        tensor.data = written  # keeps the marks by which transformers knows that it is loaded
    writer.release()


def quantise_parameters(
    model: PreTrainedModel, names: Collection[str], quantization: Quantization, writer: TensorWriter
) -> None:
    """Replace those of the named parameters that are quantised by the dequantised weights, and write their levels.

    A parameter that is tied to another gets weights of its own.
    """
    for name in sorted(names):
        weight = model.get_parameter_or_buffer(name)
        if weight.is_meta or name + GRID in writer.levels or not is_quantised(name, weight):
            continue
        levels = quantise(name, weight, quantization)
        weights, numbers, grid = writer.add([levels.weights(), levels.numbers, levels.grid])
        writer.levels |= {name + NUMBERS: numbers, name + GRID: grid}
        path, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(weights, requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001 - transformers' mark
        setattr(model.get_submodule(path), leaf, parameter)


def _joined(reports: list[LoadStateDictInfo]) -> LoadStateDictInfo:
    """Return one report on all batches."""
    joined = reports[0]
    for report in reports[1:]:
        joined.missing_keys &= report.missing_keys
        joined.unexpected_keys |= report.unexpected_keys
        joined.mismatched_keys |= report.mismatched_keys
        joined.conversion_errors |= report.conversion_errors
        joined.error_msgs += report.error_msgs
    return joined
