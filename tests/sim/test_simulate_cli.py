"""`longspan simulate`: its numbers, files and mistakes."""

from __future__ import annotations

import gzip
import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run
from msgspec import structs
from test_profile import SUBJECT

from longspan.cost import catalog
from longspan.cost.catalog import model_config
from longspan.cost.profile import Decode, Prefill, Profile, Transfer
from longspan.cost.step_cost import RooflineCost
from longspan.extras import timeline
from longspan.extras.report import lanes
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

FIELDS = {
    "ttft_p50_s",
    "ttft_p99_s",
    "tbt_p50_s",
    "tbt_p99_s",
    "e2e_p50_s",
    "throughput_tokens_per_s",
    "max_queue",
    "utilisation",
    "num_completed",
    "makespan_s",
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A machine that takes 10 ms and 50 us per token, shared evenly, and 12 ms between tokens."""
    found = Profile(profile_key=structs.replace(SUBJECT, model="/models/smollm2-135m"))
    for members, exchange in ((1, "local"), (2, "ring_kv")):
        for new, cached in ((1000, 0), (8000, 0), (1000, 8000)):
            seconds = 0.01 + 5e-5 * new / members + 1e-10 * new * cached
            sizes: dict[str, Any] = {"members": members, "exchange": exchange}
            found = found.with_measured(Prefill(new_tokens=new, cached_tokens=cached, seconds=(seconds,), **sizes))
        for batch in (1, 4):
            for context in (1000, 8000):
                sizes = {"members": members, "exchange": "local" if members == 1 else "ring_q"}
                seconds = 0.012 + 1e-9 * batch * context
                found = found.with_measured(Decode(batch=batch, context_tokens=context, seconds=(seconds,), **sizes))
    path = tmp_path / "profile.json"
    path.write_text(found.to_json())
    return path


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run("simulate", "smollm2-135m", *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found.keys() >= FIELDS
    return found


def test_the_same_options_give_the_same_numbers(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--profile", str(profile), "--policy", "context", "--gpus-per-host", "2")
    options = (*base, "--rate", "1", "--num-requests", "20")
    first = simulated(capsys, *options)
    assert first == simulated(capsys, *options)
    assert first != simulated(capsys, *options, "--seed", "1")
    assert (first["num_completed"], first["num_refused"]) == (20, 0)
    assert first["tbt_p50_s"] >= 0.012 and 0 < first["utilisation"] <= 1
    slower = simulated(capsys, *options, "--slow", "0=3", "--slow", "1=3")
    assert slower["ttft_p50_s"] > 2 * first["ttft_p50_s"]
    lost = simulated(capsys, *options, "--lose-worker-at", "5", "--restart-time", "100")
    assert lost["makespan_s"] > 105 and lost["num_completed"] == 20


def test_roofline_clusters_of_data_sheets(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--hosts", "1", "--gpus-per-host", "4", "--rate", "2", "--num-requests", "10", "--output-len", "8")
    assert run("simulate", "llama-3-8b", "--hardware", "a100-sxm-80g", *options, "--json") == 0
    slow = json.loads(capsys.readouterr().out)
    assert run("simulate", "llama-3-8b", "--hardware", "h100-sxm-80g", *options, "--json") == 0
    quick = json.loads(capsys.readouterr().out)
    assert 0 < quick["ttft_p50_s"] < slow["ttft_p50_s"] < 10
    assert slow["num_completed"] == quick["num_completed"] == 10


@pytest.mark.parametrize(
    ("policy", "option"),
    [("fixed-sp", "sp=6"), ("fixed-sp", "sp=3"), ("tetris", "sp_sizes=1,3"), ("loongserve", "sp_sizes=5")],
)
def test_groups_of_any_size_are_predicted(policy: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ("--hardware", "a100-sxm-80g", "--hosts", "2", "--gpus-per-host", "6")
    requests = ("--rate", "0.1", "--num-requests", "3", "--output-len", "2", "--workload", "long")
    assert run("simulate", "llama-3-8b", *cluster, *requests, "--policy", policy, "-o", option, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_completed"] == 3


@pytest.mark.parametrize(
    ("policy", "option", "words"),
    [
        ("fixed-sp", "sp=5", "sp(5) does not divide 6 instances into groups: choose a divisor"),
        ("fixed-sp", "sp=7", "sp size 7 is more than the 6 instances"),
        ("tetris", "sp_sizes=1,7", "sp size 7 is more than the 6 instances"),
        ("tetris", "sp_sizes=0,1", "sp_sizes ascend from at least 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    policy: str, option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ("--hardware", "a100-sxm-80g", "--gpus-per-host", "6", "--rate", "1")
    assert run("simulate", "llama-3-8b", *cluster, "--policy", policy, "-o", option) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_rate_above_the_highest_makes_ttft_too_long(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--profile", str(profile), "--gpus-per-host", "1", "--num-requests", "80", "--output-len", "1")
    options = (*options, "--policy", "chunked")
    found = simulated(capsys, *options, "--rate", "0.1", "--find-max-rate")
    limit = 25 * found["light_ttft_p99_s"]
    assert simulated(capsys, *options, "--rate", str(found["max_rate"]))["ttft_p99_s"] < limit
    assert simulated(capsys, *options, "--rate", str(found["max_rate"] * 1.05))["ttft_p99_s"] >= limit


def test_too_few_requests_have_no_highest_rate(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--profile", str(profile), "--policy", "context", "--gpus-per-host", "2")
    options = (*base, "--num-requests", "3", "--rate", "1")
    assert run("simulate", "smollm2-135m", *options, "--find-max-rate", "--json") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["max_rate"] is None
    assert shown.err == (
        "longspan: context: max_rate is null: if all 3 requests arrive at once, P99 TTFT is still below 25 times the "
        f"{found['light_ttft_p99_s']:.3g} s of light load: give a larger --num-requests\n"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--policy", "tetris"), True),
        (("--policy", "tetris", "-o", "improvement_rate=auto"), True),
        (("--policy", "tetris", "-o", "improvement_rate=0.3"), False),
        (("--policy", "tetris", "-o", "improvement_rates=1:0.3"), False),
        (("--policy", "context"), False),
    ],
)
def test_an_improvement_rate_without_a_profile_is_reported(
    options: tuple[str, ...], told: bool, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = ("--profile", str(profile), "--gpus-per-host", "2", "--num-requests", "3", "--rate", "1")
    assert run("simulate", "smollm2-135m", *requests, *options, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["num_completed"] == 3
    told_once = "longspan: policy option improvement_rate=auto is 0.05 until rates for the requests are found:"
    assert shown.err.count("\n") == shown.err.count(told_once) == told


def test_traces_quantiles_and_conversations_are_workloads(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--profile", str(profile), "--policy", "context", "--gpus-per-host", "2", "--workload")
    mooncake = tmp_path / "trace.jsonl.gz"
    rows = [
        {"timestamp": 4000 * i, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 9 + i]} for i in range(4)
    ]
    mooncake.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    found = simulated(capsys, *base, str(mooncake))
    assert (found["num_completed"], found["num_prompt_tokens"], found["num_output_tokens"]) == (4, 6000, 20)
    assert found["num_cached_tokens"] == 3 * 1024, "two blocks of 512 tokens are those of the first"
    assert 12 < found["makespan_s"] < 13
    stretched = simulated(capsys, *base, str(mooncake), "--rate", "0.1")
    assert 40 < stretched["makespan_s"] < 41, "4 requests at 0.1 per second"
    alone = simulated(capsys, *base, str(mooncake), "--no-enable-prefix-caching", "--num-requests", "2")
    assert (alone["num_completed"], alone["num_cached_tokens"]) == (2, 0)
    quantiles = tmp_path / "lengths.json"
    quantiles.write_text(json.dumps({"input_len": {"0": 100, "1": 100}, "output_len": {"0": 3, "1": 3}}))
    found = simulated(capsys, *base, str(quantiles), "--rate", "5", "--num-requests", "6", "--turns", "3")
    assert (found["num_prompt_tokens"], found["num_cached_tokens"]) == (2 * (100 + 203 + 306), 2 * (102 + 205))
    shared = simulated(
        capsys,
        *base,
        str(quantiles),
        "--rate",
        "0.1",
        "--num-requests",
        "6",
        "--prefix-len",
        "512",
        "--num-prefixes",
        "2",
    )
    assert shared["num_prompt_tokens"] == 6 * 612 and shared["num_cached_tokens"] == 4 * 512


def test_page_and_trace(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "out.html", tmp_path / "out.json"
    base = ("--profile", str(profile), "--policy", "context", "--gpus-per-host", "2")
    options = (*base, "--rate", "1", "--num-requests", "12")
    found = simulated(capsys, *options, "--report", str(page), "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    chunks = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in chunks} == {0, 1}
    for instance in (0, 1):
        times = sorted((one["ts"], one["ts"] + one["dur"]) for one in chunks if one["tid"] == instance)
        assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in pairwise(times))
    requests = {event["id"]: event for event in events if event["ph"] == "e" and event["cat"] == "request"}
    assert len(requests) == 12
    assert max(event["ts"] for event in requests.values()) == pytest.approx(1e6 * found["makespan_s"])
    prompts = dict.fromkeys(range(12), 0)
    for event in chunks:
        if event["cat"] == "prefill" and event["tid"] == event["args"]["group"][0]:
            prompts[int(event["name"].split()[1])] += event["args"]["stop"] - event["args"]["start"]
    assert sum(prompts.values()) == found["num_prompt_tokens"]
    text = page.read_text().replace("\u00a0", " ")
    assert all(f'id="{name}"' in text for name in ("instances", "ttft-by-length", "ttft", "tpot", "tbt"))
    assert "<h2>Error of these predictions</h2>" in text and "against papers" not in text, "a profile has no data sheet"
    assert ">in compute</td>" in text, "nor does it tell communication apart"
    linked = re.findall(r'(?:src|href)="([^"]+)"', text.partition("</head>")[2])
    assert not linked, "everything is in the page"


def rows_of(page: Path) -> dict[str, str]:
    return dict(
        re.findall(r"<tr><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td></tr>", page.read_text().replace("\u00a0", " "))
    )


def test_the_page_describes_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    run_of = ("--rate", "2", "--num-requests", "6", "--report", str(page), "--json")
    cluster = ("--hardware", "a100-sxm-80g", "--hosts", "2", "--link-gbytes-per-s", "25")
    roles = ("--prefill-parallel", "4", "--decode-parallel", "tp4", "--transfer-backends", "3")
    policy = ("--policy", "tetris", "-o", "min_chunk=512", "--exchange", "ring_q", "--max-num-seqs", "7")
    faults = ("--slow", "0=2", "--slow", "1=3", "--lose-worker-at", "1.5", "--noisy-link", "0.5:1:7")
    faults = (*faults, "--no-async-scheduling")
    assert run("simulate", "llama-3-8b", *cluster, *roles, *policy, *faults, *run_of) == 0
    capsys.readouterr()
    expected = {
        "model": "llama-3-8b",
        "cluster": (
            "2 hosts × 4 a100-sxm-80g, nvlink3 in a host, infiniband-8x200g at 25 GB/s between hosts, bfloat16"
        ),
        "instances": "4 prefill, 1 decode, 3 transfers at once to each",
        "policy": "tetris min_chunk=512 exchange=ring_q",
        "prefill-parallel": "4",
        "decode-parallel": "tp4",
        "max-num-seqs": "7",
        "async-scheduling": "no",
        "enable-prefix-caching": "yes",
        "workload": "short",
        "rate": "2",
        "num-requests": "6",
        "slow": "0=2 1=3",
        "noisy-link": "0.5:1:7",
        "lose-worker-at": "1.5",
    }
    found = rows_of(page)
    assert {name: found.get(name) for name in expected} == expected
    assert re.fullmatch(r"[\d,]+, [\d,]+ to decode", found["KV blocks"])
    assert not {"profile", "restart-time", "exchange", "transfer-backends"} & found.keys()
    assert '"names":["prefill 0","prefill 1","prefill 2","prefill 3","decode 4"]' in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--hardware must be a name that longspan estimate knows, if no --profile is given"),
        (("--profile", "nowhere.json", "--rate", "1"), "nowhere.json"),
        (("--hardware", "a1", "--rate", "1"), "a100-sxm-80g"),
        (("--hardware", "l4", "--profile", "P"), "--hardware l4 and profile exclude each other: give one of them"),
        (("--hardware", "l4", "--max-num-batched-tokens", "90000000"), "with a step of 90000000 tokens"),
        (
            ("--profile", "P", "--parallel", "3", "--gpus-per-host", "2"),
            "--gpus-per-host(2) * hosts(1) = 2 devices, but instances(3) * tp(1) = 3 given",
        ),
        (("--profile", "P", "--parallel", "2", "--hosts", "3"), "2 ranks lie on 1 to 2 hosts, but 3 given"),
        (
            ("--hardware", "l4", "--parallel", "6", "--hosts", "5"),
            "--hosts(5) are more than the 3 that 6 devices, 2 each, take",
        ),
        (("--hardware", "l4", "--parallel", "2", "--hosts", "3"), "--hosts(3) are more than the 2 that 2 devices"),
        (("--profile", "P", "--parallel", "2xtp2"), "of instances with tp 1"),
        (("--profile", "P", "--hosts", "0"), "--hosts must be at least 1, but 0 given"),
        (("--profile", "P", "--link", "nvlink"), "--link nvlink refines data sheets"),
        (("--profile", "P", "--link-gbytes-per-s", "50"), "--link-gbytes-per-s 50.0 refines data sheets"),
        (("--profile", "P", "--dtype", "float32"), "--dtype float32 refines data sheets"),
        (("--profile", "P", "--ffn-dtype", "fp8"), "--ffn-dtype fp8 refines data sheets"),
        (("--profile", "P", "--attention", "flash"), "--attention flash refines data sheets"),
        (("--profile", "P", "--rate", "1", "--restart-time", "5"), "--restart-time 5 needs a lost worker"),
        (("--profile", "P", "--rate", "1", "--num-prefixes", "2"), "--num-prefixes 2 counts shared prefixes"),
        (("--profile", "P", "--rate", "1", "--think-time", "0"), "--think-time 0 is the time between turns"),
        (("--profile", "P", "--profile-improvement-rates", "--find-max-rate"), "--find-max-rate is for a single run"),
        (("--profile", "P", "--profile-improvement-rates", "--trace", "t.json"), "--trace is for a single run"),
        (("--profile", "P", "--profile-improvement-rates"), "needs --rate: give the highest expected rate"),
        (("--profile", "P", "--rate", "inf", "--find-max-rate"), "varies the time between them: give a number"),
        (("--profile", "P", "--workload", "huge", "--rate", "1"), "none of short, medium, long, nor a file"),
        (("--profile", "P"), "give --rate"),
        (("--profile", "P", "--rate", "0"), "--rate must be above 0"),
        (("--profile", "P", "--rate", "1", "--num-requests", "0"), "--num-requests must be at least 1"),
        (("--profile", "P", "--rate", "1", "--turns", "0"), "--turns must be at least 1"),
        (("--profile", "P", "--rate", "1", "--concurrency", "2"), "--rate 1.0 excludes"),
        (("--profile", "P", "--offline", "--batch-size", "2"), "--offline True excludes"),
        (("--profile", "P", "--concurrency", "2", "--find-max-rate"), "--concurrency and --batch-size ignore"),
        (
            ("--profile", "P", "--rate", "1", "--turns", "2", "--think-time", "inf"),
            "number of at most 1e+15, but inf given",
        ),
        (("--profile", "P", "--rate", "1", "--slow", "0"), "--slow"),
        (("--profile", "P", "--rate", "1", "--slow", "0=x"), "--slow is INSTANCE=FACTOR"),
        (("--profile", "P", "--rate", "1", "--slow", "9=2"), "instance 9 does not exist, there are 8"),
        (("--profile", "P", "--rate", "1", "--noisy-link", "0.5:1:0"), "--noisy-link 0.5:1:0 needs --hardware"),
        (("--profile", "P", "--lose-worker-at", "x"), "--lose-worker-at must be a number of seconds, but x given"),
        (
            ("--profile", "P", "--rate", "1", "--policy", "best"),
            "--policy 'best' is unknown: choose from auto, chunked",
        ),
        (
            ("--profile", "P", "--rate", "1", "--policy", "context", "-o", "x=1"),
            "--policy-option x: policy context has no such option",
        ),
        (("--profile", "P", "--rate", "1", "--report", "no/where.html"), "--report 'no/where.html' cannot be written"),
        (
            ("--profile", "P", "--rate", "1", "--gpus-per-host", "4", "--policy", "context", "-o", "threshold=9"),
            "4 inst",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], words: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(profile) if argument == "P" else argument for argument in arguments]
    assert run("simulate", "smollm2-135m", *given, "--json") == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--find-max-rate",), "--find-max-rate: no request was served"),
        (
            ("--profile-improvement-rates", "--policy", "tetris"),
            "no request was served, so no improvement rate is best",
        ),
    ],
)
def test_statistics_of_times_need_a_served_request(
    arguments: tuple[str, ...], words: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--profile", str(profile), "--gpus-per-host", "2", "--rate", "1", "--num-requests", "3")
    assert run("simulate", "smollm2-135m", *base, "--max-model-len", "16", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--report", "--trace"])
def test_a_result_that_cannot_be_written_is_reported(
    flag: str, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--profile", str(profile), "--policy", "context", "--gpus-per-host", "2")
    options = (*base, "--rate", "1", "--num-requests", "2")
    assert run("simulate", "smollm2-135m", *options, flag, str(tmp_path)) == 2
    assert f"{flag} {str(tmp_path)!r} cannot be written (Is a directory)" in capsys.readouterr().err


def test_a_page_needs_the_library_that_draws(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("longspan.extras.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    page = str(tmp_path / "out.html")
    assert run("simulate", "smollm2-135m", "--profile", str(profile), "--rate", "1", "--report", page) == 2
    assert "--report needs plotly: pip install 'longspan[report]'" in capsys.readouterr().err


def test_pictures_of_long_runs_hold_the_first_blocks_and_say_so(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeline, "_MAX_BLOCKS", 5)
    monkeypatch.setattr(lanes, "MAX_BLOCKS", 3)
    page, trace = tmp_path / "out.html", tmp_path / "out.json"
    options = ("--profile", str(profile), "--gpus-per-host", "1", "--rate", "1", "--num-requests", "6")
    pictures = ("--report", str(page), "--trace", str(trace))
    assert run("simulate", "smollm2-135m", *options, *pictures) == 0
    blocks = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert 5 <= len(blocks) <= 7, "whole steps, until there are 5"
    assert f"longspan: --trace holds the first {len(blocks)} blocks only\n" in capsys.readouterr().err
    text = page.read_text()
    assert re.search(r"Shown are the first [\d.]+ seconds\.", text)
    assert re.search(r"Steps can be shown in the first [\d.]+ seconds\.", text)


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ({"hosts": 2, "parallel": "5xtp2"}, [0, 0, 0, 1, 1]),
        ({"hosts": 3, "parallel": "7"}, [0, 0, 0, 1, 1, 1, 2]),
        ({"hosts": 2, "gpus_per_host": 3, "prefill_parallel": "2", "decode_parallel": "2xtp2"}, [0, 0, 0, 1]),
    ],
)
def test_policies_and_costs_have_instances_on_the_same_hosts(flags: dict[str, Any], hosts: list[int]) -> None:
    found = make_experiment("llama-3-8b", ClusterSpec(hardware="a100-sxm-80g", **flags))
    assert isinstance(found.cost, RooflineCost)
    assert [found.cluster.location(instance).host for instance in found.cluster.instances] == hosts
    assert found.facts.cluster == found.cluster
    assert all(line.topology.hosts == hosts for line in found.cost.lines)


@pytest.mark.parametrize(("link", "flows"), [("rdma-400g", 1), ("efa-400g-per-host", 8)])
def test_rules_use_the_speeds_and_links_of_instances(link: str, flows: int) -> None:
    """Devices of a host may share its link: then each has an eighth of that for all that it computes."""
    found = make_experiment("llama-3-8b", ClusterSpec(hardware="a100-sxm-80g", hosts=2, parallel="2xtp8", link=link))
    hardware = found.facts.hardware
    assert hardware is not None and hardware.flops_per_s == 8 * 312e12
    assert hardware.bytes_per_s == pytest.approx(8 / flows * catalog.link(link).bytes_per_s)


def test_clients_of_a_closed_loop_are_an_option(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Little's law: the mean number of requests under way is throughput times mean time of a request."""
    base = ("--profile", str(profile), "--policy", "chunked", "--gpus-per-host", "2", "--num-requests", "40")
    found = simulated(capsys, *base, "--output-len", "20", "--concurrency", "4")
    e2e_s = found["ttft_mean_s"] + 19 * found["tpot_mean_s"]
    assert 3 < found["throughput_requests_per_s"] * e2e_s <= 4 + 1e-6
    batches = simulated(capsys, *base, "--output-len", "20", "--batch-size", "4")
    assert batches["makespan_s"] > found["makespan_s"]


@pytest.mark.parametrize("turns", [1, 3])
def test_requests_come_at_a_rate_however_it_was_given(turns: int) -> None:
    """Also when they are turns: the highest rate, given as --rate, is the same load."""
    options = WorkloadSpec(rate=2.0, num_requests=600, turns=turns)
    given = make_workload(options)
    stretched = make_workload(replace(options, rate=0.5)).at_rate(2.0)
    firsts = [[one.due_s for one in workload.arrivals if one.follows is None] for workload in (given, stretched)]
    assert len(firsts[0]) == 600 / turns
    assert firsts[1] == pytest.approx(firsts[0], rel=0.1)
    assert firsts[1][-1] == pytest.approx(300)


def test_another_model_than_was_profiled_is_refused(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "llama-3-8b", "--profile", str(profile), "--rate", "1") == 2
    assert "--profile is of model /models/smollm2-135m, but llama-3-8b given" in capsys.readouterr().err


def test_the_profiled_model_can_be_a_folder_that_has_moved(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "SmolLM2-135M"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config("smollm2-135m")))
    monkeypatch.chdir(folder)
    options = ("--profile", str(profile), "--gpus-per-host", "1", "--rate", "1", "--num-requests", "2")
    for model in (".", str(folder), str(folder / "config.json")):
        assert run("simulate", model, *options) == 0, capsys.readouterr().err


