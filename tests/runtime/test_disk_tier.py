"""A prefix that one run has stored is found by the next. Whole engines run, also with damaged files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import ThreadLLM
from oracle import Oracle, assert_exact
from test_exact import GREEDY, assert_all_exact, prompts_of
from tiny_models import make_tiny

from longspan.errors import ParameterError
from longspan.outputs import RequestOutput
from longspan.runtime.disk_pool import DiskPool

PROMPTS = prompts_of(108, 42)
SIZES = {"block_size": 16, "host_kv_gib": 0.02, "disk_kv_gib": 0.02}


@contextmanager
def running(folder: Path, disk: Path, **given: Any) -> Iterator[ThreadLLM]:
    """Yield an engine with blocks of 16 tokens, all of which fit on the disk."""
    with ThreadLLM(str(folder), skip_tokenizer_init=True, disk_kv_dir=str(disk), **SIZES | given) as llm:
        yield llm


def answered(folder: Path, disk: Path, oracle: Oracle, **given: Any) -> Sequence[RequestOutput]:
    """Start an engine, run the prompts and shut it down."""
    with running(folder, disk, **given) as llm:
        return assert_all_exact(llm, oracle, PROMPTS)


def files(disk: Path) -> list[Path]:
    """Return the files of blocks: seven and a partial one of the first prompt, two and a partial one of the second."""
    found = sorted(disk.glob("*/host-0/*.kv"))
    assert len(found) == 11
    return found


def num_cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.metrics.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(("before", "after"), [("1", "2xpp2"), ("tp2", "1"), ("pp3", "tp2pp2"), ("2", "3")])
def test_another_layout_reads_stored_blocks(
    tiny: Path, oracle: Oracle, tmp_path: Path, before: str, after: str
) -> None:
    """All but the last token of each prompt, which must be computed."""
    assert num_cached(answered(tiny, tmp_path, oracle, parallel=before)) == [0, 0]
    assert num_cached(answered(tiny, tmp_path, oracle, parallel=after, policy="context")) == [107, 41]


def test_each_tier_finds_the_kv_of_the_same_cache_salt_only(tiny: Path, oracle: Oracle, tmp_path: Path) -> None:
    """On the device in one run, on the disk in the next one. The answer does not depend on the salt."""

    def cached(llm: ThreadLLM, **salt: str) -> list[int]:
        prompt: Any = {"prompt_token_ids": PROMPTS[0], **salt}
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert_exact(output, oracle.complete(PROMPTS[0], 6))
        return num_cached([output])

    with running(tiny, tmp_path) as llm:
        assert cached(llm, cache_salt="a") == [0]
        assert cached(llm, cache_salt="b") == cached(llm) == [0]
        assert cached(llm, cache_salt="a") == cached(llm) == [107]
    with running(tiny, tmp_path, parallel="2") as llm:
        assert cached(llm, cache_salt="c") == [0]
        assert cached(llm, cache_salt="b") == cached(llm) == [107]
        assert llm.engine.kv.counts.num_disk_hits == 2 * 112, "seven blocks each"
        [output] = llm.generate({"prompt_token_ids": PROMPTS[1], "cache_salt": "a"}, use_tqdm=False)
        assert output.prompt_token_ids == PROMPTS[1], "a dict is one prompt"


def cut(path: Path) -> None:
    """Loses the end."""
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path, position: int = -1) -> None:
    """Of the last byte, or another one."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def replace_by_text(path: Path) -> None:
    """Something else altogether."""
    path.write_text("no KV\n")


