"""Models with attention sinks equal Hugging Face in every layout, with every exchange and tier.

The parameters cover all pairs of options. `make test-all` runs all combinations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Engines, Row, ThreadLLM, pairwise
from oracle import Oracle, assert_exact
from test_exact import GREEDY, SHORT, assert_all_exact, prompts_of
from tiny_models import BASE, SINKS, write_checkpoint
from transformers import AutoModelForCausalLM, GraniteSWAConfig

from longspan import SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_logits=True)
LAYOUTS: dict[str, tuple[str, dict[str, str]]] = {
    "one instance": ("1", {}),
    "tp2": ("tp2", {}),
    "pp2": ("pp2", {}),
    "tp2pp2": ("tp2pp2", {}),
    "groups": ("2xtp2", {"rotate": "block"}),
    "ring_kv": ("3", {"exchange": "ring_kv", "decode": "ring_q"}),
    "ring_q": ("2xtp2", {"exchange": "ring_q", "decode": "ring_kv"}),
    "alltoall": ("3", {"exchange": "alltoall", "decode": "alltoall"}),
    "weights of the host": ("2xtp2", {"exchange": "alltoall", "weights": "host"}),
    "weights of peers": ("2xtp2", {"exchange": "alltoall", "weights": "peers"}),
    "gather_kv": ("2xpp2", {"exchange": "gather_kv", "decode": "gather_kv"}),
    "dense": ("2", {"exchange": "gather_kv", "dense": "true"}),
    "gather_hidden": ("2", {"exchange": "gather_hidden"}),
    "micro-partitions": ("2xpp2", {"exchange": "gather_hidden", "micro_partitions": "3"}),
    "chain": ("3", {"exchange": "chain"}),
    "chain, computed": ("2xtp2", {"exchange": "chain", "home": "computed"}),
}
CASES = ("turns", "preempted", "host tier", "on hosts")


def is_legal(row: Row) -> bool:
    """The policy chooses the exchange of parts that read hosts."""
    return row["case"] != "on hosts" or "exchange" not in LAYOUTS[row["layout"]][1]


def engine(engines: Engines, folder: Path, layout: str, **given: Any) -> ThreadLLM:
    parallel, options = LAYOUTS[layout]
    llm = engines(folder, parallel=parallel, **given)
    llm.set_policy("context" if options else "chunked", {"threshold": "20", **options} if options else {})
    return llm


@pytest.mark.parametrize("row", pairwise({"name": SINKS, "layout": tuple(LAYOUTS), "case": CASES}, is_legal))
def test_layouts_and_tiers(engines: Engines, folders: dict[str, Path], oracles: dict[str, Oracle], row: Row) -> None:
    """Prompts in chunks and later turns, preemption, KV in host memory, and contexts of which the host has a part."""
    folder, oracle = folders[row["name"]], oracles[row["name"]]
    if row["case"] == "turns":
        llm = engine(engines, folder, row["layout"])
        prompts = prompts_of(1, 17, 40, 200)
        assert_all_exact(llm, oracle, prompts, SHORT)
        turn = [*prompts[2], *oracle.complete(prompts[2], 4).token_ids, *prompts_of(70)[0]]
        [output] = assert_all_exact(llm, oracle, [turn], SHORT)
        assert output.metrics.num_cached_tokens > 0
        return
    if row["case"] == "on hosts":
        given = {"policy": "context" if LAYOUTS[row["layout"]][1] else "chunked", "host_kv_gib": 0.02}
        llm = engine(engines, folder, row["layout"], num_gpu_blocks_override=6, **given)
        assert_all_exact(llm, oracle, prompts_of(300, 30))
        return
    tier = {"host_kv_gib": 0.02} if row["case"] == "host tier" else {}
    llm = engine(engines, folder, row["layout"], num_gpu_blocks_override=8, **tier)
    outputs = assert_all_exact(llm, oracle, prompts_of(*[20 + 3 * number for number in range(9)]), LONG)
    num_instances = llm.engine.config.cluster.num_instances
    assert num_instances > 1 or any(output.metrics.num_preemptions for output in outputs)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sinks and without windows, which sparse attention is for."""
    config = GraniteSWAConfig(**BASE, attention_multiplier=0.3, layer_types=["full_attention"] * 3)
    return write_checkpoint(config, tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("exchange", ["alltoall", "gather_hidden"])
@pytest.mark.parametrize("parallel", ["3", "2xtp2"])
def test_sparse_attention_that_drops_nothing_is_exact(full: Path, exchange: str, parallel: str) -> None:
    """In prompts, and in decodes that read kept keys."""
    if (exchange, parallel) == ("gather_hidden", "3"):
        parallel = "2"
    settings = json.dumps({"levels": 3, "drop": {2: 0.0}, "drop_in_decode": exchange == "alltoall"})
    options = {"csa": settings, "exchange": exchange, "threshold": "30"}
    oracle = Oracle(full)
    given = {"block_size": 16, "max_num_batched_tokens": 64, "skip_tokenizer_init": True}
    with ThreadLLM(str(full), parallel=parallel, policy="csps", policy_options=options, **given) as llm:
        assert_all_exact(llm, oracle, prompts_of(150, 91, 20), GREEDY)
        assert f"{exchange}_sparse" in llm.bytes_exchanged


@pytest.mark.parametrize("name", SINKS)
def test_bfloat16_is_as_exact_as_transformers(
    engines: Engines, folders: dict[str, Path], oracles: dict[str, Oracle], name: str
) -> None:
    """The error of logits is at most three times that of transformers in bfloat16."""
    params = SamplingParams(temperature=0, max_tokens=1, output_logits=True)
    prompts, errors = prompts_of(5, 40, 100), {"transformers": [0.0], "tp2": [], "3": [], "1": []}
    expected = [oracles[name].complete(prompt, 1).logits[0] for prompt in prompts]
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.bfloat16).eval()
    with torch.no_grad():
        found = [model(torch.tensor([prompt])).logits[0, -1].float().numpy() for prompt in prompts]
    errors["transformers"] = [float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)]
    for parallel in ("1", "tp2", "3"):
        llm = engines(folders[name], parallel=parallel, dtype="bfloat16")
        if parallel == "3":
            llm.set_policy("context", {"threshold": "20"})
        for prompt, wanted in zip(prompts, expected, strict=True):
            [output] = llm.generate([prompt], params, use_tqdm=False)
            [got] = output.outputs
            assert got.logits is not None
            errors[parallel].append(float(np.abs(got.logits[0] - wanted).max()))
    largest = {kind: max(values) for kind, values in errors.items()}
    assert all(error <= 3 * largest["transformers"] for error in largest.values()), largest


def test_roles_and_phases_hand_on_sinks_with_the_weights(folders: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    """Instances with other degrees of tensor parallelism cut the sinks again."""
    given = {"block_size": 16, "max_num_batched_tokens": 48, "skip_tokenizer_init": True}
    for policy, more in (("tetris", {}), ("seesaw", {"host_kv_gib": 0.02})):
        split = {"prefill_parallel": "2", "decode_parallel": "tp2", "policy": policy, **more}
        with ThreadLLM(str(folders["granite_swa"]), **split, **given) as llm:
            prompts = prompts_of(100, 17, 60)
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                assert_exact(output, oracles["granite_swa"].complete(prompt, 6))
