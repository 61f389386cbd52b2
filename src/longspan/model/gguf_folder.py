"""Folders in Hugging Face's format of GGUF files, made at first use."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from longspan.model.contents import content_hash
from longspan.model.files import ModelError, cache_root, check_whole
from longspan.model.store import build_once

_log = logging.getLogger("longspan")


def only_gguf(model: str, folder: Path) -> Path:
    """Return the folder of the only GGUF file in a folder. Raise ModelError if there are none or several."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        problem = f"model folder {model!r} has {len(files)} GGUF files and no config.json"
        raise ModelError(f"{problem}: give one of the files, e.g. {str(files[0])!r}")
    if not files:
        raise ModelError(f"model folder {model!r} has no config.json: give a folder in Hugging Face's format")
    return gguf_folder(files[0])


def gguf_folder(gguf: Path) -> Path:
    """Return the folder of a GGUF file's model. The contents of the file determine the folder.

    Raise ModelError if the file cannot be converted.
    """
    check_whole(gguf)
    return convert_once(gguf, f"gguf-{content_hash({'model': gguf})[:16]}")


def convert_once(gguf: Path, name: str) -> Path:
    """Return the folder `name` of the cache, which has the converted model of a GGUF file."""

    def build(folder: Path) -> None:
        if missing := [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]:
            raise ModelError(f"a GGUF file needs {' and '.join(missing)}; run: pip install 'longspan[gguf]'")
        from longspan.model.gguf_file import convert  # noqa: PLC0415 - imports transformers' models: seconds

        _log.info("converting %s, once", gguf)
        convert(gguf, folder)

    return build_once(cache_root() / "models" / name, build)
