"""Devices that users describe in files: equal to known ones with the same fields, never mixed up, and checked."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run

from longspan import ClusterSpec, WorkloadSpec, simulate
from longspan.cost import catalog
from longspan.cost.links import collective_s
from longspan.cost.precision import HALF
from longspan.cost.topology import Devices
from longspan.simulation import read_device

DATA = Path(catalog.__file__).parent / "data"
NAMES = catalog.names("hardware")
BRIDGE = {
    "where": "inside",
    "gbytes_per_s": 100,
    "achieved": 0.8,
    "collective": 0.7,
    "latency_us": 8,
    "collective_us": 20,
}


def entry(name: str = "h100-sxm-80g") -> dict[str, Any]:
    fields: dict[str, Any] = tomllib.loads((DATA / "hardware.toml").read_text(encoding="utf-8"))[name]
    return fields


def written(path: Path, fields: object) -> str:
    path.write_text(json.dumps(fields), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_the_fields_of_a_known_device_describe_that_device(name: str, tmp_path: Path) -> None:
    device = read_device(written(tmp_path / f"{name}.json", entry(name)))
    assert device == replace(catalog.device(name), attention="")


@pytest.mark.parametrize("entry_of_attention", tomllib.loads((DATA / "attention.toml").read_text(encoding="utf-8")))
def test_a_device_does_not_depend_on_the_name_of_its_file(entry_of_attention: str, tmp_path: Path) -> None:
    fields = {**entry(), "generation": "blackwell"}
    first, second = (read_device(written(tmp_path / f"{name}.json", fields)) for name in (entry_of_attention, "mine"))
    assert catalog.flash_constants(first, HALF) == catalog.flash_constants(second, HALF)


def test_link_names_are_those_of_the_file_and_of_the_catalog(tmp_path: Path) -> None:
    fabric = {**BRIDGE, "where": "between", "per": "host"}
    fields = {**entry(), "links": {"bridge": BRIDGE, "fabric": fabric, "nvlink4": {**BRIDGE, "gbytes_per_s": 7}}}
    device = read_device(written(tmp_path / "mine.json", fields))

    def slowest(hosts: int, link: str) -> float:
        devices = Devices(hardware=device, gpus_per_host=2, hosts=hosts, link=link)
        assert devices.slowest_link in devices.links()
        return devices.slowest_link.nominal_bytes_per_s

    assert [slowest(1, "bridge"), slowest(2, "fabric"), slowest(1, "nvlink4")] == [1e11, 1e11, 7e9]
    assert slowest(1, "nvlink3") == catalog.link("nvlink3").nominal_bytes_per_s
    for hosts, link, problem in (
        (1, "bridg", r"choose from bridge, fabric, nvlink4, .*\(bridge is similar\)"),
        (2, "bridge", r"choose one between hosts \(fabric, "),
        (1, "fabric", "give 2 hosts or more"),
    ):
        with pytest.raises(ValueError, match=problem):
            slowest(hosts, link)


def test_links_of_a_file_have_the_fields_of_known_links(tmp_path: Path) -> None:
    bridge = {**BRIDGE, "collectives": "nvlink4"}
    fields = {**entry(), "link": "bridge", "links": {"bridge": bridge}}
    link = read_device(written(tmp_path / "mine.json", fields)).link
    assert (link.name, link.bytes_per_s) == ("bridge", 8e10)
    known = catalog.link("nvlink4").at(1e11)
    assert collective_s(link.gather, 1e8, 4) == pytest.approx(collective_s(known.gather, 1e8, 4))


def test_the_example_of_the_page_is_a_device(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.toml").write_text(example, encoding="utf-8")
    device = read_device(str(tmp_path / "mine.toml"))
    assert (device.name, device.link.name, device.flops_per_s) == ("mine", "my-bridge", 9e14)
    assert set(entry()) - {"source"} <= set(tomllib.loads(example)) | {"tflops_int8"}


def test_files_of_one_name_are_different_devices(tmp_path: Path) -> None:
    """Times are cached by the contents of a device, not by its name."""
    found = []
    for folder, tflops in (("first", 900), ("second", 450), ("third", 900)):
        (tmp_path / folder).mkdir()
        file = written(tmp_path / folder / "mine.json", {**entry(), "tflops": tflops})
        workload = WorkloadSpec(workload="short", rate=2.0, num_requests=4)
        found.append(simulate("llama-3-8b", ClusterSpec(hardware=file, gpus_per_host=1), workload).summary())
    assert found[0] == found[2]
    assert found[0]["ttft_p50_s"] < found[1]["ttft_p50_s"]


@pytest.mark.parametrize("verb", ["estimate", "simulate"])
def test_the_command_line_reads_files(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry("l40s").items()]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    rest = ("--context", "8K") if verb == "estimate" else ("--num-requests", "3", "--rate", "1")
    answers = []
    for hardware in (str(file), "l40s"):
        assert run(verb, "llama-3-8b", "--hardware", hardware, *rest, "--json") == 0
        answers.append(json.loads(capsys.readouterr().out))
    cluster = answers[0].pop("cluster")
    assert cluster["hardware"] == "mine"
    answers[1].pop("cluster")
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"tflops": None}, "tflops = None", "give a number from 0.01 to 100,000 TFLOP/s"),
        ({"tflops": "fast"}, "tflops = 'fast'", "give a number from "),
        ({"tflops": True}, "tflops = True", "give a number from "),
        ({"units": 0}, "units = 0", "give a number from 1 to 100,000"),
        ({"memory_gib": float("inf")}, "memory_gib = inf", "give a number from "),
        ({"links": {"bridge": {**BRIDGE, "per": "host"}}}, "links.bridge.per = 'host'", "between have: leave it out"),
        (
            {"links": {"bridge": {**BRIDGE, "where": "between", "collectives": "nvlink4"}}},
            "links.bridge.collectives = 'nvlink4'",
            "inside have: leave it out",
        ),
        ({"tflops_fp8": -1}, "tflops_fp8 = -1", "0 if the device does not support it"),
        ({"source": 3}, "source = 3", "give a text"),
        ({"generation": "hoper"}, "generation = 'hoper'", "hopper is similar"),
        ({"link": "wifi"}, "link = 'wifi'", "choose from nvlink2, "),
        ({"link": ["nvlink4"]}, "link = ['nvlink4']", "choose from nvlink2, "),
        ({"network": "nvlink4"}, "network = 'nvlink4'", "choose from infiniband-8x200g, "),
        ({"tflop": 3}, "tflop = 3", "tflops is similar"),
        ({"links": []}, "links = []", "give a table for each link"),
        ({"links": {"bridge": 3}}, "links = {'bridge': 3}", "give a table for each link"),
        ({"links": {"bridge": {**BRIDGE, "achieved": 1.2}}}, "links.bridge.achieved = 1.2", "to 1, a part"),
        ({"links": {"bridge": {**BRIDGE, "where": "here"}}}, "links.bridge.where = 'here'", "choose from inside, "),
        ({"links": {"bridge": {**BRIDGE, "collectives": "tcp-100g"}}}, "collectives = 'tcp-100g'", "choose from"),
        ({"links": {"bridge": {}}}, "links.bridge.where", "add it"),
    ],
)
def test_errors_name_the_field_its_value_and_a_remedy(
    changes: dict[str, Any], field: str, remedy: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "mine.json", {**entry(), **changes})
    with pytest.raises(ValueError, match="hardware '") as caught:
        read_device(file)
    assert "mine.json" in str(caught.value) and field in str(caught.value) and remedy in str(caught.value)


NUMBERS = {f"{key}": value for key, value in entry().items() if isinstance(value, int | float)}


@pytest.mark.parametrize("field", [*NUMBERS, *(key for key, value in BRIDGE.items() if key != "where")])
def test_numbers_that_no_device_has_are_refused(field: str, tmp_path: Path) -> None:
    """So are numbers in other units, and whole numbers that no float can hold."""
    for value in (1e-320, 1e-6, 9.9e14, 10**400, -1, math.nan, math.inf):
        own = {"links": {"bridge": {**BRIDGE, field: value}}} if field in BRIDGE else {field: value}
        with pytest.raises(ValueError, match=rf"{field} = .*: give a number from "):
            read_device(written(tmp_path / "mine.json", {**entry(), **own}))


@pytest.mark.parametrize("field", sorted(set(entry()) - {"source", "tflops_fp8", "tflops_int8"}))
def test_missing_fields_are_named(field: str, tmp_path: Path) -> None:
    fields = entry()
    del fields[field]
    with pytest.raises(ValueError, match=f"has no {field}: add it"):
        read_device(written(tmp_path / "mine.json", fields))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("mine.toml", "tflops = ", "correct that part of it"),
        ("mine.json", "{", "correct that part of it"),
        ("MINE.TOML", "tflops = ", "correct that part of it"),
        ("mine.json", "[]", "must be a JSON object"),
        ("mine.toml", None, "check the path"),
        ("mine.yaml", "tflops: 3", "choose from a100-sxm-80g"),
        ("mine.yaml", "tflops: 3", "or give a .toml or .json file"),
        ("mine", None, "or give a .toml or .json file"),
    ],
)
def test_files_that_are_no_devices(
    name: str, text: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert run("estimate", "llama-3-8b", "--hardware", str(tmp_path / name), "--context", "1K") == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "--hardware" in shown and problem in shown
