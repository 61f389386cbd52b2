"""Policy `csps`: without drops, outputs equal Hugging Face. No exact request reads KV that was computed sparsely."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Row, ThreadLLM, num_free_blocks, pairwise
from fake_llm import run
from oracle import Oracle, assert_exact
from refusals import refused
from test_exact import GREEDY, prompts_of
from tiny_models import make_tiny

from longspan.core.sparse_plan import Heads, work_of_layer
from longspan.errors import ParameterError
from longspan.policy.registry import make_policy


def csa(**settings: object) -> str:
    return json.dumps({"levels": 3, **settings})


def engine(
    tiny: Path,
    parallel: str,
    settings: str,
    *,
    exchange: str = "alltoall",
    sizing: tuple[str, str] = ("threshold", "30"),
    **given: object,
) -> ThreadLLM:
    options = dict([("csa", settings), ("exchange", exchange), sizing])
    return ThreadLLM(
        str(tiny),
        skip_tokenizer_init=True,
        parallel=parallel,
        policy="csps",
        policy_options=options,
        block_size=16,
        **{"num_gpu_blocks_override": 60, **given},  # type: ignore[arg-type]
    )


STEPS: list[tuple[str, int | None, object]] = [
    ("alltoall", None, {"2": 3, "3": 2}),
    ("alltoall", 48, 1),
    ("gather_hidden", 48, 1),
    ("gather_hidden", 100, 5),
]


def undropped() -> Iterator[Any]:
    """Yield each split with one or two kinds of steps, and each kind with several splits. The rest are `full`."""
    for row, parallel in enumerate(("2", "3", "4", "2xtp2", "2xpp2")):
        for column, kind in enumerate(STEPS):
            yield pytest.param(parallel, *kind, marks=[pytest.mark.full] if (row + column) % 2 else [])


@pytest.mark.parametrize(("parallel", "exchange", "step_tokens", "pieces"), [*undropped()])
def test_nothing_dropped_is_exact(
    tiny: Path, oracle: Oracle, parallel: str, exchange: str, step_tokens: int | None, pieces: object
) -> None:
    """Whole prompts, chunks behind other requests, a prompt with a cached beginning, and short prompts."""
    first, second, short = prompts_of(150, 90, 20)
    settings = csa(micro_partitions=pieces)
    with engine(tiny, parallel, settings, exchange=exchange, max_num_batched_tokens=step_tokens) as llm:
        for prompts in ([first, second, short], [first]):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                assert_exact(output, oracle.complete(prompt, 6))
        assert f"{exchange}_sparse" in str(output.metrics.exchanges)
        assert output.metrics.num_cached_tokens >= 128
        assert num_free_blocks(llm) == [60] * llm.engine.config.cluster.num_instances


@pytest.mark.parametrize("parallel", ["2", "3", "4", "2xtp2", "2xpp2"])
def test_decodes_with_nothing_dropped_are_exact(tiny: Path, oracle: Oracle, parallel: str) -> None:
    """Prompts of several members, one with a cached beginning, and one of a single instance."""
    prompts = prompts_of(150, 91, 20)
    with engine(tiny, parallel, csa(drop={2: 0.0}, drop_in_decode=True), max_num_batched_tokens=64) as llm:
        for again in (prompts, prompts[:1]):
            for prompt, output in zip(again, llm.generate(again, GREEDY, use_tqdm=False), strict=True):
                assert_exact(output, oracle.complete(prompt, 6))
        assert set(output.metrics.exchanges["decode"]) == {"ring_q_sparse"}
        assert num_free_blocks(llm) == [60] * llm.engine.config.cluster.num_instances


@pytest.mark.parametrize("drop", [0.0, 0.5, 1.0])
def test_decodes_send_queries_for_kept_keys_only(tiny: Path, drop: float) -> None:
    """With all distant tokens dropped, only layers that drop nothing ask the other members."""
    [prompt] = prompts_of(150)
    settings = csa(drop={2: drop, 3: drop}, drop_mode="kv", drop_in_decode=True)
    with engine(tiny, "3", settings, max_num_batched_tokens=None) as llm:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        spec, num_layers = llm.info.specs[0], llm.info.num_layers
        num_dropping = num_layers - 2 if drop == 1 else 0
        of_query = spec.num_heads * (2 * spec.head_dim + 1) * 4
        steps = output.metrics.exchanges["decode"]["ring_q_sparse"]
        asked = 2 * (num_layers - num_dropping) * of_query * steps
        assert llm.bytes_exchanged["ring_q_sparse"] == asked, "the output is on the member of the last partition"
        saved = llm.sparse_savings(output)
        assert saved is not None
        assert (saved.decode_reads_saved_share > 0) == (drop > 0)


BY_LENGTH = {
    "settings": ("off", csa(), csa(micro_partitions=2)),
    "exchange": ("alltoall", "gather_hidden"),
    "sizing": (("partition", "64"), ("partition", "memory")),
}


@pytest.mark.parametrize("row", pairwise(BY_LENGTH))
def test_groups_by_length_are_exact(tiny: Path, oracle: Oracle, row: Row) -> None:
    """Groups of three, two and one instance, at once and one after the other."""
    settings, exchange, sizing = row.values()
    prompts = prompts_of(150, 90, 20, 190, 65, 33)
    with engine(tiny, "4", settings, exchange=exchange, sizing=sizing, num_gpu_blocks_override=8) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            assert_exact(output, oracle.complete(prompt, 6))
        assert num_free_blocks(llm) == [8] * 4


@pytest.mark.parametrize(
    ("prefill", "decode", "backends", "settings"),
    [("2", "2", 1, "off"), ("2xtp2", "2", None, csa()), ("3", "2xtp2", 2, csa()), ("2xpp2", "3", None, "off")],
)
def test_decodes_on_several_instances_are_exact(
    tiny: Path, oracle: Oracle, prefill: str, decode: str, backends: int | None, settings: str
) -> None:
    """Long requests are decoded by all decode instances, together with short ones. Then another turn."""
    prompts = prompts_of(190, 20, 150, 7, 28, 90)
    with ThreadLLM(
        str(tiny),
        skip_tokenizer_init=True,
        prefill_parallel=prefill,
        decode_parallel=decode,
        transfer_backends=backends,
        policy="csps",
        policy_options={"csa": settings, "threshold": "30"},
        block_size=16,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=60,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_exact(output, oracle.complete(prompt, 6))
            decodes = output.metrics.exchanges["decode"]
            assert ("ring_q" in decodes) == (len(prompt) > 30), "no KV comes together again"
        turn = [*prompts[0], *outputs[0].outputs[0].token_ids, *prompts[3]]
        [output] = llm.generate([turn], GREEDY, use_tqdm=False)
        found = output.metrics.num_cached_tokens > 0
        assert found == (settings == "off"), "a longer prompt has another setting"
        assert_exact(output, oracle.complete(turn, 6))
        assert num_free_blocks(llm) == [60] * llm.engine.config.cluster.num_instances


@pytest.mark.parametrize("mode", ["qkv", "kv"])
@pytest.mark.parametrize("parallel", ["2", "3", "3xpp2"])
def test_duplicate_computation_is_dropped(tiny: Path, mode: str, parallel: str) -> None:
    """Both exchanges rate alike when all queries are in the sample, and members have all readers of a KV head."""
    [prompt] = prompts_of(150)
    logits = []
    for exchange in ("alltoall", "gather_hidden"):
        with engine(
            tiny, parallel, csa(drop=0.4, drop_mode=mode, samples=500, rate_by="head"), exchange=exchange
        ) as llm:
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.outputs[0].logits is not None
            logits.append(output.outputs[0].logits[0])
            saved = llm.sparse_savings(output)
            assert saved is not None
            assert saved.attention_flops_saved_share > 0.05
            assert (saved.bytes_saved_share > 0) == (exchange == "alltoall"), "hidden states all travel"
    np.testing.assert_allclose(*logits, atol=1e-3)


@pytest.mark.parametrize("mode", ["qkv", "kv"])
def test_sparse_kv_is_found_by_the_same_setting_only(tiny: Path, oracle: Oracle, mode: str) -> None:
    [prompt] = prompts_of(150)
    with engine(tiny, "4", csa(drop=0.4, drop_mode=mode)) as llm:
        sparse, again = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
        assert sparse.metrics.num_cached_tokens == 0
        assert again.metrics.num_cached_tokens == 144
        for changed in (csa(drop=0.3, drop_mode=mode), "off"):
            llm.service.update_policy({"csa": changed})
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.metrics.num_cached_tokens == 0
        assert_exact(output, oracle.complete(prompt, 6))
        assert llm.sparse_savings(output) is None
        llm.service.update_policy({"csa": csa(drop=0.4, drop_mode=mode)})
        [once_more] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert once_more.metrics.num_cached_tokens == 144


@pytest.mark.parametrize("parallel", ["4", "4xpp2"])
def test_bytes_equal_the_formula(parallel: str, tiny: Path) -> None:
    [prompt] = prompts_of(160)
    with engine(tiny, parallel, csa(drop=0.4)) as llm:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        [(setting, q_runs, kv_runs)] = output.metrics.sparse_parts
        cluster, one = llm.engine.config.cluster, llm.info.specs[0]
        stages = [cluster.layers(0, stage) for stage in range(cluster.pp(0))]
        what = stages, Heads(one.num_heads, one.num_kv_heads), one.head_dim, 4
        work = [work_of_layer(setting, q_runs, kv_runs, layer, *what) for layer in range(llm.info.num_layers)]
        assert llm.bytes_exchanged["alltoall_sparse"] == sum(one.num_bytes for one in work)
        saved = llm.sparse_savings(output)
        assert saved is not None and saved.num_levels == 3
        assert 0 < saved.bytes_saved_share < 1 and 0 < saved.attention_flops_saved_share < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"exchange": "ring_kv"},
            "csa is for exchange alltoall, gather_hidden and layout contiguous, but exchange ring_kv given: leave one",
        ),
        ({"layout": "zigzag"}, "but layout zigzag given"),
        ({"weights": "host"}, "weights and csa exclude each other, but host given"),
        ({"fractions": "0.4,0.2,0.2,0.2"}, "fractions and csa exclude each other"),
        ({"csa": "{"}, "csa is off, auto or settings as JSON, but"),
        ({"csa": csa(levels=0)}, "Expected `int` >= 1 - at `$.levels`"),
        ({"csa": csa(drop=1.5)}, "Expected `float` <= 1.0 - at `$.drop`"),
        ({"csa": csa(drop={"4": 0.1})}, "drop names level 4, but levels are 2 to 3"),
        ({"csa": csa(drop={"2": [0.1, 0.2], "3": [0.1, 0.2, 0.3]})}, "give all levels as many"),
        ({"csa": csa(micro_partitions=17)}, "Expected `int` <= 16 - at `$.micro_partitions`"),
        ({"csa": csa(micro_partitions={"5": 2})}, "micro_partitions names level 5, but levels are 2 to 3"),
        ({"csa": csa(share=1)}, "unknown field `share`"),
        (
            {"csa": csa(drop_in_decode=True), "exchange": "gather_hidden"},
            "drop_in_decode is for exchange alltoall",
        ),
        ({"csa": csa(drop_in_decode=True), "decode": "alltoall"}, "drop_in_decode is for decode ring_q, but alltoall"),
        ({"micro_partitions": "2", "exchange": "gather_hidden"}, "micro_partitions and csa exclude each other, but 2"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ParameterError) as error:
        make_policy("csps", num_instances=4, options={"csa": csa(), **options})
    assert words in str(error.value)


def test_ratios_by_level_layer_and_head() -> None:
    table = csa(drop={"2": 0.1, "3": [[0.2, 0.3], 0.4]})
    policy = make_policy("csps", num_instances=4, options={"csa": table, "threshold": "30"})
    setting = policy.sparse(1000, 16, 100)
    assert setting is not None
    assert setting.partition == 256, "16 blocks each, and the last has fewer"
    assert [[setting.ratio(layer, head, 3) for head in range(2)] for layer in range(2)] == [[0.2, 0.3], [0.4, 0.4]]
    assert [setting.ratio(layer, 1, 2) for layer in range(2)] == [0.1, 0.1]
    assert policy.sparse(30, 16, 100) is None, "it stays on one instance"


def test_the_command_line_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "csa.yaml"
    file.write_text("levels: 3\ndrop: {2: 0.2, 3: 0.5}\n")
    common = ["generate", "--prompt", "a", "--policy", "csps", "--parallel", "2"]
    assert run(*common, "--csa", str(file), "--exchange", "ring_kv") == 2
    assert "--csa is for exchange alltoall" in capsys.readouterr().err
    assert run(*common, "--csa", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml' cannot be read (No such file" in capsys.readouterr().err
    file.write_text("a: [")
    assert run(*common, "--csa", str(file)) == 2
    assert "is no YAML" in capsys.readouterr().err
    assert run("generate", "--prompt", "a", "--policy", "context", "--csa", str(file), "--parallel", "2") == 2


@pytest.mark.parametrize("name", ["mistral-window", "llama4"])
def test_models_with_windows_or_chunks_are_refused(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path / "model")
    with refused("csa"):
        engine(folder, "2", csa())
    with engine(folder, "2", "off") as llm:
        with refused("csa"):
            llm.service.update_policy({"csa": csa()})
        [output] = llm.generate(prompts_of(60), GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 6


def test_roles_refuse_drops_in_decode(tiny: Path) -> None:
    with refused("csa"):
        ThreadLLM(
            str(tiny),
            skip_tokenizer_init=True,
            prefill_parallel="2",
            decode_parallel="2",
            policy="csps",
            policy_options={"csa": csa(drop_in_decode=True)},
        )


@pytest.mark.parametrize("drop_in_decode", [False, True])
@pytest.mark.parametrize("host_kv_gib", [0.0, 0.01])
def test_preempted_requests_resume(tiny: Path, oracle: Oracle, host_kv_gib: float, drop_in_decode: bool) -> None:
    """Pools hold two of these prompts, so that some wait, and outputs preempt requests."""
    prompts, settings = prompts_of(150, 120, 100, 140), csa(drop_in_decode=drop_in_decode)
    with engine(tiny, "3", settings, num_gpu_blocks_override=6, host_kv_gib=host_kv_gib) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            assert_exact(output, oracle.complete(prompt, 6))
        assert num_free_blocks(llm) == [6] * 3
