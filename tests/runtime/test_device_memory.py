"""Where workers measure memory, pools take the memory that the largest step leaves on the fullest device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import InOrderLauncher, num_free_blocks
from fake_llm import run
from oracle import Oracle
from refusals import refused
from tiny_models import BASE, write_checkpoint
from transformers import LlamaConfig

from longspan import LLM, SamplingParams
from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.kv_record import KvRecord, LayerRecord
from longspan.core.steps import Forward
from longspan.model.adapter import Model
from longspan.model.source import prepare
from longspan.model.store import read_info
from longspan.pool_sizes import weight_bytes
from longspan.runtime.device_memory import CudaMemory, DeviceMemory, largest_step, measured
from longspan.runtime.messages import RankMemory
from longspan.runtime.pool import WINDOW_BYTES
from longspan.runtime.worker import Worker
from longspan.service import Service

TOTAL, STEP, ROOM = 10**8, 10**6, 2 * 10**6
RANK = RankMemory(available_bytes=ROOM, pool_bytes=0, weight_bytes=2 * 10**6, step_bytes=STEP, num_devices=8)
RECORD = KvRecord(layers=(LayerRecord(num_heads=9, num_kv_heads=3, key_bytes=64, value_bytes=64),) * 3)
"""Of three layers that are alike."""
TOKEN_BYTES = 3 * 2 * 3 * 16 * 4
"""Bytes of a token's KV in the tiny model: 3 layers, 3 heads of 16 float32 numbers."""


@dataclass
class FakeMemory:
    """A device with given figures: `room` bytes are free while the step runs."""

    room: int
    step: int = STEP
    num_devices: int = 8
    calls: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.calls.append("begin")

    def step_bytes(self) -> int:
        self.calls.append("step")
        return self.step

    def free_and_total(self) -> tuple[int, int]:
        self.calls.append("free")
        return TOTAL // 10 + self.room, TOTAL


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[FakeMemory]], type[LLM]]:
    """Makes engines whose workers are threads on devices with these figures."""

    def make(probes: Sequence[FakeMemory]) -> type[LLM]:
        class Launcher(InOrderLauncher):
            def probe(self, rank: int) -> FakeMemory:
                return probes[rank]

        def service(*args: Any, **kwargs: Any) -> Service:
            return Service(*args, **kwargs, launcher=Launcher)

        monkeypatch.setattr("longspan.service.measures_memory", lambda given: given.num_gpu_blocks_override is None)
        return type("MeasuringLLM", (LLM,), {"make_service": staticmethod(service)})

    return make


def options(model: Path, **given: object) -> dict[str, Any]:
    sizes = {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 7}
    return {"model": str(model), "dtype": "float32", "skip_tokenizer_init": True, **sizes, **given}


def num_blocks(
    room: int, copies: int = 1, *, windows: int = 0, share: int = 9, fullest: int = 9, layers: int = 3
) -> int:
    """Return the blocks of the pool on the rank with the least memory, which has `share` of the heads of all layers.

    The pool of the measured step is freed, and memory for copies of a layer is left.
    """
    left = room + 48 * TOKEN_BYTES // 9 * share - STEP - windows * WINDOW_BYTES
    return left * layers // (layers + copies) // (16 * TOKEN_BYTES // 9 * fullest)


