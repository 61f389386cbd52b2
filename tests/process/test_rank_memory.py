"""The memory of ranks stays the same over changes of phase: they share the weights, and nothing accumulates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import psutil
import pytest
from transformers import LlamaConfig
from turns import turning_args

from longspan import SamplingParams
from longspan.core.steps import Reshard, Step
from longspan.model.store import TENSORS
from longspan.runtime.executor.control_plane import WorkerExecutor
from longspan.service import Service

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="nobody says what a process maps")
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LENGTHS = tuple(5 + 7 * number % 50 for number in range(24))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The configuration of a model of 160 MB, whose dummy weights go with this folder."""
    with tempfile.TemporaryDirectory(prefix="ls-large-") as folder:
        monkeypatch.setenv("LONGSPAN_CACHE", f"{folder}/cache")
        LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(f"{folder}/model")
        yield Path(folder, "model")


class Memory(NamedTuple):
    """Bytes of some processes together.

    Attributes:
        counted_once: their own pages, and those of weights and of KV on the host, which count once for all of them.
        resident: the sum of their resident sizes. A page that two have mapped counts twice.
        mapped: of weights and of KV on the host, whether they are in memory or not.
    """

    counted_once: int
    resident: int
    mapped: int

    @classmethod
    def of(cls, pids: Iterable[int], weights: Path) -> Self:
        counted_once = resident = mapped = 0
        for pid in pids:
            for part in psutil.Process(pid).memory_maps():
                counted_once, resident = counted_once + part.anonymous, resident + part.rss
                if part.path == str(weights.with_name(TENSORS)) or part.path.startswith("/memfd:longspan-kv"):
                    counted_once, mapped = counted_once + part.pss, mapped + part.size
        return cls(counted_once, resident, mapped)


@pytest.mark.parametrize("spec", ["pp2 tp2", pytest.param("tp2 pp2", marks=pytest.mark.full)])
def test_no_transition_takes_more_memory(large: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    given = turning_args(large, spec, host_kv_gib=0.0025, load_format="dummy")
    service, submit, found = Service(given), WorkerExecutor.submit, list[Memory]()

    def measuring(executor: WorkerExecutor, step: Step) -> None:
        if isinstance(step, Reshard):  # the ranks do nothing now, and have used the cluster that they leave
            found.append(Memory.of(executor.pids, service.files.weights))
        submit(executor, step)

    monkeypatch.setattr(WorkerExecutor, "submit", measuring)
    rng = np.random.default_rng(0)
    try:
        for length in LENGTHS:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            service.engine.add(rng.integers(3, 4096, length).tolist(), params)
        while service.engine.has_unfinished:
            service.engine.step()
        weight_bytes = service.files.weights.with_name(TENSORS).stat().st_size
    finally:
        service.close()
    assert len(found) >= 6
    first, second = found[:2]
    assert first.counted_once > weight_bytes > 150 * 2**20, "all of them are in use"
    assert max(one.counted_once for one in found) <= 1.05 * first.counted_once, found
    assert max(one.resident for one in found[2:]) <= 1.05 * second.resident, found
    assert first.mapped > 2 * weight_bytes and {one.mapped for one in found} == {first.mapped}, "all is mapped once"
