"""`longspan estimate`: its options, its JSON, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_llm import run

from longspan.cli.estimate import length
from longspan.cost import catalog
from longspan.cost.forward import Roofline, rooflines

FIELDS = {
    "ttft_s",
    "lower_bound_s",
    "compute_s",
    "exposed_communication_s",
    "bytes_exchanged",
    "memory_gib_per_gpu",
    "fits",
    "mfu",
    "breakdown",
}
BASE = ("estimate", "llama-3-8b", "--hardware", "a100-sxm-80g")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_prefill_as_the_papers_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys,
        *BASE,
        "--gpus-per-host",
        "8",
        "--hosts",
        "2",
        "--parallel",
        "16",
        "--exchange",
        "ring_kv",
        "--context",
        "64k",
        "--phase",
        "prefill",
    )
    assert set(found) >= FIELDS
    assert found["ttft_s"] == pytest.approx(0.96, rel=0.1)
    assert found["fits"] is True
    assert sum(found["breakdown"].values()) == pytest.approx(found["ttft_s"])


def test_decode_with_mixed_weights(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys,
        "estimate",
        "llama-3-405b",
        "--hardware",
        "h100-96g-hbm2e-500w",
        "--hosts",
        "4",
        "--parallel",
        "4xtp8",
        "--exchange",
        "ring_q",
        "--context",
        "128000",
        "--phase",
        "decode",
        "--ffn-dtype",
        "fp8",
    )
    assert set(found) >= FIELDS - {"ttft_s"} | {"tbt_s"}
    assert found["tbt_s"] == pytest.approx(0.071, rel=0.15)


def test_kv_of_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """131,072 bytes per token. Each of eight devices has a bus, also with stages or instances."""
    shape = (*BASE, "--gpus-per-host", "8", "--context", "64k", "--batch", "4", "--host-kv-gib", "32")
    found = [answer(capsys, *shape, "--parallel", spec) for spec in ("tp8", "pp8", "2xtp2pp2", "tp4")]
    assert [one["host_kv_tokens"] for one in found] == [32 * 2**30 // 131_072] * 4
    times = [one["host_fetch_s"] for one in found]
    assert times[0] == times[1] == times[2] == pytest.approx(times[3] / 2, rel=0.01)
    assert times[3] == pytest.approx(4 * 64_000 * 131_072 / 4 / 25e9, rel=0.3)
    assert "host_fetch_s" not in answer(capsys, *shape[:-2])
    assert run(*shape[:-1], "-1") == 2
    assert "--host-kv-gib -1 holds no token" in capsys.readouterr().err
    assert run(*shape) == 0
    assert re.search("from the host *│ .*; holds KV of 262,144 tokens", capsys.readouterr().out)


def test_float32_is_computed_without_tensor_cores(capsys: pytest.CaptureFixture[str]) -> None:
    """312 and 19.5 TFLOP/s of an A100: 16 times, minus the time outside computation."""
    options = (*BASE, "--gpus-per-host", "1", "--context", "16K")
    half, full = (answer(capsys, *options, "--dtype", dtype)["ttft_s"] for dtype in ("bfloat16", "float32"))
    assert 12 < full / half < 16


def test_links_by_name_and_by_speed(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--parallel", "4", "--exchange", "gather_kv", "--context", "8K")
    times = {
        option: answer(capsys, *BASE, *rest, *option.split())["ttft_s"]
        for option in (
            "--link nvlink3",
            "--link-gbytes-per-s 300",
            "--link pcie4-x16",
            "--link-gbytes-per-s 31.5",
            "--link-gbytes-per-s 32",
            "--link-gbytes-per-s 100",
            "--link-gbytes-per-s 1",
        )
    }
    assert times["--link nvlink3"] == times["--link-gbytes-per-s 300"] < times["--link pcie4-x16"]
    assert times["--link-gbytes-per-s 31.5"] == times["--link pcie4-x16"], "no quicker than the bus: it goes there"
    assert times["--link-gbytes-per-s 1"] == max(times.values())
    by_speed = [times[f"--link-gbytes-per-s {speed}"] for speed in ("1", "31.5", "32", "100", "300")]
    assert by_speed == sorted(by_speed, reverse=True), "a quicker link never takes longer"


def test_chains_with_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--parallel", "2", "--exchange", "chain", "--attention", "eager", "--context", "8K")
    even, given, searched = (
        answer(capsys, *BASE, *rest, *more) for more in ((), ("--fractions", "0.6,0.4"), ("--fractions", "search"))
    )
    assert even["partition"] == [4096, 4096]
    assert given["partition"] == [4915, 3277]
    assert searched["ttft_s"] <= given["ttft_s"] < even["ttft_s"]


def test_cached_tokens_are_not_computed_again(capsys: pytest.CaptureFixture[str]) -> None:
    whole = answer(capsys, *BASE, "--context", "32K")
    rest = answer(capsys, *BASE, "--context", "32K", "--cached", "28K")
    assert rest["ttft_s"] < whole["ttft_s"] / 4


def test_too_little_memory_is_reported_with_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*BASE, "--context", "256k", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert err.startswith("longspan: does not fit: 15.0 weights + 31.2 KV + ")


def test_a_folder_a_file_and_the_hub(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(catalog.model_config("llama-3-8b")))
    named = answer(capsys, *BASE, "--context", "4K")
    rest = ("--hardware", "a100-sxm-80g", "--context", "4K")
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repo, name: str(tmp_path / name) if repo == "a/b" else ""
    )
    for model in (str(tmp_path), str(file), "a/b"):
        assert answer(capsys, "estimate", model, *rest) == named
    file.write_text("{")
    assert run("estimate", str(file), *rest) == 2
    assert "config.json' cannot be read" in capsys.readouterr().err
    file.write_text("[]")
    assert run("estimate", str(file), *rest) == 2
    assert "must be a JSON object" in capsys.readouterr().err


def test_a_model_that_the_hub_does_not_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(repo: str, name: str) -> str:
        raise OSError(f"no {name} of {repo}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    assert run("estimate", "some/model", "--hardware", "a10", "--context", "1K") == 2
    assert "'some/model' could not be fetched from the hub (OSError: no config.json of" in capsys.readouterr().err


def test_without_json_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*BASE, "--parallel", "8", "--context", "64k") == 0
    out = capsys.readouterr().out
    assert "time to first token" in out and "attention" in out


def test_a_table_has_no_part_that_takes_next_to_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Launches are hidden but for some nanoseconds."""
    assert run("estimate", "llama-2-13b", "--hardware", "l4", "--parallel", "tp8", "--context", "16K") == 0
    shown = capsys.readouterr().out
    assert "all reduce" in shown and "launch" not in shown