def test_pools_fill_the_memory_that_the_largest_step_leaves(
    tiny: Path, oracle: Oracle, measuring: Callable[..., type[LLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with measuring([FakeMemory(ROOM)])(**options(tiny)):
        pass  # the first start of all tries the model on a small copy, by workers too
    ran, run_step = list[Forward](), Worker.run
    monkeypatch.setattr(Worker, "run", lambda self, step: (ran.append(step), run_step(self, step))[1])
    probe = FakeMemory(ROOM)
    with measuring([probe])(**options(tiny)) as llm:
        [step] = ran
        assert sum(part.stop - part.start for part in step.parts) == 48
        assert sum(part.sample is not None for part in step.parts) == 7
        assert probe.calls == ["begin", "step", "free", "step", "free"]
        assert llm.engine.config.cluster.num_blocks == (num_blocks(ROOM),)
        assert num_free_blocks(llm) == [num_blocks(ROOM)]
        length = llm.max_model_len - 6
        assert length == num_blocks(ROOM) * 16 - 6
        prompt = [3 + i % 190 for i in range(length)]
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert output.outputs[0].token_ids == oracle.complete(prompt, 6).token_ids


@pytest.mark.parametrize("least", [0, 1, 2, 3])
@pytest.mark.parametrize("spec", ["2xtp2", "2xpp2"])
def test_the_fullest_rank_decides(tiny: Path, measuring: Callable[..., type[LLM]], spec: str, least: int) -> None:
    room = ROOM + 4 * WINDOW_BYTES
    probes = [FakeMemory(room + 10**6 * (rank != least)) for rank in range(4)]
    with measuring(probes)(**options(tiny, parallel=spec)) as llm:
        cluster = llm.engine.config.cluster
    _, stage, shard = cluster.at(least)
    share = 3 * (2, 1)[shard] if cluster.tp(0) == 2 else 3 * len(cluster.layers(0, stage))
    wanted = num_blocks(room, 3, windows=4, share=share, fullest=6, layers=3 if cluster.tp(0) == 2 else 2)
    assert cluster.num_blocks == (wanted, wanted)


def test_roles_have_pools_of_their_own() -> None:
    cluster = Cluster.of("2", "tp2").with_layers(3, 1.0)
    ranks = [replace_memory(available_bytes=room) for room in (10**9, 10**9 + 5, 2 * 10**9, 2 * 10**9 - 8)]
    memory = DeviceMemory(record=RECORD, cluster=cluster, ranks=tuple(ranks))
    left = [room - STEP - 2 * WINDOW_BYTES for room in (10**9, 10**9, 2 * 10**9 - 8)]
    assert [memory.kv_bytes(cluster, one, 0) for one in cluster.instances] == [one * 3 // 6 for one in left]


def test_a_pool_leaves_space_for_copies_of_its_largest_layer() -> None:
    """A linear layer, keys and values, and a latent: 24, 16 and 40 bytes of a block."""
    linear = LayerRecord(num_heads=2, num_kv_heads=2, state_bytes=12)
    paged = LayerRecord(num_heads=2, num_kv_heads=1, key_bytes=10, value_bytes=6)
    latent = LayerRecord(num_heads=2, num_kv_heads=1, key_bytes=40)
    cluster = Cluster.of("2").with_layers(3, 1.0)
    memory = DeviceMemory(record=KvRecord(layers=(linear, paged, latent)), cluster=cluster, ranks=(RANK, RANK))
    left = ROOM - STEP - 2 * WINDOW_BYTES
    assert memory.kv_bytes(cluster, 0, 0) == left * 80 // (80 + 3 * 40)


def test_ranks_that_share_a_device_divide_it() -> None:
    """Each keeps its own needs and half of the shared memory."""
    cluster = Cluster.of("tp2").with_layers(3, 1.0)
    ranks = [replace_memory(num_devices=1, pool_bytes=pool, weight_bytes=pool) for pool in (10**6, 3 * 10**6)]
    memory = DeviceMemory(record=RECORD, cluster=cluster, ranks=tuple(ranks))
    assert memory.kv_bytes(cluster, 0, 0) == ((ROOM + 8 * 10**6) // 2 - 3 * 10**6 - STEP) * 3 // 4


@pytest.mark.parametrize(("spec", "step"), [("1", 2 * STEP), ("tp4", STEP)])
def test_another_split_goes_by_the_weights_it_would_have(spec: str, step: int) -> None:
    """Larger shares take more for a step."""
    memory = DeviceMemory(record=RECORD, cluster=Cluster.of("tp2").with_layers(3, 1.0), ranks=(RANK, RANK))
    other = Cluster.of(spec).with_layers(3, 1.0)
    assert memory.kv_bytes(other, 0, 10**6) == (ROOM + RANK.weight_bytes - 10**6 - step) * 3 // 4


def test_more_ranks_on_the_same_devices_have_less() -> None:
    memory = DeviceMemory(
        record=RECORD, cluster=Cluster.of("1").with_layers(3, 1.0), ranks=(replace_memory(num_devices=1),)
    )
    two = Cluster.of("tp2").with_layers(3, 1.0)
    assert memory.kv_bytes(two, 0, 10**6) == ((ROOM + RANK.weight_bytes) // 2 - 10**6 - STEP) * 3 // 4


def test_sizes_follow_a_reshard_and_outlast_lost_workers(
    tiny: Path, oracle: Oracle, measuring: Callable[..., type[LLM]]
) -> None:
    """Measurements at the start stay valid."""
    with measuring([FakeMemory(2 * ROOM) for _ in range(2)])(**options(tiny, parallel="tp2", policy="chunked")) as llm:
        assert llm.engine.config.cluster.num_blocks == (num_blocks(2 * ROOM, share=3, fullest=6),)
        llm.service.restart()
        assert llm.engine.config.cluster.num_blocks == (num_blocks(2 * ROOM, share=3, fullest=6),)
        llm.reshard("pp2")
        prompt = [3 + i % 190 for i in range(90)]
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        assert output.outputs[0].token_ids == oracle.complete(prompt, 9).token_ids
        [found] = llm.engine.config.cluster.num_blocks
        assert 0 < found < num_blocks(2 * ROOM, fullest=6, layers=2), "a step takes twice as much"


def test_pools_of_every_phase_follow_the_measurement_of_the_first(
    tiny: Path, oracle: Oracle, measuring: Callable[..., type[LLM]]
) -> None:
    """Also where a rank is a spare one in the first, and so has no weights yet."""
    roles = {"prefill_parallel": "1", "decode_parallel": "tp2", "policy": "seesaw", "host_kv_gib": 0.01}
    with measuring([FakeMemory(2 * ROOM) for _ in range(2)])(**options(tiny, **roles)) as llm:
        first, second = llm.engine.config.phases
        assert first.num_spare == 1 and first.num_blocks == (num_blocks(2 * ROOM),)
        info, left = llm.service.info, 2 * ROOM - STEP  # the spare rank has nothing but this
        weights = int(3 * info.layer_weights / 2 + 2 * info.vocab_size * info.hidden_size) * 4
        assert second.num_blocks == ((left - weights) * 3 // 4 // (16 * TOKEN_BYTES // 9 * 6),)
        prompts = [[3 + (i + j) % 190 for i in range(30 + 9 * j)] for j in range(4)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == oracle.complete(prompt, 9).token_ids


@pytest.mark.parametrize("spec", ["1", "tp2", "pp2", "tp2pp2"])
def test_weights_of_another_split_are_known_before_it_is_there(spec: str, tmp_path: Path) -> None:
    """Only norms are missing, which every shard holds completely."""
    sizes = BASE | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    files = prepare(str(write_checkpoint(LlamaConfig(**sizes), tmp_path)), dtype="float32")
    info = read_info(files.weights)
    cluster = Cluster.of(spec).with_layers(info.num_layers, 0.0)
    found = []
    for rank in cluster.ranks(0):
        _, stage, shard = cluster.at(rank)
        layers, tp = cluster.layers(0, stage), cluster.tp(0)
        found.append(Model(files, torch.device("cpu"), tp_index=shard, tp=tp, layers=layers).weight_bytes)
    assert weight_bytes(info, cluster, 0, torch.float32) == pytest.approx(max(found), rel=0.01)


def test_a_cuda_device_is_asked_for_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the allocator keeps of the step is freed before the measurement."""
    taken = {"memory_reserved": 300, "max_memory_reserved": 500}

    def empty() -> None:
        taken["memory_reserved"] = 120

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: taken.update(max_memory_reserved=120))
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name: taken[name])
    probe = CudaMemory(torch.device("cuda", 1))
    probe.begin()
    assert probe.step_bytes() == 0, "earlier steps do not count"
    taken.update(memory_reserved=300, max_memory_reserved=500)
    found = measured(probe, pool_bytes=7, weight_bytes=8)
    assert found == RankMemory(available_bytes=0, pool_bytes=7, weight_bytes=8, step_bytes=380, num_devices=4)


def test_too_little_memory_is_refused(tiny: Path, tmp_path: Path, measuring: Callable[..., type[LLM]]) -> None:
    """Nothing of the failed start is left: another engine can use the same folder at once."""
    per_block = 16 * TOKEN_BYTES
    room = STEP - 3 * per_block + per_block  # of which a fourth is left for a copy
    words = (
        f"^{per_block * 3 // 4} bytes of KV memory per rank hold no block of {per_block} bytes: "
        "use a larger `tp` or `pp`"
    )
    tiers = {"host_kv_gib": 0.01, "disk_kv_gib": 0.01, "disk_kv_dir": str(tmp_path)}
    with pytest.raises(ValueError, match=words) as refusal:
        measuring([FakeMemory(room)])(**options(tiny, **tiers))
    with measuring([FakeMemory(ROOM)])(**options(tiny, **tiers)):
        pass  # it takes the folder, although the error refers to its last owner
    assert refusal.traceback


def test_a_length_that_does_not_fit_is_refused(tiny: Path, measuring: Callable[..., type[LLM]]) -> None:
    """The refusal follows the measurement. No estimate refuses anything before."""
    fits = num_blocks(ROOM) * 16
    with measuring([FakeMemory(ROOM)])(**options(tiny, max_model_len=fits)) as llm:
        assert llm.max_model_len == fits
    with refused("max_model_len"):
        measuring([FakeMemory(ROOM)])(**options(tiny, max_model_len=fits + 1))


def test_an_explicit_number_of_blocks_is_not_measured(tiny: Path, measuring: Callable[..., type[LLM]]) -> None:
    probe = FakeMemory(0)
    with measuring([probe])(**options(tiny, num_gpu_blocks_override=7)) as llm:
        assert num_free_blocks(llm) == [7]
    assert probe.calls == ["begin"]


@pytest.mark.usefixtures("signals")
def test_a_device_that_is_full_is_a_mistake_of_the_user(
    tiny: Path, measuring: Callable[..., type[LLM]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a lost worker."""
    with measuring([FakeMemory(ROOM)])(**options(tiny)):
        pass  # as above: workers fail from here on

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("longspan.LLM", measuring([FakeMemory(ROOM)]))
    monkeypatch.setattr("longspan.cli.options.start_server", lambda: None)
    monkeypatch.setattr(Worker, "run", fails)
    arguments = ("--dtype", "float32", "--skip-tokenizer-init", "--token-ids", "3,4", "--max-num-batched-tokens", "64")
    assert run("generate", str(tiny), *arguments) == 2
    words = "the device of rank 0 has too little memory for the model and a step of 64 tokens: use a larger --tp"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "context", "lengths", "blocks"),
    [(48, 7, 4096, [42, *[1] * 6], 3), (48, 1, 20, [16, 16, 16], 1), (4, 128, 4096, [1, 1, 1, 1], 1)],
)
def test_the_largest_step(num_tokens: int, num_seqs: int, context: int, lengths: list[int], blocks: int) -> None:
    """No request in it is longer than the model's context."""
    config = EngineConfig(
        cluster=Cluster.of("2", num_blocks=[1, 1]),
        block_size=16,
        max_model_len=100,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
    )
    cluster, step = largest_step(config, context)
    assert cluster.num_blocks == (blocks, blocks)
    for instance in (0, 1):
        assert [part.stop for part in step.parts if part.group == (instance,)] == lengths
    assert len({part.request_id for part in step.parts}) == len(step.parts)


def replace_memory(**figures: int) -> RankMemory:
    fields = {name: getattr(RANK, name) for name in RankMemory.__struct_fields__}
    return RankMemory(**fields | figures)