def test_requests_that_are_too_long_are_reported(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--profile", str(profile), "--policy", "context", "--gpus-per-host", "2")
    options = (*base, "--rate", "1", "--num-requests", "9")
    assert run("simulate", "smollm2-135m", *options, "--max-model-len", "9000", "--json") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert 0 < found["num_refused"] < 9 and found["num_completed"] == 9 - found["num_refused"]
    assert f"{found['num_refused']} requests were refused" in shown.err


def test_truncated_answers_are_reported(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"input_len": {"0": 8000, "1": 8000}, "output_len": {"0": 100000, "1": 100000}}')
    options = ("--profile", str(profile), "--gpus-per-host", "1", "--workload", str(lengths), "--rate", "1")
    asked = ("--num-requests", "2", "--max-model-len", "9000")
    assert run("simulate", "smollm2-135m", *options, *asked, "--json") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["num_truncated"] == found["num_completed"] == 2
    assert found["num_prompt_tokens"] + found["num_output_tokens"] == 2 * 9_000
    assert "2 answers are shorter than requested, the first, 0, by" in shown.err


@pytest.mark.parametrize("kind", ["searched", "predicted"])
@pytest.mark.parametrize("measured", [False, True])
def test_cuts_of_chains_are_searched_by_the_model(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, measured: bool
) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"input_len": {"0": 8000, "1": 8000}, "output_len": {"0": 2, "1": 2}}')
    found = Profile.from_json(profile.read_text())
    for one in [one for one in found.prefills if one.members == 2]:
        found = found.with_measured(structs.replace(one, exchange="chain"))
    for num_bytes in (1000, 10_000_000):
        sent = Transfer(kind="point_to_point", members=2, num_bytes=num_bytes, seconds=(1e-5 + num_bytes * 1e-9,))
        found = found.with_transfer(sent)
    profile.write_text(found.to_json())
    name, ttfts = "smollm2-135m" if measured else "llama-3-8b", {}
    where = ("--profile", str(profile)) if measured else ("--hardware", "a100-sxm-80g")
    for partition in ("even", kind):
        options = ("--policy", "runahead", "-o", f"partition={partition}", "-o", "threshold=0", "--rate", "0.001")
        sizes = ("--workload", str(lengths), "--num-requests", "3", "--max-num-batched-tokens", "8192")
        assert run("simulate", name, *where, "--gpus-per-host", "2", *sizes, *options, "--json") == 0
        ttfts[partition] = json.loads(capsys.readouterr().out)["ttft_p50_s"]
    assert measured or ttfts[kind] < ttfts["even"], "chains were measured with even pieces"


