"""Weights that workers map from the checkpoint itself, and converted weights: equal to `from_pretrained`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from engines import ThreadLLM
from safetensors.torch import load_file, save_file
from tiny_models import TINY, make_tiny, write_checkpoint
from tiny_types import tiny_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from longspan import SamplingParams
from longspan.errors import WorkerLostError
from longspan.model import loading
from longspan.model.files import ModelError, ModelFiles
from longspan.model.folder import weight_files
from longspan.model.mapped import TensorWriter
from longspan.model.source import prepare
from longspan.model.store import TENSORS, StoredTensors, WeightForm, named_tensors, read_description

CPU = torch.device("cpu")
TYPES = ("qwen3_moe", "olmoe", "gpt_neox", "phimoe", "ernie4_5_moe", "gemma3_text", "minimax_m2", "dots1")
"""Further types with stacked experts, persistent buffers, fused projections or parameters that stay in float32."""
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written_bytes(files: ModelFiles) -> int:
    path = files.weights.with_name(TENSORS)
    return path.stat().st_size if path.exists() else 0


def checkpoint(name: str, folder: Path, dtype: torch.dtype, shards: str = "60KB") -> Path:
    """Write a model of a type in shards of a dtype."""
    if name in TINY:
        make_tiny(name, folder)
    else:
        write_checkpoint(tiny_config(name), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def assert_as_from_pretrained(files: ModelFiles, folder: Path) -> None:
    expected, aliases = named_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, files.dtype)))
    stored = StoredTensors(files, CPU)
    assert {*stored} == {*expected, *aliases}
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor), name
    assert {alias: stored.owner(alias) for alias in aliases} == aliases


@pytest.mark.parametrize(("served", "batch_bytes"), [("float32", 2**27), ("bfloat16", 1)])
@pytest.mark.parametrize("name", [*TINY, *TYPES])
def test_stored_weights_are_those_of_from_pretrained(
    name: str, served: str, batch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit: from shards in the same dtype and at once, and in another dtype and tensor by tensor."""
    monkeypatch.setattr(loading, "_BATCH_BYTES", batch_bytes)
    folder = checkpoint(name, tmp_path / "m", torch.float32)
    assert len([*folder.glob("*.safetensors")]) > 2
    assert_as_from_pretrained(prepare(str(folder), dtype=served), folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TINY)
