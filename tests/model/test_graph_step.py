"""Steps that are recorded and replayed, against the same model layer by layer: a tape replays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import pytest
import torch
from engines import InOrderLauncher, ThreadLLM
from interpreted import Run
from late_copies import LateCopies
from oracle import Oracle, assert_exact
from tape import Tape, recordable_sums
from thread_launcher import ThreadLauncher
from tiny_models import TINY, write_checkpoint
from tiny_types import tiny_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longspan import RequestOutput, SamplingParams
from longspan.attn import paged_splits
from longspan.attn.backends import NOWHERE, Partial
from longspan.attn.backends.pytorch import AttentionBackend, TorchCpu
from longspan.attn.paged import PagedKv, PagedPlan, Reads, on_device
from longspan.attn.paged_splits import NumberBuffer
from longspan.attn.spec import AttnSpec
from longspan.model import graph_step
from longspan.model.adapter import Model
from longspan.model.recording import (
    CudaRecorder,
    HostReadError,
    Record,
    Recording,
    Replay,
    ReplayedStep,
    WithoutHostReads,
)
from longspan.model.source import prepare
from longspan.model.step import Rows, SingleTokens
from longspan.model.trunk import LayerTrunk
from longspan.runtime import rank
from longspan.runtime.batch import Packed
from longspan.runtime.worker import Transports
from longspan.service import Service

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK_SIZE, NUM_BLOCKS = 16, 80
RECORDED = ["llama", "llama-yarn", "phi3", "qwen2", "qwen3", "mistral-window", "gemma2", "glm4", "mixtral", "llama4"]
RECORDED += ["granite_swa", "gpt_oss"]
TOLERANCE = 1e-4


def triton_backend() -> AttentionBackend:
    from longspan.attn.backends.triton import TritonCuda

    return TritonCuda()


class Recordable(TorchCpu):
    """Computes by PyTorch as recordable kernels do, from tensors of fixed sizes only."""

    def is_recordable(self, spec: AttnSpec) -> bool:
        return spec.head_dim > 0

    def store(self, kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the first token again for each padding token."""
        row = torch.where(blocks == NOWHERE, 0, torch.arange(len(blocks)))
        super().store(kv, blocks[row], offsets[row], k[:, row], v[:, row])

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        splits, size = plan.splits, kv.block_size
        of_queries = splits.of_query.numpy()  # an operator would be refused
        assert (np.diff(of_queries) >= 0).all(), "padding splits are the last"
        assert (splits.first.numpy() < splits.last.numpy()).sum() == of_queries[-1], "and have no blocks"
        item, split = (torch.arange(len(one)) for one in (splits.blocks, splits.owner))
        of_split = (splits.first[:, None] <= item) & (item < splits.last[:, None])
        of_query = (splits.of_query[:-1, None] <= split) & (split < splits.of_query[1:, None])
        slot = torch.arange(size)
        seen = (splits.low[:, None] <= slot) & (slot < splits.high[:, None])
        seen = (of_query.float() @ of_split.float() > 0)[:, :, None] & seen
        k, v = (pool[splits.blocks].transpose(0, 1).flatten(1, 2) for pool in (kv.keys, kv.values))
        rows = q.unflatten(0, (spec.num_kv_heads, -1))
        scores = torch.einsum("hrtd,hsd->hrts", rows, k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~seen.flatten(1), -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        return torch.einsum("hrts,hsd->hrtd", weights, v).flatten(0, 1), lse.flatten(0, 1)


class Decodes:
    """A model that records, and steps of single tokens of it, each computed layer by layer, too."""

    def __init__(
        self, folder: Path, record: Record, backend: AttentionBackend, device: str = "cpu", *, triton: bool = False
    ) -> None:
        self.device, self.backend = torch.device(device), backend
        recording = Recording(backend=self.backend, record=record)
        self.model = Model(prepare(str(folder), dtype="float32"), self.device, recording=recording, triton=triton)
        self.specs = self.model.specs
        self.change_pool(0)

    def change_pool(self, seed: int) -> None:
        """Make another pool, with an unused block before its first. A store at block -1 would change it."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(2, NUM_BLOCKS + 1, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim) for spec in self.specs]
        self.pairs = [torch.randn(shape, generator=generator).to(self.device) for shape in shapes]
        self.kv = pool_of(self.pairs)

    def step(self, *stops: int, seed: int = 0) -> Tensor:
        """Compute the last token of requests with `stops` tokens. Return the logits."""
        generator = torch.Generator().manual_seed(seed)
        num_tokens, positions = len(stops), torch.tensor(stops) - 1
        tokens = torch.randint(0, 199, (64,), generator=generator)[:num_tokens]
        numbers = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
        tables = [[next(numbers) for _ in range(0, stop, BLOCK_SIZE)] for stop in stops]
        plans = {}
        for visibility in {spec.visibility for spec in self.specs}:
            starts = [visibility.first(stop - 1) for stop in stops]
            reads = [Reads(blocks=t, start=a, stop=b) for t, a, b in zip(tables, starts, stops, strict=True)]
            plans[visibility] = self.backend.plan(reads, self.kv[0])
        step = SingleTokens(
            blocks=torch.tensor([table[-1] for table in tables]),
            offsets=positions % BLOCK_SIZE,
            kv=self.kv,
            plans=[plans[spec.visibility] for spec in self.specs],
        )
        own_pairs = [pair.clone() for pair in self.pairs]
        rows = Rows(tokens=tokens, positions=positions, keep=torch.arange(num_tokens), rope_lengths=positions + 1)
        wanted = self.model.trunk.run(rows, ByLayers(self, pool_of(own_pairs), step)).result
        found = self.model.trunk.run(rows, AtOnce(self, self.kv, step)).result.clone()
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(self.pairs, own_pairs, atol=TOLERANCE, rtol=TOLERANCE)
        return found


def pool_of(pairs: Sequence[Tensor]) -> tuple[PagedKv, ...]:
    return tuple(PagedKv(keys=keys[1:], values=values[1:]) for keys, values in pairs)


@dataclass
class ByLayers:
    """Attends as a step says, wherever its slots are."""

    decodes: Decodes
    kv: Sequence[PagedKv]
    step: SingleTokens

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        backend, step = self.decodes.backend, self.step
        backend.store(self.kv[layer], *on_device((step.blocks, step.offsets), q.device), k, v)
        out, lse = backend.attend_paged(q, self.kv[layer], step.plans[layer], self.decodes.specs[layer])
        sinks = self.decodes.model.sinks.get(layer)
        return out if sinks is None else out * (1 / (1 + (sinks[:, None] - lse).exp()))[..., None]


class AtOnce(ByLayers):
    def single_tokens(self) -> SingleTokens:
        return self.step


# ---------------------------------------------------------------- with PyTorch's operators


@pytest.mark.parametrize("name", RECORDED)
def test_a_replay_equals_the_layers(folders: dict[str, Path], name: str) -> None:
    """Batches have the size of a graph or are padded, contexts grow and shrink, and the pool changes."""
    tape = Tape()
    decodes = Decodes(folders[name], tape, Recordable())
    for number, stops in enumerate([(1,), (40, 3, 17), (8, 16, 9, 31), (150, 1), (149, 2), (5, 99, 7, 64, 33)]):
        decodes.step(*stops, seed=number)
        if number == 2:
            assert tape.num_recorded == 2
            decodes.change_pool(1)
            decodes.step(70, 1, 25, seed=9)
            assert tape.num_recorded == 3
    assert tape.num_replayed == 7 > tape.num_recorded


@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gemma4", "mistral3", "qwen2_vl", "qwen3_vl"])
def test_text_of_multimodal_models_is_recorded(tmp_path: Path, name: str) -> None:
    """The modules around the language model read nothing on the host."""
    tape = Tape()
    decodes = Decodes(write_checkpoint(tiny_config(name), tmp_path), tape, Recordable())
    for number, stops in enumerate([(1,), (40, 3, 17), (8, 16, 9, 31)]):
        decodes.step(*stops, seed=number)
    assert tape.num_recorded == 2
    assert tape.num_replayed == 3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prepared_sizes_are_recorded_once(folders: dict[str, Path], name: str) -> None:
    """Graphs of 1, 2 and 4 tokens, each with space for contexts of 256 and of 1,024 tokens."""
    tape = Tape()
    decodes = Decodes(folders[name], tape, Recordable())
    assert [*decodes.model.trunk.prepare(decodes.kv, 3, 1000)] == [(number, 6) for number in range(1, 7)]
    assert (tape.num_recorded, tape.num_replayed) == (6, 0)
    for stops in ((1,), (900, 2), (300, 280, 310), (255,), (700, 1, 1, 200)):
        decodes.step(*stops)
    assert (tape.num_recorded, tape.num_replayed) == (6, 5)


def test_prepared_sizes_end_with_the_pool(tiny: Path) -> None:
    """The pool has 1,280 tokens, so that two requests without common blocks have at most 640 tokens on average."""
    tape = Tape()
    decodes = Decodes(tiny, tape, Recordable())
    for _ in decodes.model.trunk.prepare(decodes.kv, 8, 10**6):
        pass
    assert sorted((size.rows, size.context) for size in decodes.model.trunk.step._graphs) == [
        *[(1, 256), (1, 1024), (1, 4096)],
        *[(2, 256), (2, 1024)],
        *[(4, 256), (4, 1024)],
        (8, 256),
    ]


def test_steps_of_many_tokens_are_not_recorded(tiny: Path) -> None:
    tape = Tape()
    decodes = Decodes(tiny, tape, Recordable())
    with mock.patch.object(graph_step, "_MAX_ROWS", 2):
        decodes.step(1, 2, 3)
        assert (tape.num_recorded, tape.num_replayed) == (0, 0)
        decodes.step(2, 3)
    assert (tape.num_recorded, tape.num_replayed) == (1, 1)


class Refusing:
    """A recorder that cannot record."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self, _: object) -> Any:
        self.num_asked += 1
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("name", "num_asked", "why"),
    [
        ("llama", 1, "stream is capturing"),
        ("llama-longrope", 0, "aten._local_scalar_dense.default needs values"),
        ("phi3-longrope", 0, "aten._local_scalar_dense.default needs values"),
    ],
)
def test_a_model_that_cannot_be_recorded_is_computed_by_layers(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture, name: str, num_asked: int, why: str
) -> None:
    record = Refusing()
    decodes = Decodes(folders[name], record, Recordable())
    caplog.clear()  # of the weights that were written
    with caplog.at_level(logging.WARNING, "longspan"):
        decodes.step(1, 2)
        decodes.step(3)
    assert record.num_asked == num_asked
    [line] = caplog.messages
    assert line.startswith("decode steps are computed layer by layer") and why in line


