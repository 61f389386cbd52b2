"""Content hashes: which are remembered, which files are read again, and that replaced files are always noticed."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from longspan.model import contents
from longspan.model.contents import content_hash
from longspan.model.files import ModelError

TICK_S = 0.02
"""Longer than a tick of the clock by which files are dated."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remembers hashes of files of any size."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "_SMALL_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled after a tick."""
    monkeypatch.setattr(contents, "_SETTLED_NS", int(TICK_S / 2 * 1e9))


def write(path: Path, content: bytes) -> None:
    """As systems do that give all files the same time."""
    path.write_bytes(content)
    os.utime(path, (1, 1))


def rename_over(path: Path, content: bytes) -> None:
    write(path.with_suffix(".new"), content)
    path.with_suffix(".new").replace(path)


def remove_first(path: Path, content: bytes) -> None:
    path.unlink()
    write(path, content)


def link_elsewhere(path: Path, content: bytes) -> None:
    write(path.with_suffix(".other"), content)
    path.unlink()
    path.symlink_to(path.with_suffix(".other"))


@pytest.mark.parametrize("replace", [write, rename_over, remove_first, link_elsewhere])
def test_a_replaced_file_of_the_same_size_and_time_has_another_hash(
    settled: None, replace: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    del settled
    path = tmp_path / "weights"
    write(path, b"a" * 100)
    time.sleep(TICK_S)
    first = content_hash({"w": path})
    before = path.stat()
    time.sleep(TICK_S)
    replace(path, b"b" * 100)
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    assert content_hash({"w": path}) != first
    replace(path, b"a" * 100)
    assert content_hash({"w": path}) == first


def test_a_file_changed_in_the_tick_in_which_it_was_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    for number in range(50):
        path.write_bytes(b"a" * 100)
        first = content_hash({"w": path})
        path.write_bytes(b"b" * 100)
        assert content_hash({"w": path}) != first, number


def test_a_settled_file_is_read_once_and_again_only_after_a_change(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del settled
    path, read = tmp_path / "weights", []
    whole = contents.hash_file
    monkeypatch.setattr(contents, "hash_file", lambda path, *rest: read.append(path) or whole(path, *rest))
    write(path, b"a" * 100)
    time.sleep(TICK_S)
    assert len({content_hash({"w": path}) for _ in range(3)}) == 1
    assert read == [path]
    path.chmod(0o600)
    time.sleep(TICK_S)
    assert len({content_hash({"w": path}) for _ in range(3)}) == 1
    assert read == [path, path]


def test_names_count_as_contents_do(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    hashes = {content_hash(files) for files in ({"a": one, "b": other}, {"a": other, "b": one}, {"a": one}, {"c": one})}
    assert len(hashes) == 4


def test_a_time_in_whole_seconds_is_no_reason_to_remember(
    settled: None, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of file systems have such times, and the same for all versions."""
    del settled
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    stat = path.stat()

    def dated(ctime_ns: int) -> None:
        fields = {"st_dev": stat.st_dev, "st_ino": stat.st_ino, "st_size": 1, "st_ctime_ns": ctime_ns}
        monkeypatch.setattr(contents, "os", SimpleNamespace(fstat=lambda _: SimpleNamespace(**fields)))

    dated(10**9)
    content_hash({"w": path})
    assert not cache.exists()
    dated(10**9 + 1)
    content_hash({"w": path})
    assert [file.suffix for file in (cache / "hashes").iterdir()] == [".json"]


def test_a_damaged_record_is_written_again(settled: None, tmp_path: Path, cache: Path) -> None:
    del settled
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    time.sleep(TICK_S)
    first = content_hash({"w": path})
    [record] = (cache / "hashes").iterdir()
    good = record.read_bytes()
    for damaged in (b"", good[:-9], b"[]", b'{"stamp": 1}', good.replace(b'sha256":"', b'sha256":"zz')):
        record.write_bytes(damaged)
        assert content_hash({"w": path}) == first
        assert record.read_bytes() == good


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)

    class Digest:
        def update(self, _: object) -> None:
            with path.open("ab") as file:
                file.write(b"more") if path.stat().st_size < 200 else None

        def hexdigest(self) -> str:
            return ""

    monkeypatch.setattr(contents, "hashlib", SimpleNamespace(sha256=Digest))
    with pytest.raises(ModelError, match=r"weights changed while it was read: start again"):
        content_hash({"w": path})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in (".", "nowhere", "loop"):
        with pytest.raises(ModelError, match=f"{tmp_path / name} cannot be read"):
            content_hash({"w": tmp_path / name})


def test_hashes_are_found_without_the_right_to_write(
    settled: None, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computed where there are none."""
    del settled
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    time.sleep(TICK_S)
    first = content_hash({"w": path})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert content_hash({"w": path}) == first
    [record] = (cache / "hashes").iterdir()
    record.unlink()
    assert content_hash({"w": path}) == first
    assert not record.exists()


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """Make a sparse file that takes 15 minutes to read, and no disk space."""
    path = tmp_path / "endless"
    path.touch()
    os.truncate(path, 2**40)
    return path


@pytest.mark.timeout(60)
def test_a_long_reading_can_be_interrupted(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(contents, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        content_hash({"w": endless})


@pytest.mark.timeout(60)
def test_the_first_failure_ends_a_long_reading(endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contents.hash_file

    def fail(path: Path, *rest: object) -> object:
        if path != endless:
            raise ModelError("other cannot be read")
        return whole(path, *rest)

    monkeypatch.setattr(contents, "hash_file", fail)
    (tmp_path / "other").touch()
    with pytest.raises(ModelError, match="other cannot be read"):
        content_hash({"w": endless, "o": tmp_path / "other"})


def test_progress_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in (("_SHOWN_BYTES", 0), ("_LOG_EVERY_S", 0), ("_POLL_S", 0.001)):
        monkeypatch.setattr(contents, name, value)
    path = tmp_path / "weights"
    path.touch()
    os.truncate(path, 2**27)
    caplog.set_level(logging.INFO)
    content_hash({"w": path})
    assert f"reading 0.1 GB of {tmp_path}" in caplog.text
    assert " of 0.1 GB are read" in caplog.text


def test_the_hash_of_a_file_is_that_of_all_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size."""
    path, content = tmp_path / "weights", bytes(range(256)) * 5
    path.write_bytes(content)
    for size in (1, 7, 1280, 5000):
        monkeypatch.setattr(contents, "_CHUNK_BYTES", size)
        assert contents.hash_file(path, [0], contents.Event()).sha256 == hashlib.sha256(content).hexdigest()
