"""The fit of collectives: protocols are found again, held-out rows are left out, and sizes are elements."""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measured_kernels import collectives

from longspan.cost import catalog

DEVICE, LINK = "h100_sxm", "nvlink4"
COLUMNS = ("device", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
KERNEL_COLUMNS = ("device", "framework", "kernel_source", "num_gpus", "message_size", "latency")


def written(path: Path, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def data(folder: Path, framework: str = "vllm") -> Path:
    """Write the times of links.toml as if they were measured. The kernels of `framework` are twice as slow as NCCL."""
    (folder / "kernels").mkdir()
    link, nccl, kernels = catalog.link(LINK), [], []
    for members in (2, 4, 8):
        for power in range(8, 29):
            num_bytes = 2 * 2**power
            seconds = link.all_reduce_s(num_bytes, members, kernels=False)
            nccl.append((DEVICE, "all_reduce", "half", members, 2**power, 1e3 * seconds))
            kernels.append((DEVICE, framework, "graph", members, 2**power, 2e3 * seconds))
    written(folder / "kernels" / "nccl.csv.gz", COLUMNS, nccl)
    written(folder / "kernels" / "custom_allreduce.csv.gz", KERNEL_COLUMNS, kernels)
    return folder


def test_an_all_reduce_is_the_better_of_nccl_and_the_kernel(tmp_path: Path) -> None:
    for part in collectives.errors(data(tmp_path)):
        assert part.kind == "all-reduce" and part.device == "h100-sxm-80g"
        if part.size.endswith("larger"):
            assert part.after == pytest.approx(0, abs=1e-9)  # from 8 MiB on both use NCCL
        else:
            assert all(part.after <= 1e-9), "kernels of links.toml are never slower than its NCCL"


@pytest.mark.parametrize(("framework", "held_out"), [("vllm", False), ("sglang", True)])
def test_one_framework_and_two_sizes_are_held_out(framework: str, held_out: bool, tmp_path: Path) -> None:
    parts = list(collectives.errors(data(tmp_path, framework)))
    numbers = [[len(found) for found in (p.after, p.left_rows, p.left_framework) if found is not None] for p in parts]
    fitted, rows, sglang = (sum(column) for column in zip(*numbers, strict=True))
    assert fitted + rows + sglang == 3 * 21
    assert (fitted, rows, sglang) == ((0, 0, 63) if held_out else (57, 6, 0))


@pytest.mark.parametrize("members", [2, 4, 8])
def test_two_lines_are_found_again(members: int, tmp_path: Path) -> None:
    rows = [row for row in collectives.read_measured(data(tmp_path)) if (row.source, row.members) == ("nccl", members)]
    protocols = catalog.link(LINK).all_reduce
    found = sorted((float(line[0]), float(line[1])) for line in collectives.fit(rows))
    expected = sorted(protocol.of(members) for protocol in protocols)
    assert [start for start, _ in found] == pytest.approx([start for start, _ in expected], rel=0.02)
    assert [byte for _, byte in found] == pytest.approx([byte for _, byte in expected], rel=0.02)
