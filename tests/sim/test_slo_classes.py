"""Classes of requests with service levels of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.options import SchedulingArgs
from longspan.sim.experiment import within
from longspan.sim.run import Result
from longspan.sim.spec import DEFAULT_CLASS, ClusterSpec, ServiceLevel, SloClass
from longspan.simulation import simulate
from longspan.workload.spec import WorkloadSpec

CLUSTER = ClusterSpec(hardware="h100-sxm-80g", hosts=1, gpus_per_host=1)
CHAT = SloClass(name="chat", max_input_len=1000, slo_ttft=0.5, slo_tbt=0.05)
DOCUMENTS = SloClass(name="documents", max_input_len=10_000, slo_ttft=20.0)
LENGTHS = [100, 1000, 1001, 9000, 20_000, 400]
NAMES = ["", "", "", "", "", "documents"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        {"timestamp": 2000 * place, "input_length": length, "output_length": 4} | ({"class": name} if name else {})
        for place, (length, name) in enumerate(zip(LENGTHS, NAMES, strict=True))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def result(trace: Path) -> Result:
    """Serve all but the longest request, which is refused."""
    sizes = SchedulingArgs(max_model_len=16_000)
    return simulate("llama-3-8b", CLUSTER, WorkloadSpec(workload=str(trace)), scheduling=sizes)


def test_a_request_is_in_the_class_it_names_or_in_the_first_that_its_length_fits(result: Result) -> None:
    level = ServiceLevel(classes=(DOCUMENTS, CHAT))
    parts = result.by_class(level)
    assert {name: [one.index for one in part.served] for name, part in parts.items()} == {
        "chat": [0, 1],
        "documents": [2, 3, 5],
        DEFAULT_CLASS: [],
    }
    assert {name: list(part.refused) for name, part in parts.items()} == {
        "chat": [],
        "documents": [],
        DEFAULT_CLASS: [4],
    }
    every = replace(DOCUMENTS, max_input_len=None)
    assert [one.index for one in result.by_class(ServiceLevel(classes=(every, CHAT)))["chat"].served] == [0, 1]
    assert list(result.by_class(ServiceLevel(classes=(every, CHAT)))["documents"].refused) == [4]
    assert list(result.by_class(ServiceLevel(classes=(CHAT,)))) == ["chat", DEFAULT_CLASS], "5 names another class"


@given(
    classes=st.lists(
        st.builds(
            SloClass,
            name=st.sampled_from("abc"),
            max_input_len=st.none() | st.integers(1, 20_000),
            slo_ttft=st.none() | st.floats(0.001, 2.0),
            slo_tbt=st.none() | st.floats(0.001, 0.1),
        ),
        max_size=3,
        unique_by=lambda one: one.name,
    ),
    slo_ttft=st.none() | st.floats(0.01, 2.0),
)
def test_attainment_counts_each_request_by_its_own_class(
    classes: list[SloClass], slo_ttft: float | None, result: Result
) -> None:
    level = ServiceLevel(slo_ttft=slo_ttft, classes=tuple(classes))
    parts = result.by_class(level)
    levels = {one.name: ServiceLevel(slo_ttft=one.slo_ttft, slo_tbt=one.slo_tbt) for one in classes}
    levels[DEFAULT_CLASS] = ServiceLevel(slo_ttft=slo_ttft)
    assert sum(len(part.served) + len(part.refused) for part in parts.values()) == len(LENGTHS)
    good = {name: part.num_good(levels[name]) for name, part in parts.items()}
    assert result.num_good(level) == sum(good.values())
    for name, part in parts.items():
        assert part.attainment(level) == good[name] / (len(part.served) + len(part.refused))
    if level.is_given:
        summary = result.summary(level)
        assert summary["slo_attainment"] == sum(good.values()) / len(LENGTHS)
        assert summary["goodput_requests_per_s"] == pytest.approx(sum(good.values()) / result.makespan_s)
        assert within(level)(result) == (sum(good.values()) >= 0.9 * len(LENGTHS))


def test_numbers_of_classes_are_printed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--hardware", "h100-sxm-80g", "--gpus-per-host", "1", "--workload", str(trace), "--policy", "chunked")
    classes = ("--slo-class", "chat:1000:0.5:0.05", "--slo-class", "documents::0.0001:", "--slo-ttft", "9")
    assert run("simulate", "llama-3-8b", *options, *classes, "--json") == 0
    numbers: dict[str, Any] = json.loads(capsys.readouterr().out)
    of = numbers["classes"]
    assert {name: numbers["num_requests"] for name, numbers in of.items()} == {"chat": 2, "documents": 4}
    assert (of["chat"]["slo_attainment"], of["documents"]["slo_attainment"]) == (1.0, 0.0)
    assert numbers["slo_attainment"] == 2 / 6
    assert of["chat"]["ttft_p99_s"] < of["documents"]["ttft_p99_s"]
    assert run("simulate", "llama-3-8b", *options, *classes) == 0
    assert "chat slo_attainment" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat", "is NAME:MAX_INPUT_LEN:TTFT:TBT"),
        (":1:1:1", "is NAME:MAX_INPUT_LEN:TTFT:TBT"),
        ("chat:1.5::", "is NAME:MAX_INPUT_LEN:TTFT:TBT"),
        ("chat:0::", "max_input_len must be above 0 tokens"),
        ("chat::0:", "slo_ttft must be above 0 seconds"),
        ("chat:::nan", "slo_tbt must be above 0 seconds"),
        ("other:::", "none other"),
    ],
)
def test_a_class_that_cannot_be_read_is_refused(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "llama-3-8b", "--rate", "1", "--slo-class", text) == 2
    error = capsys.readouterr().err
    assert "--slo-class" in error and words in error and error.count("\n") == 1


def test_classes_have_different_names(capsys: pytest.CaptureFixture[str]) -> None:
    twice = ("--slo-class", "chat:::", "--slo-class", "chat:9::")
    assert run("simulate", "llama-3-8b", "--rate", "1", *twice) == 2
    assert "--slo-class must have different names" in capsys.readouterr().err


@given(
    st.builds(
        SloClass,
        name=st.just("a"),
        max_input_len=st.none() | st.integers(1, 10**6),
        slo_ttft=st.none() | st.integers(1, 10**5),
        slo_tbt=st.none() | st.sampled_from([0.05, 0.125, 3.0]),
    )
)
def test_a_class_is_written_as_it_is_read(one: SloClass) -> None:
    assert SloClass.parse(str(one)) == one
