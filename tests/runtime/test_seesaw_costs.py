"""Seesaw on real engines whose steps were measured: clusters change where that pays."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import ThreadLLM
from invented_profiles import measure
from oracle import Oracle
from test_exact import assert_all_exact, prompts_of

from longspan import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_logits=True)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("decode_s", "options", "changes"), [(1e-3, {}, True), (0.2, {}, False), (0.2, {"strict": "true"}, True)]
)
def test_clusters_change_where_that_pays(
    tiny: Path, oracle: Oracle, decode_s: float, options: dict[str, str], changes: bool
) -> None:
    """Prompts are quick on the first cluster, where a decode takes 0.1 s."""
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.1)
    measure(tiny, tp=2, token_s=1e-2, decode_s=decode_s)
    given = {"host_kv_gib": 0.02, "block_size": 16, "num_gpu_blocks_override": 200, "threads_per_rank": 1}
    specs = {"policy": "seesaw", "prefill_parallel": "pp2", "decode_parallel": "tp2", "policy_options": options}
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, **given, **specs) as llm:
        assert_all_exact(llm, oracle, prompts_of(100, 40, 75, 20), PARAMS)
        assert bool(llm.engine.transitions) == changes
        llm.reset_prefix_cache()
        assert llm.engine.load().host_blocks == 0, "copies in flight to the host are dropped, too"


@pytest.mark.parametrize(("host_kv_gib", "changes"), [(0.02, True), (0.0003, False)])
def test_phases_change_only_if_the_host_holds_a_large_batch(
    tiny: Path, oracle: Oracle, host_kv_gib: float, changes: bool
) -> None:
    """Decodes are a little quicker on the second cluster. The host limits the number of concurrent requests."""
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.1)
    measure(tiny, tp=2, token_s=1e-2, decode_s=0.08)
    given = {"host_kv_gib": host_kv_gib, "block_size": 16, "num_gpu_blocks_override": 200, "threads_per_rank": 1}
    specs = {"policy": "seesaw", "prefill_parallel": "pp2", "decode_parallel": "tp2"}
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, **given, **specs) as llm:
        assert_all_exact(llm, oracle, prompts_of(*[60] * 12), PARAMS)
        assert bool(llm.engine.transitions) == changes


def test_swaps_are_priced_as_in_simulations(tiny: Path) -> None:
    """Stages share the recomputation, and the links of both ranks share the copies."""
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.1)
    given = {"host_kv_gib": 0.02, "num_gpu_blocks_override": 200, "threads_per_rank": 1, "skip_tokenizer_init": True}
    prices = []
    for spec in ("1", "pp2"):
        with ThreadLLM(str(tiny), parallel=spec, block_size=16, **given) as llm:
            config = llm.engine.config
            assert config.swap is not None
            price = config.swap(config.cluster)
            assert price is not None
            prices.append((price.recompute_s(1000, 0), price.block_s))
    (alone_s, block_s), (staged_s, shared_s) = prices
    assert alone_s == pytest.approx(0.1, rel=0.01)
    assert 0.5 * alone_s < staged_s < 0.9 * alone_s
    assert shared_s == pytest.approx(block_s / 2)
