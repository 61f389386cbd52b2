"""The files of a model's folder that determine its weights, found as transformers finds them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from longspan.model.files import ModelError, check_whole, config_dtype, one_line, read_json

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_ADAPTER = "adapter_config.json"
_INDEX = ".index.json"
_WEIGHTS = ("model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin", f"pytorch_model.bin{_INDEX}")
"""In the order in which transformers looks for them."""

_DTYPES_OF_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""PyTorch's names for floating-point types of safetensors files."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with none of these files has no tokenizer."""
PROCESSOR_TEMPLATE = "chat_template.json"
"""The chat template of older multimodal models."""
_MORE_OF_TOKENIZERS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", PROCESSOR_TEMPLATE),
)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files of the tokenizer, by name. There are none without a tokenizer."""
    files = {name: folder / name for name in _TOKENIZERS + _MORE_OF_TOKENIZERS if (folder / name).is_file()}
    return files if any(name in files for name in _TOKENIZERS) else {}


def description_files(folder: Path, *, trust_remote_code: bool) -> dict[str, Path]:
    """Return the files that describe the model, by name: configurations (JSON objects), and code if it is trusted."""
    files = {CONFIG: folder / CONFIG}
    if (folder / GENERATION_CONFIG).exists():
        files[GENERATION_CONFIG] = folder / GENERATION_CONFIG
    for path in files.values():
        read_json(path)
    code = sorted(folder.rglob("*.py")) if trust_remote_code else ()
    return files | {str(path.relative_to(folder)): path for path in code}


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the files of the weights and their index, by name. There are none without weights.

    Raise ModelError if the index cannot be used or names a missing file, or there is an adapter. Only with the package
    peft would transformers apply an adapter.
    """
    if (folder / _ADAPTER).exists():
        problem = f"{folder} has an adapter ({_ADAPTER}), which longspan does not apply"
        raise ModelError(f"{problem}: merge it into the weights (merge_and_unload of peft), or remove that file")
    explicit = read_json(folder / CONFIG).get("transformers_weights")
    names = _WEIGHTS if explicit is None else (str(explicit),)
    first = next((name for name in names if _exists(folder / name)), None)
    if first is None:
        return {}
    check_whole(folder / first)
    files = {first: folder / first}
    if first.endswith(_INDEX):
        files |= {name: folder / name for name in _shards(folder / first)}
    return files


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _shards(index: Path) -> list[str]:
    content: dict[str, Any] = read_json(index)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{index} has no weight_map from names of weights to files: fetch it again")
    if not isinstance(content.get("metadata"), dict):
        raise ModelError(f"{index} has no metadata, which transformers needs: fetch it again")
    names = sorted(set(places.values()))
    if missing := [name for name in names if not _exists(index.parent / name)]:
        problem = f"{index} names {missing[0]}, which does not exist"
        more = f", and {len(missing) - 1} more missing files" if missing[1:] else ""
        raise ModelError(f"{problem}{more}: fetch the model again")
    return names


def stated_dtype(folder: Path, *, with_weights: bool) -> str | None:
    """Return the dtype of a checkpoint, such as float16: from config.json, else the most frequent type of its tensors.

    Return None if config.json has no dtype and the safetensors files have no floating-point tensors, or are not read.
    Raise ModelError if config.json or a file of weights cannot be read.
    """
    if (stated := config_dtype(read_json(folder / CONFIG))) is not None:
        return stated
    types = Counter(stored_types(weight_files(folder)).values() if with_weights else ())
    return next((_DTYPES_OF_TYPES[kind] for kind, _ in types.most_common() if kind in _DTYPES_OF_TYPES), None)


def stored_types(files: dict[str, Path]) -> dict[str, str]:
    """Return the type of each tensor of safetensors files, by name. Files in PyTorch's own format are skipped.

    Raise ModelError for a file that is empty, cut, damaged or a git-lfs pointer.
    """
    types: dict[str, str] = {}
    for name, path in files.items():
        check_whole(path)
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(path, framework="pt") as file:
                types |= {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            problem = f"{path} is damaged, or was not copied whole ({one_line(error)})"
            raise ModelError(f"{problem}: fetch it again") from error
    return types