class Full(Tape):
    """A recorder that has memory for graphs of a few rows only."""

    def __init__(self, max_rows: int) -> None:
        super().__init__()
        self.num_refused, self._max_rows = 0, max_rows

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        if len(compute()) > self._max_rows:
            self.num_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(compute)


def test_a_size_without_memory_for_its_graph_is_computed_by_layers(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = Full(max_rows=2)
    decodes = Decodes(tiny, record, Recordable())
    caplog.clear()  # of the weights that were written
    with caplog.at_level(logging.WARNING, "longspan"):
        decodes.step(1, 2)
        decodes.step(4, 5, 6)
        decodes.step(7, 8, 9, 10)
        decodes.step(11, 12)
    assert (record.num_refused, record.num_recorded, record.num_replayed) == (1, 1, 2)
    [line] = caplog.messages
    assert "up to 4 requests" in line and "no memory" in line


def test_a_start_without_memory_for_all_graphs_raises(tiny: Path) -> None:
    decodes = Decodes(tiny, Full(max_rows=2), Recordable())
    with pytest.raises(torch.OutOfMemoryError):
        list(decodes.model.trunk.prepare(decodes.kv, 4, 100))


class EagerSteps:
    """Counts the decode steps of engines that are computed layer by layer, and not by replays."""

    def __init__(self) -> None:
        self.num = 0
        self._run = LayerTrunk.run

    def __enter__(self) -> Self:
        run = self._run

        def counted(trunk: LayerTrunk, rows: Rows, attend: Any, **arguments: Any) -> Any:
            if isinstance(rows, Packed) and len(rows.keep) == len(rows.tokens):
                self.num += 1
            return run(trunk, rows, attend, **arguments)

        LayerTrunk.run = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        LayerTrunk.run = self._run  # type: ignore[method-assign]


class RecordableLauncher(InOrderLauncher):
    """Ranks whose sums a tape records, as CUDA graphs record sums of NCCL."""

    def transports(self, rank: int, num_ranks: int) -> Transports:
        transports = super().transports(rank, num_ranks)
        inside: Any = transports.steps.inside
        inside.sums = recordable_sums(inside.sums)
        return transports


class RecordableLLM(ThreadLLM):
    make_service = partial(Service, launcher=RecordableLauncher)


class MessageLLM(ThreadLLM):
    """Ranks that sum by messages, as gloo's do."""

    make_service = partial(Service, launcher=ThreadLauncher)


@contextmanager
def engine(
    folder: Path, *, llm_class: type[ThreadLLM] = RecordableLLM, max_context: int = 128, **given: Any
) -> Iterator[tuple[ThreadLLM, list[Tape]]]:
    """Start an engine that records on the CPU. Each rank has a tape."""
    backend, tapes = Recordable(), list[Tape]()

    def recording_of(_backend: object, _device: object) -> Recording:
        tapes.append(Tape())
        return Recording(backend=backend, record=tapes[-1], between=tapes[-1].between)

    defaults = {"block_size": 16, "num_gpu_blocks_override": 24, "max_model_len": 128, "max_num_seqs": 3}
    with (
        mock.patch.object(rank, "backend_of", return_value=backend),
        mock.patch.object(rank, "recording_of", side_effect=recording_of),
        llm_class(str(folder), skip_tokenizer_init=True, **{**defaults, **given}) as llm,
    ):
        llm.service.executor.prepare(3, max_context, 64)  # as engines on CUDA devices
        yield llm, tapes


NUM_TOKENS = 12
PROMPTS = [[5, 6, 7], [8] * 100, list(range(30))]


def decode(folder: Path, **given: Any) -> tuple[list[RequestOutput], list[Tape]]:
    """Generate, with replays of prepared steps unless `enforce_eager` is given."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_logits=True)
    with engine(folder, **given) as (llm, tapes), EagerSteps() as eager:
        prepared = [tape.num_recorded for tape in tapes]
        outputs = llm.generate(PROMPTS, params)
        assert [tape.num_recorded for tape in tapes] == prepared, "requests meet prepared steps only"
        assert given.get("enforce_eager") or eager.num == 0
    return outputs, tapes


SHARED = {"policy": "context", "policy_options": {"threshold": "20"}}
"""Long prompts are shared by all instances, and decoded by `ring_q`."""
PARALLEL: dict[str, dict[str, Any]] = {
    "one": {},
    "tp3": {"tp": 3},
    "tp2 by messages": {"tp": 2, "llm_class": MessageLLM},
    "pp2": {"pp": 2},
    "tp2pp2": {"parallel": "tp2pp2"},
    "ring_q": {"instances": 2, **SHARED},
    "ring_q of tp2": {"parallel": "2xtp2", **SHARED},
    "keys on hosts": {"host_kv_gib": 0.02, "num_gpu_blocks_override": 6},
}


@pytest.mark.parametrize("parallel", PARALLEL)
def test_no_decode_step_of_an_engine_is_eager(tiny: Path, oracle: Oracle, parallel: str) -> None:
    """Every rank replays, and the tokens equal the tokens of transformers."""
    outputs, tapes = decode(tiny, **PARALLEL[parallel])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_exact(output, oracle.complete(prompt, NUM_TOKENS))
    assert all(tape.num_recorded and tape.num_replayed for tape in tapes)


@pytest.mark.parametrize("parallel", ["one", "tp3", "pp2", "ring_q of tp2", "keys on hosts"])
def test_recorded_steps_have_sinks(folders: dict[str, Path], oracles: dict[str, Oracle], parallel: str) -> None:
    """In the graphs, and in attention that the host computes between two of them."""
    outputs, tapes = decode(folders["granite_swa"], **PARALLEL[parallel])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_exact(output, oracles["granite_swa"].complete(prompt, NUM_TOKENS))
    assert all(tape.num_recorded and tape.num_replayed for tape in tapes)


RANDOM = SamplingParams(temperature=1.5, top_p=0.9, top_k=50, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    replace(RANDOM, min_tokens=5),
    RANDOM,
]


@pytest.mark.parametrize("parallel", ["one", "tp3", "ring_q", "pp2"])
def test_tokens_stay_on_the_device_between_steps(tiny: Path, parallel: str) -> None:
    """The next step is launched before the host has read the tokens. They are the same. Stages send theirs."""
    with engine(tiny, **PARALLEL[parallel]) as (llm, _):
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLED)]
    with LateCopies() as late, engine(tiny, **PARALLEL[parallel]) as (llm, _):
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLED)]
    assert found == wanted
    if parallel == "pp2":
        assert late.num_ahead == 0
    else:
        assert late.num_ahead >= NUM_TOKENS - 3


@pytest.mark.parametrize("needs", [{"logprobs": 1}, {"repetition_penalty": 1.5}, {"output_logits": True}])
def test_the_host_reads_the_tokens_that_it_needs_before_the_next_step(tiny: Path, needs: dict[str, Any]) -> None:
    params = [*SAMPLED[:2], replace(RANDOM, **needs)]
    with engine(tiny) as (llm, _):
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with LateCopies() as late, engine(tiny) as (llm, _):
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert found == wanted and late.num_ahead == 0


def test_an_eager_engine_records_nothing(tiny: Path) -> None:
    _, tapes = decode(tiny, enforce_eager=True)
    assert [tape.num_recorded for tape in tapes] == [0]


def test_sums_of_graphs_that_are_recorded_late_are_recorded_too(tiny: Path) -> None:
    """Contexts of up to 16 tokens are prepared. Requests that share blocks, for example, need larger graphs."""
    with (
        mock.patch.object(graph_step, "_MIN_CONTEXT", 16),
        engine(tiny, tp=3, max_context=16) as (llm, tapes),
        EagerSteps() as eager,
    ):
        prepared = [tape.num_recorded for tape in tapes]
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    assert all(tape.num_recorded > before for tape, before in zip(tapes, prepared, strict=True))
    assert eager.num == 0 and not any(tape.num_actions for tape in tapes), "no sum is made by the host"


def test_replays_count_the_bytes_of_sums(tiny: Path) -> None:
    """Equal to steps that are computed layer by layer, without the rows that a graph adds."""
    sent = []
    for is_eager in (False, True):
        with engine(tiny, parallel="tp2", enforce_eager=is_eager) as (llm, _):
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            llm.generate([PROMPTS[0], PROMPTS[2]], params)
            sent.append(llm.bytes_exchanged)
    assert sent[0] == sent[1] and sent[0]


def test_only_kernels_that_follow_from_shapes_are_recorded(tiny: Path) -> None:
    recording = Recording(backend=TorchCpu(), record=Tape())
    model = Model(prepare(str(tiny), dtype="float32"), torch.device("cpu"), recording=recording)
    assert isinstance(model.trunk, LayerTrunk)
    assert rank.recording_of(TorchCpu(), torch.device("cpu")) is None
    assert rank.recording_of(TorchCpu(), torch.device("cuda")) is not None


# ---------------------------------------------------------------- with Triton's kernels


def compare_steps(folder: Path, record: Record, device: str = "cpu") -> None:
    decodes = Decodes(folder, record, triton_backend(), device)
    with mock.patch.object(paged_splits, "_SPLIT_TOKENS", 2 * BLOCK_SIZE):
        decodes.step(70, 3, 17)
        decodes.step(40, 64, 65, 1, seed=1)


def compare_neighbours(folder: Path) -> None:
    """Compute three tokens with padding, and with a token of a longer request, in the same graph or a larger one."""
    tape = Tape()
    decodes = Decodes(folder, tape, triton_backend())
    alone = decodes.step(9, 30, 17)
    for num_recorded, other in ((1, 1), (1, 100), (2, 1100)):
        assert torch.equal(decodes.step(9, 30, 17, other)[:3], alone)
        assert tape.num_recorded == num_recorded
    compare_steps(folder, tape)
    assert tape.num_replayed == 6


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", ["gemma2", "granite_swa"])
def test_padding_changes_no_bit(assert_interpreted: Run, tmp_path: Path, name: str) -> None:
    """Of a model with a window in one of two layers, and softcaps or sinks."""
    config = TINY[name]()
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 2, 1
    config.layer_types = config.layer_types[:2]
    assert_interpreted(compare_neighbours, write_checkpoint(config, tmp_path))


# ---------------------------------------------------------------- how steps are recorded


def assign(numbers: Tensor) -> None:
    numbers[numbers > 1] = 3


@pytest.mark.parametrize(
    "read",
    [
        lambda numbers: numbers.sum().item(),
        lambda numbers: bool((numbers > 1).any()),
        lambda numbers: numbers.nonzero(),
        lambda numbers: numbers[numbers > 1],
        assign,
    ],
    ids=["item", "if", "nonzero", "mask", "assign"],
)
def test_reads_by_the_host_are_found(read: Callable[[Tensor], object]) -> None:
    numbers, places = torch.tensor([1, 0, 2]), torch.tensor([2, 1, 0])
    with WithoutHostReads():
        numbers[places] = numbers[places] + torch.where(numbers > 1, 0, 1)  # nothing of this does
        with pytest.raises(HostReadError, match="needs values of the device on the host"):
            read(numbers)


def test_copies_to_the_host_are_found() -> None:
    """By tensors that only say that they are on a device."""
    with FakeTensorMode(), WithoutHostReads():
        there = torch.ones(3, device="cuda") * torch.tensor(2.0)
        with pytest.raises(HostReadError, match="copies values of the device to the host"):
            there.cpu()
        with pytest.raises(HostReadError, match="copies values of the device to the host"):
            torch.empty(3).copy_(there)


def test_a_buffer_is_filled_and_padded() -> None:
    buffer = NumberBuffer([3, 1, 4], torch.device("cpu"))
    buffer.fill([torch.tensor(one).numpy() for one in ([7, 8], [9], [5])], [-1, 0, 6])
    assert [one.tolist() for one in buffer.arrays] == [[7, 8, -1], [9], [5, 6, 6, 6]]
    assert [one.storage_offset() for one in buffer.arrays] == [0, 4, 6], "multiples of 16 bytes"
    with pytest.raises(AssertionError, match="large enough"):
        buffer.fill([torch.arange(4).numpy()])


def test_arrays_go_to_a_device_in_one_copy() -> None:
    """A device without memory gets a copy. Arrays on the device are not copied."""
    here = torch.arange(3), torch.arange(5)
    assert on_device(here, torch.device("cpu")) is here
    there = on_device(here, torch.device("meta"))
    assert [(len(one), one.device.type) for one in there] == [(3, "meta"), (5, "meta")]
    assert on_device(there, torch.device("meta")) is there


class FakeCuda:
    """Replaces PyTorch's CUDA graphs and streams, and fails if the whole device is synchronised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools, self.replayed = list[Any](), list[Any]()
        self.main, self.side, self.capturing = mock.Mock(), mock.Mock(), None
        self.stream: Any = self.main
        fake: Any = self

        class Graph:
            def pool(self) -> object:
                return self

            def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local" and fake.capturing is None
                fake.pools.append((self, pool))
                fake.capturing = fake.stream

            def capture_end(self) -> None:
                assert fake.capturing is fake.stream
                fake.capturing = None

            def replay(self) -> None:
                fake.replayed.append(self)

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            before, fake.stream = fake.stream, chosen
            try:
                yield
            finally:
                fake.stream = before

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self.side)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=AssertionError("peers may wait for us")))


