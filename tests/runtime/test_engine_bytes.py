"""Bytes sent by real workers equal the formulas of docs/exchanges.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ThreadLLM
from exchange_bytes import bytes_of_layer, tokens_of_members
from tiny_models import make_tiny

from longspan import LLM, SamplingParams

HOSTS, MEMBERS, TOKENS, BLOCK = 2, 4, 200, 16


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_tiny("llama", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSPAN_HOSTS", str(HOSTS))
        with ThreadLLM(
            str(folder),
            instances=MEMBERS,
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_num_batched_tokens=2 * TOKENS,
            enable_prefix_caching=False,
        ) as started:
            yield started


@pytest.mark.parametrize("record_times", [False, True])
def test_times_of_each_rank_are_reported_if_they_are_recorded(record_times: bool, tmp_path: Path) -> None:
    folder, begin_s = make_tiny("llama", tmp_path), time.perf_counter()
    shared = {"policy": "context", "policy_options": {"threshold": "10"}}
    options = {"instances": 2, **shared, "record_times": record_times, "block_size": BLOCK}
    with ThreadLLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        llm.generate([[5] * 40], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        found = llm.worker_times()
    assert len(found) == 2
    for times in found:
        assert set(times) == ({"attention", "linear", "other", "messages", "controller"} if record_times else set())
        assert all(seconds > 0 for seconds in times.values())
        assert sum(times.values()) < time.perf_counter() - begin_s


def test_memory_for_less_than_a_block_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    of_a_block = 3 * BLOCK * 2 * 3 * 16 * 4
    with pytest.raises(
        ValueError, match=rf"{of_a_block - 1} bytes of KV memory .* no block of {of_a_block} bytes: allow"
    ):
        ThreadLLM(str(folder), skip_tokenizer_init=True, block_size=BLOCK, kv_cache_memory_bytes=of_a_block - 1)


@pytest.mark.parametrize("exchange", ["ring_kv", "ring_q", "gather_kv", "alltoall", "gather_hidden", "chain"])
def test_bytes_equal_the_formula(llm: LLM, exchange: str) -> None:
    llm.set_policy("context", {"exchange": exchange, "threshold": "10"})
    before, crossed_before = llm.bytes_exchanged, llm.bytes_between_hosts
    [output] = llm.generate([[5] * TOKENS], SamplingParams(max_tokens=1), use_tqdm=False)
    sent = llm.bytes_exchanged[exchange] - before.get(exchange, 0)
    tokens = tokens_of_members(output, exchange, TOKENS, MEMBERS, BLOCK)
    assert sent == bytes_of_layer(llm, exchange, tokens) * llm.info.num_layers
    if exchange == "gather_kv":
        crossed = llm.bytes_between_hosts[exchange] - crossed_before.get(exchange, 0)
        assert crossed * (MEMBERS - 1) == sent * (HOSTS - 1), "each byte goes to the other host once"
