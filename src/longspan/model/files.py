"""The files of a prepared model, the cache folder that they lie in, and the error for what a user can get wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from transformers.utils import logging


class ModelError(ValueError):
    """The user asked for a model that cannot be served; the message is one line with the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that is ready to be mapped by workers on this host.

    `config_dir` is the folder that AutoConfig reads, `weights` the module-layout safetensors file of the store,
    `tokenizer_dir` is None when the model comes without tokenizer files, `dtype` is a key of `DTYPES`.
    """

    name: str
    config_dir: Path
    weights: Path
    tokenizer_dir: Path | None
    dtype: str
    trust_remote_code: bool = False


def one_line(error: BaseException) -> str:
    """The kind and the beginning of the message of someone else's error, for use within a line of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def cache_root() -> Path:
    """The folder for everything longspan keeps between runs: `LONGSPAN_CACHE`, else the user's cache folder."""
    if chosen := os.environ.get("LONGSPAN_CACHE"):
        return Path(chosen).expanduser().resolve()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().resolve() / "longspan"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `build` if it does not exist yet.

    `build` gets an empty folder beside it, which is renamed when complete: other processes see all of it or
    nothing, and a lock lets one of several that start together do the work. Raises ModelError when the cache cannot
    be written to.
    """
    if folder.is_dir():
        return folder
    _make_writable(folder.parent)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            unfinished = folder.with_name(folder.name + ".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder


def write_file(path: Path, text: str) -> None:
    """Puts a file into the cache, or replaces it: others see the old text or the new. Raises as `build_once` does."""
    _make_writable(path.parent)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be made ({one_line(error)}); set LONGSPAN_CACHE to another folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ModelError(f"the cache folder {folder} cannot be written to; set LONGSPAN_CACHE to another folder")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers from logging anything but errors, and from drawing progress bars."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
