"""`longspan models`: sizes that were computed by hand from published configurations, verdicts of starts, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_types
import transformers
from engines import ThreadLLM
from fake_llm import run
from tiny_models import make_tiny

from longspan import limits, served_models
from longspan.args import EngineArgs
from longspan.limits import Memory
from longspan.model import hub
from longspan.model.files import ResourceError
from longspan.resolve import ResolvedEngine
from longspan.runtime.dry_run import DryRuns
from longspan.served_models import LAYOUTS, Inspection, KvSize, config_folder

CONFIGS = Path(__file__).parents[1] / "model" / "configs"
K, GIB = 1 << 10, 1 << 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    del one_thread
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.json")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run("models", *arguments, "--json") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ---------------------------------------------------------------- sizes


@dataclass(frozen=True, kw_only=True)
class Hand:
    """The answer for a configuration, by hand, with 2 bytes per element.

    Attributes:
        layers: number, KV heads, head dimension and window of each kind of layer.
        kv_bytes: of a token in all layers.
    """

    parameters: int
    context: int
    layers: list[tuple[int, int, int, int | None]]
    kv_bytes: int


def decoder(*, vocab: int, hidden: int, layers: int, layer: int, is_tied: bool = False) -> int:
    """Embedding, output head, layers, and the last norm."""
    return vocab * hidden * (1 if is_tied else 2) + layers * layer + hidden


HAND = {
    "llama-3.1-8b": Hand(  # q and o, k and v, three matrices of the MLP, two norms
        parameters=decoder(
            vocab=128256,
            hidden=4096,
            layers=32,
            layer=2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096,
        ),
        context=128 * K,
        layers=[(32, 8, 128, None)],
        kv_bytes=128 * K,
    ),
    "llama-3.1-70b": Hand(
        parameters=decoder(
            vocab=128256,
            hidden=8192,
            layers=80,
            layer=2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192,
        ),
        context=128 * K,
        layers=[(80, 8, 128, None)],
        kv_bytes=320 * K,
    ),
    "qwen2.5-7b-1m": Hand(  # biases of q, k and v
        parameters=decoder(
            vocab=152064,
            hidden=3584,
            layers=28,
            layer=2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584,
        ),
        context=1_010_000,
        layers=[(28, 4, 128, None)],
        kv_bytes=56 * K,
    ),
    "qwen3-30b-a3b": Hand(  # norms of queries and keys, a router, 128 experts of three matrices
        parameters=decoder(
            vocab=151936,
            hidden=2048,
            layers=48,
            layer=2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 128 * 2048 + 128 * 3 * 2048 * 768 + 2 * 2048,
        ),
        context=40 * K,
        layers=[(48, 4, 128, None)],
        kv_bytes=96 * K,
    ),
    "mistral-7b-v0.1": Hand(
        parameters=decoder(
            vocab=32000, hidden=4096, layers=32, layer=2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
        ),
        context=32 * K,
        layers=[(32, 8, 128, 4096)],
        kv_bytes=128 * K,
    ),
    "gemma-2-9b": Hand(  # the head is the embedding, and there are four norms
        parameters=decoder(
            vocab=256000,
            hidden=3584,
            layers=42,
            layer=2 * 3584 * 4096 + 2 * 3584 * 2048 + 3 * 3584 * 14336 + 4 * 3584,
            is_tied=True,
        ),
        context=8 * K,
        layers=[(21, 8, 256, 4096), (21, 8, 256, None)],
        kv_bytes=336 * K,
    ),
    "phi-3-mini-128k": Hand(
        parameters=decoder(vocab=32064, hidden=3072, layers=32, layer=4 * 3072 * 3072 + 3 * 3072 * 8192 + 2 * 3072),
        context=128 * K,
        layers=[(32, 32, 96, 256 * K)],
        kv_bytes=384 * K,
    ),
}
GPT_OSS = Hand(  # biases, a sink per head, a router, 32 experts of two matrices
    parameters=decoder(
        vocab=201088,
        hidden=2880,
        layers=24,
        layer=2 * 2880 * 4096
        + 2 * 2880 * 512
        + (4096 + 2 * 512 + 2880)
        + 64
        + (32 * 2880 + 32)
        + 32 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880)
        + 2 * 2880,
    ),
    context=128 * K,
    layers=[(12, 8, 64, 128), (12, 8, 64, None)],
    kv_bytes=48 * K,
)


def check_sizes(name: str, hand: Hand) -> None:
    with config_folder(config(name), trust_remote_code=False) as folder:
        found = Inspection(EngineArgs(dtype="bfloat16"), folder)
        assert found.num_parameters == hand.parameters
        assert found.weight_bytes["bfloat16"] == 2 * hand.parameters
        assert found.weight_bytes["float32"] == 4 * hand.parameters
        assert found.model.info.context_length == hand.context
        kinds = [(kind.num_layers, kind.num_kv_heads, kind.head_dim, kind.window) for kind in found.layers]
        assert sorted(kinds, key=str) == sorted(hand.layers, key=str)
        assert sum(kind.num_layers * kind.kv_bytes for kind in found.layers) == hand.kv_bytes
        for size in found.kv([8 * K, 128 * K, 1024 * K]):
            tokens = size.tokens
            seen = sum(number * 4 * heads * dim * min(tokens, window or tokens) for number, heads, dim, window in kinds)
            assert size == KvSize(
                tokens=tokens,
                stored_bytes=tokens * hand.kv_bytes,
                visible_bytes=seen,
                is_within_context=tokens <= hand.context,
            )


@pytest.mark.parametrize("name", HAND)
def test_sizes_are_as_by_hand(name: str) -> None:
    check_sizes(name, HAND[name])


def test_sizes_of_a_model_with_sinks_and_quantised_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal names a property of this configuration."""
    with config_folder(config("gpt-oss-20b"), trust_remote_code=False) as folder:
        reason = Inspection(EngineArgs(), folder).reason
        assert Inspection(EngineArgs(), folder).num_parameters == GPT_OSS.parameters
    if reason is None:
        check_sizes("gpt-oss-20b", GPT_OSS)
    else:
        assert "quantised" in reason or "sinks" in reason
        assert answer(capsys, config("gpt-oss-20b"), code=1)["reason"] == reason


