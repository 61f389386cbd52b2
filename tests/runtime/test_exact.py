"""Every exchange, layout, split, growth and role equals Hugging Face, on ranks that are threads.

The parameters cover all pairs of options. `make test-all` runs all combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Engines, Row, ThreadLLM, num_free_blocks, pairwise
from forced_plans import PLANS, Wandering, forced
from oracle import Oracle, assert_exact
from tiny_models import TINY

from longspan import SamplingParams
from longspan.core.exchange import of_any_layout
from longspan.policy.tetris import GroupOptions

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_logits=True)
COUNTING = SamplingParams(
    temperature=0, frequency_penalty=0.5, presence_penalty=0.25, max_tokens=30, ignore_eos=True, output_logits=True
)
DECODES = ("ring_q", "ring_kv", "alltoall", "gather_kv")
UNEVEN = {2: "0.7,0.3", 3: "0.5,0.3,0.2", 4: "0.4,0.3,0.2,0.1"}


def prompts_of(*lengths: int) -> list[list[int]]:
    """Draws the same tokens for all tests, so that the oracle answers once."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 199, length).tolist() for length in lengths]


def assert_all_exact(llm: ThreadLLM, oracle: Oracle, prompts: list[list[int]], params: SamplingParams = GREEDY) -> Any:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output, oracle.complete(prompt, params.max_tokens or 0))
    return outputs


# ---------------------------------------------------------------- one group per prompt


SHARING = {
    "instances": (2, 3, 4),
    "tp": (1, 2),
    "pp": (1, 2),
    "exchange": ("auto", "ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden", "chain"),
    "variant": ("", "dense", "weights=host", "weights=peers", "home=computed", "micro_partitions=3"),
    "layout": ("zigzag", "striped", "contiguous", "uneven"),
    "decode": DECODES,
    "rotate": ("block", "token"),
}
VARIANTS = {
    "dense": "gather_kv",
    "weights=host": "alltoall",
    "weights=peers": "alltoall",
    "home=computed": "chain",
    "micro_partitions=3": "gather_hidden",
}


def is_legal(row: Row) -> bool:
    """Chains are contiguous. Only some exchanges have variants. Unsharded weights are for split instances.

    At most eight ranks: instances, shards and stages are combined in pairs, and all three with two instances.
    """
    if row["instances"] * row["tp"] * row["pp"] > 8:
        return False
    if row["exchange"] == "chain" and row["layout"] in ("zigzag", "striped"):
        return False
    if row["variant"] and VARIANTS[row["variant"]] != row["exchange"]:
        return False
    return not row["variant"].startswith("weights") or row["tp"] > 1


def options_of(row: Row) -> dict[str, str]:
    """Options of the policy `context`."""
    layout, variant = row["layout"], row["variant"]
    options = {name: row[name] for name in ("exchange", "decode", "rotate")} | {"threshold": "20", "layout": layout}
    if layout == "uneven":
        options |= {"layout": "contiguous", "fractions": UNEVEN[row["instances"]]}
    if row["exchange"] == "chain":
        del options["layout"]
    if variant:
        name, _, value = variant.partition("=")
        options[name] = value or "true"
    return options


@pytest.mark.parametrize("row", pairwise(SHARING, is_legal))
def test_prompts_and_turns(engines: Engines, tiny: Path, oracle: Oracle, row: Row) -> None:
    """Prompts of mixed lengths at once, the longest in several chunks, then two more turns of one conversation."""
    llm = engines(tiny, instances=row["instances"], tp=row["tp"], pp=row["pp"])
    options = options_of(row)
    if row["exchange"] == "gather_hidden" and row["tp"] == 2 and row["instances"] > 2:
        with pytest.raises(ValueError, match=r"gather_hidden splits 2 query heads and 1 KV heads between"):
            llm.set_policy("context", options)  # tp 2 leaves one of two ranks with a single KV head
        return
    llm.set_policy("context", options)
    before = llm.bytes_exchanged
    prompts = prompts_of(1, 17, 40, 302)  # the answers to the last one and to the first turn cross the end of a block
    assert_all_exact(llm, oracle, prompts, SHORT)
    turn = prompts[2]
    for length in (33, 70):
        turn = [*turn, *oracle.complete(turn, 4).token_ids, *prompts_of(length)[0]]
        [output] = assert_all_exact(llm, oracle, [turn], SHORT)
        assert output.metrics.num_cached_tokens > 0
    exchange = options["exchange"].replace("auto", "ring_kv") + "_dense" * (row["variant"] == "dense")
    assert llm.bytes_exchanged[exchange] > before.get(exchange, 0)
    fetched = llm.bytes_exchanged.get("weights", 0) - before.get("weights", 0)
    assert (fetched > 0) == (row["variant"] == "weights=peers")


