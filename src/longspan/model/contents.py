"""Content hashes of files, recorded in the cache until the file changes.

A path, a size and a modification time do not identify a file: copies keep times, and some systems set all times to 1.
So a record is identified by device, inode, size and ctime, which no program can set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import IO, Annotated, NamedTuple

import msgspec
from msgspec.structs import astuple

from longspan.model.files import HashedFile, ModelError, cache_root, one_line, write_file

_SMALL_BYTES = 2**20
"""Smaller files are hashed at each start, in a millisecond per file, without a record."""
_SETTLED_NS = 60 * 10**9
"""Files that changed less than this before they were read are hashed again at the next start.

A second change in the same tick of the clock keeps the ctime. So does a change through a memory map while a page is
dirty, by default 30 s.
"""
_SECOND_NS = 10**9
_NUM_THREADS = 4
_CHUNK_BYTES = 2**22
_SHOWN_BYTES = 2**28
"""Fewer bytes take at most half a second, and show no log line and no progress bar."""
_POLL_S = 0.5
_LOG_EVERY_S = 10.0

_log = logging.getLogger("longspan")


class _Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: int
    inode: int
    size: int
    ctime_ns: int

    @classmethod
    def of(cls, file: IO[bytes]) -> _Stamp:
        """Read the stamp of an open file: network file systems query their server only for open files."""
        stat = os.fstat(file.fileno())
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns)

    def is_settled(self, now_ns: int) -> bool:
        """Return whether any later change will be seen in the ctime.

        Whole seconds come from file systems that keep no finer times, and from images whose times are all the same.
        """
        return now_ns - self.ctime_ns > _SETTLED_NS and self.ctime_ns % _SECOND_NS != 0


class _Hashed(NamedTuple):
    """A hash of a file.

    Attributes:
        is_final: a later change of the content will change the stamp.
    """

    stamp: _Stamp
    sha256: str
    is_final: bool


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stamp: _Stamp
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def content_hash(files: Mapping[str, Path]) -> str:
    """Return one hash of the contents of files and of their names, see `hash_files`."""
    return joint_hash(hash_files(files))


def joint_hash(files: Sequence[HashedFile]) -> str:
    """Return one hash of the contents of files and of their names."""
    return hashlib.sha256(json.dumps([[file.name, file.sha256] for file in files]).encode()).hexdigest()


def hash_files(files: Mapping[str, Path]) -> list[HashedFile]:
    """Return the hashes of the contents of files. The keys of `files` are names.

    Files with a valid record are not read again. Progress is logged, and shown on terminals. Raise ModelError if a file
    cannot be read, or changes meanwhile.
    """
    stamps = {name: _stamp(path) for name, path in files.items()}
    found = {name: _Hashed(stamp, _recall(stamp) or "", is_final=True) for name, stamp in stamps.items()}
    unknown = [name for name, file in found.items() if not file.sha256]
    new = _hash_all([files[name] for name in unknown], sum(stamps[name].size for name in unknown))
    found |= dict(zip(unknown, new, strict=True))
    return [
        HashedFile(name=name, path=files[name].resolve(), stamp=astuple(file.stamp), sha256=file.sha256)
        for name, file in found.items()
    ]


def check_unchanged(file: IO[bytes], hashed: HashedFile) -> HashedFile:
    """Return the record of an open file if its contents have the same hash, and raise ModelError otherwise.

    The contents are read again only if the stamp has changed, as by a chmod. The returned record has the new stamp.
    """
    try:
        if astuple(_Stamp.of(file)) == hashed.stamp:
            return hashed
        new = _hash_open(hashed.path, file, [0], Event())
    except OSError as error:
        raise ModelError(f"{hashed.path} cannot be read ({one_line(error)}): start again") from error
    if new.sha256 != hashed.sha256:
        raise ModelError(f"{hashed.path} changed after the model was loaded: start again")
    return replace(hashed, stamp=astuple(new.stamp))


def _stamp(path: Path) -> _Stamp:
    try:
        with path.open("rb") as file:
            return _Stamp.of(file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({one_line(error)})") from error


def _record_file(stamp: _Stamp) -> Path:
    return cache_root() / "hashes" / f"{stamp.device:x}-{stamp.inode:x}.json"


def _recall(stamp: _Stamp) -> str | None:
    if stamp.size < _SMALL_BYTES:
        return None
    try:
        record = msgspec.json.decode(_record_file(stamp).read_bytes(), type=_Record)
    except (OSError, ValueError):  # there is no record, or a damaged one, which will be overwritten
        return None
    return record.sha256 if record.stamp == stamp else None


def _hash_all(paths: Sequence[Path], num_bytes: int) -> list[_Hashed]:
    stop, read = Event(), [[0] for _ in paths]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        jobs = [pool.submit(hash_file, path, count, stop) for path, count in zip(paths, read, strict=True)]
        try:
            if num_bytes >= _SHOWN_BYTES:
                _log.info("reading %.1f GB of %s, to identify the weights", num_bytes / 1e9, paths[0].parent)
                _show_progress(jobs, read, num_bytes)
            hashed = [job.result() for job in jobs]
        except BaseException:
            stop.set()
            raise
    _remember([_Record(new.stamp, new.sha256) for new in hashed if new.is_final and new.stamp.size >= _SMALL_BYTES])
    return hashed


def _show_progress(jobs: Sequence[Future[_Hashed]], read: Sequence[list[int]], num_bytes: int) -> None:
    """Wait until all jobs are done, or one has failed. Show the bytes `read`, in a bar on terminals or in the log."""
    from tqdm import tqdm  # noqa: PLC0415 - most starts need none

    logged_s = time.monotonic()
    with tqdm(total=num_bytes, desc="reading weights", unit="B", unit_scale=True, disable=None) as bar:
        while (waited := wait(jobs, timeout=_POLL_S, return_when=FIRST_EXCEPTION)).not_done:
            for job in waited.done:
                job.result()  # raises the error of the job, if any
            num_read = sum(count for (count,) in read)
            bar.update(num_read - bar.n)
            if bar.disable and time.monotonic() - logged_s >= _LOG_EVERY_S:
                logged_s = time.monotonic()
                _log.info("%.1f of %.1f GB are read", num_read / 1e9, num_bytes / 1e9)
        bar.update(num_bytes - bar.n)


def hash_file(path: Path, num_read: list[int], stop: Event) -> _Hashed:
    """Compute the hash of one file, and count its bytes in `num_read[0]`. After `stop` the result is invalid."""
    try:
        with path.open("rb", buffering=0) as file:
            return _hash_open(path, file, num_read, stop)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({one_line(error)})") from error


def _hash_open(path: Path, file: IO[bytes], num_read: list[int], stop: Event) -> _Hashed:
    """Compute the hash of an unbuffered file, see `hash_file`."""
    began_ns, stamp = time.time_ns(), _Stamp.of(file)
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    file.seek(0)
    while not stop.is_set() and (size := file.readinto(buffer)):  # type: ignore[attr-defined]  # of unbuffered files
        digest.update(buffer[:size])
        num_read[0] += size
    if _Stamp.of(file) != stamp:
        raise ModelError(f"{path} changed while it was read: start again when it is complete")
    return _Hashed(stamp, digest.hexdigest(), is_final=stamp.is_settled(began_ns))


def _remember(records: Sequence[_Record]) -> None:
    for record in records:
        try:
            write_file(_record_file(record.stamp), msgspec.json.encode(record).decode())
        except ModelError as error:
            if (num_bytes := sum(unsaved.stamp.size for unsaved in records)) >= _SHOWN_BYTES:
                _log.info("the next start will read %.1f GB again: %s", num_bytes / 1e9, error)
            return