def lengthen(path: Path) -> None:
    """Goes on behind the end."""
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [cut, flip_a_bit, replace_by_text, lengthen], ids=lambda one: one.__name__)
def test_a_damaged_file_is_ignored_with_one_line(
    tiny: Path, oracle: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """The blocks before it in the prompt are used."""
    answered(tiny, tmp_path, oracle)
    damaged = files(tmp_path)[2]
    damage(damaged)
    assert num_cached(answered(tiny, tmp_path, oracle)) == [32, 41]
    [line] = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert damaged.name in line
    assert num_cached(answered(tiny, tmp_path, oracle)) == [107, 41], "it has been stored again"


@pytest.mark.parametrize("position", [0, 20, 33, 40, 80, 200])
def test_any_byte_counts(tiny: Path, oracle: Oracle, tmp_path: Path, position: int) -> None:
    """Magic number, checksum, length, header and keys."""
    answered(tiny, tmp_path, oracle)
    flip_a_bit(files(tmp_path)[0], position)
    assert num_cached(answered(tiny, tmp_path, oracle)) == [0, 41]


def test_another_models_files_are_ignored(
    tiny: Path, oracle: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In addition to the model's own files, and even in place of them."""
    other = make_tiny("llama", tmp_path / "other", seed=5)
    disk = tmp_path / "disk"
    answered(other, disk, Oracle(other))
    assert num_cached(answered(tiny, disk, oracle)) == [0, 0]
    first, second = sorted(disk.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    for path in (first / "host-0").glob("*.kv"):
        path.replace(second / "host-0" / path.name)
    assert num_cached(answered(tiny, disk, oracle)) == [0, 0]
    assert [line for line in caplog.messages if "11 files" in line and "of another model" in line]


def test_kv_of_a_model_that_was_replaced_is_not_taken_for_that_of_the_new_one(tmp_path: Path) -> None:
    """Whose files have the same names, sizes and times."""
    folder, disk = tmp_path / "m", tmp_path / "disk"
    for seed in (0, 5):
        make_tiny("llama", folder, seed)
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        oracle = Oracle(folder)
        assert num_cached(answered(folder, disk, oracle)) == [0, 0]
        assert num_cached(answered(folder, disk, oracle)) == [107, 41]


def test_prompts_on_disk_are_for_their_owner_only(tiny: Path, tmp_path: Path) -> None:
    with running(tiny, tmp_path / "made"):
        [folder] = (tmp_path / "made").glob("*/host-0")
        assert folder.stat().st_mode & 0o777 == 0o700


def test_block_sizes_have_folders_of_their_own(tiny: Path, oracle: Oracle, tmp_path: Path) -> None:
    answered(tiny, tmp_path, oracle)
    assert num_cached(answered(tiny, tmp_path, oracle, block_size=32)) == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_has_one_server(tiny: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with (
            running(tiny, tmp_path),
            pytest.raises(ParameterError, match=f"{tmp_path}.* is used by another server: give another one"),
        ):
            running(tiny, tmp_path).__enter__()


def test_a_full_disk_is_no_reason_to_fail(
    tiny: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DiskPool, "_write", full)
    with running(tiny, tmp_path) as llm:
        assert_all_exact(llm, oracle, PROMPTS)
        assert llm.engine.settle(60.0)
        assert llm.engine.load().disk_blocks == 0 < llm.engine.load().host_blocks
    assert len([line for line in caplog.messages if "No space left on device" in line]) == 1


def test_a_save_that_was_cut_off_leaves_nothing(
    tiny: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has no name yet by which it could be found, and the next run removes it."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: None)
        answered(tiny, tmp_path, oracle)
    assert len(list(tmp_path.glob("*/host-0/*.unfinished"))) == 11
    with running(tiny, tmp_path) as llm:
        assert llm.engine.load().disk_blocks == 0
    assert not list(tmp_path.glob("*/host-0/*.*"))


def test_a_smaller_disk_keeps_less(tiny: Path, oracle: Oracle, tmp_path: Path) -> None:
    """And more than it holds is never on it."""
    answered(tiny, tmp_path, oracle)
    size = files(tmp_path)[0].stat().st_size
    with running(tiny, tmp_path, disk_kv_gib=4.5 * size / 2**30) as llm:
        assert llm.engine.load().disk_blocks == 4
        for number in range(8):
            assert_all_exact(llm, oracle, prompts_of(50 + number))
    assert len(list(tmp_path.glob("*/host-0/*.kv"))) == 4


def test_the_prefix_cache_is_reset_on_disk_too(tiny: Path, oracle: Oracle, tmp_path: Path) -> None:
    with running(tiny, tmp_path) as llm:
        assert_all_exact(llm, oracle, PROMPTS)
        while llm.engine.has_unfinished:
            llm.engine.step()
        llm.reset_prefix_cache()
    assert num_cached(answered(tiny, tmp_path, oracle)) == [0, 0]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"disk_kv_gib": 1e9}, r"disk_kv_gib .* is more than .* blocks: allow at most"),
        ({"disk_kv_gib": 500.0}, r"disk_kv_gib .*needs .* GiB more in .*: allow less"),
        ({"disk_kv_gib": 1e-9}, r"disk_kv_gib.*holds no block of .* bytes: allow more"),
        ({"host_kv_gib": 0.0}, r"disk_kv_gib.*needs `host_kv_gib`, too"),
        ({"disk_kv_dir": "/dev/null/kv"}, r"disk_kv_dir .*cannot be used .*: give another one"),
    ],
)
def test_invalid_options_are_refused(
    tiny: Path, tmp_path: Path, given: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with 100 GiB left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100 * 2**30))
    with pytest.raises(ParameterError, match=problem):
        ThreadLLM(str(tiny), skip_tokenizer_init=True, **{"disk_kv_dir": str(tmp_path), **SIZES, **given})