def test_a_table_has_the_tokens_of_each_instance_if_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    chain = (*BASE, "--parallel", "2", "--exchange", "chain", "--context", "4000")
    assert run(*chain, "--fractions", "0.75,0.25") == 0
    assert re.search(r"tokens *│ 3000, 1000 ", capsys.readouterr().out)
    assert run(*chain) == 0
    assert not re.search(r"tokens *│", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimate", "nope", "--hardware", "a10", "--context", "1"), "model 'nope' is unknown"),
        (
            ("estimate", "llama-7b", "--hardware", "a11", "--context", "1"),
            "--hardware 'a11' is unknown: choose from a100-sxm-80g",
        ),
        ((*BASE, "--context", "8 K"), "--context must be a number of tokens such as 8192"),
        ((*BASE, "--context", "1K", "--cached", "1K"), "--context must be more than the cached"),
        ((*BASE, "--phase", "decode", "--context", "0"), "but 1 requests of 0 tokens given"),
        ((*BASE, "--phase", "decode", "--context", "1K", "--batch", "0"), "at least 1 request and 1 token, but 0"),
        ((*BASE, "--context", "1K", "--batch", "0"), "batch must be at least 1, but 0 given"),
        ((*BASE, "--context", "1K", "--parallel", "64"), "64 GPUs, but there are 1 hosts * 8 = 8"),
        ((*BASE, "--context", "1K", "--link", "wifi"), "--link 'wifi' is unknown"),
        *(
            (("estimate", "mixtral-8x7b", *BASE[2:], "--context", "1K", "--expert-parallel", *given), words)
            for given, words in (
                ((), "--expert-parallel needs tp 2 or more"),
                (("--parallel", "4xpp2"), "--expert-parallel needs tp 2 or more"),
                (("--parallel", "tp16", "--hosts", "2"), "--expert-parallel tp(16) ranks cannot share 8 whole experts"),
            )
        ),
        *(
            (
                (*BASE, "--context", "1K", "--link-gbytes-per-s", speed),
                f"--link-gbytes-per-s must be {wanted}, but {speed} given",
            )
            for speed, wanted in (("0", "above 0 and finite"), ("inf", "a number of at most 1e+15"))
        ),
        ((*BASE, "--context", "1K", "--link", "nvlink3", "--link-gbytes-per-s", "5"), "both give its speed"),
        ((*BASE, "--context", "1K", "--phase", "decode", "--cached", "5"), "leave them out with --phase decode"),
        ((*BASE, "--context", "1K", "--parallel", "2", "--fractions", "0.5"), "fractions must add up to 1"),
        (
            (*BASE, "--hosts", "4", "--context", "64K", "--parallel", "32", "--fractions", "search"),
            "for up to 16 instances",
        ),
        ((*BASE, "--context", "1K", "--dtype", "fp4"), "fp4"),
    ],
)
def test_mistakes_are_refused_with_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("8192", 8192),
        ("8K", 8192),
        ("8k", 8000),
        ("1M", 2**20),
        ("1m", 10**6),
        ("25.6k", 25600),
        ("1.001k", 1001),
        ("0.29k", 290),
        ("0", 0),
        ("2G", 2**31),
    ],
)
def test_lengths_are_read_as_vllm_reads_them(text: str, tokens: int) -> None:
    assert length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.5K", "0.0001k", "8KB", "1e3", "٣"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a (whole )?number of tokens"):
        length(text)