# ---------------------------------------------------------------- groups that grow, and instances with roles


GROWTH = {
    "plans": tuple(PLANS),
    "exchange": ("auto", *dict.fromkeys(one.kind for one in of_any_layout())),
    "balance": (False, True),
    "roles": ("none", "1 backend", "4 backends"),
}


@pytest.mark.parametrize("row", pairwise(GROWTH))
def test_groups_that_grow(engines: Engines, tiny: Path, oracle: Oracle, row: Row) -> None:
    """Chunks of several steps each, which end inside blocks. A short prompt decodes meanwhile.

    With roles, four instances of one rank prefill and one of two ranks decodes.
    """
    plans, balance, options = PLANS[row["plans"]], row["balance"], GroupOptions(exchange=row["exchange"]).sharing()
    if row["roles"] == "none":
        llm = engines(tiny, instances=4)
        llm.engine.set_policy(forced(plans, 4, options, balance=balance))
    else:
        backends = int(row["roles"][0])
        llm = engines(tiny, prefill_parallel="4", decode_parallel="tp2", transfer_backends=backends)
        llm.engine.set_policy(forced(plans, 4, options, decode=(4,), balance=balance))
    before = llm.bytes_exchanged
    outputs = assert_all_exact(llm, oracle, prompts_of(300, 200, 17))
    moved = {name: llm.bytes_exchanged.get(name, 0) > before.get(name, 0) for name in ("kv_transfer", "kv_balance")}
    assert moved == {"kv_transfer": row["roles"] != "none", "kv_balance": balance}
    if row["roles"] == "none":
        held = [i for i, tokens in enumerate(outputs[0].metrics.kv_tokens_per_instance) if tokens]
        assert held == sorted(plans[300][-1][1])
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert not any(llm.engine.load().used_blocks), "all blocks are free"


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_change_at_any_step(engines: Engines, tiny: Path, oracle: Oracle, seed: int) -> None:
    """Also while tokens are decoded a step ahead."""
    llm = engines(tiny, instances=4)
    llm.engine.set_policy(Wandering(4, seed))
    assert_all_exact(llm, oracle, prompts_of(300, 200, 17))


def test_penalties_on_groups_that_change(engines: Engines, tiny: Path) -> None:
    """Members that come later have to be told all tokens so far."""
    llm = engines(tiny, instances=4)
    llm.engine.set_policy(Wandering(4, seed=7))
    for output in llm.generate(prompts_of(17, 60, 3), COUNTING, use_tqdm=False):
        [got] = output.outputs
        assert got.logits is not None
        counts = np.zeros(len(got.logits[0]), dtype=np.float32)
        for token, logits in zip(got.token_ids, got.logits, strict=True):
            assert token == int((logits - 0.5 * counts - 0.25 * (counts > 0)).argmax())
            counts[token] += 1


@pytest.mark.parametrize("policy", ["tetris", "fixed-sp"])
def test_policies(engines: Engines, tiny: Path, oracle: Oracle, policy: str) -> None:
    """Many prompts at once, then another turn of the longest conversation."""
    llm = engines(tiny, instances=4)
    llm.set_policy(policy, {"min_chunk": "16", "improvement_rate": "0"} if policy == "tetris" else {"sp": "2"})
    prompts = prompts_of(1, 17, 40, 300, 200)
    outputs = assert_all_exact(llm, oracle, prompts)
    turn = [*prompts[3], *outputs[3].outputs[0].token_ids, *prompts[2]]
    [output] = assert_all_exact(llm, oracle, [turn])
    assert output.metrics.num_cached_tokens > 0


CHATS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "one instance": ({}, "chunked", {}),
    "tp 2": ({"instances": 1, "tp": 2}, "chunked", {}),
    "pp 2": ({"instances": 1, "pp": 2}, "chunked", {}),
    "prompts first": ({"instances": 2, "tp": 2}, "prefill-first", {}),
    "decodes first": ({"parallel": "2xpp2"}, "decode-first", {}),
    "ring_kv": ({"instances": 3}, "context", {"threshold": "20", "exchange": "ring_kv"}),
    "chain": ({"instances": 2}, "context", {"threshold": "20", "exchange": "chain"}),
    "alltoall": ({"instances": 2}, "context", {"threshold": "20", "exchange": "alltoall"}),
    "gather_hidden": ({"instances": 2}, "context", {"threshold": "20", "exchange": "gather_hidden"}),
    "by token": ({"instances": 2}, "context", {"threshold": "20", "rotate": "token"}),
    "tetris": ({"instances": 4}, "tetris", {"min_chunk": "16", "improvement_rate": "0"}),
    "roles": ({"prefill_parallel": "2", "decode_parallel": "tp2"}, "tetris", {"min_chunk": "16"}),
    "roles with stages": ({"prefill_parallel": "2xpp2", "decode_parallel": "tp2pp3"}, "tetris", {"min_chunk": "16"}),
}


