"""`longspan simulate` with several policies and a service level, and its page about them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run

from longspan import ClusterSpec, WorkloadSpec, simulate
from longspan.core.config import EngineConfig
from longspan.core.exchange import RING_KV
from longspan.core.options import SchedulingArgs
from longspan.cost.estimate import activation_bytes, estimate_prefill
from longspan.cost.step_cost import RooflineCost
from longspan.extras.timeline import Timeline
from longspan.sim import run as simulation
from longspan.sim.executor import StepTiming
from longspan.sim.run import Observers
from longspan.sim.spec import ServiceLevel
from longspan.simulation import each_policy, make_experiment, read_architecture
from longspan.workload.arrivals import Arrival, Workload, text
from longspan.workload.requests import make_workload

HOST = ("llama-3-8b", "--hardware", "a100-sxm-80g", "--gpus-per-host", "8")
REQUESTS = ("--workload", "short", "--num-requests", "12", "--rate", "3", "--output-len", "8")
SPEC = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=8)
ASKED = WorkloadSpec(workload="short", num_requests=12, rate=3.0, output_len=8)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run("simulate", *HOST, *REQUESTS, *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_policies_that_are_compared_do_as_they_do_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Also with options that only some policies have, such as group sizes."""
    options = ("--exchange", "ring_kv", "-o", "sp=4")
    found = printed(capsys, "--policy", "chunked,context,fixed-sp", *options)
    assert list(found) == ["chunked", "context", "fixed-sp"]
    assert found["chunked"] == printed(capsys, "--policy", "chunked")
    assert found["context"] == printed(capsys, "--policy", "context", "--exchange", "ring_kv")
    assert found["fixed-sp"] == printed(capsys, "--policy", "fixed-sp", *options)
    assert len({one["ttft_p50_s"] for one in found.values()}) == 3


def test_stages_leave_memory_for_their_own_activations() -> None:
    """A full step has one part per stage, so the tokens that each part has more take their memory once."""
    spec = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=4, parallel="pp4")
    rooms = []
    for per_stage in (1024, 8192):
        found = make_experiment("llama-3-8b", spec, SchedulingArgs(max_num_batched_tokens=4 * per_stage, block_size=16))
        rooms.append(found.cluster.num_blocks[0] * 16)
    model = read_architecture("llama-3-8b")
    most_layers = max(len(found.cluster.layers(0, stage)) for stage in range(4))
    taken_bytes = sum(activation_bytes(model, 8192, 1)) - sum(activation_bytes(model, 1024, 1))
    assert rooms[0] - rooms[1] == pytest.approx(taken_bytes / (model.attention.kv_bytes * most_layers), abs=16)


def test_a_host_spares_further_turns_their_prefill() -> None:
    """Devices cannot keep the KV of these conversations. Host memory restores more of their prefixes. A disk holds
    more, and pays off for a model with few heads.
    """
    cluster = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=1)
    turns = WorkloadSpec(workload="short", num_requests=12, rate=1.0, output_len=8, turns=3)
    found = []
    for host, disk in ((0.0, 0.0), (1.0, 0.0), (1.0, 16.0), (16.0, 0.0)):
        scheduling = SchedulingArgs(num_gpu_blocks_override=400, host_kv_gib=host, disk_kv_gib=disk)
        found.append(simulate("falcon-7b", cluster, turns, scheduling=scheduling).summary()["num_cached_tokens"])
    assert found[0] < found[1] < found[2] == found[3]  # type: ignore[operator]


def test_prompts_that_no_device_holds_come_from_the_host() -> None:
    """60,000 tokens and more, of which a device holds 25,600: served with a host, and more slowly than by a larger
    device.
    """
    cluster = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=1)
    asked = WorkloadSpec(prefix_len=60_000, num_prefixes=3, num_requests=3, rate=0.01, output_len=20)
    found = []
    for blocks, host in ((100, 0.0), (100, 16.0), (400, 0.0)):
        scheduling = SchedulingArgs(num_gpu_blocks_override=blocks, host_kv_gib=host, policy="chunked")
        found.append(simulate("llama-3-8b", cluster, asked, scheduling=scheduling).summary())
    refused, hosted, large = found
    assert (refused["num_refused"], hosted["num_completed"], large["num_completed"]) == (3, 3, 3)
    assert hosted["num_preemptions"] == 0
    host_s = (60_000 - 25_600) * 2 * 8 * 128 * 2 * 32 / 25e9
    assert hosted["tbt_p50_s"] > large["tbt_p50_s"] + host_s  # type: ignore[operator]
    assert hosted["ttft_p50_s"] < 1.5 * large["ttft_p50_s"], "attention hides most copies"  # type: ignore[operator]


