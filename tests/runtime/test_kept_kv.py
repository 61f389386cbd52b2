"""Named KV of documents: found by every layout, never evicted, shared by readers, dropped only when unused."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

import pytest
from engines import ThreadLLM

from longspan import SamplingParams
from longspan.core.kv.check import violations
from longspan.model.files import lock_folder
from longspan.outputs import RequestOutput
from longspan.runtime import disk_pool, kept_kv

DOCUMENT = [7 + number % 90 for number in range(100)]
ONE, OTHER = [3, 4, 5], [6, 3, 9, 2]
SIZE, MIB = 16, 2**-10
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LAYOUTS = [
    {"instances": 1},
    {"instances": 2, "policy": "context", "policy_options": {"threshold": "1"}},
    {"instances": 3},
    {"tp": 3},
    {"pp": 2},
    {"prefill_parallel": "2", "decode_parallel": "1", "policy": "tetris"},
]


def opened(tiny: Path, folder: Path, *, disk_mib: float = 4, **layout: object) -> ThreadLLM:
    sizes = {"block_size": SIZE, "host_kv_gib": 4 * MIB, "disk_kv_gib": disk_mib * MIB, "disk_kv_dir": str(folder)}
    return ThreadLLM(str(tiny), skip_tokenizer_init=True, threads_per_rank=1, **sizes, **layout)


def answer(llm: ThreadLLM, *parts: list[int]) -> RequestOutput:
    """Return the answer to a prompt once its KV is on disk, or no copy is in flight."""
    [output] = llm.generate([[token for part in parts for token in part]], GREEDY, use_tqdm=False)
    assert llm.engine.settle(60)
    assert not violations(llm.engine.kv, ())
    return output


def kept(tiny: Path, folder: Path, **layout: object) -> Path:
    """Keep the document by a first question, and return the folder of its model."""
    with opened(tiny, folder, **layout) as llm:
        assert answer(llm, DOCUMENT, ONE).num_cached_tokens == 0
        answer(llm, [1, 2] * 40)
    [model] = folder.glob("*")
    assert kept_kv.keep(model, DOCUMENT, SIZE, model="tiny")
    return model


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_kept_document_is_found_by_every_layout(tiny: Path, tmp_path: Path, layout: dict[str, object]) -> None:
    model = kept(tiny, tmp_path)
    with opened(tiny, tmp_path / "none") as llm:
        expected = answer(llm, DOCUMENT, OTHER).outputs[0].token_ids
    with opened(tiny, tmp_path, **layout) as llm:
        output = answer(llm, DOCUMENT, OTHER)
    assert output.outputs[0].token_ids == expected
    assert output.num_cached_tokens >= len(DOCUMENT) // SIZE * SIZE
    assert kept_kv.is_kept(model)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_every_layout_can_keep_a_document(tiny: Path, tmp_path: Path, layout: dict[str, object]) -> None:
    kept(tiny, tmp_path, **layout)
    with opened(tiny, tmp_path) as llm:
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens >= len(DOCUMENT) // SIZE * SIZE


def test_a_document_kept_on_two_hosts_is_found_on_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    model = kept(tiny, tmp_path, **LAYOUTS[1])
    assert all(any((model / host).glob("*.kv")) for host in ("host-0", "host-1"))
    monkeypatch.delenv("LONGSPAN_HOSTS")
    with opened(tiny, tmp_path) as llm:
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens >= len(DOCUMENT) // SIZE * SIZE


def test_only_blocks_of_the_document_are_kept_and_none_is_evicted(tiny: Path, tmp_path: Path) -> None:
    model = kept(tiny, tmp_path)
    files = sorted(model.glob("host-*/*.kv"))
    assert len(files) == -(-len(DOCUMENT) // SIZE)
    with opened(tiny, tmp_path, num_gpu_blocks_override=12) as llm:
        for number in range(20):  # as many blocks as the quota has
            answer(llm, [100 + number] * 100)
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens >= len(DOCUMENT) // SIZE * SIZE
    assert sorted(model.glob("host-*/*.kv")) == files


def test_readers_share_a_document_and_keep_it_from_being_dropped(tiny: Path, tmp_path: Path) -> None:
    model = kept(tiny, tmp_path)
    with opened(tiny, tmp_path) as first, opened(tiny, tmp_path) as second:
        for llm in (first, second):
            assert answer(llm, DOCUMENT, OTHER).num_cached_tokens >= len(DOCUMENT) // SIZE * SIZE
        with pytest.raises(kept_kv.KvInUseError):
            kept_kv.drop(tmp_path)
        assert kept_kv.is_kept(model)
    kept_kv.drop(tmp_path)
    assert not tmp_path.exists()


def test_pools_on_disks_have_the_blocks_of_the_document_and_none_after_a_reset(tiny: Path, tmp_path: Path) -> None:
    num_files = len([*kept(tiny, tmp_path).glob("host-*/*.kv")])
    with opened(tiny, tmp_path) as llm:
        assert num_disk_blocks(llm) == num_files
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens
        assert num_disk_blocks(llm) == num_files
        llm.service.reset_prefix_cache()
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens == 0
        assert num_disk_blocks(llm) == 0
        llm.service.restart()
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens, "on the host"
        assert num_disk_blocks(llm) == 0
    with opened(tiny, tmp_path) as llm:
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens


def num_disk_blocks(llm: ThreadLLM) -> int:
    return llm.engine.load().disk_blocks


def test_a_document_kept_by_another_process_just_before_the_lock_is_read_only(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kept(tiny, tmp_path)
    files, mark = sorted(model.glob("host-*/*.kv")), model / disk_pool.KEPT
    hidden = mark.rename(tmp_path / "hidden")
    lock = disk_pool.lock_folder

    def late(folder: Path, *, shared: bool = False) -> object:
        if hidden.exists():
            hidden.rename(mark)
        return lock(folder, shared=shared)

    monkeypatch.setattr(disk_pool, "lock_folder", late)
    with opened(tiny, tmp_path) as llm:
        assert answer(llm, DOCUMENT, OTHER).num_cached_tokens
        answer(llm, [1, 2] * 40)
    assert sorted(model.glob("host-*/*.kv")) == files


def test_the_record_has_the_root_of_the_prefix_keys(tiny: Path, tmp_path: Path) -> None:
    model = kept(tiny, tmp_path)
    with opened(tiny, tmp_path) as llm:
        config, policy = llm.engine.config, llm.service.setup.policy
    assert kept_kv.record(model)["root"] == kept_kv.root_of(config, policy, len(DOCUMENT))


def test_a_lock_of_a_removed_folder_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, flock = tmp_path / "folder", fcntl.flock
    folder.mkdir()

    def late(file: IO[bytes], how: int) -> None:
        flock(file, how)
        if removals:
            removals.pop()
            (folder / "lock").unlink()

    removals = [True]
    monkeypatch.setattr(fcntl, "flock", late)
    with lock_folder(folder), pytest.raises(BlockingIOError):
        lock_folder(folder)


def test_a_document_larger_than_the_quota_is_not_kept(tiny: Path, tmp_path: Path) -> None:
    with opened(tiny, tmp_path, disk_mib=0.1) as llm:
        answer(llm, DOCUMENT, ONE)
        assert llm.engine.config.cluster.disk_blocks[0] < len(DOCUMENT) // SIZE
    [model] = tmp_path.glob("*")
    before = sorted(model.rglob("*"))
    assert kept_kv.keep(model, DOCUMENT, SIZE, model="tiny") is None
    assert sorted(model.rglob("*")) == before


def test_a_damaged_document_is_computed_and_kept_again(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = kept(tiny, tmp_path)
    [file, *_] = sorted(model.glob("host-*/*.kv"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with opened(tiny, tmp_path / "none") as llm:
        expected = answer(llm, DOCUMENT, OTHER).outputs[0].token_ids
    with opened(tiny, tmp_path) as llm:
        assert answer(llm, DOCUMENT, OTHER).outputs[0].token_ids == expected
    assert file.name in caplog.text
    assert not kept_kv.is_kept(model)
    with opened(tiny, tmp_path) as llm:
        answer(llm, DOCUMENT, ONE)
    assert kept_kv.keep(model, DOCUMENT, SIZE, model="tiny")
