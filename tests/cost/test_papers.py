"""The cost model against measurements of papers: every given cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import context_parallelism
import kv_runahead
import tetris
from cells import Cell, Setting, mean_error, report

from longspan.core.cluster import Cluster
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.forward import rooflines
from longspan.cost.precision import Precision
from longspan.cost.roofline import linear_s
from longspan.cost.topology import Devices


def check(cells: list[Cell]) -> None:
    for cell in cells:
        assert abs(cell.error) <= cell.tolerance, cell


def check_recorded(what: str, cells: list[Cell]) -> None:
    """The errors that pages and reports show are those of the cells."""
    [recorded] = [one for one in catalog.errors()[0] if one.what.startswith(what)]
    worst = max((cell.error for cell in cells), key=abs)
    assert recorded.mean == round(100 * mean_error(cells), 1)
    assert recorded.worst.startswith(f"{100 * worst:+.1f} %".replace("-", "−"))


def test_tetris_table_1() -> None:
    cells = tetris.table_1()
    assert len(cells) == 19
    check(cells)
    assert mean_error(cells) <= 0.10
    check_recorded("Tetris, Table 1", cells)
    assert not tetris.HOSTS.prefill("1", "local", 256_000).memory.fits


def test_tetris_sizes_that_are_best_for_a_length_are_the_paper_s() -> None:
    """The bold cells of Table 1: 4, 8, 16 and 16 instances."""
    for thousands, best in ((4, 4), (16, 8), (64, 16), (256, 16)):
        times = {n: tetris.HOSTS.prefill(str(n), "ring_kv", 1000 * thousands).seconds for n in (2, 4, 8, 16)}
        assert min(times, key=times.__getitem__) == best


def test_tetris_decode_ratios() -> None:
    cells = tetris.fig_2()
    assert [cell.paper for cell in cells] == [5.73, 3.87, 1.93, 1.83, 1.41, 1.15]
    check(cells)
    check_recorded("Tetris, Fig. 2", cells)


@pytest.mark.full
def test_kv_runahead_tables_1_and_2() -> None:
    cells = kv_runahead.tables_1_and_2()
    assert len(cells) == 48
    check(cells)
    check_recorded("KV-Runahead, Tables 1 and 2", cells)


def test_kv_runahead_table_3_and_memory() -> None:
    cells = kv_runahead.table_3()
    check(cells)
    check_recorded("KV-Runahead, Table 3", cells)
    llama = kv_runahead.setting("llama-7b")
    assert not llama.prefill("2", "gather_kv", 16_384).memory.fits
    assert llama.prefill("2", "chain", 16_384, fractions="search").memory.fits
    assert llama.prefill("1", "local", 12_288).memory.fits
    assert kv_runahead.setting("llama-13b").prefill("4", "gather_kv", 16_384).memory.fits


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "half_ms", "rounded_ms"),
    [(8192, 8192, 8192, 1.879, 1.180), (65536, 7168, 8192, 13.383, 7.516), (65536, 8192, 3584, 7.044, 4.390)],
)
def test_products_of_context_parallelism(
    rows: int, inputs: int, outputs: int, half_ms: float, rounded_ms: float
) -> None:
    """FBGEMM's row-wise kernels on an H100 of 500 W, with rounding (its pull request 2546)."""
    config, precision = catalog.model_config("llama-3-405b"), Precision.of("bfloat16", ffn="fp8")
    model = from_config(config, name="405b", precision=precision)
    hosts = Devices(hardware="h100-96g-hbm2e-500w", gpus_per_host=8)
    [line] = rooflines(model, hosts, Cluster.of("tp8"), constants=context_parallelism.products_of_2024())
    assert linear_s(line.layer, rows, inputs, outputs, "bfloat16") == pytest.approx(half_ms * 1e-3, rel=0.1)
    assert linear_s(line.layer, rows, inputs, outputs, "fp8") == pytest.approx(rounded_ms * 1e-3, rel=0.11)


def test_context_parallelism() -> None:
    cells = {cell.name: cell for cell in context_parallelism.cells()}
    check(list(cells.values()))
    check_recorded("Context Parallelism", list(cells.values()))
    alone = context_parallelism.hosts(1).attention_flops_per_s("tp8", 8192)
    assert alone == pytest.approx(540e12, rel=0.03), "the measured speed of attention alone"
    rate, part = cells["TFLOP/s per GPU at 1M"].ours, cells["that, of attention alone"].ours
    assert part == pytest.approx(rate / (alone / 1e12), rel=0.01) and part != pytest.approx(rate / 540, rel=0.001)


def test_the_paper_s_pass_q_waits_for_every_hop() -> None:
    """Its decode time grows with the hosts, since queries are padded. Querying all members at once grows less."""

    def grows_s(on: Callable[[int], Setting]) -> float:
        few, many = (on(number).decode(f"{number}xtp8", 128_000).seconds for number in (2, 16))
        return many - few

    ours_s = grows_s(lambda number: replace(context_parallelism.hosts(number), costs={}))
    assert grows_s(context_parallelism.hosts) > 1.3 * ours_s


def test_a_report_fails_when_a_cell_is_too_far(capsys: pytest.CaptureFixture[str]) -> None:
    near, far = (Cell(name=name, paper=1.0, ours=ours, tolerance=0.1) for name, ours in (("a", 1.05), ("b", 1.2)))
    assert report("good", [near])
    assert not report("bad", [near, far])
    assert not report("wide", [near], mean_tolerance=0.01)
    assert "bad: FAIL: mean error 12.5%, worst +20.0% (b), 1 of 2 cells too far" in capsys.readouterr().out