@pytest.mark.parametrize("text", ["2T", "1" + 400 * "0", "99999999999999999999.5k"])
def test_lengths_beyond_reason_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^can be at most 1099511627776 tokens"):
        length(text)


def test_sparse_attention_shortens_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without drops costs about as much as the exact exchange, and more drops save more."""
    base = (*BASE, "--parallel", "8", "--exchange", "alltoall", "--context", "256K")
    exact, found = answer(capsys, *base), {}
    for drop in (0.0, 0.2, 0.5):
        file = tmp_path / f"{drop}.yaml"
        file.write_text(f"levels: 2\ndrop: {drop}\n")
        found[drop] = answer(capsys, *base, "--csa", str(file))
        own = found[drop]["csa"]
        assert own["levels"] == 2 and own["drop"] == [pytest.approx(drop)]
        assert sum(found[drop]["breakdown"].values()) == pytest.approx(found[drop]["ttft_s"])
        assert found[drop]["bytes_exchanged"] == pytest.approx(own["bytes_share"] * exact["bytes_exchanged"], rel=1e-6)
        assert own["products_share"] == pytest.approx(1 - drop * (30 / 32) * (7 / 8), abs=0.02)
    assert "csa" not in exact
    assert found[0.5]["ttft_s"] < found[0.2]["ttft_s"] < min(exact["ttft_s"], found[0.0]["ttft_s"])
    behind = answer(capsys, *base, "--csa", str(file), "--cached", "192K")
    assert behind["csa"]["products_share"] < found[0.5]["csa"]["products_share"], "later queries see more distant keys"


@pytest.mark.parametrize("given", [("--attention", "eager"), ("--launch", "eager"), ("--launch", "graph"), ()])
def test_sparse_attention_is_priced_by_the_costs_of_the_exact_exchange(
    given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Roofline] = []

    def recorded(*arguments: Any, **options: Any) -> tuple[Roofline, ...]:
        lines.extend(found := rooflines(*arguments, **options))
        return found

    for module in ("forward", "step_cost"):
        monkeypatch.setattr(f"longspan.cost.{module}.rooflines", recorded)
    file = tmp_path / "csa.yaml"
    file.write_text("levels: 2\ndrop: 0.5\n")
    assert run(*BASE, "--parallel", "8", "--context", "64K", "--csa", str(file), *given) == 0
    first, *others = [(line.layer.attention, line.launch) for line in lines]
    assert others and set(others) == {first}


def test_sparse_attention_of_an_estimate_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "csa.yaml"
    file.write_text("levels: 2\n")
    base = (*BASE, "--parallel", "8", "--context", "64K", "--csa")
    for arguments, words in (
        ((str(file), "--phase", "decode"), "--csa is for prefills"),
        ((str(file), "--exchange", "ring_kv"), "csa is for exchange alltoall"),
        (("gone.yaml",), "--csa"),
        (("auto",), "auto has no tuned file for llama-3-8b"),
    ):
        assert run(*base, *arguments) == 2
        assert words in capsys.readouterr().err
    found = answer(capsys, *BASE, "--parallel", "1", "--context", "64K", "--csa", str(file))
    assert found["csa"]["levels"] == 1, "one instance drops nothing"
