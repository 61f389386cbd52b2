"""Named KV on disk: the blocks of a document, which stay until the user drops them.

The folder of a name has a folder for each model, with the pools of its hosts as `DiskPool` has written them. `keep`
removes blocks of questions and answers, and makes the rest read-only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from longspan.core.blocks import chain_key
from longspan.core.config import EngineConfig
from longspan.core.policy import Policy
from longspan.core.request import root_key
from longspan.model.files import lock_folder
from longspan.runtime.disk_pool import KEPT, DamagedError, Header, read_header


class KvInUseError(ValueError):
    """Another process uses a folder with KV."""


def keep(folder: Path, tokens: Sequence[int], block_size: int, *, model: str) -> int | None:
    """Keep the blocks of a document in the folder of a model, and remove its other blocks.

    Args:
        tokens: the tokens of the prompt up to the question.
        model: the name of the model, for lists.

    Returns:
        The bytes of the blocks. None if a full block of the document is missing. The folder is then unchanged.

    Raises:
        KvInUseError: another process uses the folder.
    """
    with _locked([folder]):
        headers = dict(_headers(folder))
        chains = {root: _chain(headers, root, tokens, block_size) for root in _parents(headers)}
        root = max(chains, key=lambda root: len(chains[root]), default=b"")
        chain = chains.get(root, [])
        if len(chain) < len(tokens) // block_size:
            return None
        for path in headers.keys() - set(chain):
            path.unlink(missing_ok=True)
        num_bytes = sum(path.stat().st_size for path in chain)
        unfinished = folder / f"{KEPT}.unfinished"
        fields = {"model": model, "tokens": len(tokens), "root": root.hex()}
        unfinished.write_text(json.dumps(fields), encoding="utf-8")
        unfinished.replace(folder / KEPT)
    return num_bytes


def is_kept(folder: Path) -> bool:
    """Return whether the folder of a model is complete and read-only."""
    return (folder / KEPT).exists()


def record(folder: Path) -> dict[str, object]:
    """Return the model, the number of tokens and the root key of a kept document.

    Empty if it is not complete or not readable.
    """
    try:
        fields: dict[str, object] = json.loads((folder / KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields


def root_of(config: EngineConfig, policy: Policy, num_prompt_tokens: int) -> str:
    """Return the root key in the record of a document whose KV a prompt of this length can use."""
    return root_key(config.rope_length(num_prompt_tokens), config.sparse(policy, num_prompt_tokens)).hex()


def check_unused(folder: Path) -> None:
    """Raise KvInUseError if another process uses a document."""
    with _locked(_models(folder)):
        pass


def replace(folder: Path, new: Path) -> None:
    """Replace a document by another, which gets its name. Raise KvInUseError if another process uses the first."""
    drop(folder)
    new.rename(folder)


def drop(folder: Path) -> None:
    """Remove a document with its KV of all models. Raise KvInUseError if another process uses it."""
    with _locked(_models(folder)):
        shutil.rmtree(folder)


def drop_model(folder: Path) -> None:
    """Remove the KV of one model. Raise KvInUseError if another process uses it."""
    with _locked([folder]):
        shutil.rmtree(folder)


def _models(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.is_dir()]


@contextmanager
def _locked(models: Iterable[Path]) -> Iterator[None]:
    """Lock the pools of all hosts in the folders of models."""
    with ExitStack() as acquired:
        for host in [host for folder in models for host in folder.glob("host-*")]:
            try:
                acquired.enter_context(closing(lock_folder(host)))
            except BlockingIOError:
                raise KvInUseError(f"{host} is used by another process: stop it first") from None
        yield


def _headers(folder: Path) -> Iterator[tuple[Path, Header]]:
    """Yield the readable files of a model with their headers."""
    for path in sorted(folder.glob("host-*/*.kv")):
        try:
            with path.open("rb") as file:
                yield path, read_header(file)[0]
        except (OSError, DamagedError):
            path.unlink(missing_ok=True)


def _parents(headers: dict[Path, Header]) -> set[bytes]:
    return {header.parent for header in headers.values()}


def _chain(headers: dict[Path, Header], root: bytes, tokens: Sequence[int], block_size: int) -> list[Path]:
    """Return the files of the document's blocks in order, the last of which may be used in part."""
    by_parent = dict[bytes, list[tuple[Path, Header]]]()
    for path, header in headers.items():
        by_parent.setdefault(header.parent, []).append((path, header))
    chain, parent = list[Path](), root
    for start in range(0, len(tokens), block_size):
        block = tuple(tokens[start : start + block_size])
        same = [path for path, header in by_parent.get(parent, ()) if header.tokens[: len(block)] == block]
        if not same:
            break
        chain.append(same[0])
        parent = chain_key(parent, block)
    return chain