@pytest.mark.parametrize(("setup", "block_size"), list(zip(CHATS, cycle((16, 256)), strict=False)))
def test_chats_share_a_system_prompt(engines: Engines, tiny: Path, oracle: Oracle, setup: str, block_size: int) -> None:
    """It is no multiple of a block. Two users, more at once, and then each goes on with a conversation of its own."""
    arguments, policy, options = CHATS[setup]
    llm = engines(tiny, **arguments, block_size=block_size)
    llm.set_policy(policy, options)
    system, *asked = prompts_of(156, 200, 25, 40, 20)
    chats = [[*system, number, *own] for number, own in enumerate(asked, 3)]
    outputs = [output for some in (chats[:1], chats[1:2], chats[2:]) for output in assert_all_exact(llm, oracle, some)]
    assert outputs[1].metrics.num_cached_tokens == len(system)
    turns = [[*chat, *output.outputs[0].token_ids, 9] for chat, output in zip(chats, outputs, strict=True)]
    for turn in turns:
        [output] = assert_all_exact(llm, oracle, [turn])
        assert output.metrics.num_cached_tokens >= len(system)
    assert all(free == llm.engine.kv.account.num_blocks(i) for i, free in enumerate(num_free_blocks(llm)))


def test_several_outputs_of_a_prompt_are_drawn_alike(engines: Engines, tiny: Path) -> None:
    llm = engines(tiny, prefill_parallel="4", decode_parallel="tp2", transfer_backends=1)
    llm.set_policy("tetris", {"min_chunk": "16", "improvement_rate": "0"})
    drawn = SamplingParams(temperature=1, seed=3, n=3, max_tokens=8, ignore_eos=True)
    [first], [again] = llm.generate(prompts_of(150), drawn), llm.generate(prompts_of(150), drawn)
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in again.outputs]
    assert len({tuple(one.token_ids) for one in first.outputs}) == 3


# ---------------------------------------------------------------- every architecture


def architectures() -> Iterator[Any]:
    """Yield each family with shards on two instances, and with stages. Most of the other splits are `full`."""
    needed = {("llama", "3"), ("mistral-window", "3"), ("gemma2", "2xtp2pp2"), ("mixtral", "2xtp2pp2")}
    needed |= {("llama4", "3"), ("llama4", "2xtp2pp2")}
    for name, rotate in zip(TINY, cycle(("block", "token")), strict=False):
        for parallel in ("2xtp2", "pp3", "3", "2xtp2pp2"):
            is_needed = parallel in ("2xtp2", "pp3") or (name, parallel) in needed
            yield pytest.param(name, parallel, rotate, marks=[] if is_needed else [pytest.mark.full])


@pytest.mark.parametrize(("name", "parallel", "rotate"), [*architectures()])
def test_prompts_packed_together(
    engines: Engines, folders: dict[str, Path], oracles: dict[str, Oracle], name: str, parallel: str, rotate: str
) -> None:
    """Prompts are sharded in several chunks. Three KV heads on two ranks are two and one."""
    llm = engines(folders[name], parallel=parallel)
    llm.set_policy("context", {"threshold": "20", "rotate": rotate})
    prompts = prompts_of(1, 2, 28, 40, 100, 200)  # the third grows past the window, and the fourth past the chunk
    assert_all_exact(llm, oracles[name], prompts)
    assert ("all_reduce" in llm.bytes_exchanged) == ("tp2" in parallel)


@pytest.mark.parametrize(("name", "parallel"), [("llama", "tp5"), ("gemma2", "2xtp3")])
def test_more_ranks_than_kv_heads(
    engines: Engines, folders: dict[str, Path], oracles: dict[str, Oracle], name: str, parallel: str
) -> None:
    """On five ranks most KV heads are there twice."""
    llm = engines(folders[name], parallel=parallel)
    if "x" in parallel:
        llm.set_policy("context", {"threshold": "20"})
    assert_all_exact(llm, oracles[name], prompts_of(1, 17, 40, 160))
