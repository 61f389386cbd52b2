"""The KV pool on the disk of a host: a file per block, of all layers and heads, which later servers find.

A file holds a magic number, a checksum of all behind it, the length of a header, the header, and then the record of the
block, see `core/kv_record.py`.
"""

from __future__ import annotations

import fcntl
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
from longspan.runtime.block_records import BlockRecords
from longspan.runtime.messages import Stored

_MAGIC = b"longspan-kv-1\n\0\0"
_CHECKSUM_BYTES = 16
_FRONT_BYTES = len(_MAGIC) + _CHECKSUM_BYTES + 4
_MOST_HEADER_BYTES = 2**24
_UNFINISHED = ".unfinished"

_log = logging.getLogger("longspan")


class _Header(msgspec.Struct, frozen=True):
    """Says what a block holds: KV of `tokens`, behind the prefix that `parent` names, of a model and its options."""

    model: str
    parent: bytes
    tokens: tuple[int, ...]


class _DamagedError(Exception):
    """A file is not what a server has written here."""


class DiskPool:
    """Blocks in a folder, which no other server has at the same time.

    Args:
        folder: made if need be.
        model: all that makes KV what it is, but for tokens and places: files that say something else are ignored.
        num_blocks: of more files than that, the least recently used are removed.
        host: the pool of the host, whose blocks are saved and loaded.

    Raises:
        ParameterError: when the folder cannot be used, with its reason.
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
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # others must not read the tokens of prompts
                self._lock: IO[bytes] = acquired.enter_context((folder / "lock").open("ab"))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remove([*folder.glob(f"*{_UNFINISHED}")])
                kept_bytes = sum(path.stat().st_size for path in self._shrink())
            except BlockingIOError:
                raise ParameterError("disk_kv_dir", f"{folder} is used by another server: give another one") from None
            except OSError as error:
                raise ParameterError("disk_kv_dir", f"{folder} cannot be used ({error}): give another one") from error
            needed, free = num_blocks * self._block_bytes - kept_bytes, shutil.disk_usage(folder).free
            if needed > free:
                problem = f"needs {needed / 2**30:.1f} GiB more in {folder}, but {free / 2**30:.1f} are free"
                raise ParameterError("disk_kv_gib", f"{problem}: allow less")
            acquired.pop_all()  # `close` releases the lock from now on

    def _shrink(self) -> list[Path]:
        """Removes the least recently used files that have no room; returns the others, which get numbers that exist."""
        files = sorted(self._files(), key=lambda one: one[0].stat().st_mtime_ns, reverse=True)
        kept, others = files[: self._num_blocks], files[self._num_blocks :]
        self._remove([path for path, _ in others])
        used = {block for _, block in kept}
        unused = (block for block in range(self._num_blocks) if block not in used)
        return [path if block < self._num_blocks else path.replace(self._path(next(unused))) for path, block in kept]

    def contents(self) -> list[tuple[int, Content]]:
        """Lists what earlier servers have saved, the least recently used first; what cannot be is logged, and ignored.

        Records are checked when they are loaded.
        """
        found, ignored = [], []
        for path, block in self._files():
            try:
                with path.open("rb") as file:
                    header, size = self._read_header(file)
                    stat = os.fstat(file.fileno())
                if stat.st_size != _FRONT_BYTES + size + self._block_bytes:
                    raise _DamagedError("it is too short or too long")
            except (OSError, _DamagedError) as error:
                ignored.append(f"{path.name} ({error})")
            else:
                found.append((stat.st_mtime_ns, block, Content(header.parent, header.tokens)))
        if ignored:
            _log.warning("%d files of %s are ignored, such as %s", len(ignored), self._folder, min(ignored))
        return [(block, content) for _, block, content in sorted(found, key=lambda one: one[:2])]

    def save(self, source: int, block: int, content: Content) -> bool:
        """Writes a block of the host; returns whether that was possible."""
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
        header = msgspec.msgpack.encode(_Header(self._model, content.parent, tuple(content.tokens)))
        front, parts = len(header).to_bytes(4, "little") + header, [part[source].data for part in self._parts]
        checksum = hashlib.blake2b(front, digest_size=_CHECKSUM_BYTES)
        for part in parts:
            checksum.update(part)
        path = self._path(block)
        unfinished = path.with_suffix(_UNFINISHED)
        with unfinished.open("wb", buffering=0) as file:
            for data in (_MAGIC + checksum.digest() + front, *parts):
                if file.write(data) != len(data):
                    raise OSError(f"{unfinished} was not written whole")
        unfinished.replace(path)

    def load(self, block: int, target: int, content: Content) -> bool:
        """Reads a block into one of the host; returns whether it is what it should be. Another file is removed.

        One that cannot be read stays: the next server may be able to.
        """
        path = self._path(block)
        try:
            with path.open("rb", buffering=0) as file:
                front = file.read(len(_MAGIC) + _CHECKSUM_BYTES)
                file.seek(0)
                header, size = self._read_header(file)
                if (header.parent, header.tokens) != (content.parent, tuple(content.tokens)):
                    raise _DamagedError("it holds something else")
                file.seek(len(front))
                checksum = hashlib.blake2b(file.read(4 + size), digest_size=_CHECKSUM_BYTES)
                for part in self._parts:
                    room = part[target].data
                    if file.readinto(room) != len(room):
                        raise _DamagedError("it is too short")
                    checksum.update(room)
            if checksum.digest() != front[len(_MAGIC) :]:
                raise _DamagedError("its checksum is wrong")
            os.utime(path)  # it is the last to be evicted, also for later servers
        except (FileNotFoundError, _DamagedError) as error:
            _log.warning("%s is ignored (%s)", path, error)
            path.unlink(missing_ok=True)
            return False
        except OSError as error:
            _log.warning("%s cannot be read (%s)", path, error)
            return False
        return True

    def run(self, move: MoveKV, closing: Event) -> Stored:
        """Makes a move to the pool, or from there. What is left of it when `closing` is set fails."""
        do = self.save if move.way == "save" else self.load
        pairs = zip(_blocks(move), move.contents, strict=True)
        done = [not closing.is_set() and do(*pair, content) for pair, content in pairs]
        failed = tuple(index for index, is_done in enumerate(done) if not is_done)
        return Stored(move.number, sum(done) * self._block_bytes, failed)

    def clear(self) -> None:
        """Removes all files of blocks."""
        self._remove([path for path, _ in self._files()])

    def close(self) -> None:
        """Lets others have the folder, and the memory of the host go."""
        self._lock.close()
        self._parts.clear()

    def _path(self, block: int) -> Path:
        return self._folder / f"{block:08d}.kv"

    def _files(self) -> Iterator[tuple[Path, int]]:
        for path in self._folder.glob("*.kv"):
            if path.stem.isdecimal() and path == self._path(int(path.stem)):
                yield path, int(path.stem)

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    def _read_header(self, file: IO[bytes]) -> tuple[_Header, int]:
        front = file.read(_FRONT_BYTES)
        if front[: len(_MAGIC)] != _MAGIC:
            raise _DamagedError("it holds no KV")
        size = int.from_bytes(front[-4:], "little")
        try:
            header = msgspec.msgpack.decode(file.read(min(size, _MOST_HEADER_BYTES)), type=_Header)
        except msgspec.MsgspecError as error:
            raise _DamagedError("its header is damaged") from error
        if header.model != self._model:
            raise _DamagedError("it is of another model")
        return header, size


class DiskLane:
    """Makes moves to and from disks, one after the other, on a thread of its own, which reports them.

    Requests wait for loads, so these come before all saves. Only what is saved already is loaded.
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
        """Ends the thread behind the block that it copies; what is left is dropped."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _run_next(self) -> None:
        *_, move = self._moves.get_nowait()
        [disk] = {ref.pool for pair in move.copies for ref in pair} & {*self._pools}
        try:
            stored = self._pools[disk].run(move, self._closing)
        except Exception:  # noqa: BLE001 - the engine would wait for ever
            _log.exception("a disk cannot be used")
            stored = Stored(move.number, 0, tuple(range(len(move.copies))))
        self._report(stored)


def _blocks(move: MoveKV) -> Iterator[tuple[int, int]]:
    return ((source.block, target.block) for source, target in move.copies)
