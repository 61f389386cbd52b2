"""The KV pool on a host's disk: one file per block with all layers and heads. It survives a restart of the server.

A folder with the file `KEPT` is read-only: its blocks are the KV of a document that a user keeps by name. Several
processes can read it at once.

A file consists of a magic number, a checksum of all following bytes, the header length, the header, and the block's
record (`core/kv_record.py`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import PriorityQueue
from threading import Event
from typing import IO

import msgspec
import torch

from longspan.core.steps import Content, MoveKV
from longspan.errors import ParameterError
from longspan.model.files import ModelFiles, cache_root, lock_folder
from longspan.model.store import DTYPES
from longspan.runtime.block_records import BlockRecords
from longspan.runtime.host_pool import map_blocks
from longspan.runtime.host_tiers import PoolPlan
from longspan.runtime.messages import Stored

_MAGIC = b"longspan-kv-1\n\0\0"
_CHECKSUM_BYTES = 16
_FRONT_BYTES = len(_MAGIC) + _CHECKSUM_BYTES + 4
_MAX_HEADER_BYTES = 2**24
_UNFINISHED = ".unfinished"
KEPT = "kept.json"
"""Name of the file that makes the pools of all hosts in its folder read-only."""

_log = logging.getLogger("longspan")


class Header(msgspec.Struct, frozen=True):
    """The content of a block: KV of `tokens` after the prefix with hash `parent`, for a model and its options."""

    model: str
    parent: bytes
    tokens: tuple[int, ...]


class DamagedError(Exception):
    """A file is damaged or was not written by this format."""


def read_header(file: IO[bytes]) -> tuple[Header, int]:
    """Read the header of a file and its length in bytes. Raise DamagedError for files of another format."""
    front = file.read(_FRONT_BYTES)
    if front[: len(_MAGIC)] != _MAGIC:
        raise DamagedError("the file contains no KV")
    size = int.from_bytes(front[-4:], "little")
    try:
        return msgspec.msgpack.decode(file.read(min(size, _MAX_HEADER_BYTES)), type=Header), size
    except msgspec.MsgspecError as error:
        raise DamagedError("the header is damaged") from error


class DiskPool:
    """KV blocks in a folder that one server locks, or that several lock if it is read-only.

    Args:
        folder: created if missing.
        model: identifies all that determines KV, except tokens and positions. Files with another value are ignored.
        num_blocks: maximum number of files. The least recently used files are removed.
        host: the host pool, whose blocks are saved and loaded.

    Attributes:
        is_kept: whether the folder is read-only. Its blocks are then the files of all hosts, in order of their names.

    Raises:
        ParameterError: if the folder cannot be used.
    """

    def __init__(self, folder: Path, model: str, *, num_blocks: int, host: BlockRecords) -> None:
        self._folder, self._model, self._num_blocks = folder, model, num_blocks
        # bytes of all blocks, [block, byte], of each field of each layer
        fields = [field for layer in host.layers.values() for field in layer.values()]
        self._parts = [field.flatten(1).view(torch.uint8).numpy() for field in fields]
        self._block_bytes = sum(part.shape[1] for part in self._parts)
        self._is_writable = True
        with ExitStack() as acquired:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # headers contain the tokens of prompts
                self._lock = acquired.enter_context(self._locked())
                self._kept = sorted(folder.parent.glob("host-*/*.kv"))[:num_blocks] if self.is_kept else []
                if not self.is_kept:
                    self._prepare()
            except BlockingIOError:
                raise ParameterError("disk_kv_dir", f"{folder} is used by another server: give another one") from None
            except OSError as error:
                raise ParameterError("disk_kv_dir", f"{folder} cannot be used ({error}): give another one") from error
            acquired.pop_all()  # `close` releases the lock from now on

    def _locked(self) -> IO[bytes]:
        """Lock the folder and set `is_kept`, which another process can change until the folder is locked."""
        while True:
            self.is_kept = (self._folder.parent / KEPT).exists()
            lock = lock_folder(self._folder, shared=self.is_kept)
            if (self._folder.parent / KEPT).exists() == self.is_kept:
                return lock
            lock.close()

    def _prepare(self) -> None:
        """Remove files beyond the size of the pool. Raise ParameterError if there is no space for the pool."""
        folder = self._folder
        self._remove([*folder.glob(f"*{_UNFINISHED}")])
        kept_bytes = sum(path.stat().st_size for path in self._shrink())
        needed, free = self._num_blocks * self._block_bytes - kept_bytes, shutil.disk_usage(folder).free
        if needed > free:
            problem = f"needs {needed / 2**30:.1f} GiB more in {folder}, but {free / 2**30:.1f} are free"
            raise ParameterError("disk_kv_gib", f"{problem}: allow less")

    def _shrink(self) -> list[Path]:
        """Remove the least recently used files beyond `num_blocks`. Return the kept files, renumbered below it."""
        files = sorted(self._files(), key=lambda file: file[0].stat().st_mtime_ns, reverse=True)
        kept, evicted = files[: self._num_blocks], files[self._num_blocks :]
        self._remove([path for path, _ in evicted])
        used = {block for _, block in kept}
        unused = (block for block in range(self._num_blocks) if block not in used)
        return [path if block < self._num_blocks else path.replace(self._path(next(unused))) for path, block in kept]

    def contents(self) -> list[tuple[int, Content]]:
        """List the blocks saved by earlier servers, the least recently used first. Logs and ignores invalid files.

        Records are verified when they are loaded.
        """
        blocks, ignored = [], []
        for path, block in self._files():
            try:
                with path.open("rb") as file:
                    header, size = self._read_header(file)
                    stat = os.fstat(file.fileno())
                if stat.st_size != _FRONT_BYTES + size + self._block_bytes:
                    raise DamagedError("the file has a wrong size")
            except (OSError, DamagedError) as error:
                ignored.append(f"{path.name} ({error})")
            else:
                blocks.append((stat.st_mtime_ns, block, Content(header.parent, header.tokens)))
        if ignored:
            _log.warning("ignored %d files of %s, such as %s", len(ignored), self._folder, min(ignored))
        return [(block, content) for _, block, content in sorted(blocks, key=lambda entry: entry[:2])]

    def save(self, source: int, block: int, content: Content) -> bool:
        """Write a host block to its file. Return False if that failed or the folder is read-only."""
        if self.is_kept:
            return False
        try:
            self._write(source, block, content)
        except OSError as error:
            if self._is_writable:
                _log.warning("KV is not saved to %s (%s)", self._folder, error)
            self._is_writable = False
            return False
        self._is_writable = True
        return True

    def _write(self, source: int, block: int, content: Content) -> None:
        header = msgspec.msgpack.encode(Header(self._model, content.parent, tuple(content.tokens)))
        front, parts = len(header).to_bytes(4, "little") + header, [part[source].data for part in self._parts]
        checksum = hashlib.blake2b(front, digest_size=_CHECKSUM_BYTES)
        for part in parts:
            checksum.update(part)
        path = self._path(block)
        unfinished = path.with_suffix(_UNFINISHED)
        with unfinished.open("wb", buffering=0) as file:
            for data in (_MAGIC + checksum.digest() + front, *parts):
                if file.write(data) != len(data):
                    raise OSError(f"{unfinished} was written only in part")
        unfinished.replace(path)

    def load(self, block: int, target: int, content: Content) -> bool:
        """Read a block into a host block. Return False if it cannot be used.

        Removes a file with other content. Keeps an unreadable file, since the next server may be able to read it.
        """
        path = self._path(block)
        try:
            with path.open("rb", buffering=0) as file:
                front = file.read(len(_MAGIC) + _CHECKSUM_BYTES)
                file.seek(0)
                header, size = self._read_header(file)
                if (header.parent, header.tokens) != (content.parent, tuple(content.tokens)):
                    raise DamagedError("the file has other content")
                file.seek(len(front))
                checksum = hashlib.blake2b(file.read(4 + size), digest_size=_CHECKSUM_BYTES)
                for part in self._parts:
                    data = part[target].data
                    if file.readinto(data) != len(data):
                        raise DamagedError("the file is too short")
                    checksum.update(data)
            if checksum.digest() != front[len(_MAGIC) :]:
                raise DamagedError("the checksum is wrong")
            os.utime(path)  # marks it as most recently used, also for later servers
        except (FileNotFoundError, DamagedError) as error:
            _log.warning("ignored %s (%s)", path, error)
            path.unlink(missing_ok=True)
            (self._folder.parent / KEPT).unlink(missing_ok=True)  # the next run computes and saves the KV again
            return False
        except OSError as error:
            _log.warning("%s cannot be read (%s)", path, error)
            return False
        return True

    def run(self, move: MoveKV, closing: Event) -> Stored:
        """Execute a save or a load. Copies that have not started when `closing` is set fail."""
        do = self.save if move.way == "save" else self.load
        pairs = zip(_blocks(move), move.contents, strict=True)
        done = [not closing.is_set() and do(*pair, content) for pair, content in pairs]
        failed = tuple(index for index, is_done in enumerate(done) if not is_done)
        return Stored(move.number, sum(done) * self._block_bytes, failed)

    def clear(self) -> None:
        """Remove all blocks. Kept blocks stay for the next run."""
        self._remove([] if self.is_kept else [path for path, _ in self._files()])

    def close(self) -> None:
        """Release the lock of the folder, and drop the references to host memory."""
        self._lock.close()
        self._parts.clear()

    def _path(self, block: int) -> Path:
        return self._kept[block] if self.is_kept else self._folder / f"{block:08d}.kv"

    def _files(self) -> Iterator[tuple[Path, int]]:
        if self.is_kept:
            yield from ((path, block) for block, path in enumerate(self._kept))
            return
        for path in self._folder.glob("*.kv"):
            if path.stem.isdecimal() and path == self._path(int(path.stem)):
                yield path, int(path.stem)

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    def _read_header(self, file: IO[bytes]) -> tuple[Header, int]:
        header, size = read_header(file)
        if header.model != self._model:
            raise DamagedError("the file is of another model")
        return header, size


class DiskLane:
    """Executes moves to and from disks on one thread, in order, and reports each.

    Loads run before all saves, since requests wait for loads. A load only names blocks that were saved before.
    """

    def __init__(self, pools: Mapping[int, DiskPool], report: Callable[[Stored], object]) -> None:
        self._pools, self._report = pools, report
        self._moves = PriorityQueue[tuple[bool, int, MoveKV]]()
        self._closing = Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")

    def put(self, move: MoveKV) -> None:
        self._moves.put((move.way == "save", move.number, move))
        self._thread.submit(self._run_next)

    def close(self) -> None:
        """End the thread after its current block. Drops all remaining copies."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _run_next(self) -> None:
        *_, move = self._moves.get_nowait()
        [disk] = {ref.pool for pair in move.copies for ref in pair} & {*self._pools}
        try:
            stored = self._pools[disk].run(move, self._closing)
        except Exception:  # noqa: BLE001 - without a report, the engine would wait forever
            _log.exception("the KV copy to or from the disk failed")
            stored = Stored(move.number, 0, tuple(range(len(move.copies))))
        self._report(stored)


def _blocks(move: MoveKV) -> Iterator[tuple[int, int]]:
    return ((source.block, target.block) for source, target in move.copies)


def name_of_kv(files: ModelFiles, block_size: int) -> str:
    """Return the name of the folder with the KV of a model, which has its pools of all hosts."""
    return f"{files.weights.parent.name}-{block_size}"


def open_disk(plan: PoolPlan, memory: Path) -> DiskPool:
    """Open the pool on the disk of a host. Each model, block size and host has its own folder.

    Args:
        memory: of the host pool.
    """
    folder = cache_root() / "kv" if plan.kv_dir is None else Path(plan.kv_dir).expanduser()
    size, dtype = plan.block_size, DTYPES[plan.dtype]
    blocks = map_blocks(memory, plan.record, num_blocks=plan.num_blocks, block_size=size, dtype=dtype)
    path = folder / plan.model / f"host-{plan.host}"
    return DiskPool(path, plan.model, num_blocks=plan.num_disk_blocks, host=blocks)
