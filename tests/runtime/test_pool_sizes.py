"""Pools of CPUs fit into the memory that the process may use. A larger pool is an error about a parameter."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from engines import ThreadLLM
from fake_llm import run
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from longspan import limits
from longspan.core.cluster import Cluster
from longspan.cost.memory import CPU_KV_BYTES
from longspan.limits import Memory
from longspan.model.source import prepare
from longspan.runtime.pool import PROCESS_BYTES, default_kv_bytes

GIB = 2**30


@settings(max_examples=200)
@given(
    available=st.integers(0, 100 * GIB),
    weights=st.integers(0, 50 * GIB),
    spec=st.sampled_from(["1", "2", "tp2", "4", "2xpp2"]),
)
def test_default_kv_leaves_memory_for_processes_weights_and_steps(available: int, weights: int, spec: str) -> None:
    cluster = Cluster.of(spec)
    found = default_kv_bytes(cluster, "cpu", weights, available) * cluster.num_ranks
    assert 0 <= found <= CPU_KV_BYTES
    left = max(0, available - PROCESS_BYTES)
    shared = weights * cluster.spec.tp * cluster.spec.pp
    assert found <= max(0.1 * left, 0.4 * (left - shared))


def test_default_kv_never_shrinks_with_more_memory() -> None:
    found = [default_kv_bytes(Cluster.of("2"), "cpu", GIB, number * GIB // 4) for number in range(100)]
    assert found == sorted(found)
    assert found[0] == 0 and found[-1] == CPU_KV_BYTES // 2


def test_the_default_pool_is_of_the_memory_of_the_container(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(available: int, **options: Any) -> tuple[int, ...]:
        memory = Memory(total=2 * GIB, available=available, is_limited=True)
        monkeypatch.setattr(limits, "memory", lambda: memory)
        with ThreadLLM(str(tiny), skip_tokenizer_init=True, **options) as llm:
            return llm.engine.config.cluster.num_blocks

    [large], [small] = blocks(GIB), blocks(GIB // 2)
    assert 1 < small < large
    [beside_host] = blocks(GIB, host_kv_gib=0.5)
    assert beside_host <= small


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"kv_cache_memory_bytes": 5 * GIB}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 3 * GIB, "instances": 2}, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 10**9}, "num_gpu_blocks_override"),
        ({"host_kv_gib": 3.0}, "host_kv_gib"),
    ],
)
def test_a_pool_beyond_all_memory_is_refused_by_name(
    options: dict[str, Any], parameter: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "memory", lambda: Memory(total=4 * GIB, available=2 * GIB, is_limited=True))
    with refused(parameter):
        ThreadLLM(str(tiny), skip_tokenizer_init=True, **options)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory can be mapped."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files and memory without a name have at most 8 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**23, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("thread_llm")
@pytest.mark.parametrize(
    ("condition", "flags", "words"),
    [("no_memory", (), "use a larger --tp or --pp"), ("small_files", ("--host-kv-gib", "0.01"), "--host-kv-gib needs")],
)
def test_a_pool_that_cannot_be_allocated_is_code_2_and_one_sentence(
    condition: str,
    flags: tuple[str, ...],
    words: str,
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    prepare(str(tiny), dtype="float32")
    request.getfixturevalue(condition)
    assert run("generate", str(tiny), "--skip-tokenizer-init", "--token-ids", "5,6", *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = [line for line in err.splitlines() if line.startswith("longspan: ")]
    assert words in line
