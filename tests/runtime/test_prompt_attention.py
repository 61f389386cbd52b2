"""The attention of a prompt is Hugging Face's, in every layout, and independent of cached prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engines import ThreadLLM
from transformers import AutoModelForCausalLM

from longspan import SamplingParams
from longspan.outputs import RequestOutput

PROMPT = [5 + (number * 7) % 80 for number in range(110)]
FIRST = 90
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, attention_from=FIRST)
ALWAYS = {"policy": "context", "policy_options": {"threshold": "1"}}
EXCHANGES = ("ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden")
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 3},
    {"pp": 2},
    *({"instances": 2, "exchange": exchange, **ALWAYS} for exchange in EXCHANGES),
    {"parallel": "2xtp2", **ALWAYS},
    {
        "parallel": "2xtp2",
        "exchange": "alltoall",
        "policy": "context",
        "policy_options": {"threshold": "1", "weights": "host"},
    },
    {"parallel": "2xpp2", "exchange": "gather_hidden", **ALWAYS},
    {"instances": 2, "exchange": "chain", **ALWAYS},
    {
        "instances": 3,
        "exchange": "chain",
        "policy": "context",
        "policy_options": {"threshold": "1", "home": "computed"},
    },
    {"instances": 2, "policy": "runahead"},
    {"prefill_parallel": "2", "decode_parallel": "1", "policy": "tetris"},
    {"prefill_parallel": "2", "decode_parallel": "tp2", "policy": "seesaw", "host_kv_gib": 0.01},
    {"max_num_batched_tokens": 50},
    {"instances": 2, "max_num_batched_tokens": 48, **ALWAYS},
    {"num_gpu_blocks_override": 5, "host_kv_gib": 0.01, "max_num_batched_tokens": 32},
    {"instances": 2, "num_gpu_blocks_override": 3, "host_kv_gib": 0.01, "max_num_batched_tokens": 32, **ALWAYS},
]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> npt.NDArray[np.float32]:
    return weights_of(tiny)


def weights_of(folder: Path) -> npt.NDArray[np.float32]:
    """Return the attention weights of the question by Hugging Face, summed over layers, heads and queries."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        layers = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    total = sum(layer[0, :, FIRST:].sum(dim=(0, 1)) for layer in layers)
    return (total / total.sum()).numpy()


def answer(llm: ThreadLLM, params: SamplingParams = PARAMS) -> RequestOutput:
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return output


def opened(tiny: Path, **layout: Any) -> ThreadLLM:
    return ThreadLLM(str(tiny), skip_tokenizer_init=True, threads_per_rank=1, block_size=16, **layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_reports_the_attention_of_transformers(
    tiny: Path, expected: npt.NDArray[np.float32], layout: dict[str, Any]
) -> None:
    with opened(tiny, **layout) as llm:
        plain = answer(llm, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        for _ in range(2):  # the second time, the whole prompt is cached
            output = answer(llm)
            assert output.prompt_attention is not None
            np.testing.assert_allclose(output.prompt_attention, expected, atol=2e-5, rtol=1e-3)
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.prompt_attention is None


@pytest.mark.parametrize("exchange", ["ring_kv", "alltoall", "gather_hidden"])
def test_weights_include_sinks_and_windows(folders: dict[str, Path], exchange: str) -> None:
    folder = folders["gpt_oss"]
    expected = weights_of(folder)
    with opened(folder, instances=2, exchange=exchange, **ALWAYS) as llm:
        np.testing.assert_allclose(answer(llm).prompt_attention, expected, atol=2e-5, rtol=1e-3)


def test_requests_of_a_step_do_not_mix(tiny: Path, expected: npt.NDArray[np.float32]) -> None:
    with opened(tiny, instances=2, **ALWAYS) as llm:
        prompts = [PROMPT[::-1], PROMPT, [3, 4, 5] * 20]
        params = [SamplingParams(max_tokens=2, temperature=0), PARAMS, SamplingParams(max_tokens=4, attention_from=50)]
        plain, rated, other = llm.generate(prompts, params, use_tqdm=False)
    assert plain.prompt_attention is None
    assert rated.prompt_attention is not None
    np.testing.assert_allclose(rated.prompt_attention, expected, atol=2e-5, rtol=1e-3)
    assert other.prompt_attention is not None
    assert len(other.prompt_attention) == 60


def test_sparse_layouts_report_attention_over_all_keys(tiny: Path) -> None:
    """The report counts dropped keys, too."""
    csa = str(Path(__file__).parents[1] / "support/csa.yaml")
    for exchange in ("alltoall", "gather_hidden"):
        options = {"policy": "csps", "csa": csa, "policy_options": {"threshold": "1"}, "exchange": exchange}
        with opened(tiny, instances=4, **options) as llm:
            output = answer(llm)
        assert output.metrics.sparse_parts
        assert output.prompt_attention is not None
        assert output.prompt_attention.sum() == pytest.approx(1.0)
        assert output.prompt_attention.min() > 0


@pytest.mark.parametrize("first", [-1, 110, 1.5])
def test_a_position_outside_the_prompt_is_refused(tiny: Path, first: Any) -> None:
    with opened(tiny) as llm, pytest.raises(ValueError, match="attention_from"):
        llm.generate([PROMPT], SamplingParams(attention_from=first), use_tqdm=False)
