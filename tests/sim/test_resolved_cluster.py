"""`longspan simulate` and `longspan estimate` show the cluster that they take options for, and warn of odd ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fake_llm import run

from longspan.sim.spec import ClusterSpec
from longspan.simulation import simulate
from longspan.workload.spec import WorkloadSpec

MODEL = ("llama-3-8b", "--hardware", "a100-sxm-80g")
FEW = ("--rate", "1", "--num-requests", "2", "--output-len", "2", "--num-gpu-blocks-override", "1000")
UNUSED, ACROSS = "stay unused", "every layer waits for sums over"


def resolved(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], list[str]]:
    """The field `cluster`, and the lines on stderr."""
    assert run(*options, "--json") == 0
    out, err = capsys.readouterr()
    return json.loads(out)["cluster"], err.splitlines()


@pytest.mark.parametrize(
    ("options", "devices", "instances", "warnings"),
    [
        ("--hosts 2 --parallel tp8", (2, 4, 8, 0), [("all", "tp8", 1, 2)], [ACROSS]),
        ("--hosts 3 --parallel tp8", (3, 3, 9, 1), [("all", "tp8", 1, 3)], [UNUSED, ACROSS]),
        ("--hosts 2 --parallel 5", (2, 3, 6, 1), [("all", "1", 5, 1)], [UNUSED]),
        ("--parallel tp8", (1, 8, 8, 0), [("all", "tp8", 1, 1)], []),
        ("--hosts 2 --parallel 2xtp4", (2, 4, 8, 0), [("all", "tp4", 2, 1)], []),
        ("--hosts 2 --parallel tp4pp2", (2, 4, 8, 0), [("all", "tp4pp2", 1, 2)], []),
        ("--hosts 2 --parallel 3xtp2", (2, 3, 6, 0), [("all", "tp2", 2, 1), ("all", "tp2", 1, 2)], [ACROSS]),
        ("--hosts 2 --gpus-per-host 4", (2, 4, 8, 0), [("all", "1", 8, 1)], []),
        ("", (1, 8, 8, 0), [("all", "1", 8, 1)], []),
        (
            "--prefill-parallel 4 --decode-parallel tp4 --policy tetris -o improvement_rate=0.1",
            (1, 8, 8, 0),
            [("prefill", "1", 4, 1), ("decode", "tp4", 1, 1)],
            [],
        ),
        (
            "--prefill-parallel pp4 --decode-parallel tp2 --policy seesaw --host-kv-gib 10",
            (1, 4, 4, 0),
            [("prefill", "pp4", 1, 1), ("decode", "tp2", 1, 1)],
            [UNUSED],
        ),
    ],
)
def test_a_simulation_shows_devices_and_instances_and_warns_of_odd_ones(
    options: str,
    devices: tuple[int, ...],
    instances: list[tuple[str, str, int, int]],
    warnings: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, lines = resolved(capsys, "simulate", *MODEL, *FEW, *options.split())
    names = ("hosts", "gpus_per_host", "num_gpus", "num_unused_gpus")
    assert tuple(found[name] for name in names) == devices
    kinds = [(one["role"], one["parallel"], one["number"], one["num_hosts"]) for one in found["instances"]]
    assert kinds == instances
    assert len(lines) == len(warnings)
    assert all(words in line for words, line in zip(warnings, lines, strict=True)), lines


def test_a_simulation_from_python_logs_the_warnings(caplog: pytest.LogCaptureFixture) -> None:
    cluster = ClusterSpec(hardware="a100-sxm-80g", hosts=3, parallel="tp8")
    simulate("llama-3-8b", cluster, WorkloadSpec(num_requests=1, rate=1.0, output_len=1))
    assert [words in line for words, line in zip((UNUSED, ACROSS), caplog.messages, strict=True)] == [True, True]


def test_links_precision_and_kv_are_those_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    precise = ("--dtype", "float32", "--ffn-dtype", "fp8")
    found, _ = resolved(capsys, "simulate", *MODEL, *FEW, "--hosts", "2", "--link-gbytes-per-s", "9", *precise)
    assert found["links"] == {"inside": "nvlink3", "between": "infiniband-8x200g at 9 GB/s"}
    assert (found["hardware"], found["dtype"], found["ffn_dtype"]) == ("a100-sxm-80g", "float32", "fp8")
    assert {one["kv_tokens"] for one in found["instances"]} == {256_000}
    found, _ = resolved(capsys, "simulate", *MODEL, *FEW, "--link", "pcie4-x16", "--block-size", "16")
    assert found["links"] == {"inside": "pcie4-x16", "between": None}
    assert (found["dtype"], found["ffn_dtype"], found["instances"][0]["kv_tokens"]) == ("bfloat16", "bfloat16", 16_000)


def test_the_cluster_stands_above_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", *MODEL, *FEW, "--hosts", "2", "--parallel", "2xtp4") == 0
    cluster, instances, border, *_ = capsys.readouterr().out.splitlines()
    links = "nvlink3 in a host, infiniband-8x200g between hosts"
    assert cluster == f"cluster: 2 hosts × 4 a100-sxm-80g, {links}, bfloat16"
    assert instances == "instances: 2 of tp4, 256,000 KV tokens each"
    assert set(border) <= set("┌─┬┐")


def test_compared_policies_show_their_own_pools(capsys: pytest.CaptureFixture[str]) -> None:
    """Policies that want whole prompts take larger steps, which leave less memory for KV."""
    some = ("--rate", "1", "--num-requests", "2", "--output-len", "2", "--gpus-per-host", "2")
    assert run("simulate", *MODEL, *some, "--policy", "auto,chunked,csps") == 0
    out = capsys.readouterr().out
    tokens = dict(re.findall(r"^instances of (.*): 2 of 1 device, ([\d,]+) KV tokens each$", out, re.MULTILINE))
    assert list(tokens) == ["auto, chunked", "csps"]
    assert run("simulate", *MODEL, *some, "--policy", "auto,chunked,csps", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    pools = {policy: one["cluster"]["instances"][0]["kv_tokens"] for policy, one in found.items()}
    assert pools["auto"] == pools["chunked"] > pools["csps"]


@pytest.mark.parametrize(
    ("policies", "cluster", "told"),
    [
        ("auto,chunked,context", "--gpus-per-host 2", ""),
        ("context,auto", "--gpus-per-host 2", ""),
        ("auto,chunked", "--parallel tp2", "longspan: auto is chunked here\n"),
        ("context,auto", "--gpus-per-host 2 --exchange chain", "longspan: auto is context here\n"),
        ("auto,fixed-sp", "--prefill-parallel 2 --decode-parallel 1 -o sp=2", ""),
    ],
)
def test_auto_can_be_compared_with_other_policies(
    policies: str, cluster: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("simulate", *MODEL, *FEW, *cluster.split(), "--policy", policies, "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == policies.split(",")
    assert all(numbers["num_completed"] == 2 for numbers in found.values())
    assert err == told
    for policy, numbers in found.items():
        options = cluster if policy != "auto" else cluster.replace(" -o sp=2", "")
        options = options if policy != "chunked" else options.partition(" --exchange")[0]
        assert run("simulate", *MODEL, *FEW, *options.split(), "--policy", policy, "--json") == 0
        assert json.loads(capsys.readouterr().out) == numbers, "a mixture gives the numbers of the policy alone"


@pytest.mark.parametrize(
    ("options", "instances", "warnings"),
    [
        ("--parallel tp8 --hosts 2", [("tp8", 1, 1)], [UNUSED]),
        ("--parallel tp16 --hosts 2", [("tp16", 1, 2)], [ACROSS]),
        ("--parallel 3xtp4 --hosts 2 --gpus-per-host 6", [("tp4", 2, 1), ("tp4", 1, 2)], [ACROSS]),
        ("--parallel 16 --hosts 2", [("1", 16, 1)], []),
        ("", [("1", 1, 1)], []),
    ],
)
def test_an_estimate_shows_its_cluster_too(
    options: str, instances: list[tuple[str, int, int]], warnings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = resolved(capsys, "estimate", *MODEL, "--context", "8K", *options.split())
    assert [(one["parallel"], one["number"], one["num_hosts"]) for one in found["instances"]] == instances
    assert all(one["kv_tokens"] > 100_000 for one in found["instances"])
    assert len(lines) == len(warnings)
    assert all(words in line for words, line in zip(warnings, lines, strict=True)), lines
    assert run("estimate", *MODEL, "--context", "8K", *options.split()) == 0
    assert capsys.readouterr().out.startswith("cluster: ")
