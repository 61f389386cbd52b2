"""How many threads compute a step: one where waking others takes longer than what they would do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import ThreadLLM
from one_part import part_of
from tiny_models import make_tiny

from longspan import SamplingParams
from longspan.attn.spec import AttnSpec
from longspan.runtime import worker
from longspan.runtime.worker import is_small_step

SPEC = AttnSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, window=None, softcap=None)
SMALL, LARGE = 4_500_000, 60_000_000
"""Weights per layer of a model with 135 million, and of one with a billion."""


def is_small(layer_weights: int, *spans: tuple[int, int], group: tuple[int, ...] = (0,)) -> bool:
    parts = [part_of(group, start=start, stop=stop) for start, stop in spans]
    return is_small_step(parts, layer_weights, SPEC)


def test_a_token_of_a_small_model_is_a_small_step() -> None:
    assert is_small(SMALL, (500, 501))
    assert not is_small(LARGE, (500, 501))


def test_many_tokens_are_none_whether_of_one_request_or_of_many() -> None:
    assert not is_small(SMALL, (0, 500))
    assert not is_small(SMALL, *[(500, 501)] * 64)


def test_nor_is_one_that_reads_much_kv_which_members_share() -> None:
    assert not is_small(SMALL, (50_000, 50_001))
    assert is_small(SMALL, (50_000, 50_001), group=tuple(range(8)))


def test_prompts_are_computed_by_all_threads_and_tokens_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    with ThreadLLM(str(folder), skip_tokenizer_init=True, threads_per_rank=2, block_size=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        chosen: list[int] = []
        choose = torch.set_num_threads
        monkeypatch.setattr(torch, "set_num_threads", lambda number: (chosen.append(number), choose(number))[1])
        monkeypatch.setattr(worker, "_SMALL_STEP", 200_000)  # of weights as few as this model's
        llm.generate([[5, 6, 7] * 100], params, use_tqdm=False)
        steps = list(chosen)
    assert steps[0] == 2
    assert set(steps[1:]) == {1}
