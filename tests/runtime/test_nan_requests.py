"""A request for which the model computes NaN ends with an error and changes no answer to another request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_files import COMPLETIONS
from engines import ThreadLLM
from kernels import loaded_kernels
from oracle import Expected, assert_exact
from safetensors.torch import load_file, save_file
from test_exact import prompts_of

from longspan import SamplingParams
from longspan.outputs import RequestOutput
from longspan.serve.convert import ServedModel
from longspan.serve.responses import answer_each
from longspan.serve.settings import ServerSettings

POISON = 7
"""A token whose embedding is NaN, and which no clean prompt has and no request samples."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True, logit_bias={POISON: -100.0})
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.5}


def _shared(**options: str) -> dict[str, Any]:
    return {"policy": "context", "policy_options": {"threshold": "20", **options}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "1 bfloat16": {"dtype": "bfloat16"},
    "1 int4": {"dtype": "bfloat16", "quantization": "int4"},
    "1 host": {"host_kv_gib": 0.003},
    "1 on its host": {"host_kv_gib": 0.003, "num_gpu_blocks_override": 6},  # the longest prompts outgrow the device
    "2 host": {"host_kv_gib": 0.006, **_shared(), "instances": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "2xtp2": {"parallel": "2xtp2", **_shared()},
    "2 by token": {"instances": 2, **_shared(rotate="token")},
    "roles": {"prefill_parallel": "2", "decode_parallel": "1", "policy": "tetris"},
    **{
        f"2 {exchange}": {
            "instances": 2,
            "policy": "context",
            "policy_options": {"threshold": "20", "exchange": exchange},
        }
        for exchange in ("ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden")
    },
    "2 csps": {"instances": 2, "policy": "csps", "policy_options": {"threshold": "20"}},
    "3 chain": {"instances": 3, **_shared(exchange="chain")},
}
PROMPTS = [[9 if token == POISON else token for token in prompt] for prompt in prompts_of(5, 17, 40, 100, 33)]
DIRTY = [
    [POISON] * 90,
    [*PROMPTS[2][:20], POISON, *PROMPTS[2][20:]],  # in the middle of a block that a clean prompt begins with
    [*PROMPTS[3][:64], POISON],  # behind chunks that are finite
    [*PROMPTS[3], POISON, *PROMPTS[0]],
]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose heads have the size of our own kernels, and which has one token without a number."""
    from tiny_models import BASE, write_checkpoint
    from transformers import LlamaConfig

    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    folder = write_checkpoint(LlamaConfig(**BASE | sizes), tmp_path_factory.mktemp("poisoned") / "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def alone(poisoned: Path) -> dict[str, list[Expected]]:
    """Return the outputs of the clean prompts alone, for each kind of numbers."""
    kinds = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int4": LAYOUTS["1 int4"]}
    return {kind: [_expected(one) for one in _answers(poisoned, more)] for kind, more in kinds.items()}


def _answers(folder: Path, options: dict[str, Any]) -> list[RequestOutput]:
    with engine(folder, **options) as llm:
        return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def _expected(output: RequestOutput) -> Expected:
    return Expected(token_ids=output.outputs[0].token_ids, logits=output.outputs[0].logits or [])


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with loaded_kernels():
        yield


def engine(folder: Path, **options: Any) -> ThreadLLM:
    given = {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 48, "max_model_len": 200} | options
    return ThreadLLM(str(folder), skip_tokenizer_init=True, **{"num_gpu_blocks_override": 24} | given)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_ends_its_request_alone(
    poisoned: Path, alone: dict[str, list[Expected]], layout: str, tmp_path: Path
) -> None:
    """Clean prompts run after dirty ones in the same few blocks, alongside them, and share prefixes with them."""
    options = LAYOUTS[layout]
    if "host_kv_gib" in options:
        options = options | {"disk_kv_dir": str(tmp_path), "disk_kv_gib": 0.003}
    kind = options.get("quantization", options.get("dtype", "float32"))
    with engine(poisoned, **options) as llm:
        for prompts in (DIRTY, PROMPTS + DIRTY, DIRTY + PROMPTS):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                if POISON in prompt:
                    [completion] = output.outputs
                    assert (completion.finish_reason, completion.error) == ("error", "non_finite")
                    assert completion.token_ids == [] and "NaN" in str(completion.stop_reason)
                else:
                    tolerance = TOLERANCES.get(options.get("dtype", "float32"), 0.5)
                    assert_exact(output, alone[kind][PROMPTS.index(prompt)], tolerance=tolerance)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_a_weight_without_a_number_is_an_error_of_every_request(
    poisoned: Path, tmp_path: Path, name: str, number: float
) -> None:
    """Also where only logits are not finite: greedy, sampled, with and without logprobs."""
    weights = load_file(poisoned / "model.safetensors")
    weights[name][3, 5] = number
    for file in poisoned.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wishes: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 1},
        {"temperature": 1, "seed": 1},
        {"temperature": 0, "prompt_logprobs": 0},
        {"temperature": 0, "n": 2},
    ]
    with engine(tmp_path) as llm:
        for wish in wishes:
            [output] = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=6, ignore_eos=True, **wish), use_tqdm=False)
            assert {(one.finish_reason, one.error) for one in output.outputs} == {("error", "non_finite")}


def test_a_token_that_the_model_rules_out_is_no_error(poisoned: Path) -> None:
    """A logit of -inf is a number that a model may give, such as for tokens that only pad its vocabulary."""
    with engine(poisoned) as llm, pytest.MonkeyPatch.context() as patch:
        rule_out_last_token(patch)
        [output] = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def rule_out_last_token(patch: pytest.MonkeyPatch) -> None:
    """Lets the model rule out the last token of its vocabulary."""
    from longspan.model.trunk import LayerTrunk, Output

    run = LayerTrunk.run

    def with_hole(self: LayerTrunk, *row: Any, **others: Any) -> Output:
        output = run(self, *row, **others)
        if output.result.shape[-1] == 199:
            output.result[..., -1] = -torch.inf
        return output

    patch.setattr(LayerTrunk, "run", with_hole)


def test_a_batch_file_gets_the_answer_of_a_server(poisoned: Path) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 2} for prompt in (DIRTY[0], PROMPTS[0])]
    requests = ((index, COMPLETIONS, json.dumps(body).encode()) for index, body in enumerate(bodies))
    with engine(poisoned) as llm:
        served = ServedModel(input_processor=llm.input_processor, settings=ServerSettings(model_names=("m",)))
        answers = {tag: rest for tag, *rest in answer_each(llm, served, requests, max_groups=2, max_waiting_tokens=999)}
    assert {tag: status for tag, (status, _) in answers.items()} == {0: 500, 1: 200}
    error = answers[0][1]["error"]
    assert (error["code"], error["param"], error["type"]) == ("non_finite", None, "server_error")
