"""Multimodal models serve text exactly as transformers' whole model does, without the parts that text does not need."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_types
import torch
from engines import Engines, ThreadLLM
from oracle import Oracle
from safetensors.torch import load_file, save_file
from test_exact import SHORT, assert_all_exact, prompts_of
from tiny_models import auto_class, make_speaking, write_checkpoint
from transformers import AutoConfig

from longspan import SamplingParams
from longspan.model.files import ModelError
from longspan.model.source import prepare
from longspan.model.store import StoredTensors, read_info

FAMILIES = {
    "gemma3": "",
    "gemma3n": "",
    "gemma4": "",
    "gemma4_unified": "",
    "llava": "",
    "mistral3": "Ministral 3",
    "qwen2_5_vl": "",
    "qwen2_vl": "windows",
    "qwen3_vl": "",
    "qwen3_vl_moe": "",
}
"""Types, each with its variant."""
LAYOUTS = {
    "ring_kv": {"parallel": "3"},
    "ring_q": {"parallel": "2xtp2"},
    "alltoall": {"parallel": "2xpp2"},
    "gather_kv": {"parallel": "2"},
    "gather_hidden": {"parallel": "2"},
    "chain": {"parallel": "3"},
}
"""By exchange."""
DRAWN = dict(zip(FAMILIES, itertools.cycle(LAYOUTS)))
"""The exchange of each family outside of `make test-all`."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_logits=True)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("multimodal")
    return {
        name: write_checkpoint(tiny_types.tiny_config(name, variant), root / name) for name, variant in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def oracles_of_families(families: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(folder) for name, folder in families.items()}


@pytest.fixture
def gemma3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a cache of its own."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return write_checkpoint(tiny_types.tiny_config("gemma3"), tmp_path / "gemma3")


def cases() -> list[Any]:
    return [
        pytest.param(name, exchange, marks=[] if DRAWN[name] == exchange else [pytest.mark.full])
        for name, exchange in itertools.product(FAMILIES, LAYOUTS)
    ]


@pytest.mark.parametrize(("name", "exchange"), cases())
def test_prompts_and_turns_are_those_of_the_whole_model(
    engines: Engines, families: dict[str, Path], oracles_of_families: dict[str, Oracle], name: str, exchange: str
) -> None:
    """Prompts in several chunks, and a second turn whose prefix is cached. Some tokens are those of images."""
    llm = engines(families[name], **LAYOUTS[exchange])
    llm.set_policy("context", {"threshold": "20", "exchange": exchange})
    oracle, prompts = oracles_of_families[name], prompts_of(5, 63, 97)
    assert_all_exact(llm, oracle, prompts, SHORT)
    turn = [*prompts[2], *oracle.complete(prompts[2], 4).token_ids, *prompts_of(33)[0]]
    [output] = assert_all_exact(llm, oracle, [turn], SHORT)
    assert output.metrics.num_cached_tokens > 0


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen2_vl"])
def test_contexts_on_the_host_and_preempted_requests(
    engines: Engines, families: dict[str, Path], oracles_of_families: dict[str, Oracle], name: str
) -> None:
    """96 tokens fit on the device: long requests attend to blocks on the host, and several are preempted."""
    host = {"host_kv_gib": 0.02, "num_gpu_blocks_override": 6, "policy": "chunked"}
    llm = engines(families[name], **host)
    assert_all_exact(llm, oracles_of_families[name], prompts_of(150, 60, 60, 20), GREEDY)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_as_transformers(
    engines: Engines, families: dict[str, Path], oracles_of_families: dict[str, Oracle], name: str
) -> None:
    """The error against float32 is at most three times that of transformers in bfloat16."""
    [prompt] = prompts_of(63)
    [exact] = oracles_of_families[name].complete(prompt, 1).logits
    [theirs] = Oracle(families[name], dtype=torch.bfloat16).complete(prompt, 1).logits
    llm = engines(families[name], instances=2, policy="context", dtype="bfloat16")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, output_logits=True)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    ours = output.outputs[0].logits
    assert ours is not None
    assert abs(ours[0] - exact).max() <= 3 * abs(theirs - exact).max()


# ---------------------------------------------------------------- weights


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(StoredTensors(prepare(str(folder), dtype="float32"), torch.device("cpu")))


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_other_parts_are_not_stored(families: dict[str, Path], name: str) -> None:
    stored = stored_tensors(families[name])
    left_out = read_info(prepare(str(families[name]), dtype="float32").weights).left_out
    assert left_out and not [key for key in stored if key.startswith(left_out)]
    with_tower = sum(tensor.numel() for tensor in load_file(families[name] / "model.safetensors").values())
    assert sum(tensor.numel() for tensor in stored.values()) < with_tower