def test_compared_policies_have_a_column_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", *HOST, *REQUESTS, "--policy", "chunked, context") == 0
    lines = re.findall(r"^[│┃](.*)[│┃]$", capsys.readouterr().out, re.MULTILINE)
    head, *rows = [[cell.strip() for cell in re.split("[│┃]", line)] for line in lines]
    assert head == ["", "chunked", "context"]
    assert {name: cells for name, *cells in rows}["num_completed"] == ["12", "12"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--policy", "chunked,context", "-o", "sp=4"),
            "--policy-option sp: none of chunked, context has it: their options are",
        ),
        (("--policy", "chunked,best"), "--policy 'best' is unknown: choose from auto, chunked"),
        (("--policy", "auto,auto"), "--policy auto,auto repeats a policy"),
        (("--policy", "context,context"), "--policy context,context repeats a policy"),
        (("--policy", "context,fixed-sp"), "sp must be 1 or more: give the number of instances"),
        (
            ("--policy", "chunked", "--exchange", "ring_kv"),
            "--policy-option exchange: policy chunked has no such option",
        ),
        (("--policy", "tetris,chunked", "--profile-improvement-rates"), "--policy must be tetris"),
        (("--profile-improvement-rates", "--slo-tbt", "1"), "--slo-tbt is for a single run"),
        (("--slo-ttft", "0"), "--slo-ttft must be above 0 seconds, but 0.0 given"),
        (("--slo-tbt", "nan"), "--slo-tbt must be a number of at most 1e+15, but nan given"),
    ],
)
def test_mistakes(options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", *HOST, *REQUESTS, *options) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_requests_that_keep_within_a_service_level_are_goodput() -> None:
    result = simulate("llama-3-8b", SPEC, ASKED)
    plain = result.summary()
    middle = sorted(one.ttft_s for one in result.served)[5]
    halves = result.summary(ServiceLevel(slo_ttft=middle))
    assert halves == plain | {"slo_attainment": 0.5, "goodput_requests_per_s": 6 / result.makespan_s}
    slowest = max(one.mean_tbt_s for one in result.served)
    one = next(one for one in result.served if one.mean_tbt_s == slowest)
    assert slowest == pytest.approx((one.e2e_s - one.ttft_s) / 7)
    assert result.attainment(ServiceLevel(slo_tbt=slowest)) == 1.0
    assert result.attainment(ServiceLevel(slo_tbt=slowest * 0.999)) < 1.0
    assert result.attainment(ServiceLevel(slo_ttft=middle, slo_tbt=slowest / 1e3)) == 0.0
    refused = simulate("llama-3-8b", SPEC, ASKED, scheduling=SchedulingArgs(max_model_len=20_000))
    assert 0 < len(refused.served) < 12
    assert refused.attainment(ServiceLevel(slo_ttft=1e6)) == len(refused.served) / 12, "refused requests are not served"


def test_a_rate_above_the_highest_keeps_too_few_within_the_service_level(capsys: pytest.CaptureFixture[str]) -> None:
    bound = ("--policy", "chunked", "--num-requests", "60", "--slo-ttft", "8")
    highest = printed(capsys, *bound, "--find-max-rate")["max_rate"]
    assert printed(capsys, *bound, "--rate", str(highest))["slo_attainment"] >= 0.9
    assert printed(capsys, *bound, "--rate", str(highest * 1.05))["slo_attainment"] < 0.9


def test_a_service_level_that_light_load_does_not_keep_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told, and other policies are compared all the same."""
    bound = ("--policy", "chunked,context", "--slo-ttft", "2", "--find-max-rate")
    assert run("simulate", *HOST, *REQUESTS, *bound, "--json") == 0
    shown = capsys.readouterr()
    rates = {policy: found["max_rate"] for policy, found in json.loads(shown.out).items()}
    assert rates["chunked"] == 0 != rates["context"]
    assert "longspan: chunked: max_rate is 0: only " in shown.err
    assert "when requests do not overlap, but 90% must" in shown.err


def test_highest_rates_by_light_loads_of_their_own_are_not_to_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--policy", "chunked,context", "--num-requests", "3", "--find-max-rate")
    for bound, told in (((), 1), (("--slo-ttft", "9"), 0)):
        assert run("simulate", *HOST, *REQUESTS, *few, *bound, "--json") == 0
        shown = capsys.readouterr()
        assert shown.err.count("each max_rate is relative to the policy's own light load: give --slo-ttft") == told
        assert json.loads(shown.out)["chunked"]["max_rate"] is None


def test_exposed_communication_is_that_of_the_estimate() -> None:
    """Of a prompt that one step of a group prefills alone."""
    alone = WorkloadSpec(workload="short", num_requests=1, rate=1.0, output_len=2)
    scheduling = SchedulingArgs(
        policy="fixed-sp", exchange="ring_kv", policy_options={"sp": "8"}, max_num_batched_tokens=100_000
    )
    experiment, seen = make_experiment("llama-3-8b", SPEC, scheduling), Timeline()
    [arrival] = make_workload(alone).arrivals
    [served] = experiment.run(make_workload(alone), seen.observers(experiment.cost)).served
    split = seen.split(served)
    assert isinstance(experiment.cost, RooflineCost) and split.exposed_communication_s is not None
    [line] = experiment.cost.lines
    tokens = len(arrival.prompt)
    expected = estimate_prefill(line, 8, RING_KV, tokens, 0).as_json()
    assert split.queue_s == split.transfer_s == 0
    assert split.exposed_communication_s == pytest.approx(expected["exposed_communication_s"], rel=0.05)
    assert split.compute_s == pytest.approx(expected["compute_s"], rel=0.05)


@pytest.mark.parametrize("policy", ["tetris", "runahead", "context"])
def test_exposed_communication_is_part_of_the_time_of_a_step(policy: str) -> None:
    scheduling = SchedulingArgs(policy=policy, max_num_batched_tokens=8192)
    experiment = make_experiment("llama-3-8b", replace(SPEC, gpus_per_host=4), scheduling)
    num_shared = 0

    def check(ran: StepTiming) -> None:
        nonlocal num_shared
        exposed_s = experiment.cost.exposed_s(ran.forward)
        assert exposed_s is not None and exposed_s.keys() == ran.ends_s.keys()
        for instance, end_s in ran.ends_s.items():
            assert 0 <= exposed_s[instance] <= end_s - ran.start_s
            num_shared += exposed_s[instance] > 0

    config = EngineConfig.of(scheduling, experiment.cluster, chosen := experiment.policy())
    simulation.simulate(make_workload(ASKED).arrivals, config, chosen, experiment.cost, watch=Observers(ran=check))
    assert num_shared > 10


def test_transfers_are_reported_and_part_of_the_time(tmp_path: Path) -> None:
    """A slow link: KV comes long after the first token, and decodes wait for it."""
    trace = tmp_path / "trace.json"
    roles = ("--prefill-parallel", "4", "--decode-parallel", "tp4", "--policy", "tetris", "--link-gbytes-per-s", "0.5")
    assert run("simulate", *HOST, *REQUESTS, *roles, "--trace", str(trace), "--json") == 0
    events = json.loads(trace.read_text())["traceEvents"]
    asked = {one["name"]: one for one in events if one["ph"] == "b" and one["cat"] == "request"}
    moved = [one for one in events if one.get("cat") == "transfer"]
    assert len(moved) >= 2 * len(asked) == 24
    assert all(one["args"]["to"] == [4] for one in moved if one["ph"] == "b")
    for name, one in asked.items():
        times = one["args"]
        arrived_s = max(move["ts"] for move in moved if move["name"] == name and move["ph"] == "e") / 1e6
        first_s = one["ts"] / 1e6 + times["ttft_s"]
        assert times["transfer_s"] == pytest.approx(arrived_s - first_s)
        assert times["transfer_s"] > 10 * times["decode_s"] > 0
    assert {one["name"] for one in events if one["ph"] == "C"} == {"waiting", "KV prefill", "KV decode"}


def test_cached_kv_is_reported_apart_from_kv_in_use() -> None:
    seen = Timeline()
    shared = WorkloadSpec(workload="short", num_requests=6, rate=1.0, output_len=2, prefix_len=5000)
    simulate("llama-3-8b", SPEC, shared, timeline=seen)
    assert seen.moments[-1].held == {"all": 0.0} and seen.moments[-1].cached["all"] > 0
    assert all(0 <= one.held["all"] <= one.held["all"] + one.cached["all"] <= 1 for one in seen.moments)


def test_a_trace_of_several_policies_has_their_processes_apart(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert run("simulate", *HOST, *REQUESTS, "--policy", "chunked,context", "--trace", str(trace)) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert sorted(names.values()) == sorted(
        f"{policy}: {what}" for policy in ("chunked", "context") for what in ("instances", "requests", "transfers")
    )
    ended = [names[one["pid"]] for one in events if one["ph"] == "e"]
    assert ended.count("chunked: requests") == ended.count("context: requests") == 12


@pytest.mark.parametrize(
    ("hardware", "options", "words"),
    [
        ("a100-sxm-80g", ("--policy", "tetris"), ("on a100, flash attention, against papers", "Tetris, Table 1", "+9")),
        ("a100-sxm-80g", ("--policy", "runahead", "--attention", "eager"), ("on a100, eager", "KV-Runahead, Table 3")),
        ("h100-sxm-80g", ("--policy", "tetris"), ("+9",)),
        ("a40", (), ("No comparison with measurements covers auto on a40",)),
        ("h100-sxm-80g", ("--policy", "context"), ("against papers:</p>", "TP64 / CP8", ">context<")),
        ("h100-sxm-80g", (), ("No comparison with measurements covers auto on h100",)),
        ("a100-sxm-80g", ("--policy", "auto,loongserve"), ("Tetris, Table 1", "covers auto on a100")),
    ],
)
def test_the_page_has_the_errors_of_its_policies_and_hardware(
    hardware: str, options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    host = ("llama-3-8b", "--hardware", hardware, "--gpus-per-host", "4", *REQUESTS)
    assert run("simulate", *host, *options, "--report", str(page)) == 0
    text = page.read_text().replace("\u00a0", " ")
    text = text.partition("<h2>Error of these predictions</h2>")[2].partition("<h2>")[0]
    assert all(one in text for one in words)
    assert ("Context Parallelism" in text) == ("TP64 / CP8" in words)
    assert ("Tetris, Table" in text) == ("Tetris, Table 1" in words)


def test_the_page_has_policies_side_by_side(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert (
        run("simulate", *HOST, *REQUESTS, "--policy", "chunked,context", "--slo-ttft", "2", "--report", str(page)) == 0
    )
    text = re.sub(r"<(t[dhr])[^>]*>", r"<\1>", page.read_text())
    assert "<tr><th></th><th>chunked</th><th>context</th></tr>" in text
    assert re.search(r"<tr><td>goodput_requests_per_s</td><td>[\d.]+</td><td>[\d.]+</td></tr>", text)
    assert text.count("<td>mean</td>") == 2
    assert text.count('"name":"chunked"') >= 5, "in each picture of times"


def test_policies_are_compared_from_python() -> None:
    several = SchedulingArgs(policy="chunked,context", exchange="ring_kv", max_num_batched_tokens=8192)
    chunked, context = each_policy(several)
    assert (chunked.policy, chunked.all_policy_options()) == ("chunked", {})
    assert (context.policy, context.all_policy_options()) == ("context", {"exchange": "ring_kv"})
    assert chunked.max_num_batched_tokens == 8192
    assert each_policy(context) == [context]


def test_sparse_attention_is_priced_by_kept_tokens() -> None:
    """Without drops it costs about as much as `alltoall`, with half dropped less. Bytes equal the formula."""
    cluster = ClusterSpec(hardware="a100-sxm-80g", parallel="8", gpus_per_host=4, hosts=2)
    requests = Workload(arrivals=[Arrival(due_s=0.0, prompt=text(1, 65536), output_len=2)], shares=False)
    found = {}
    for csa in ("off", '{"levels": 3}', '{"levels": 3, "drop": 0.5}'):
        scheduling = SchedulingArgs(policy="csps", csa=csa, max_num_batched_tokens=8192)
        result = make_experiment("llama-3-8b", cluster, scheduling).run(requests)
        found[csa] = result.served[0].ttft_s
    off, kept, half = found.values()
    assert 0.8 * off < kept < 1.1 * off
    assert half < 0.9 * kept
