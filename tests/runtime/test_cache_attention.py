"""Classes whose attention is reached by the KV cache equal Hugging Face: layouts, exchanges, tiers and turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engines, Row, pairwise
from oracle import Oracle
from test_exact import assert_all_exact, options_of, prompts_of
from test_hosted import HOST
from tiny_models import write_checkpoint
from tiny_types import tiny_config
from transformers import AutoModelForCausalLM

from longspan import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, output_logits=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_logits=True)
FAMILIES = {
    "falcon": ("falcon", ""),
    "falcon-kv": ("falcon", "several KV heads"),
    "falcon-sequential": ("falcon", "sequential"),
    "stablelm": ("stablelm", ""),
    "stablelm-norms": ("stablelm", "norms of heads"),
    "nemotron": ("nemotron", ""),
    "biogpt": ("biogpt", ""),
    "codegen": ("codegen", ""),
    "gpt-neo": ("gpt_neo", ""),
    "gpt-neox-japanese": ("gpt_neox_japanese", ""),
    "gptj": ("gptj", ""),
    "rembert": ("rembert", ""),
    "xglm": ("xglm", ""),
}
CORE = ("falcon", "falcon-kv", "stablelm-norms", "gpt-neo")
"""Keys for all heads, repeated keys, the attention interface, and windows. All other families are `full`."""
Family = tuple[Path, Oracle]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Family]]:
    """Return a checkpoint of a family, and the reference for it."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def made(name: str) -> Family:
        folder = write_checkpoint(tiny_config(*FAMILIES[name]), root / name)
        return folder, Oracle(folder)

    yield made
    made.cache_clear()


def families() -> list[Any]:
    return [pytest.param(name, marks=[] if name in CORE else [pytest.mark.full]) for name in FAMILIES]


SHARING = {
    "name": tuple(FAMILIES),
    "instances": (1, 2, 3),
    "pp": (1, 2),
    "exchange": ("ring_kv", "ring_q", "alltoall", "gather_kv", "chain"),
    "rotate": ("block", "token"),
}


def of_others() -> Iterator[Any]:
    """Yield rows of the families outside of `CORE`: one for each, and further rows for `make test-all`."""
    exchanges = cycle(SHARING["exchange"])
    for name in sorted(FAMILIES.keys() - CORE):
        row = {"name": name, "instances": 2, "pp": 1, "exchange": next(exchanges), "rotate": "block"}
        yield pytest.param(row, id="-".join(map(str, row.values())))
    for parameters in pairwise(SHARING | {"name": sorted(FAMILIES.keys() - CORE)}):
        yield pytest.param(*parameters.values, id=f"{parameters.id}-all", marks=pytest.mark.full)


@pytest.mark.parametrize("row", [*pairwise(SHARING | {"name": CORE}), *of_others()])
def test_prompts_and_turns(engines: Engines, family: Callable[[str], Family], row: Row) -> None:
    """Prompts of mixed lengths at once, in several chunks, then another turn of one of them."""
    folder, oracle = family(row["name"])
    llm = engines(folder, instances=row["instances"], pp=row["pp"])
    if row["instances"] > 1:
        llm.set_policy("context", options_of(row | {"layout": "zigzag", "variant": "", "decode": "ring_q"}))
    prompts = prompts_of(1, 17, 40, 302)
    assert_all_exact(llm, oracle, prompts, GREEDY)
    turn = [*prompts[2], *oracle.complete(prompts[2], 5).token_ids, *prompts_of(70)[0]]
    [output] = assert_all_exact(llm, oracle, [turn], GREEDY)
    assert output.metrics.num_cached_tokens > 0


@pytest.mark.parametrize("name", families())
def test_preempted_requests_and_contexts_on_hosts(engines: Engines, family: Callable[[str], Family], name: str) -> None:
    """A context of which the device holds a third. Then more requests at once than the device holds."""
    folder, oracle = family(name)
    llm = engines(folder, parallel="1", **HOST)
    assert_all_exact(llm, oracle, prompts_of(300, 30), GREEDY)
    llm = engines(folder, parallel="1", num_gpu_blocks_override=12, host_kv_gib=0.02, max_num_seqs=32)
    outputs = assert_all_exact(llm, oracle, prompts_of(*range(5, 25)), LONG)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("name", families())
def test_bfloat16_is_as_near_as_transformers(engines: Engines, family: Callable[[str], Family], name: str) -> None:
    """The error of the logits is at most three times the error of transformers in bfloat16."""
    folder, oracle = family(name)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    llm, errors = engines(folder, dtype="bfloat16"), []
    for prompt in prompts_of(40, 150, 90):
        expected = torch.tensor(oracle.complete(prompt, 1).logits[0])
        with torch.no_grad():
            theirs = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        logits = output.outputs[0].logits
        assert logits is not None
        errors.append([(found - expected).square().mean() for found in (torch.tensor(logits[0]), theirs)])
    own, others = torch.tensor(errors).mean(0).sqrt().tolist()
    assert own <= 3 * others