def test_cuda_graphs_share_their_memory_and_leave_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, results = FakeCuda(monkeypatch), [torch.zeros(1), torch.zeros(1)]
    record = CudaRecorder()

    def fail() -> Tensor:
        assert cuda.capturing is cuda.side
        raise RuntimeError("capture")

    replays = [record(lambda: results[0]), record(lambda: results[1])]
    with pytest.raises(RuntimeError, match="capture"):
        record(fail)
    assert cuda.stream is cuda.main and cuda.capturing is None
    assert cuda.side.mock_calls == [mock.call.wait_stream(cuda.main)] * 3
    assert cuda.main.mock_calls == [mock.call.wait_stream(cuda.side)] * 2
    (first, no_pool), *others = cuda.pools
    assert no_pool is None and [pool for _, pool in others] == [first, first]
    assert [replay(ReplayedStep(1)) for replay in replays] == results
    assert cuda.replayed == [graph for graph, _ in cuda.pools[:2]]


def test_host_actions_lie_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay calls them with its step. The recording does not, and nothing happens without a recording."""
    cuda, called, result = FakeCuda(monkeypatch), list[object](), torch.zeros(1)
    record = CudaRecorder()
    record.between(lambda _: called.append("at once"))

    def compute() -> Tensor:
        for number in (10, 20):
            record.between(lambda step, number=number: called.extend((number + step.num_tokens, *cuda.replayed[-1:])))  # type: ignore[misc]
        return result

    replay = record(compute)
    assert not called and len(cuda.pools) == 3
    graphs = [graph for graph, _ in cuda.pools]
    assert [pool for _, pool in cuda.pools] == [None, graphs[0], graphs[0]], "the graphs share memory"
    assert replay(ReplayedStep(3)) is result
    assert called == [13, graphs[0], 23, graphs[1]] and cuda.replayed == graphs