def test_quantised_weights_have_levels_and_steps() -> None:
    """32 weights have 32 or 16 bytes of levels, and 4 bytes of step and base. The head has at least 8 bits."""
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head, rest = 128256 * 4096, 128256 * 4096 + 65 * 4096
    with config_folder(config("llama-3.1-8b"), trust_remote_code=False) as folder:
        found = Inspection(EngineArgs(), folder).weight_bytes
    assert found["int8"] == (matrices + head) * 36 // 32 + 2 * rest
    assert found["int4"] == matrices * 20 // 32 + head * 36 // 32 + 2 * rest


def test_a_tied_head_has_levels_of_its_own() -> None:
    matrices = 42 * (2 * 3584 * 4096 + 2 * 3584 * 2048 + 3 * 3584 * 14336)
    norms, embedding = (4 * 42 + 1) * 3584, 256000 * 3584
    with config_folder(config("gemma-2-9b"), trust_remote_code=False) as folder:
        found = Inspection(EngineArgs(), folder).weight_bytes
    assert found["int8"] == (matrices + embedding) * 36 // 32 + 2 * (embedding + norms)


_BOUNDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
from longspan.cli.app import main
try:
    main(sys.argv[1:])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, file=sys.stderr)
"""


def test_a_large_model_takes_little_memory(cache: Path) -> None:
    """141 GB of weights, in 16 GiB of addresses and 2 GiB of memory, most of it for the trials of layouts."""
    command = [sys.executable, "-c", _BOUNDED, "models", config("llama-3.1-70b"), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(ran.stdout)
    assert found["num_parameters"] == HAND["llama-3.1-70b"].parameters
    assert [layout["supported"] for layout in found["layouts"]] == [True] * len(LAYOUTS)
    assert int(ran.stderr.split()[-1]) < 2048
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) < 20e6


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(("name", "parallel"), [("phi-3-mini-128k", "tp2"), ("gpt-oss-20b", "tp8")])
def test_layouts_of_sizes_that_few_numbers_divide_work(name: str, parallel: str) -> None:
    """RoPE factors keep the size of heads, and 2,880 divided by a power of two is no multiple of 64."""
    with config_folder(config(name), trust_remote_code=False) as folder:
        assert Inspection(EngineArgs(), folder).layout(parallel, ()).reason is None


@pytest.mark.parametrize(("name", "reason"), [("deepseek-v3", "latent attention"), ("mamba-2.8b", "")])
def test_a_refused_model_has_a_reason_and_exit_code_1(
    name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is the reason of a start."""
    found = answer(capsys, config(name), code=1)
    assert found["supported"] is False
    assert reason in found["reason"]
    assert (found["layouts"], found["machines"], found["weight_bytes"]) == ([], [], None)
    assert run("models", config(name)) == 1
    out, err = capsys.readouterr()
    assert found["reason"] in out
    assert err == ""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny configuration without weights."""
    tiny_types.tiny_config(request.param, "", even=True).save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


@pytest.mark.parametrize("folder", ["llama", "phi", "olmo2", "mamba"], indirect=True)
def test_verdicts_are_the_verdicts_of_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def of_a_start(**options: Any) -> str | None:
        try:
            ThreadLLM(str(folder), load_format="dummy", skip_tokenizer_init=True, block_size=16, **options).shutdown()
        except ValueError as error:
            return str(error)
        return None

    verdict = of_a_start(dtype="float32")
    found = answer(capsys, str(folder), code=0 if verdict is None else 1)
    assert found["reason"] == verdict
    for layout in found["layouts"]:
        exchange = "gather_hidden" if layout["exchanges"] == ["gather_hidden"] else "auto"
        started = of_a_start(dtype="float32", parallel=layout["parallel"], exchange=exchange)
        assert layout["reason"] == started, layout["parallel"]
        assert layout["supported"] == (started is None)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_no_layout_is_tried_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start stores the result of its trial, and so does this verb."""
    tried: list[str] = []
    problem = DryRuns.problem

    def counted(self: DryRuns, cluster: Any, exchange: Any) -> str:
        tried.append(str(cluster.spec))
        return problem(self, cluster, exchange)

    monkeypatch.setattr(DryRuns, "problem", counted)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "block_size": 16}
    ThreadLLM(str(folder), parallel="tp2", **options).shutdown()
    assert tried == ["tp2"]
    first = answer(capsys, str(folder))
    assert tried.count("tp2") == 1 and {"1", "2", "tp4", "pp2"} <= {*tried}
    before = list(tried)
    assert answer(capsys, str(folder))["layouts"] == first["layouts"]
    assert tried == before


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_machine_without_memory_for_a_trial_refuses_no_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: object) -> str:
        raise ResourceError("a small copy of the model could not be run: start again with more free memory")

    monkeypatch.setattr(DryRuns, "problem", lacks)
    assert run("models", str(folder)) == 2
    assert "more free memory" in capsys.readouterr().err