def test_tensors_that_agree_are_not_written(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The store has buffers, and stacked experts that the checkpoint holds one by one."""
    folder = checkpoint(name, tmp_path / "m", dtype)
    held = {key for path in folder.glob("*.safetensors") for key in load_file(path)}
    files = prepare(str(folder), dtype=str(dtype).removeprefix("torch."))
    model = AutoModelForCausalLM.from_pretrained(folder)
    stacked = [tensor for key, tensor in model.named_parameters() if tensor.ndim == 3 and key not in held]
    own = [*(tensor for key, tensor in model.named_buffers() if key not in held), *stacked]
    aligned = sum(64 + tensor.nbytes + -tensor.nbytes % 64 for tensor in own)
    assert sum(tensor.nbytes for tensor in own) <= written_bytes(files) <= aligned + 64
    in_store = {name for name, place in read_description(files.weights).tensors.items() if not place.file}
    assert in_store == {name for name, tensor in named_tensors(model)[0].items() if any(tensor is one for one in own)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_weight_that_the_checkpoint_holds_twice_is_stored_once(dtype: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    once = written_bytes(prepare(str(folder), dtype=dtype))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files = prepare(str(folder), dtype=dtype)
    assert written_bytes(files) == once
    assert_as_from_pretrained(files, folder)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_from_pretrained(prepare(str(folder), dtype=dtype), folder)


def test_tied_weights_that_differ_are_both_stored(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files = prepare(str(folder), dtype="float32")
    assert_as_from_pretrained(files, folder)
    assert torch.equal(StoredTensors(files, CPU)["lm_head.weight"], tensors["lm_head.weight"])


def test_tensors_at_odd_addresses_are_read_right(tmp_path: Path) -> None:
    """A safetensors file may hold a tensor at an address that its dtype does not divide. It is copied then."""
    folder = make_tiny("llama", tmp_path / "m")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    files = prepare(str(folder), dtype="float32")
    assert {place.file for place in read_description(files.weights).tensors.values()} == {""}
    assert_as_from_pretrained(files, folder)


def test_a_base_model_without_a_prefix_is_mapped(tmp_path: Path) -> None:
    """Prefixes of base models are added or removed by transformers."""
    folder = make_tiny("qwen3", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    files = prepare(str(folder), dtype="float32")
    assert written_bytes(files) < 1000
    assert_as_from_pretrained(files, folder)


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_weights_in_pytorchs_own_format_are_converted(kind: str, tmp_path: Path) -> None:
    folder = make_tiny("mixtral", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        own: dict[str, object] = {name: tensors[name] for name in names}
        torch.save(own | {"step": 7}, folder / f"{number}.bin", _use_new_zipfile_serialization=kind == "zip")
    places = {name: f"{index % 2}.bin" for index, name in enumerate(tensors)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_as_from_pretrained(prepare(str(folder), dtype="float32"), folder)


class Halves:
    """Computes a tensor when it is read, as code that de-quantises does."""

    def __init__(self, tensor: Tensor) -> None:
        self._half, self.num_reads = tensor / 2, 0

    def __getitem__(self, _: object) -> Tensor:
        self.num_reads += 1
        return self._half + self._half


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_tensor_may_be_computed_when_it_is_read(name: str, tmp_path: Path) -> None:
    folder, writer = make_tiny(name, tmp_path / "m"), TensorWriter(tmp_path / TENSORS)
    tensors = loading.checkpoint_tensors(weight_files(folder), writer)
    computed = {key: Halves(tensor) for key, tensor in tensors.items() if key.endswith("w1.weight") or "q_proj" in key}
    form, config = WeightForm(dtype="float32"), AutoConfig.from_pretrained(folder)
    model, report = loading.load_model(folder, config, tensors | computed, form, writer)
    assert not any(report.values()) and {one.num_reads for one in computed.values()} == {1}
    for key, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
        assert writer.place(model.state_dict()[key]) is not None, key


def test_trusted_code_may_load_weights_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = make_tiny("llama", tmp_path / "m")
    (folder / "ours.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "ours.OwnConfig", "AutoModelForCausalLM": "ours.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": classes}))
    stored = StoredTensors(prepare(str(folder), dtype="float32", trust_remote_code=True), CPU)
    own = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(stored["model.norm.weight"], own + 1)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    @classmethod
    def from_pretrained(cls, *args, **options):
        model, report = super().from_pretrained(*args, **options)
        model.model.norm.weight.data += 1
        return model, report
"""


# ---------------------------------------------------------------- files that change


def overwritten(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())
    os.utime(path, (1, 1))


def replaced(path: Path, other: Path) -> None:
    os.utime(other, (1, 1))
    other.replace(path)


def linked_elsewhere(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def truncated(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def deleted(path: Path, _: Path) -> None:
    path.unlink()


def unchanged(path: Path, _: Path) -> None:
    path.chmod(0o600)


def copied(path: Path, _: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


CHANGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "overwritten": (overwritten, "changed after the model was loaded"),
    "replaced": (replaced, "changed after the model was loaded"),
    "linked elsewhere": (linked_elsewhere, "changed after the model was loaded"),
    "truncated": (truncated, "changed after the model was loaded"),
    "deleted": (deleted, "cannot be read any more"),
    "chmod": (unchanged, ""),
    "copied": (copied, ""),
}
"""By name: a change of a file, and a part of the error for workers that start later, if any."""


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Make a file of weights, and one of another model with the same size and time."""
    folders = [make_tiny("qwen3", tmp_path / name, seed) for seed, name in enumerate("ab")]
    paths = [folder / "model.safetensors" for folder in folders]
    for path in paths:
        os.utime(path, (1, 1))
    return paths[0], paths[1]


def expectation(name: str) -> AbstractContextManager[object]:
    return pytest.raises(ModelError, match=CHANGES[name][1]) if CHANGES[name][1] else nullcontext()


@pytest.mark.parametrize("name", CHANGES)
def test_a_worker_that_starts_later_maps_the_weights_that_were_checked(name: str, two: tuple[Path, Path]) -> None:
    files = prepare(str(two[0].parent), dtype="float32")
    weight = StoredTensors(files, CPU)["model.norm.weight"].clone()
    CHANGES[name][0](*two)
    with expectation(name) as refusal:
        assert torch.equal(StoredTensors(files, CPU)["model.norm.weight"], weight)
    if refusal is not None:
        assert str(two[0]) in str(refusal.value) and "\n" not in str(refusal.value)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHANGES)
def test_mapped_weights_stay_or_the_change_is_noticed(name: str, two: tuple[Path, Path]) -> None:
    """A file that is replaced or deleted stays mapped. A file that is overwritten in place has other contents."""
    stored = StoredTensors(prepare(str(two[0].parent), dtype="float32"), CPU)
    stored.check()
    weights: dict[str, Tensor] = {key: tensor.clone() for key, tensor in stored.items()}
    CHANGES[name][0](*two)
    if name in {"overwritten", "truncated"}:
        with pytest.raises(ModelError, match="changed after the model was loaded: start again"):
            stored.check()
    else:
        stored.check()
        assert all(torch.equal(stored[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("name", ["overwritten", "replaced", "deleted", "chmod"])
def test_new_workers_of_a_running_engine_get_the_same_weights_or_an_error(name: str, two: tuple[Path, Path]) -> None:
    with ThreadLLM(str(two[0].parent), parallel="tp2", skip_tokenizer_init=True) as llm:
        [before] = llm.generate([[5, 6, 7]], ONE_TOKEN, use_tqdm=False)
        CHANGES[name][0](*two)
        if CHANGES[name][1]:
            with pytest.raises(WorkerLostError, match=CHANGES[name][1]):
                llm.service.restart()
        else:
            llm.service.restart()
            [after] = llm.generate([[5, 6, 7]], ONE_TOKEN, use_tqdm=False)
            assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_no_result_is_computed_with_weights_that_were_overwritten(two: tuple[Path, Path]) -> None:
    with ThreadLLM(str(two[0].parent), parallel="2", skip_tokenizer_init=True) as llm:
        llm.generate([[5, 6, 7]], ONE_TOKEN, use_tqdm=False)
        overwritten(*two)
        with pytest.raises(WorkerLostError, match=f"{two[0]} changed after the model was loaded: start again"):
            llm.generate([[8, 9, 10]], ONE_TOKEN, use_tqdm=False)