def layouts_of(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by their names on the hub, and by their names in the module tree."""
    yield load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    yield {name: tensor.clone() for name, tensor in auto_class(config).from_pretrained(folder).state_dict().items()}


@pytest.mark.parametrize("name", ["gemma3", "llava", "mistral3", "qwen2_vl"])
def test_names_of_older_and_newer_checkpoints_give_the_same_weights(
    families: dict[str, Path], tmp_path: Path, name: str
) -> None:
    expected, names = stored_tensors(families[name]), set[frozenset[str]]()
    for number, tensors in enumerate(layouts_of(families[name])):
        folder = tmp_path / str(number)
        folder.mkdir()
        AutoConfig.from_pretrained(families[name]).save_pretrained(folder)
        if number and AutoConfig.from_pretrained(folder).tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        names.add(frozenset(tensors))
        stored = stored_tensors(folder)
        assert stored.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in stored.items())
    assert len(names) == 2


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_configurations_of_older_checkpoints(engines: Engines, tmp_path: Path, name: str) -> None:
    """The fields of the language model lie next to those of the whole model, and RoPE has its older name."""
    folder = write_checkpoint(tiny_types.tiny_config(name), tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    llm = engines(folder, instances=2)
    assert_all_exact(llm, Oracle(folder), prompts_of(5, 63), SHORT)


def test_a_class_for_text_alone_reads_its_own_checkpoints(engines: Engines, tmp_path: Path) -> None:
    """Even if the configuration is that of the whole model."""
    whole = tiny_types.tiny_config("llama4", "full attention")
    folder = write_checkpoint(whole.get_text_config(), tmp_path / "text")
    oracle, prompts = Oracle(folder), prompts_of(5, 63)
    whole.architectures = ["Llama4ForCausalLM"]
    whole.save_pretrained(folder)
    assert_all_exact(engines(folder, instances=2), oracle, prompts, SHORT)


def test_weights_of_other_parts_are_not_read(gemma3: Path) -> None:
    """Towers may be absent, or of other sizes."""
    expected, file = stored_tensors(gemma3), gemma3 / "model.safetensors"
    tensors = load_file(file)
    of_towers = [name for name in tensors if "vision" in name or "projector" in name]
    assert of_towers
    for change in (lambda name: tensors.update({name: torch.zeros(3)}), tensors.pop):
        for name in of_towers:
            change(name)
        save_file(tensors, file, metadata={"format": "pt"})
        stored = stored_tensors(gemma3)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in stored.items())


def test_a_lost_weight_of_the_language_model_is_an_error(gemma3: Path) -> None:
    file = gemma3 / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith("layers.1.self_attn.q_proj.weight"))
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of the model's weights, e\.g\. .*layers\.1\.self_attn\.q_proj"):
        prepare(str(gemma3), dtype="float32")


def test_another_tensor_is_named_and_towers_are_not(gemma3: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(str(gemma3), dtype="float32")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    file = gemma3 / "model.safetensors"
    save_file(load_file(file) | {"language_model.model.extra": torch.ones(2)}, file, metadata={"format": "pt"})
    prepare(str(gemma3), dtype="float32")
    assert "extra" in caplog.text and "vision" not in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_dummy_weights_have_the_form_of_read_ones(families: dict[str, Path], name: str) -> None:
    """Also of weights that ranks draw on devices: only their description is stored."""
    read = read_info(prepare(str(families[name]), dtype="float32").weights)
    for device in ("cpu", "cuda"):
        drawn = prepare(str(families[name]), dtype="float32", load_format="dummy", device=device)
        assert read_info(drawn.weights) == read


def test_the_checkpoints_precision_is_that_of_its_language_model(tmp_path: Path) -> None:
    config = tiny_types.tiny_config("gemma3")
    config.get_text_config().dtype, config.dtype = torch.bfloat16, None
    config.save_pretrained(tmp_path)
    assert prepare(str(tmp_path), dtype="auto", load_format="dummy").dtype == "bfloat16"


# ---------------------------------------------------------------- reports


def test_the_facts_name_the_parts_that_are_left_out(
    families: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="longspan"), ThreadLLM(str(families["gemma3"]), skip_tokenizer_init=True):
        pass
    [block] = [record.getMessage() for record in caplog.records if "the engine has started" in record.getMessage()]
    [line] = [line for line in block.splitlines() if "left out" in line]
    assert "model.vision_tower" in line and "text only" in line


def test_a_chat_has_text_only(tmp_path: Path) -> None:
    folder = make_speaking(tmp_path, tiny_types.tiny_config("gemma3"))
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with ThreadLLM(str(folder)) as llm:
        params = SamplingParams(max_tokens=2, temperature=0)
        text = {"type": "text", "text": "What is this? <image>"}
        [whole] = llm.chat([{"role": "user", "content": [text]}], params, use_tqdm=False)
        assert whole.outputs[0].token_ids
        with pytest.raises(ValueError, match=r"messages\[0\] has a part that is not text.*remove this part"):
            llm.chat([{"role": "user", "content": [image, text]}], params, use_tqdm=False)
