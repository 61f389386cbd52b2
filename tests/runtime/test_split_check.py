"""A split is exact, or it is refused at start with the parameter to change. No worker is lost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ThreadLLM
from oracle import Oracle, assert_exact
from refusals import refused
from test_exact import prompts_of
from tiny_models import BASE, TINY, write_checkpoint
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from longspan import SamplingParams
from longspan.core.cluster import Cluster
from longspan.core.exchange import Exchange
from longspan.errors import ParameterError
from longspan.model.files import ModelFiles
from longspan.model.shard import Shard
from longspan.model.shrunken import ShrunkenModel, shrink
from longspan.model.source import prepare
from longspan.model.store import read_info
from longspan.runtime import dry_run

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True, prompt_logprobs=0)
GATHER_HIDDEN = {
    "instances": 2,
    "policy": "context",
    "policy_options": {"exchange": "gather_hidden", "threshold": "20"},
}
HIDDEN_TP = {
    "parallel": "2xtp2",
    "policy": "context",
    "policy_options": {"exchange": "gather_hidden", "threshold": "20", "micro_partitions": "3"},
}
UNSHARDED = {"parallel": "2xtp2", "policy": "context"}
UNSHARDED |= {"policy_options": {"exchange": "alltoall", "weights": "peers", "threshold": "20"}}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
SHARED_KV = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 199}
FIVE_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}
"""Shares of three and of two heads."""
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {"sliding_window": 32, "moe_intermediate_size": 32, **EXPERTS}),
    "beam": ("beam", {}),
    "aria": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "bert": ("bert", {"is_decoder": True}),
    "bitnet": ("bitnet", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 32}),
    "gemma3n": (
        "gemma3n_text",
        {"num_hidden_layers": 4, "layer_types": ALTERNATING, "sliding_window": 32, **SHARED_KV},
    ),
    "gemma4": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": ALTERNATING, "sliding_window": 32, "global_head_dim": 32, **SHARED_KV},
    ),
    "gemma4-own-kv": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": ALTERNATING, "sliding_window": 32, "global_head_dim": 32}
        | SHARED_KV
        | {"num_kv_shared_layers": 0},
    ),
    "gpt-bigcode": ("gpt_bigcode", {}),
    "gpt-neox": ("gpt_neox", FIVE_HEADS),
    "gpt2": ("gpt2", FIVE_HEADS),
    "granitemoeshared": ("granitemoeshared", {"shared_intermediate_size": 32, **EXPERTS}),
    "mellum": ("mellum", {"sliding_window": 32, "moe_intermediate_size": 32, **EXPERTS}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 1.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "olmo2": ("olmo2", {}),
    "opt-350m": ("opt", {"word_embed_proj_dim": 64, "do_layer_norm_before": False, "ffn_dim": 128}),
    "phi": ("phi", FIVE_HEADS),
    "qwen3-moe": ("qwen3_moe", {"moe_intermediate_size": 64, **EXPERTS}),
    "starcoder2": ("starcoder2", {}),
}
SPLITS: dict[str, dict[str, Any]] = {
    "1": {},
    "tp2": {"tp": 2},
    "tp3": {"tp": 3},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "tp2pp2": {"parallel": "tp2pp2"},
    "gather_hidden": GATHER_HIDDEN,
    "hidden-tp2": HIDDEN_TP,
    "unsharded": UNSHARDED,
}
REFUSED = {
    ("bert", "gather_hidden"),  # the output projection is outside of the attention module
    ("bert", "hidden-tp2"),
    ("bert", "unsharded"),
}
"""Unsupported splits of these models. All other splits must work."""
REPAIRED = {
    *((name, "tp2") for name in ("afmoe", "aria", "beam", "bert", "bitnet", "gemma4", "gpt-bigcode", "gpt-neox")),
    *((name, "tp2") for name in ("gpt2", "granitemoeshared", "olmo2", "opt-350m", "phi", "starcoder2")),
    *((name, "pp2") for name in ("bert", "gemma3n", "gemma4", "gemma4-own-kv", "opt-350m")),
    *((name, split) for name in ("gemma3n", "gemma4") for split in ("pp4", "tp2pp2")),
    *((name, "tp2pp2") for name in ("gpt-neox", "gpt2")),
    *((name, "gather_hidden") for name in ("afmoe", "beam", "gemma3", "gemma4", "mellum", "ministral3")),
    *((name, "gather_hidden") for name in ("bitnet", "gpt-bigcode", "gpt-neox", "gpt2", "olmo2", "opt-350m")),
    *((name, "hidden-tp2") for name in ("bitnet", "gpt-bigcode", "olmo2")),
    *((name, "unsharded") for name in ("gemma3", "gpt2", "ministral3", "olmo2", "opt-350m")),
    ("qwen3-moe", "tp3"),
}
"""Splits that gave wrong results, lost a worker, or were refused for the names of weights."""


def folder_of(name: str, folder: Path) -> Path:
    kind, extra = MODELS[name]
    return write_checkpoint(AutoConfig.for_model(kind, **{**BASE, **extra}), folder)


def start(folder: Path, **split: Any) -> ThreadLLM:
    return ThreadLLM(str(folder), skip_tokenizer_init=True, block_size=16, max_num_batched_tokens=48, **split)


def cases() -> list[Any]:
    """Return all models with all splits. Pairs that never failed are marked `full`."""
    rows = []
    for name, split in itertools.product(MODELS, SPLITS):
        if split == "pp4" and "num_hidden_layers" not in MODELS[name][1]:
            continue  # three layers
        marks = [] if (name, split) in REFUSED | REPAIRED else [pytest.mark.full]
        rows.append(pytest.param(name, split, id=f"{name}-{split}", marks=marks))
    return rows


@pytest.mark.parametrize(("name", "split"), cases())
def test_a_split_is_exact_or_refused_at_start(name: str, split: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    if (name, split) in REFUSED:
        with pytest.raises(ParameterError) as refused:
            start(folder, **SPLITS[split])
        assert refused.value.parameter == "exchange"
        return
    prompts, oracle = prompts_of(5, 63, 90), Oracle(folder)
    with start(folder, **SPLITS[split]) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            assert_exact(output, oracle.complete(prompt, GREEDY.max_tokens or 0))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps results of trials from other tests, which ran other code than that of the test."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


def wrong_cut(pattern: str) -> Callable[[Shard, str, Tensor], Tensor]:
    """Gives every rank the next rank's share of some weights, as a wrong rule for a model would."""
    cut = Shard.cut

    def wrong(self: Shard, path: str, weight: Tensor) -> Tensor:
        index = (self.index + 1) % self.size if re.search(pattern, path) else self.index
        return cut(replace(self, index=index), path, weight)

    return wrong


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("weights", ["o_proj", "v_proj", "down_proj", r"layers\.[13]\.self_attn\.o_proj"])
def test_wrong_shares_of_any_weights_are_refused(
    weights: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of one kind of layers: every second layer of this model has sliding windows."""
    monkeypatch.setattr(Shard, "cut", wrong_cut(weights))
    with refused("tp") as error:
        start(folders["gemma2"], parallel="tp3pp2")
    assert error.value.value == 3


@pytest.mark.usefixtures("own_cache")
def test_a_split_is_tried_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with start(folders["llama"], tp=2):
        pass
    tried: list[Cluster] = []

    def problem(_: object, cluster: Cluster, _exchange: Exchange) -> str:
        tried.append(cluster)
        return "a fault" if cluster.num_ranks > 1 else ""

    monkeypatch.setattr(dry_run.DryRuns, "problem", problem)
    with start(folders["llama"], tp=2):
        assert not tried
    with refused("pp"):
        start(folders["llama"], pp=3)
    with refused("tp"):
        start(folders["qwen2"], tp=2)


@pytest.mark.usefixtures("own_cache")
def test_another_split_is_refused_when_it_is_asked_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts_of(40)
    with start(folders["llama"], parallel="2", policy="context") as llm:
        before = llm.generate(prompt, GREEDY, use_tqdm=False)
        monkeypatch.setattr(Shard, "cut", wrong_cut("o_proj"))
        with refused("tp"):
            llm.reshard("tp2")
        monkeypatch.setattr(Shard, "local_specs", property(lambda self: self.specs[:1]))
        with refused("exchange"):
            llm.set_policy("context", {"exchange": "gather_hidden"})
        after = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


# ---------------------------------------------------------------- copies


def copy_of(config: PreTrainedConfig, folder: Path, *, pp: int = 1, tp: int = 1) -> ShrunkenModel:
    return shrink(
        *model_of(config, folder), stages=stages_of(config.num_hidden_layers, pp), tp=tp, try_out=lambda _: None
    )


def model_of(config: PreTrainedConfig, folder: Path) -> tuple[ModelFiles, Any]:
    files = prepare(str(write_checkpoint(config, folder)), dtype="float32")
    return files, read_info(files.weights)


def stages_of(num_layers: int, pp: int) -> list[range]:
    return [range(num_layers * stage // pp, num_layers * (stage + 1) // pp) for stage in range(pp)]


def test_a_copy_has_a_layer_of_each_kind_in_each_stage(tmp_path: Path) -> None:
    config = TINY["gemma2"]()
    config.num_hidden_layers, config.layer_types = 8, ["sliding_attention"] * 3 + ["full_attention"] + ALTERNATING
    small = copy_of(config, tmp_path, pp=2)
    assert list(small.layers) == [0, 3, 4, 5]
    assert [small.info.specs[layer].window is None for layer in small.layers] == [False, True, False, True]
    assert small.info.num_layers == 8


def test_a_small_model_keeps_widths_heads_and_experts(tmp_path: Path) -> None:
    config = TINY["mixtral"]()
    small = copy_of(config, tmp_path)
    own = dict(small.module.named_parameters())
    assert own["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 2 * 128, 96)
    assert own["model.layers.0.self_attn.q_proj.weight"].shape == (6 * 16, 96)
    assert len(own["lm_head.weight"]) == small.info.vocab_size < config.vocab_size
    assert all(weight.std() > 0 for weight in own.values())


@pytest.mark.parametrize("tp", [1, 3, 8])
def test_a_copy_of_wide_layers_is_small_and_divides_alike(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TINY["qwen3"]()
    config.hidden_size, config.intermediate_size, config.head_dim = 1024, 3 * 512, 64
    monkeypatch.setattr("longspan.model.shrunken._MAX_WEIGHTS", 1 << 20)
    small = copy_of(config, tmp_path, tp=tp)
    width, inner = small.module.config.hidden_size, small.module.config.intermediate_size
    assert sum(weight.numel() for weight in small.module.parameters()) <= 1 << 20
    assert width < 1024 and 1024 // width == 1536 // inner
    assert (inner % (8 * tp) == 0) == (1536 % (8 * tp) == 0)
    spec = small.info.specs[0]
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim * 1024 // width) == (6, 3, 64)


def test_switches_and_windows_lie_inside_the_prompts_of_a_trial(tmp_path: Path) -> None:
    shortest, longest = sorted(dry_run.PROMPT_LENGTHS)
    small = copy_of(TINY["llama-longrope"](), tmp_path / "longrope")
    assert small.info.rope_switch_length is not None and shortest < small.info.rope_switch_length < longest
    small = copy_of(TINY["mistral-window"](), tmp_path / "window")
    assert all(
        spec.window is not None and spec.window < shortest for spec in map(small.info.specs.__getitem__, small.layers)
    )
    small = copy_of(TINY["llama4"](), tmp_path / "chunk")
    chunks = [small.info.specs[layer].chunk for layer in small.layers]
    assert chunks[1] is None and chunks[0] is not None and chunks[0] < shortest


def test_a_model_that_cannot_be_small_is_tried_in_full(tmp_path: Path) -> None:
    """Its code needs a token that a small vocabulary lacks."""
    files, info = model_of(TINY["llama"](), tmp_path)
    tried: list[int] = []

    def needs_all_tokens(small: ShrunkenModel) -> None:
        tried.append(small.info.vocab_size)
        small.logits(torch.tensor([150]), torch.tensor([0]))

    shrink(files, info, stages=[range(3)], tp=1, try_out=needs_all_tokens)
    assert tried[-1] == 199 > tried[0]


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox"])
def test_prompts_are_scored_by_models_of_any_form(name: str, tmp_path: Path) -> None:
    """Whatever the path of the module that calls the layers, and however the head calls it."""
    folder = write_checkpoint(AutoConfig.for_model(name, **BASE), tmp_path)
    [prompt] = prompts_of(20)
    with start(folder) as llm:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    wanted = Oracle(folder).logprobs(prompt)
    assert output.prompt_logprobs is not None
    for at in range(1, len(prompt)):
        found = output.prompt_logprobs[at]
        assert found is not None and abs(found[prompt[at]].logprob - wanted[at - 1, prompt[at]]) < 1e-3


def test_a_model_that_numbers_tokens_otherwise_is_refused(tmp_path: Path) -> None:
    """RoBERTa counts positions from behind its padding token, unless it is given some."""
    config = AutoConfig.for_model("roberta", **BASE, is_decoder=True)
    folder = write_checkpoint(config, tmp_path / "model")
    with pytest.raises(ValueError, match="depends on whether position_ids are given"):
        ThreadLLM(str(folder), skip_tokenizer_init=True)