# ---------------------------------------------------------------- this machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores and 24 GiB."""
    monkeypatch.setattr(limits, "cores", lambda: 2)
    monkeypatch.setattr(limits, "memory", lambda: Memory(total=32 * GIB, available=24 * GIB, is_limited=False))
    monkeypatch.setattr(served_models.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(DryRuns, "problem", lambda *_: "")


@pytest.mark.usefixtures("machine")
def test_layouts_that_fit_have_the_pools_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    """One rank has 40 % of the memory besides weights, a process of 320 MiB and a rank of 64 MiB, for 32 MiB blocks."""
    given = ("--max-model-len", "8192", "--dtype", "bfloat16")
    [found] = answer(capsys, config("llama-3.1-8b"), *given)["machines"]
    assert (found["device"], found["num_devices"], found["memory_bytes"]) == ("cpu", 2, 24 * GIB)
    assert [layout["parallel"] for layout in found["layouts"]] == ["1", "2", "pp2", "tp2"]
    weights = 2 * (HAND["llama-3.1-8b"].parameters - 4096)  # all but the last norm
    assert found["layouts"][0]["kv_tokens"] == int(0.4 * (24 * GIB - 384 * K * K - weights)) // (32 << 20) * 256
    with config_folder(config("llama-3.1-8b"), trust_remote_code=False) as folder:
        model = Inspection(EngineArgs(dtype="bfloat16"), folder).model
        for layout in found["layouts"]:
            start = ResolvedEngine.of(EngineArgs(dtype="bfloat16", parallel=layout["parallel"]), model)
            assert layout["fits"]
            assert layout["kv_tokens"] == sum(start.config.cluster.num_blocks) * 256
            assert layout["longest_request"] == start.config.longest(start.policy)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("tokens", "fits"), [(32 * K, True), (64 * K, True), (80 * K, False)])