def test_a_run_that_serves_nothing_fails(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--profile", str(profile), "--gpus-per-host", "1", "--rate", "1", "--num-requests", "2")
    assert run("simulate", "smollm2-135m", *options, "--max-model-len", "100") == 1
    assert "2 requests were refused" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("longspan.sim.experiment.Experiment.run", None)
    for flag in ("--report", "--trace"):
        assert run("simulate", "smollm2-135m", "--profile", str(profile), "--rate", "1", flag, str(tmp_path)) == 2
        assert f"{flag} {str(tmp_path)!r} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e300"])
@pytest.mark.parametrize("line", [1, 2])
def test_times_that_are_no_times_are_refused_with_their_line(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, line: int
) -> None:
    trace = tmp_path / "odd.jsonl"
    times = ["0", "1"]
    times[line - 1] = value
    trace.write_text("".join(f'{{"timestamp": {time}, "input_length": 10, "output_length": 2}}\n' for time in times))
    assert run("simulate", "smollm2-135m", "--profile", str(profile), "--workload", str(trace)) == 2
    said = capsys.readouterr().err
    assert f"line {line if value != '1e300' else 2} of trace" in said and "give finite times" in said


@pytest.mark.parametrize("field", ["input_length", "output_length"])
@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_lengths_that_are_no_lengths_are_refused_with_their_line(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    trace = tmp_path / "odd.jsonl"
    row = {"timestamp": 0, "input_length": 10, "output_length": 2} | {field: float(value)}
    trace.write_text(json.dumps(row))
    assert run("simulate", "smollm2-135m", "--profile", str(profile), "--workload", str(trace)) == 2
    assert "line 1 of trace" in capsys.readouterr().err


def test_a_rate_that_takes_years_is_refused(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "smollm2-135m", "--profile", str(profile), "--rate", "1e-300") == 2
    assert "--rate 1e-300 spreads 1000 requests over more than 1e+08 s: give 1e-05 or more" in capsys.readouterr().err


def test_a_trace_that_is_too_short(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "two.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,9,9\n1,9,9\n")
    options = ("--profile", str(profile), "--workload", str(trace), "--num-requests", "3")
    assert run("simulate", "smollm2-135m", *options) == 2
    assert "holds 2 requests, but --num-requests is 3" in capsys.readouterr().err


def test_offline_all_requests_are_there_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--hardware", "a10", "--gpus-per-host", "2", "--num-requests", "20", "--output-len", "40")
    at_once = simulated(capsys, *options, "--policy", "chunked", "--parallel", "pp2", "--rate", "inf")
    stays = simulated(capsys, *options, "--policy", "chunked", "--parallel", "pp2", "--offline")
    assert {name: stays[name] for name in at_once} == at_once
    assert stays["throughput_requests_per_s"] == pytest.approx(20 / stays["makespan_s"])
    assert (stays["phase_s"], stays["num_transitions"]) == ({}, 0)
    turns = ("--policy", "seesaw", "--prefill-parallel", "pp2", "--decode-parallel", "tp2", "--host-kv-gib", "4")
    found = simulated(capsys, *options, *turns, "-o", "strict=true", "--offline")
    assert found["num_transitions"] >= 1
    assert "swap_bytes" not in stays
    assert found["num_host_hits"] >= found["num_prompt_tokens"] > 0 == found["num_disk_hits"]
    token_bytes = 2 * 2 * 3 * 64 * 30  # keys and values in bfloat16, 3 heads of 64, 30 layers
    assert found["swap_bytes"] >= 2 * found["num_prompt_tokens"] * token_bytes, "all of it is offloaded and loaded"
    assert found["phase_s"].keys() == {"prefill", "decode", "transition"}
    assert sum(found["phase_s"].values()) == pytest.approx(found["makespan_s"])
    assert run("simulate", "smollm2-135m", *options, *turns, "-o", "strict=true", "--offline") == 0
    assert "phase_decode" in capsys.readouterr().out
    assert run("simulate", "smollm2-135m", *options, "--offline", "--rate", "2") == 2
    assert "--rate 2 excludes --offline" in capsys.readouterr().err
