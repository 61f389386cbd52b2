"""A model whose files are replaced is served with the new files, whatever their sizes and times are."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspan.args import EngineArgs
from longspan.cost.profile_key import ProfileKey
from longspan.model import mapped, source
from longspan.model.adapter import Model
from longspan.model.files import ModelError, ModelFiles
from longspan.model.mapped import Place, TensorWriter
from longspan.model.source import prepare, smollm2_folder
from longspan.model.store import DESCRIPTION, TENSORS, StoredTensors, build_once
from longspan.resolve import EngineModel
from longspan.runtime.grammar import GrammarMatcher, Vocabulary
from longspan.text.tokenizer import load_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same_times(folder: Path) -> Path:
    """As reproducible images have them."""
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    return folder


def looks(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def prepared(folder: Path) -> ModelFiles:
    return prepare(str(folder), dtype="float32")


def norm_of(files: ModelFiles) -> Tensor:
    return StoredTensors(files, CPU)["model.norm.weight"]


def in_place(folder: Path, other: Path) -> None:
    for path in other.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def whole_folder(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    other.rename(folder)


def file_by_file(folder: Path, other: Path) -> None:
    for path in other.iterdir():
        path.replace(folder / path.name)


def by_links(folder: Path, other: Path) -> None:
    for path in other.iterdir():
        (folder / path.name).unlink()
        (folder / path.name).symlink_to(path)


@pytest.mark.parametrize("shards", ["one file", "shards", "pickle"])
@pytest.mark.parametrize("replace", [in_place, whole_folder, file_by_file, by_links])
def test_weights_of_the_same_size_and_time_are_served_as_they_are(
    replace: Callable[[Path, Path], None], shards: str, tmp_path: Path
) -> None:
    folder, other = tmp_path / "m", tmp_path / "other"
    for path, seed in ((folder, 0), (other, 1)):
        make_tiny("llama", path, seed)
        if shards == "shards":
            model = AutoModelForCausalLM.from_pretrained(path)
            (path / "model.safetensors").unlink()
            model.save_pretrained(path, max_shard_size="250KB")
        elif shards == "pickle":
            torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
            (path / "model.safetensors").unlink()
        same_times(path)
    expected = [AutoModelForCausalLM.from_pretrained(path).model.norm.weight.clone() for path in (folder, other)]
    first, before = prepared(folder), looks(folder)
    replace(folder, other)
    same_times(folder)
    assert looks(folder) == before
    assert torch.equal(norm_of(prepared(folder)), expected[1])
    if shards == "pickle":  # its weights were converted
        assert torch.equal(norm_of(first), expected[0])
    else:
        with pytest.raises(ModelError, match=r"changed after the model was loaded|cannot be read any more"):
            norm_of(first)


def edit(path: Path, old: str, new: str) -> None:
    """Changes a text, but not its length."""
    content = path.read_text()
    assert old in content and len(old) == len(new)
    path.write_text(content.replace(old, new))
    os.utime(path, (1, 1))


def test_a_configuration_of_the_same_size_and_time_is_served_as_it_is(tmp_path: Path) -> None:
    folder = same_times(make_tiny("llama", tmp_path / "m"))
    first = prepared(folder)
    edit(folder / "config.json", '"rope_theta": 10000.0', '"rope_theta": 50000.0')
    assert prepared(folder).weights != first.weights
    edit(folder / "generation_config.json", '"eos_token_id": 2', '"eos_token_id": 7')
    assert Model(prepared(folder), CPU).info.eos_token_ids == (7,)


def test_the_same_contents_are_converted_once_wherever_they_are(tmp_path: Path, cache: Path) -> None:
    """Neither the folder's name nor files that say nothing of weights matter."""
    folder = make_tiny("llama", tmp_path / "m")
    first = prepared(folder)
    moved = folder.rename(tmp_path / "moved")
    (moved / "README.md").write_text("# A model")
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    (moved / "consolidated.safetensors").write_bytes(b"of another program")
    assert prepared(moved).weights == first.weights
    assert prepared(Path(shutil.copytree(moved, tmp_path / "copy"))).weights == first.weights
    assert len([*cache.glob("weights/*/weights.json")]) == 1


def test_code_that_comes_with_a_model_counts_and_is_kept_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = make_tiny("llama", tmp_path / "m")
    (folder / "ours.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "ours.OurConfig", "AutoModelForCausalLM": "ours.OurModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "ours", "auto_map": classes}))
    first = prepare(str(folder), dtype="float32", trust_remote_code=True)
    edit(folder / "ours.py", "number = 1", "number = 2")
    second = prepare(str(folder), dtype="float32", trust_remote_code=True)
    assert [Model(files, CPU).module.number for files in (first, second)] == [1, 2]


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OurConfig(LlamaConfig):
    model_type = "ours"

class OurModel(LlamaForCausalLM):
    config_class = OurConfig
    number = 1
