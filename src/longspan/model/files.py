"""The files of a prepared model, the cache folder, and the error for a model that cannot be served."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

Quantization = Literal["int8", "int4"]
_LFS_POINTER = b"version https://git-lfs"

FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
"""The exceptions of a model whose modules do not fit together."""


class ModelError(ValueError):
    """The model of the user cannot be served. The message is one line with the value and the remedy."""


class ResourceError(ModelError):
    """This machine lacks memory, time or a writable cache. The model itself may be fine."""


@dataclass(frozen=True, kw_only=True)
class HashedFile:
    """A file as it was when its contents were hashed.

    Attributes:
        path: without symbolic links, which may lead to another file later.
        stamp: device, inode, size and ctime, see `model.contents`.
    """

    name: str
    path: Path
    stamp: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that workers on this host can map.

    `config_dir` is a folder for AutoConfig, `weights` the description in the store. Both are in the cache. Weights that
    need no conversion are in files of the `checkpoint`. Workers that start later load the same model, or fail if these
    files have changed. A model without tokenizer files has no `tokenizer_dir`. The `tokenizer_hash` is a hash of their
    contents. The `dtype` is a key of `DTYPES`.
    """

    name: str
    config_dir: Path
    weights: Path
    tokenizer_dir: Path | None
    dtype: str
    quantization: Quantization | None = None
    trust_remote_code: bool = False
    tokenizer_hash: str | None = None
    checkpoint: tuple[HashedFile, ...] = ()


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config.json states, such as float16, if any.

    Weights that are stored in 8 bits or fewer, with scales, are de-quantised to bfloat16 if it states no other dtype.
    """
    values = _values(config, "dtype", "torch_dtype")
    stated = (dtype.removeprefix("torch.") for dtype in values if isinstance(dtype, str) and dtype != "auto")
    if quantization_config(config) is not None:
        return next((dtype for dtype in stated if not dtype.startswith("float8")), "bfloat16")
    return next(stated, None)


def quantization_config(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the description of quantised weights in a config.json, or None."""
    return next((value for value in _values(config, "quantization_config", "compression_config") if value), None)


def _values(config: Mapping[str, Any], *keys: str) -> list[Any]:
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return [part.get(key) for part in parts for key in keys]


def one_line(error: BaseException) -> str:
    """Return the class and the beginning of the message of another library's error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def cache_root() -> Path:
    """Return the folder for files that longspan keeps between runs: `LONGSPAN_CACHE`, else the user's cache folder."""
    if chosen := os.environ.get("LONGSPAN_CACHE"):
        return Path(chosen).expanduser().resolve()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(user_cache).expanduser().resolve() / "longspan"
    except RuntimeError as error:
        raise ResourceError(f"there is no home folder for the cache ({one_line(error)}): set LONGSPAN_CACHE") from error


def write_file(path: Path, text: str) -> None:
    """Write a file of the cache atomically. Raise ModelError if that fails."""
    make_writable(path.parent)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise not_written(path, error) from error


def make_writable(folder: Path) -> None:
    """Make a folder of the cache if it does not exist. Raise ModelError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"the cache folder {folder} cannot be made ({one_line(error)}); set LONGSPAN_CACHE to another folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ResourceError(f"the cache folder {folder} cannot be written to; set LONGSPAN_CACHE to another folder")


def lock_folder(folder: Path, *, shared: bool = False) -> IO[bytes]:
    """Lock a folder for one owner, or for one of several readers. Closing the returned file releases the lock.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the folder cannot be written to, or was removed.
    """
    path = folder / "lock"
    while True:
        with ExitStack() as acquired:
            lock: IO[bytes] = acquired.enter_context(path.open("ab"))
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_nlink:  # otherwise its owner has removed the folder
                acquired.pop_all()  # the caller closes it
                return lock


def not_written(path: Path, error: Exception) -> ResourceError:
    """Make the error for a file of the cache that could not be written, say to a full disk."""
    return ResourceError(
        f"{path} cannot be written ({one_line(error)}): free some space, or set LONGSPAN_CACHE to another folder"
    )


def check_whole(path: Path) -> None:
    """Raise ModelError unless `path` is a readable file, not empty, and not a git-lfs pointer."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path} is a folder or a device where a file is needed: fetch the model again")
        with path.open("rb") as file:
            begin = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({one_line(error)}): fetch the model again") from error
    if not begin:
        raise ModelError(f"{path} is empty: fetch the model again")
    if begin == _LFS_POINTER:
        raise ModelError(f"{path} is a git-lfs pointer and not the file itself: run git lfs pull")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model's folder. Raise ModelError if the file holds none."""
    check_whole(path)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({one_line(error)}): fetch it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {type(content).__name__} where a JSON object is needed: fetch it again")
    return content