def test_more_memory_for_kv_is_advised_if_it_is_there(
    tokens: int, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """About 8.7 GiB are left, for 71 thousand tokens."""
    [found] = answer(capsys, config("llama-3.1-8b"), "--max-model-len", str(tokens))["machines"]
    for layout in found["layouts"]:
        assert layout["fits"] == fits
        assert (layout["kv_cache_memory_bytes"] is not None) == fits
        if fits:
            num_ranks = 1 if layout["parallel"] == "1" else 2
            assert layout["kv_cache_memory_bytes"] * num_ranks >= tokens * 128 * K


@pytest.mark.usefixtures("machine")
def test_weights_beyond_memory_fit_in_no_layout(capsys: pytest.CaptureFixture[str]) -> None:
    [found] = answer(capsys, config("llama-3.1-70b"))["machines"]
    assert not any(layout["fits"] for layout in found["layouts"])
    assert all("weights take 131.4 GiB" in layout["reason"] for layout in found["layouts"])


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("quantization", "fitting"),
    [((), {"tp4pp2", "tp2pp4", "2xtp4", "2xtp2pp2", "2xpp4", "tp8", "pp8"}), (("--quantization", "int4"), None)],
)
def test_gpus_hold_shares_of_weights(
    quantization: tuple[str, ...],
    fitting: set[str] | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight of 80 GiB: 68 GiB each for 131 GiB of weights with 40 GiB of KV, or for 41 GiB of quantised weights."""
    monkeypatch.setattr(served_models.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(served_models.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(served_models.torch.cuda, "mem_get_info", lambda _: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(served_models.torch.cuda, "get_device_name", lambda *_: "invented")
    found = answer(capsys, config("llama-3.1-70b"), *quantization)["machines"][1]
    assert (found["device"], found["num_devices"], found["memory_bytes"]) == ("cuda", 8, 80 * GIB)
    fits = {layout["parallel"] for layout in found["layouts"] if layout["fits"]}
    every = {layout["parallel"] for layout in found["layouts"]}
    assert every >= {"1", "8", "4xtp2", "4xpp2", "2xtp4", "tp8"}
    assert fits == (every - {"1"} if fitting is None else fitting)


# ---------------------------------------------------------------- input and output


@pytest.mark.usefixtures("machine")
def test_a_folder_and_a_file_of_any_name_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny("gemma2", tmp_path / "gemma2")
    (tmp_path / "other.json").write_bytes((folder / "config.json").read_bytes())
    named = [str(folder), str(folder / "config.json"), str(tmp_path / "other.json")]
    one, *others = (answer(capsys, model) for model in named)
    assert one["supported"]
    assert all({**other, "model": one["model"]} == one for other in others)


def test_only_the_configuration_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[list[str]] = []
    folder = make_tiny("llama", tmp_path / "llama")

    def fetch(_: str, wanted: list[str], *, with_weights: bool) -> Path:
        assert not with_weights
        fetched.append(wanted)
        return folder

    monkeypatch.setattr(hub, "fetch", fetch)
    for trusted in (False, True):
        with config_folder("some/model", trust_remote_code=trusted) as found:
            assert found == folder
    assert fetched == [["config.json", "generation_config.json"], ["config.json", "generation_config.json", "*.py"]]


BROKEN = {
    "no model": ("no/such/folder/at all", (), "no/such/folder"),
    "no JSON": ("broken.json", (), "broken.json is not valid JSON"),
    "no type": ("empty.json", (), "empty.json cannot be used"),
    "invalid values": ("invalid.json", (), "invalid.json cannot be used"),
    "GGUF": ("model.gguf", (), "has no config.json"),
    "weights": ("weights.bin", (), "weights.bin is larger than any config.json"),
    "a long name": ("m" * 300, (), "is no usable path"),
    "nobody's home": ("~nobody-of-this-name/m", (), "is no usable path"),
    "too long": (config("gemma-2-9b"), ("--max-model-len", "9000"), "--max-model-len 9000 exceeds"),
    "no length": (config("gemma-2-9b"), ("--max-model-len", "0"), "--max-model-len must be at least 1"),
    "two precisions": (
        config("gemma-2-9b"),
        ("--quantization", "int8", "--dtype", "float32"),
        "--quantization int8 computes in bfloat16",
    ),
}


@pytest.mark.parametrize(("model", "options", "words"), BROKEN.values(), ids=BROKEN)
def test_a_users_mistake_is_one_line_and_code_2(
    model: str,
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DryRuns, "problem", lambda *_: "")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "weights.bin").touch()
    os.truncate(tmp_path / "weights.bin", 2**24 + 1)
    (tmp_path / "invalid.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    assert run("models", model, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_sizes_that_no_model_has_are_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "negative.json"
    path.write_text('{"model_type": "llama", "vocab_size": -5, "num_hidden_layers": 1}')
    assert "negative dimension" in answer(capsys, str(path), code=1)["reason"]


def test_a_type_that_transformers_lacks_is_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    assert "no model type of_tomorrow" in answer(capsys, str(tmp_path), code=1)["reason"]


def test_a_cache_that_cannot_be_written_refuses_no_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "file"))
    assert run("models", config("llama-3.1-8b")) == 2
    assert "LONGSPAN_CACHE" in capsys.readouterr().err


@pytest.mark.usefixtures("machine")
def test_tables_have_the_numbers_of_the_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("models", config("mistral-7b-v0.1"), "--dtype", "bfloat16") == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = " ".join(out.split())
    for words in (
        "is served (mistral, bfloat16, context of 32,768 tokens)",
        "7,241,732,096 parameters",
        "26.98 GiB",  # float32
        "13.49 GiB",  # bfloat16
        "16.00 GiB",  # KV of 131,072 tokens
        "0.50 GiB",  # of 4,096 tokens
        "longer than the context",
        "32 layers of 8 KV heads x 128, 4,096 bytes per token, window of 4,096 tokens",
        "ring_kv",
        "gather_hidden",
        "tp8",
    ):
        assert words in shown


def test_without_a_model_the_exact_types_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list equals the table of all types. A type that the installed transformers lacks is left out."""
    assert run("models", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    table = json.loads((Path(__file__).parents[2] / "tools" / "models.json").read_text(encoding="utf-8"))
    assert found["transformers"] == table["transformers"]
    for kind, row in table["rows"].items():
        if ", " not in kind:
            exact = [layout for layout, cell in row["cells"].items() if cell["verdict"] == "exact"]
            assert found["types"].get(kind, []) == exact
    other = ("5.0.0", {"llama": ["1", "tp2"], "of_tomorrow": ["1"]})
    monkeypatch.setattr(served_models, "served_types", lambda: other)
    assert run("models") == 0
    out, err = capsys.readouterr()
    assert "llama" in out and "1, tp2" in out and "of_tomorrow" not in out
    assert f"transformers {transformers.__version__} is installed, but the types were tried with 5.0.0" in err