"""


def test_workers_that_start_later_get_the_model_that_was_prepared(tmp_path: Path) -> None:
    """Or an error, if its weights lay in the folder only."""
    folder = make_tiny("llama", tmp_path / "m")
    first, converted = (prepare(str(folder), dtype=dtype) for dtype in ("float32", "bfloat16"))
    edit(folder / "config.json", '"rope_theta": 10000.0', '"rope_theta": 50000.0')
    assert Model(first, CPU).module.config.rope_parameters["rope_theta"] == 10000.0
    shutil.rmtree(folder)
    assert Model(converted, CPU).info.num_layers == 3
    with pytest.raises(ModelError, match=f"{folder}/model.safetensors has weights of the model, but cannot be read"):
        Model(first, CPU)


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors"])
def test_a_checkpoint_that_changes_while_it_is_converted_is_refused(
    changed: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = make_tiny("llama", tmp_path / "m"), make_tiny("llama", tmp_path / "other", 1)
    edit(other / "config.json", '"rope_theta": 10000.0', '"rope_theta": 50000.0')
    whole = TensorWriter.places

    def places(writer: TensorWriter, tensors: dict[str, Tensor]) -> dict[str, Place]:
        found = whole(writer, tensors)
        (folder / changed).write_bytes((other / changed).read_bytes())
        return found

    monkeypatch.setattr(TensorWriter, "places", places)
    with pytest.raises(ModelError, match=f"{folder} changed while it was read: start again"):
        prepared(folder)
    assert not list(cache.glob("weights/*/"))
    monkeypatch.undo()
    monkeypatch.setenv("LONGSPAN_CACHE", str(cache))
    assert prepared(folder).weights.exists()


def test_a_tokenizer_that_was_replaced_is_not_taken_for_the_models(speaking_model: Path, tmp_path: Path) -> None:
    """A grammar reads it when the first request has one, which ends that request and no worker."""
    folder = Path(shutil.copytree(speaking_model, tmp_path / "m"))
    files = prepared(folder)
    load_tokenizer(files)
    edit(folder / "tokenizer.json", '"Ġthe": 260', '"Ġthe": 281')
    with pytest.raises(ModelError, match="changed after the model was loaded: start again"):
        load_tokenizer(files)
    matcher = GrammarMatcher('start: "a"', Vocabulary(files, size=49152, eos_token_ids=(2,)))
    assert matcher.allowed() is None
    assert "changed after the model was loaded" in matcher.error
    load_tokenizer(prepared(folder))


def test_another_version_of_the_packaged_model_gets_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package, the latest that was made."""
    gguf = tmp_path / "SmolLM2-135M-Instruct.gguf"
    monkeypatch.setattr(source, "smollm2_gguf", lambda: gguf)
    monkeypatch.setattr(
        "longspan.model.gguf_file.convert", lambda gguf, folder: (folder / "made").write_bytes(gguf.read_bytes())
    )
    for content in (b"1", b"2"):
        gguf.write_bytes(content)
        os.utime(gguf, (1, 1))
        assert (smollm2_folder() / "made").read_bytes() == content
        os.utime(smollm2_folder(), ns=(1, int(content)))
    monkeypatch.setattr(source, "smollm2_gguf", lambda: None)
    assert (smollm2_folder() / "made").read_bytes() == b"2"


def test_a_profile_is_of_models_of_the_same_sizes_only(tmp_path: Path) -> None:
    """Models in one folder share a profile only if their sizes are equal. Other weights take the same time."""

    def key(name: str, seed: int) -> ProfileKey:
        folder = make_tiny(name, tmp_path / "m", seed)
        return EngineModel.of(EngineArgs(model=str(folder), dtype="float32")).profile_key("cpu", tp=1, threads=1)

    assert key("llama", 0) == key("llama", 1) != key("qwen3", 0)


def test_a_disk_that_fills_up_is_named_and_nothing_stays(tmp_path: Path, cache: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, limits[1]))
    try:
        with pytest.raises(ModelError, match=rf"{cache}/weights/.* cannot be written .*too large.*LONGSPAN_CACHE"):
            prepare(str(folder), dtype="bfloat16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(cache.glob("weights/*/"))


@pytest.mark.parametrize("form", [{}, {"quantization": "int8"}, {"load_format": "dummy"}])
def test_a_disk_that_is_too_small_is_named_before_weights_are_written(
    form: dict[str, Any], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 10**5))
    monkeypatch.setattr(TensorWriter, "write", lambda *_: pytest.fail("nothing is written"))
    with pytest.raises(ModelError, match=rf"need \d\.\d\d GB in {cache}, but 0\.00 are free.*LONGSPAN_CACHE"):
        prepare(str(folder), dtype="bfloat16", **form)


@pytest.mark.parametrize("file", [DESCRIPTION, TENSORS])
def test_a_damaged_file_of_the_cache_is_named(file: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    path = prepare(str(folder), dtype="bfloat16").weights.with_name(file)
    os.truncate(path, 1000)
    with pytest.raises(ModelError, match=rf"{path} is damaged .*: remove its folder {path.parent}"):
        prepare(str(folder), dtype="bfloat16")


def test_starts_at_the_same_time_make_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from concurrent.futures import ThreadPoolExecutor

    folder = make_tiny("llama", tmp_path / "m")
    caplog.set_level(logging.INFO)
    prepared(
        make_tiny("qwen3", tmp_path / "imported")
    )  # threads that import the same modules would wait for each other
    caplog.clear()
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(prepared, [folder] * 4)]
    assert len(set(found)) == 1
    assert caplog.text.count("to the cache, once") == 1


def test_a_failure_leaves_no_partial_files(tmp_path: Path) -> None:
    def build(unfinished: Path) -> None:
        (unfinished / "part").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "thing", build)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock" and path.name != "cache"] == []


def test_a_folder_for_the_cache_is_asked_for_where_there_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSPAN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home directory")))
    with pytest.raises(ModelError, match="set LONGSPAN_CACHE"):
        smollm2_folder()
