"""The verb `cache`: lists and removes the files that longspan keeps on disk between runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from longspan.cli.keep import folder_of_documents
from longspan.cli.options import verb
from longspan.cli.outputs import note, number_table
from longspan.core.options import Option
from longspan.errors import ParameterError
from longspan.model.files import cache_root, lock_folder

Kind = Literal["weights", "kv", "documents"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder of the cache.

    Attributes:
        model: the model that it belongs to, in words.
        num_bytes: the size of all its files.
        used: seconds since the epoch of the last change to a file.
    """

    kind: Kind
    folder: Path
    model: str
    num_bytes: int
    used: float

    @property
    def name(self) -> str:
        return self.folder.name


@verb
def cache(
    action: Annotated[Literal["list", "drop"], Option("list shows the entries. drop removes them.")],
    kind: Annotated[
        Literal["weights", "kv", "documents"] | None,
        Option("weights: converted models. kv: the disk tier. documents: KV kept by name."),
    ] = None,
    name: Annotated[str | None, Option("Only the entry with this name.")] = None,
    *,
    as_json: Annotated[bool, Option("List as one JSON object per line.", name="json")] = False,
) -> None:
    """List or remove converted weights, KV on disk and kept documents.

    Entries that another process uses are not removed.
    """
    entries = [entry for entry in _entries() if kind in (None, entry.kind) and name in (None, entry.name)]
    if name is not None and not entries:
        raise ParameterError("name", f"{name!r} is not stored: give a name of longspan cache list", name)
    if action == "list":
        _list(entries, as_json=as_json)
        return
    if kind is None:
        raise ParameterError("kind", "is missing: give weights, kv or documents")
    removed = [entry for entry in entries if _is_dropped(entry)]
    note(f"removed {len(removed)} of {kind}, {sum(entry.num_bytes for entry in removed) / 2**20:,.0f} MiB")
    if len(removed) < len(entries):
        raise ValueError(
            f"{len(entries) - len(removed)} of {kind} are in use: end their processes, and drop them again"
        )


def _list(entries: list[Entry], *, as_json: bool) -> None:
    if as_json:
        for entry in entries:
            fields = {"kind": entry.kind, "name": entry.name, "model": entry.model, "bytes": entry.num_bytes}
            print(json.dumps({**fields, "used": _date(entry.used)}))
        return
    table = number_table(f"Stored in {cache_root()}", "MiB")
    for column in ("last change", "kind", "name", "model"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(f"{entry.num_bytes / 2**20:,.0f}", _date(entry.used), entry.kind, entry.name, entry.model)
    Console().print(table)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="minutes")


def _entries() -> Iterator[Entry]:
    root = cache_root()
    weights, kv = root / "weights", root / "kv"
    for folder in _folders(weights):
        yield _entry("weights", folder, _model_of(folder))
    for folder in _folders(kv):
        yield _entry("kv", folder, _model_of(weights / folder.name.rpartition("-")[0]))
    for folder in _folders(folder_of_documents()):
        yield _entry("documents", folder, _models_of_document(folder))


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if path.is_dir())


def _entry(kind: Kind, folder: Path, model: str) -> Entry:
    stats = list[os.stat_result]()
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process may remove files
            stats += [path.stat()] if path.is_file() else []
    used = max((stat.st_mtime for stat in stats), default=0.0)
    return Entry(kind=kind, folder=folder, model=model, num_bytes=sum(stat.st_size for stat in stats), used=used)


def _model_of(weights: Path) -> str:
    """Describe the model of a folder of weights by its configuration and its dtype."""
    try:
        config, stored = (json.loads((weights / name).read_bytes()) for name in ("config.json", "weights.json"))
        [architecture, *_] = config.get("architectures") or ["unknown"]
        layers = (config.get("text_config") or config).get("num_hidden_layers", "?")
        return f"{architecture}, {layers} layers, {stored['dtype']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "unknown"


def _models_of_document(folder: Path) -> str:
    from longspan.runtime import kept_kv  # noqa: PLC0415 - needed for kept documents only

    records = [record for path in _folders(folder) if (record := kept_kv.record(path))]
    return ", ".join(f"{record.get('model')} ({record.get('tokens')} tokens)" for record in records) or "not complete"


# ---------------------------------------------------------------- removal


def _is_dropped(entry: Entry) -> bool:
    """Remove an entry. Return False, with a note, if another process uses it."""
    try:
        _DROPS[entry.kind](entry.folder)
    except ValueError as error:
        note(f"{entry.name} is not removed: {error}")
        return False
    return True


def _drop_weights(folder: Path) -> None:
    from filelock import FileLock, Timeout  # noqa: PLC0415 - needed here only

    try:
        lock = folder.with_name(folder.name.removesuffix(".unfinished") + ".lock")
        with FileLock(lock, timeout=0), closing(lock_folder(folder)):
            if folder.is_symlink():  # to a read-only installation, see deploy/start.sh
                folder.unlink()
            else:
                shutil.rmtree(folder)
    except Timeout:
        problem = f"{folder.name} is being converted by another process: stop that first, or give another name"
        raise ParameterError("name", problem, folder.name) from None
    except BlockingIOError:
        raise ParameterError(
            "name", f"{folder.name} is used by a running engine: stop that first", folder.name
        ) from None


def _drop_kv(folder: Path) -> None:
    from longspan.runtime import kept_kv  # noqa: PLC0415

    kept_kv.drop_model(folder)


def _drop_document(folder: Path) -> None:
    from longspan.runtime import kept_kv  # noqa: PLC0415

    kept_kv.drop(folder)


_DROPS: Mapping[Kind, Callable[[Path], None]] = {
    "weights": _drop_weights,
    "kv": _drop_kv,
    "documents": _drop_document,
}
