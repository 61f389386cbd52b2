"""The files of a prepared model, the cache folder that they lie in, and the error for what a user can get wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


class ModelError(ValueError):
    """The user asked for a model that cannot be served; the message is one line with the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that is ready to be mapped by workers on this host.

    `config_dir` is the folder that AutoConfig reads, `weights` the module-layout safetensors file of the store,
    `tokenizer_dir` is None when the model comes without tokenizer files, `dtype` is a key of `DTYPES`, `quantization`
    is that of `model.quantization`, if any.
    """

    name: str
    config_dir: Path
    weights: Path
    tokenizer_dir: Path | None
    dtype: str
    quantization: str | None = None
    trust_remote_code: bool = False


def one_line(error: BaseException) -> str:
    """Returns the kind and the beginning of the message of someone else's error, for use within a line of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def cache_root() -> Path:
    """Returns the folder for everything longspan keeps between runs: `LONGSPAN_CACHE`, else the user's cache folder."""
    if chosen := os.environ.get("LONGSPAN_CACHE"):
        return Path(chosen).expanduser().resolve()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().resolve() / "longspan"


def write_file(path: Path, text: str) -> None:
    """Puts a file into the cache atomically. Raises as `build_once` does."""
    make_writable(path.parent)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def make_writable(folder: Path) -> None:
    """Makes a folder of the cache unless it exists; raises ModelError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be made ({one_line(error)}); set LONGSPAN_CACHE to another folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ModelError(f"the cache folder {folder} cannot be written to; set LONGSPAN_CACHE to another folder")
