"""`longspan plan`: its output, its exit codes, stored simulations, processes, and recorded layouts."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fake_llm import run
from invented_profiles import measure

from longspan import WorkloadSpec, plan, plan_runs
from longspan.cli.app import app
from longspan.cli.plan import read_prices
from longspan.core.fleets import parse_fleet
from longspan.core.splits import ParallelSpec
from longspan.cost import catalog
from longspan.errors import ParameterError
from longspan.model.files import cache_root
from longspan.plan_runs import Runner, Setup, experiment_of, store_of
from longspan.planner.candidates import Candidate
from longspan.planner.samples import Work
from longspan.planner.values import Plan
from longspan.sim.spec import HardwareSpec, ServiceLevel
from longspan.simulation import read_profile

BASE = ("plan", "llama-3-8b", "--hardware", "h100-sxm-80g", "--num-requests", "30", "--attainment", "0.8")
ONE = ("--gpus", "1", "--rate", "0.3", "--slo-ttft", "10", "--slo-tbt", "0.2")
LEVEL = ServiceLevel(slo_ttft=10.0, slo_tbt=0.2)
SETUP = Setup(
    model="llama-3-8b",
    devices=HardwareSpec(),
    gpus_per_host=8,
    profiles=(),
    workload=WorkloadSpec(rate=0.3),
    level=LEVEL,
)
STATIC = Candidate(hardware="h100-sxm-80g", spec=ParallelSpec(), max_num_batched_tokens=4096)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def work(num: int = 3) -> list[Work]:
    return [Work(candidate=STATIC, seed=seed, num_requests=10) for seed in range(num)]


# ---------------------------------------------------------------- the verb


def test_a_plan_has_a_command_that_the_command_line_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(*BASE, *ONE, "--report", str(page)) == 0
    out = capsys.readouterr().out
    [command] = re.findall(r"^start it: (.*)$", out, re.MULTILINE)
    words = shlex.split(command)
    assert words[:2] == ["longspan", "serve"] and "--policy" in words
    assert " ".join(words[2:]) in page.read_text()
    app.parse_args(words[1:], print_error=False, exit_on_error=False)
    [winner] = re.findall(r"^1: (.*)$", out, re.MULTILINE)
    assert "on h100" not in winner and f"--policy {winner.split()[1].strip(',')} " in command
    assert "The winner is the best static layout" in out and "error of the model" in out and "P99 TTFT" in out


def test_the_page_of_a_plan_has_its_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    assert run(*BASE, *ONE, "--json", "--report", str(page)) == 0
    answer = json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert f"<pre>{answer['winner']['command']}</pre>" in text and 'id="front"' in text
    assert f"{answer['num_simulated_requests']:,} requests were simulated" in text
    assert run(*BASE, *ONE, "--report", str(tmp_path)) == 2
    assert f"--report {str(tmp_path)!r} cannot be written" in capsys.readouterr().err


def test_too_high_a_rate_prints_the_nearest_and_the_highest_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*BASE, "--gpus", "1", "--rate", "8", "--slo-ttft", "10", "--json") == 1
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not answer["winner"]["meets"] and 0 < answer["max_rate"] < 8
    assert answer["question"]["level"]["slo_ttft"] == 10
    assert {one["reason"] for one in answer["pruned"]} or len(answer["ranked"]) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--hardware must be given"),
        (("--hardware", "nope", "--slo-ttft", "1"), "nope"),
        (("--hardware", "a10,h1000", "--slo-ttft", "1"), "h1000"),
        (("--hardware", "h100-sxm-80g,h1000", "--gpus", "64", "--slo-ttft", "1"), "h1000"),
        (("--hardware", "a10", "--slo-ttft", "1", "--current", "1xtp"), "--current '1xtp'"),
        (("--hardware", "h100-sxm-80g", "--slo-ttft", "1", "--current", "pp64"), "--current pp64 cannot run: pp(64)"),
        (("--hardware", "a10", "--profile", "x.json"), "--hardware and --profile exclude each other"),
        (("--hardware", "a10"), "--slo-ttft or --slo-tbt must be given"),
        (("--hardware", "a10", "--slo-ttft", "1", "--attainment", "1.5"), "--attainment must be above 0"),
        (("--hardware", "a10", "--slo-ttft", "1", "--gpus", "0"), "gpus"),
        (("--hardware", "a10", "--slo-ttft", "1", "--prices", "nothing.toml"), "--prices"),
    ],
)
def test_mistakes_are_named(options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "llama-3-8b", "--rate", "1", *options) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_a_mistake_with_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "llama-3-70b", "--hardware", "a10", "--gpus", "1", "--rate", "1", "--slo-ttft", "9") == 2
    assert re.search(r"--gpus\(1\) are too few of a10.*GiB", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "h100 = ", "a.toml"),
        ("a.json", "[1]", "must map names"),
        ("a.toml", "", "must map names"),
        ("a.toml", "h100 = 'two'", "must be a number"),
        ("a.json", '{"h100": true}', "must be a number"),
        *(("a.json", f'{{"h100": {price}}}', "must be a number") for price in ("1" + 400 * "0", "1e999", "NaN")),
        ("a.json", 9**5 * "[", "a.json"),
        ("a.toml", "h100 = " + 9**5 * "[", "a.toml"),
    ],
)
def test_prices_are_checked(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ParameterError, match=words):
        read_prices(tmp_path / name)


def test_prices_decide_between_hardware(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("h100-sxm-80g = 9.0\na100-sxm-80g = 1.5\n")

    def best(prices: dict[str, float]) -> str:
        answer = plan(
            "llama-3-8b",
            hardware=("h100-sxm-80g", "a100-sxm-80g"),
            gpus=1,
            workload=WorkloadSpec(rate=0.1, num_requests=20),
            level=LEVEL,
            attainment=0.5,
            prices=prices,
            policies=("chunked",),
            step_budgets=(4096,),
            seeds=1,
            num_processes=1,
        )
        assert answer.winner is not None and answer.winner.meets
        assert answer.winner.price_per_hour == prices[answer.winner.candidate.hardware]
        return answer.winner.candidate.hardware

    prices = read_prices(tmp_path / "prices.toml")
    assert best(prices) == "a100-sxm-80g"
    assert best({name: 10 - price for name, price in prices.items()}) == "h100-sxm-80g"


@pytest.mark.parametrize("prices", [(), ("h100-sxm-80g", "a100-sxm-80g")])
def test_each_candidate_of_the_front_is_one_line_of_80_columns(
    prices: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "prices.toml").write_text("".join(f"{name} = 1234.5\n" for name in prices))
    options = ("--hardware", ",".join(prices), "--prices", str(tmp_path / "prices.toml")) if prices else ()
    assert run(*BASE, *options, "--gpus", "1", "--rate", "0.8", "--slo-ttft", "10", "--slo-tbt", "0.2") == 0
    out = capsys.readouterr().out
    places = re.findall(r"^│ *(\d*) *│", out, re.MULTILINE)
    assert len(places) > 1 and places == re.findall(r"^(\d+): ", out, re.MULTILINE)
    assert all(len(line) <= 80 for line in out.splitlines() if line[:1] in "│┃")
    assert len(re.findall(r"^\d+: .* on [ah]100-sxm-80g$", out, re.MULTILINE)) == (len(places) if prices else 0)


def test_a_device_of_the_user_has_no_errors_of_another_one(tmp_path: Path) -> None:
    known = tomllib.loads((Path(plan_runs.__file__).parent / "cost/data/hardware.toml").read_text())["a100-sxm-80g"]
    lines = [f"{name} = {json.dumps(value)}" for name, value in known.items()]
    file = tmp_path / "a100-mine.toml"
    file.write_text("\n".join(lines))
    assert not small(hardware=str(file)).error
    assert small(hardware="a100-sxm-80g").error


# ---------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("layout", "policy", "gpus_per_host", "sizes"),
    [
        ("2 prefill + tp4 decode", "tetris", 8, [6]),
        ("2 prefill + tp4 decode", "tetris", 4, [2, 4]),
        ("2 prefill + tp8 decode", "tetris", 8, [2, 8]),
        ("tp8 prefill + tp4 decode", "tetris", 8, [8, 4]),
        ("3xtp4", "chunked", 8, [8, 4]),
        ("tp16", "chunked", 8, [8, 8]),
        ("tp4pp4", "chunked", 8, [8, 8]),
        ("3xpp4", "chunked", 6, [4, 4, 4]),
        ("8 prefill + 2xtp4 decode", "seesaw", 4, [4, 4]),
    ],
)
def test_hosts_are_filled_without_splitting_an_instance_that_fits(
    layout: str, policy: str, gpus_per_host: int, sizes: list[int]
) -> None:
    cluster = parse_fleet(layout)
    one = Candidate(hardware="h100-sxm-80g", spec=cluster.spec, decode=cluster.decode_spec, policy=policy)
    for phase in replace(SETUP, gpus_per_host=gpus_per_host).cluster(one).clusters(policy):
        assert list(Counter(phase.hosts).values()) == sizes


# ---------------------------------------------------------------- simulations


def test_simulations_in_processes_have_the_same_numbers(tmp_path: Path) -> None:
    with Runner(SETUP, 1, lambda _done, _total: None, None) as here:
        expected = here(work())
    seen: list[tuple[int, int]] = []
    with Runner(SETUP, 2, lambda done, total: seen.append((done, total)), tmp_path / "a.jsonl") as children:
        assert children(work()) == expected
    assert seen[0] == (0, 3) and seen[-1] == (3, 3)
    assert children.num_requests == 30


def test_stored_simulations_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "new" / "a.jsonl"
    with Runner(SETUP, 1, lambda _done, _total: None, store) as first:
        expected = first(work())
    with store.open("ab") as file:
        file.write(b'{"work": {"cand')  # as a killed process leaves it
    with Runner(SETUP, 1, lambda _done, _total: None, store) as second:
        expected |= second(work(4))
    monkeypatch.setattr(plan_runs, "run", lambda *_: pytest.fail("it was stored"))
    with Runner(SETUP, 1, lambda _done, _total: None, store) as third:
        assert third(work(4)) == expected


def test_a_store_depends_on_the_question_and_on_files(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1]}
    trace.write_text("\n".join(json.dumps(row | {"timestamp": 1000 * n}) for n in range(9)))
    ours = replace(SETUP, workload=WorkloadSpec(workload=str(trace)))
    before = store_of(ours)
    assert len({before, store_of(SETUP), store_of(replace(SETUP, level=ServiceLevel(slo_ttft=9.0)))}) == 3
    assert store_of(ours) == before
    trace.write_text(trace.read_text() + "\n" + json.dumps(row | {"timestamp": 9000}))
    assert store_of(ours) != before
    device = tmp_path / "device.toml"
    device.write_text("tflops = 100")
    before = store_of(ours, [str(device)])
    device.write_text("tflops = 200")
    assert store_of(ours, [str(device)]) != before


def test_files_are_read_again_after_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments and stores follow the contents of the files of the device and of the model, also below ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    data = Path(catalog.__file__).parent / "data" / "hardware.toml"
    device = tomllib.loads(data.read_text(encoding="utf-8"))["h100-sxm-80g"]
    config = catalog.model_config("llama-3-8b")
    setup, candidate = replace(SETUP, model="~/config.json"), Candidate(hardware="~/mine.json", spec=ParallelSpec())
    found = []
    for tflops, layers in ((900, 32), (450, 32), (450, 16), (900, 32)):
        (tmp_path / "mine.json").write_text(json.dumps({**device, "tflops": tflops}))
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        outcome = plan_runs.run(setup, Work(candidate=candidate, seed=0, num_requests=3))
        assert outcome.problem is None
        found.append((outcome, store_of(setup, ["~/mine.json"])))
    assert found[0] == found[3]
    assert all(len(set(map(str, column))) == 3 for column in zip(*found, strict=True))
    assert experiment_of(setup, candidate) is experiment_of(setup, candidate)


def test_traces_and_quantiles_are_read_again_after_they_change(tmp_path: Path) -> None:
    trace, lengths = tmp_path / "trace.jsonl", tmp_path / "lengths.json"
    row = {"input_length": 100, "output_length": 5, "hash_ids": []}
    for num, longest in ((9, 500), (12, 900)):
        trace.write_text("\n".join(json.dumps(row | {"timestamp": 1000 * n}) for n in range(num)))
        lengths.write_text(json.dumps({key: {"0": longest, "1": longest} for key in ("input_len", "output_len")}))
        assert len(plan_runs.whole(WorkloadSpec(workload=str(trace))).arrivals) == num
        drawn = plan_runs.sample_of(WorkloadSpec(workload=str(lengths)), 0, 4, 1.0)
        assert {len(arrival.prompt) for arrival in drawn.arrivals} == {longest}


def test_a_store_depends_on_all_code_that_simulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_runs, "__file__", str(tmp_path / "plan_runs.py"))
    names = ("simulation.py", "csa_file.py", "plan_runs.py", "model/files.py", "sim/run.py", "cost/data/models.toml")
    stores = set()
    for text in ("a", "b"):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            if text == "b" or name == names[-1]:
                stores.add(store_of(SETUP))
    assert len(stores) == 1 + len(names)


def test_a_cache_that_cannot_be_written_is_an_early_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/x"):
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / name))
        assert run(*BASE, *ONE) == 2
        assert "set LONGSPAN_CACHE to another folder" in capsys.readouterr().err


def test_a_full_disk_ends_the_store_and_not_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Runner(SETUP, 1, lambda _done, _total: None, tmp_path / "a.jsonl") as runner:
        monkeypatch.setattr(Path, "open", full)
        assert len(runner(work())) == 3
    assert caplog.text.count("not stored") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_plan_keeps_simulations_and_leaves_no_process(cache: Path, number: signal.Signals) -> None:
    arguments = [*BASE[:-4], "--gpus", "4", "--rate", "2", "--slo-ttft", "5", "--num-requests", "400"]
    process = subprocess.Popen(
        [sys.executable, "-m", "longspan", *arguments], env={**os.environ}, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 90
        while not (cache.is_dir() and any(file.stat().st_size for file in cache.iterdir())):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(20) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
    [store] = cache.iterdir()
    assert all(
        "outcome" in json.loads(line) for line in store.read_text().splitlines(keepends=True) if line[-1] == "\n"
    )


# ---------------------------------------------------------------- the recorded layout


def recording(path: Path, *headers: dict[str, Any]) -> WorkloadSpec:
    """Write a recording with 30 requests after each header."""
    row = {"input_length": 4000, "output_length": 20, "ttft_s": 0.2, "tpot_s": 0.01, "hash_ids": [*range(8)]}
    common = {"start_s": 0.0, "model": "llama-3-8b", "parallel": "2", "policy": "chunked"}
    lines = [{"longspan": {name: value for name, value in (common | header).items() if value is not None}}
             for header in headers]  # fmt: skip
    rows = [[header, *(row | {"timestamp": 2000 * n} for n in range(30))] for header in lines]
    path.write_text("\n".join(json.dumps(line) for part in rows for line in part))
    return WorkloadSpec(workload=str(path))


def small(model: str = "llama-3-8b", **options: Any) -> Plan:
    given: dict[str, Any] = {
        "hardware": "h100-sxm-80g",
        "gpus": 2,
        "workload": WorkloadSpec(rate=0.3, num_requests=20),
        "level": LEVEL,
        "attainment": 0.5,
        "layouts": ("1",),
        "policies": ("chunked",),
        "step_budgets": (4096,),
        "host_kv_gib": (0.0,),
        "seeds": 1,
        "num_processes": 1,
        "stores": False,
    }
    return plan(model, **given | options)


def test_the_simulation_of_the_recorded_layout_has_the_recorded_options(tmp_path: Path) -> None:
    options = {
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 7,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 200,
        "block_size": 128,
        "seed": 5,
    }
    answer = small(workload=recording(tmp_path / "a.jsonl", {"options": options}), current="2")
    assert answer.current is not None
    candidate, command = answer.current.ranked.candidate, answer.current.ranked.command
    assert not any(note.startswith("The recorded engine") for note in answer.notes)
    del options["seed"]
    assert candidate.as_json()["scheduling"] | {"max_num_batched_tokens": 1024} == options
    app.parse_args(shlex.split(command)[1:], print_error=False, exit_on_error=False)
    assert "--max-num-seqs 7" in command and "--no-enable-prefix-caching" in command


@pytest.mark.parametrize(
    ("headers", "current", "words"),
    [
        ([{"model": "/models/qwen3-8b"}], "2", ["model qwen3-8b", "llama-3-8b"]),
        ([{}], "tp2", ["layout 2", "tp2"]),
        ([{"options": {"dtype": "float32", "enforce_eager": True}}], "2", ["dtype float32", "enforce_eager True"]),
        ([{}, {"start_s": 9.0}, {"policy": "auto"}, {"parallel": "tp2"}], "2", ["changed 2 times"]),
    ],
)
def test_notes_name_differences_from_the_recorded_engine(
    headers: list[dict[str, Any]], current: str, words: list[str], tmp_path: Path
) -> None:
    answer = small(workload=recording(tmp_path / "a.jsonl", *headers), current=current)
    notes = "\n".join(note for note in answer.notes if note.startswith("The recorded engine"))
    assert all(word in notes for word in words) and "had model m" not in notes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", None),
        ("parallel", 3),
        ("policy_options", [1]),
        ("options", "text"),
        ("options", {"max_num_seqs": "many"}),
        ("options", {"max_num_seqs": 0}),
    ],
)
def test_an_invalid_header_is_a_mistake(field: str, value: object, tmp_path: Path) -> None:
    workload = recording(tmp_path / "a.jsonl", {field: value})
    with pytest.raises(ValueError, match=r"a\.jsonl.*header|header.*a\.jsonl"):
        small(workload=workload, current="2")


@pytest.mark.parametrize(
    "options",
    [{"offline": True}, {"concurrency": 3}, {"turns": 2, "rate": 1.0}, {"output_len": 90}, {"prefix_len": 9000}],
    ids=str,
)
def test_recorded_times_are_compared_at_the_recorded_load(options: dict[str, Any], tmp_path: Path) -> None:
    workload = recording(tmp_path / "a.jsonl", {})
    expected = small(workload=workload, current="2").current
    changed = small(workload=replace(workload, **options), current="2").current
    assert expected is not None and changed is not None
    assert expected.times and changed.times == expected.times


def test_the_recorded_layout_is_first_compared_with_its_simulation(tmp_path: Path) -> None:
    header = {"longspan": {"start_s": 0.0, "model": "m", "parallel": "2", "policy": "chunked", "options": {}}}
    row = {"input_length": 4000, "output_length": 20, "ttft_s": 0.2, "tpot_s": 0.01}
    lines = [row | {"timestamp": 2000 * n, "hash_ids": list(range(100 * n, 100 * n + 8))} for n in range(30)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, [header, *lines])))
    answer = plan(
        "llama-3-8b",
        hardware="h100-sxm-80g",
        gpus=2,
        workload=WorkloadSpec(workload=str(trace)),
        level=ServiceLevel(slo_ttft=2.0),
        current="2",
        policies=("chunked",),
        step_budgets=(8192,),
        host_kv_gib=(0.0,),
        seeds=2,
        num_processes=1,
    )
    current = answer.as_json()["current"]
    candidate = current["ranked"]["candidate"]
    assert (candidate["layout"], candidate["policy"], candidate["max_num_batched_tokens"]) == ("2", "chunked", 2048)
    for one in current["times"]:
        assert one["error_percent"] == pytest.approx(100 * (one["simulated_s"] / one["recorded_s"] - 1))
    assert {one["what"] for one in current["times"]} >= {"P50 TTFT", "P99 TTFT", "P50 TPOT"}
    assert answer.winner is not None and answer.winner.num_gpus == 1  # one of the two devices is enough
    assert any("The trace has 30 requests" in text for text in answer.notes)
    assert current["ranked"]["lost_because"] == "takes 2 devices instead of 1"


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "flags", "problems"),
    [
        ({}, "--device cuda", []),
        ({"dtype": "bfloat16"}, "--dtype bfloat16", []),
        ({"dtype": "int8"}, "--quantization int8", []),
        ({"launch": "eager"}, "--enforce-eager", []),
        ({"attention": "eager"}, "--enforce-eager", ["--attention eager"]),
        ({"dtype": "fp8", "kv_cache_dtype": "fp8"}, "", ["weights in fp8", "--kv-cache-dtype fp8"]),
        ({"dtype": "bfloat16", "ffn_dtype": "fp8"}, "--dtype bfloat16", ["--ffn-dtype fp8"]),
    ],
    ids=str,
)
def test_the_command_has_the_options_of_the_question_or_a_note(
    options: dict[str, Any], flags: str, problems: list[str]
) -> None:
    answer = small(devices=HardwareSpec(**options))
    assert answer.winner is not None and flags in answer.winner.command
    app.parse_args(shlex.split(answer.winner.command)[1:], print_error=False, exit_on_error=False)
    [note] = [note for note in answer.notes if "does not run as simulated" in note] or [""]
    assert bool(note) == bool(problems) and all(problem in note for problem in problems)
    assert any(note.startswith("llama-3-8b has sizes only") for note in answer.notes)


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("llama-3-8b", {}, ""),
        ("gpt-oss-20b", {}, "mxfp4"),
        ("llama-3-8b", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ("deepseek-v3", {"num_hidden_layers": 4, "quantization_config": None}, "latent"),
    ],
)
def test_a_note_names_a_model_that_the_engine_does_not_run_as_simulated(
    name: str, fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(catalog.model_config(name) | fields))
    answer = small(str(config))
    assert answer.winner is not None and answer.winner.command.startswith(f"longspan serve {tmp_path} ")
    [note] = [note for note in answer.notes if "does not run as simulated" in note] or [""]
    assert problem in note and bool(note) == bool(problem)


def test_a_current_layout_with_more_devices_than_the_question_is_ranked_but_is_no_winner() -> None:
    answer = plan(
        "llama-3-8b",
        hardware="h100-sxm-80g",
        gpus=1,
        gpus_per_host=2,
        workload=WorkloadSpec(rate=4.0, num_requests=20),
        level=ServiceLevel(slo_ttft=4.0),
        attainment=0.8,
        current="tp4",
        policies=("chunked",),
        step_budgets=(4096,),
        seeds=1,
        num_processes=1,
    )
    assert answer.winner is not None and answer.winner.num_gpus == 1
    assert answer.current is not None and answer.current.ranked.num_gpus == 4
    assert "4 devices, more than the 1 of the question" in answer.current.ranked.lost_because
    assert any("tp(4) on several hosts of 2" in text for text in answer.notes)
    one = answer.winner.candidate
    best = Runner(replace(SETUP, level=answer.question.level), 1, lambda _done, _total: None, None)
    work = Work(candidate=one, seed=0, num_requests=10, rate=answer.max_rate)
    assert answer.max_rate is not None and best([work])[work].attainment >= 0.8


# ---------------------------------------------------------------- other questions


def test_profiles_of_a_machine_replace_data_sheets(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.01)
    measure(tiny, tp=2, token_s=1e-4, decode_s=0.001)
    profiles = sorted((cache_root() / "profiles").glob("*.json"))
    assert len(profiles) == 2
    answer = plan(
        str(tiny),
        profiles=profiles,
        gpus=2,
        workload=WorkloadSpec(workload="short", rate=0.02, num_requests=20, output_len=16),
        level=ServiceLevel(slo_tbt=0.005),
        attainment=0.9,
        fewer=False,
        policies=("chunked", "auto"),
        seeds=2,
        num_processes=1,
    )
    assert answer.winner is not None
    assert answer.winner.candidate.layout == "tp2"  # the only quick decode
    assert {row.candidate.layout for row in answer.ranked} >= {"2", "pp2", "tp2"}
    [tp2] = [str(path) for path in profiles if read_profile(path).profile_key.tp == 2]
    options = ("plan", str(tiny), "--profile", tp2, "--offline", "--num-requests", "9", "--output-len", "4")
    assert run(*options, "--gpus", "2") == 0
    assert "times are from the profile" in capsys.readouterr().out
    assert run(*options, "--gpus", "1") == 2
    assert "--gpus(1) are too few" in capsys.readouterr().err
    assert "--device cpu --threads-per-rank 1 --dtype float32" in answer.winner.command
    app.parse_args(shlex.split(answer.winner.command)[1:], print_error=False, exit_on_error=False)


def test_mistakes_with_profiles_are_named(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.01)
    [path] = (cache_root() / "profiles").glob("*.json")
    options = ("plan", str(tiny), "--profile", str(path), "--gpus", "2", "--rate", "0.1", "--slo-ttft", "60")
    for sheet in (("--dtype", "fp8"), ("--kv-cache-dtype", "fp8"), ("--launch", "eager"), ("--link", "ib-ndr")):
        assert run(*options, *sheet) == 2
        assert f"{sheet[0]}" in (err := capsys.readouterr().err) and "refines data sheets" in err
    for layout in ("tp2", "2xtp2", "tp2 prefill + 1 decode"):
        assert run(*options, "--current", layout) == 2
        assert "--current" in (err := capsys.readouterr().err) and "for tp 2 is missing" in err
    profile = read_profile(path)
    for field, value in {"machine": "other", "dtype": "bfloat16", "threads": 7, "model": "m"}.items():
        key = msgspec.structs.replace(profile.profile_key, tp=2, **{field: value})
        other = tmp_path / f"{field}.json"
        other.write_text(msgspec.structs.replace(profile, profile_key=key).to_json())
        assert run(*options, "--profile", str(other)) == 2
        assert "differ in tp only" in (err := capsys.readouterr().err) and str(value) in err


@pytest.mark.parametrize(
    "workload",
    [
        WorkloadSpec(concurrency=4, num_requests=40),
        WorkloadSpec(offline=True, num_requests=24),
        WorkloadSpec(rate=0.2, turns=2, think_time=1.0, num_requests=24),
        WorkloadSpec(rate=0.2, prefix_len=2048, num_requests=24),
    ],
    ids=["closed loop", "offline", "turns", "shared prefix"],
)
def test_every_kind_of_workload_has_a_plan(workload: WorkloadSpec) -> None:
    answer = plan(
        "llama-3-8b",
        hardware="h100-sxm-80g",
        gpus=1,
        workload=workload,
        level=ServiceLevel(slo_tbt=5.0),
        step_budgets=(4096,),
        host_kv_gib=(0.0,),
        seeds=2,
        num_processes=1,
        stores=False,
    )
    assert answer.winner is not None and answer.winner.meets
    assert answer.winner.goodput_per_s.mean > 0
    assert json.dumps(answer.as_json(), allow_nan=False)
    assert answer.num_simulated_requests >= answer.winner.num_requests
