"""What only a machine with a CUDA device can show: `pytest -m gpu`. Several ranks share a device if there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle, assert_exact
from test_graph_step import compare_steps
from test_triton import compare_gather, compare_paged, compare_store, reads_of
from tiny_models import TINY
from torch import Tensor

from longspan import LLM, SamplingParams
from longspan.attn.backends import AttentionBackend, CudaKernel, backend_of
from longspan.attn.backends.pytorch import TorchCuda
from longspan.attn.check import random_qkv, reference
from longspan.attn.hosted import PinnedStaging
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run, relate
from longspan.model.graph_step import CudaRecorder, Replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SPEC = AttnSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5, window=None, softcap=None)
PARALLEL: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"instances": 2, "policy": "context", "policy_options": {"threshold": "20"}},
    "chain": {"instances": 2, "policy": "context", "policy_options": {"threshold": "20", "exchange": "chain"}},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "roles": {"prefill_parallel": "2", "decode_parallel": "1"},
}


def families() -> Iterator[Any]:
    """Yields all but Llama on one instance, and in turns in one more way; other ways are `full`."""
    first, *others = PARALLEL
    for family, turn in zip([name for name in TINY if name != "llama"], itertools.cycle(others), strict=False):
        for parallel in PARALLEL:
            yield pytest.param(family, parallel, marks=[] if parallel in {first, turn} else [pytest.mark.full])


FAMILIES = [*families()]


@pytest.fixture(scope="module", params=["as_chosen", "pytorch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return backend_of(torch.device("cuda")) if request.param == "as_chosen" else TorchCuda()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 100, 128, 256])
@pytest.mark.parametrize("kind", ["full", "diagonal", "window", "window_before", "softcap"])
def test_attention_is_its_definition(backend: AttentionBackend, kind: str, head_dim: int, dtype: torch.dtype) -> None:
    window, softcap = (90 if "window" in kind else None), (20.0 if kind == "softcap" else None)
    spec = replace(SPEC, head_dim=head_dim, scale=head_dim**-0.5, window=window, softcap=softcap)
    q_run, k_run = Run(400, 700), Run(0, {"full": 400, "window_before": 450}.get(kind, 700))
    q, k, v = random_qkv(spec, len(q_run), len(k_run), dtype, seed=1)
    out, lse = backend.attend(q.cuda(), k.cuda(), v.cuda(), relate(q_run, k_run, window), spec)
    wanted, wanted_lse = reference(q, q_run.positions, k, v, k_run.positions, spec)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=TOLERANCE[dtype], rtol=1e-5)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("cached", [0, 400])
def test_each_kernel_takes_heads_that_share_keys(kernel: CudaKernel, cached: int) -> None:
    q, k, v = random_qkv(SPEC, 300, cached + 300, torch.bfloat16, seed=2)
    q_run, k_run = Run(cached, cached + 300), Run(0, cached + 300)
    out, lse = TorchCuda(kernel).attend(q.cuda(), k.cuda(), v.cuda(), relate(q_run, k_run, None), SPEC)
    wanted, wanted_lse = reference(q, q_run.positions, k, v, k_run.positions, SPEC)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=1e-2, rtol=0)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_kernels_for_blocks(head_dim: int, dtype: torch.dtype) -> None:
    """What they compare is asserted there, within the same tolerance."""
    spec = replace(SPEC, head_dim=head_dim, scale=head_dim**-0.5)
    compare_paged(spec, reads_of((3, 190), (0, 1), (17, 150)), 16, dtype, 0, "cuda")
    compare_store(spec, 77, dtype, "cuda")
    compare_gather(spec, 16, (3, 190), dtype, "cuda")


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "phi3"])
def test_a_graph_computes_what_the_layers_do(folders: dict[str, Path], name: str) -> None:
    """Replays follow each recording, which a model that is not recorded would not ask for."""
    record, replays = CudaRecorder(), list[Replay]()

    def counted(compute: Callable[[], Tensor]) -> Replay:
        replays.append(record(compute))
        return replays[-1]

    compare_steps(folders[name], counted, "cuda")
    assert replays


def test_tokens_are_the_same_with_graphs_and_without(tiny: Path) -> None:
    prompts = [[1 + (7 * i + length) % 190 for i in range(length)] for length in (1, 40, 150, 600, 31)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for enforce_eager in (False, True):
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 16}
        with LLM(str(tiny), device="cuda", enforce_eager=enforce_eager, **options) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_tokens_are_those_of_hugging_face(tiny: Path, oracle: Oracle, parallel: str) -> None:
    check(tiny, oracle, **PARALLEL[parallel])


@pytest.mark.parametrize("options", [{}, {"tp": 2}], ids=str)
def test_most_of_a_context_lies_on_the_host(tiny: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    """Prompts of up to 150 tokens, of which a device holds 48."""
    check(tiny, oracle, num_gpu_blocks_override=3, host_kv_gib=0.02, policy="chunked", **options)


@pytest.mark.parametrize("sizes", [[64] * 7, [512, 100, 512, 512, 3]], ids=str)
def test_pieces_come_whole_while_others_are_read(sizes: list[int]) -> None:
    staging, shape = PinnedStaging(torch.device("cuda")), (4, 64)
    pieces = [torch.randn(2, shape[0], size, shape[1]) for size in sizes]
    sums = []

    def begin(number: int) -> None:
        def fill(rooms: tuple[torch.Tensor, torch.Tensor]) -> None:
            for room, source in zip(rooms, pieces[number], strict=True):
                room.copy_(source)

        if number < len(pieces):
            staging.begin(number % 2, (shape[0], sizes[number], shape[1]), torch.float32, fill)

    begin(0)
    for number in range(len(pieces)):
        begin(number + 1)
        k, v = staging.end(number % 2)
        torch.cuda._sleep(10_000_000)  # what reads it begins late
        sums.append((k.double().sum() - v.double().sum()).reshape(1))
    wanted = torch.stack([piece[0].double().sum() - piece[1].double().sum() for piece in pieces])
    torch.testing.assert_close(torch.cat(sums).cpu(), wanted)


@pytest.mark.parametrize("parallel", ["one", "two", "tp2", "pp2", "roles"])
def test_tokens_of_smollm2(smollm2_oracle: Oracle, parallel: str) -> None:
    check("smollm2-135m", smollm2_oracle, **PARALLEL[parallel])


@pytest.mark.parametrize(("family", "parallel"), FAMILIES)
def test_tokens_of_every_family(
    folders: dict[str, Path], oracles: dict[str, Oracle], family: str, parallel: str
) -> None:
    check(folders[family], oracles[family], **PARALLEL[parallel])


def check(model: str | Path, oracle: Oracle, **options: Any) -> None:
    """Compares tokens, and logits within the tolerance, of prompts of several chunks with those on the CPU."""
    prompts = [[1 + (7 * i + length) % 190 for i in range(length)] for length in (1, 40, 150)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True)
    with LLM(
        str(model),
        device="cuda",
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        block_size=16,
        max_num_batched_tokens=48,
        **options,
    ) as llm:
        for output, prompt in zip(llm.generate(prompts, params), prompts, strict=True):
            assert_exact(output, oracle.complete(prompt, 6))
