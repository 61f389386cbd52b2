"""Weights live once per host: one module-layout safetensors file per model and dtype, mapped by every worker.

The file holds every parameter and buffer of the model exactly as transformers' `from_pretrained` leaves them
(converted to the dtype, experts stacked, rotary frequencies computed), under their names in the module tree.
Tensors that the model ties are stored once. Its metadata holds the ModelInfo.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import transformers
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from longspan.model.files import ModelError, cache_root, make_writable, one_line
from longspan.model.info import PROBE, ModelInfo, gather_info, load_config, quiet_transformers
from longspan.model.quantization import Levels, Quantization, is_quantised, quantise

_FORMAT = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUMBERS, _GRID = ".numbers", ".grid"
_SOURCES = ("*.json", "*.safetensors", "*.bin", "*.py")

log = logging.getLogger(__name__)


def ensure_weights(
    config_dir: Path,
    *,
    dtype: str,
    dummy_seed: int | None = None,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Returns the weight file of the model in `config_dir`, writing it to the cache at first use.

    With `dummy_seed` the weights are random, drawn as transformers initialises a new model, and the folder needs no
    weights. With a `quantization` matrices are those that their levels stand for, and the levels lie beside them, see
    `map_levels`. Raises ModelError for a checkpoint that does not match its configuration.
    """
    key = _key(config_dir, dtype, dummy_seed, quantization)

    def build(folder: Path) -> None:
        log.info("writing the %s weights of %s to the cache, once", dtype, config_dir)
        with quiet_transformers():
            model = _load(config_dir, DTYPES[dtype], dummy_seed, trust_remote_code)
        levels = {} if quantization is None else _quantise(model, quantization)
        _write(model, gather_info(model, config_dir), folder / "model.safetensors", levels)

    return build_once(cache_root() / "weights" / key, build) / "model.safetensors"


def read_info(weights: Path) -> ModelInfo:
    """Returns the facts stored with a weight file; reads its header only."""
    with safe_open(weights, framework="pt") as file:
        return ModelInfo.from_json(file.metadata()["info"])


def map_tensors(weights: Path) -> dict[str, Tensor]:
    """Maps a weight file: name in the module tree -> CPU tensor.

    The tensors are views of the mapped file, so their pages are shared by all processes of the host for as long as
    nobody writes to them. Tied names share one tensor object.
    """
    with safe_open(weights, framework="pt") as file:
        names = [name for name in file.keys() if not name.endswith((_NUMBERS, _GRID))]  # noqa: SIM118
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
        aliases: dict[str, str] = json.loads(file.metadata()["aliases"])
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def map_levels(weights: Path) -> dict[str, Levels]:
    """Maps the levels of a quantised weight file, by the names of the weights; of any other file there are none."""
    with safe_open(weights, framework="pt") as file:
        names = [name.removesuffix(_GRID) for name in file.keys() if name.endswith(_GRID)]  # noqa: SIM118
        return {
            name: Levels(numbers=file.get_tensor(name + _NUMBERS), grid=file.get_tensor(name + _GRID)) for name in names
        }


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by `build` if it does not exist yet.

    `build` gets an empty folder beside it, which is renamed when complete: other processes see all of it or nothing,
    and a lock lets one of several that start together do the work. Raises ModelError when the cache cannot be written
    to.
    """
    if folder.is_dir():
        return folder
    make_writable(folder.parent)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            unfinished = folder.with_name(folder.name + ".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder


def _key(config_dir: Path, dtype: str, dummy_seed: int | None, quantization: Quantization | None) -> str:
    patterns = _SOURCES if dummy_seed is None else ("config.json", "generation_config.json", "*.py")
    sources = sorted({file.resolve() for pattern in patterns for file in config_dir.glob(pattern)})
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sources]
    what = [_FORMAT, msgspec.json.schema(ModelInfo), transformers.__version__]  # another description, another file
    identity = [*what, str(config_dir.resolve()), stats, dtype, dummy_seed, *([quantization] if quantization else [])]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


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
            found |= {name + _NUMBERS: levels.numbers, name + _GRID: levels.grid}
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(levels.weights(), requires_grad=False))
    return found


def _write(model: nn.Module, info: ModelInfo, path: Path, more: dict[str, Tensor]) -> None:
    first_name: dict[int, str] = {}
    tensors: dict[str, Tensor] = dict(more)
    aliases: dict[str, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        owner = first_name.setdefault(id(tensor), name)
        if owner == name:
            tensors[name] = tensor.detach().contiguous()
        else:
            aliases[name] = owner
    save_file(tensors, path, metadata={"info": info.to_json(), "aliases": json.dumps(aliases)})
