"""Describe the weights of a model in the store, and write the tensors that need a conversion, see `model.store`."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel, set_seed
from transformers.initialization import no_init_weights

from longspan.model.dequantise import WeightFormat, weight_format
from longspan.model.files import ModelError, one_line
from longspan.model.folder import stored_types, weight_files
from longspan.model.info import ModelInfo
from longspan.model.loading import checkpoint_tensors, load_model, quantise_parameters
from longspan.model.mapped import TensorWriter
from longspan.model.probe import NoProducts, gather_info
from longspan.model.skeleton import BUILT_WITH, causal_class, left_out, load_config, quiet_transformers, text_config
from longspan.model.store import DESCRIPTION, DTYPES, TENSORS, Description, Matrices, WeightForm, named_tensors

_MATRIX = 2
"""The minimum number of dimensions of a matrix, or of a stack of matrices."""
_LARGE = 2**24
"""Elements of a matrix of zeros that holds weights. Llama 4 makes its experts as zeros."""
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


def write_weights(config_dir: Path, folder: Path, form: WeightForm) -> None:
    """Write the files of the store for the model in `config_dir`. Raise errors as `ensure_weights`."""
    writer = TensorWriter(folder / TENSORS)
    matrices: Matrices | None = None
    notes: list[str] = []
    with quiet_transformers():
        if form.drawn:
            model, matrices = _draw(config_dir, form)
        elif form.dummy_seed is not None:
            model = _initialise(config_dir, form, form.dummy_seed)
        else:
            model, notes = _load(config_dir, form, writer)
        if form.quantization is not None:
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            quantise_parameters(model, names, form.quantization, writer)
        with NoProducts() if form.dummy_seed is None or form.drawn else nullcontext():  # products read all weights
            info = _info(model, config_dir)
    own, aliases = named_tensors(model)
    described = {} if matrices is None else matrices.shapes
    tensors = {name: tensor for name, tensor in own.items() if name not in described} | writer.levels
    description = Description(
        info=info,
        dtype=form.dtype,
        tensors=writer.places(tensors),
        aliases=aliases,
        matrices=matrices,
        notes=notes,
    )
    (folder / DESCRIPTION).write_bytes(msgspec.json.encode(description))


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


def _load(config_dir: Path, form: WeightForm, writer: TensorWriter) -> tuple[PreTrainedModel, list[str]]:
    """Load the weights. Return the model and its notes, see `Description`."""
    files = weight_files(config_dir)
    if not files:
        raise ModelError(f"{config_dir} has no weights: it needs a model.safetensors, or an index of shards")
    types, stored = stored_types(files), weight_format(config_dir)
    if stored is not None and not types:
        raise ModelError(f"{config_dir}: weights in {stored.method} are read from safetensors files only: convert them")
    config = load_config(config_dir, form.trust_remote_code)
    try:
        tensors: Mapping[str, Any] = checkpoint_tensors(files, writer)
        if stored is not None:
            sources = stored.sources(types)
            types = {name: types[parts[0]] if len(parts) == 1 else _DEQUANTISED for name, parts in sources.items()}
            config, tensors = _plain(config), _readers(tensors, sources, stored, DTYPES[form.dtype])
        model, report = load_model(config_dir, config, tensors, form, writer)
    except ModelError:
        raise
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


def _plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a model whose weights are no longer quantised."""
    for part in (config, text_config(config)):
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
    tensors: Mapping[str, Any], sources: Mapping[str, Sequence[str]], stored: WeightFormat, dtype: torch.dtype
) -> dict[str, Any]:
    """Return an object for each weight whose item `[...]` reads it, and de-quantises it if it has several sources."""
    return {
        name: tensors[parts[0]] if len(parts) == 1 else _Reader([tensors[part] for part in parts], stored, dtype)
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


class _NoMemory(TorchFunctionMode):
    """Lets all elements of a new, empty matrix share one number, so that a large model takes no memory.

    Small matrices of zeros are left as they are, since buffers may be filled later.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - the result of that function
        kwargs = kwargs or {}
        if function is Tensor.copy_ and not any(args[0].stride()):  # of a convolution
            return args[0]
        if function not in (torch.empty, torch.zeros):
            return function(*args, **kwargs)
        described = torch.empty(*args, **{**kwargs, "device": "meta"})
        if described.ndim < _MATRIX or (function is torch.zeros and described.numel() < _LARGE):
            return function(*args, **kwargs)
        return torch.zeros((), dtype=described.dtype).expand(described.shape)


def _draw(config_dir: Path, form: WeightForm) -> tuple[PreTrainedModel, Matrices]:
    """Return a new model, and the description of its matrices, whose memory is not touched."""
    assert form.dummy_seed is not None and form.quantization is None, "drawn matrices are random, not quantised"
    config = load_config(config_dir, form.trust_remote_code)
    config._experts_implementation = "eager"  # noqa: SLF001 - `NoProducts` skips their products then
    with no_init_weights(), _NoMemory():
        model = _new_model(config, form)
    model.tie_weights()
    models: dict[str, PreTrainedModel] = {}  # the language model of a multimodal one has its own `_init_weights`
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        models[name] = module if isinstance(module, PreTrainedModel) else models[parent]
        own = [*module.parameters(recurse=False)]
        vectors = [weight for weight in own if weight.ndim < _MATRIX]
        if vectors and len(vectors) == len(own):  # a parent may initialise matrices, which have no memory
            models[name]._init_weights(module)  # noqa: SLF001 - as transformers initialises norms
        for bias in vectors if len(vectors) < len(own) else ():
            bias.detach().zero_()
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.ndim >= _MATRIX}
    matrices = Matrices(
        seed=form.dummy_seed,
        dtype=form.dtype,
        deviation=getattr(text_config(config), "initializer_range", _DEVIATION),
        shapes=shapes,
    )
    return model, matrices
