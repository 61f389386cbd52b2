"""Tetris: Table 1 and two cells of section 2.4 (prefill of Llama 3 8B), Fig. 2 (decoding), beside the cost model.

    python benchmarks/papers/tetris.py
    python benchmarks/papers/tetris.py --serving    # Figures 8 to 13, see tetris_serving.py

The paper's 4k is read as 4,000 tokens. It does not say at which lengths and batches Fig. 2's "up to" was measured. Here
(a) is taken at the largest batch (of powers of two, of 16k tokens each) that still fits, where each ratio is largest;
(b) at the largest that fits into one GPU, 32 requests. Other batches are printed, too.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import tetris_serving
from cells import Cell, Setting, report

from longspan.cost.catalog import Efficiency

_LENGTHS = (4, 16, 64, 256)
_TABLE_1 = {
    1: (0.28, 1.29, 9.05, None),
    2: (0.16, 0.69, 4.61, 50.07),
    4: (0.13, 0.39, 2.43, 24.77),
    8: (0.21, 0.31, 1.37, 12.81),
    16: (0.39, 0.46, 0.96, 7.02),
}
_SECTION_2_4 = {8: 0.58, 16: 0.53}
"""32k, of which the text gives the times with 1 s in the queue."""
_FIG_2A = {"tp1": 5.73, "tp2": 3.87, "tp4": 1.93}
_FIG_2B = {"8": 1.83, "4xtp2": 1.41, "2xtp4": 1.15}
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = 16_000
_ONE_GPU = 32

HOSTS = Setting(model="llama-3-8b", hardware="a100-sxm-80g", hosts=2)
HOST = Setting(model="llama-3-8b", hardware="a100-sxm-80g")


def table_1(constants: Efficiency | None = None) -> list[Cell]:
    """Lists all cells but the one that does not fit."""
    hosts = replace(HOSTS, constants=constants)
    return [
        _prefill(hosts, size, thousands, paper)
        for size, row in _TABLE_1.items()
        for thousands, paper in zip(_LENGTHS, row, strict=True)
        if paper is not None
    ]


def section_2_4() -> list[Cell]:
    """Lists what the text says besides."""
    return [_prefill(HOSTS, size, 32, paper) for size, paper in _SECTION_2_4.items()]


def _prefill(on: Setting, size: int, thousands: int, paper: float) -> Cell:
    ours = on.prefill(str(size), "ring_kv", 1000 * thousands).seconds
    return Cell(name=f"SP {size}, {thousands}k", paper=paper, ours=ours, tolerance=0.25)


def fig_2() -> list[Cell]:
    """Returns how much slower decoding is than on (SP 1, TP 8)."""
    cells = []
    for parallel, paper in _FIG_2A.items():
        batch = max(_fitting(parallel))
        cells.append(_slower(f"(a) {parallel}, {batch} x 16k", parallel, paper, batch))
    return cells + [_slower(f"(b) {parallel}", parallel, paper, _ONE_GPU) for parallel, paper in _FIG_2B.items()]


def _slower(name: str, parallel: str, paper: float, batch: int) -> Cell:
    return Cell(name=name, paper=paper, ours=_ratio(parallel, batch), tolerance=0.20, unit="x")


def _ratio(parallel: str, batch: int) -> float:
    return HOST.decode(parallel, _TOKENS, batch).seconds / HOST.decode("tp8", _TOKENS, batch).seconds


def _fitting(parallel: str) -> list[int]:
    return [batch for batch in _BATCHES if HOST.decode(parallel, _TOKENS, batch).memory.fits]


def _print_batches() -> None:
    print("Fig. 2 at other batches, as far as they fit")
    for parallel in _FIG_2A | _FIG_2B:
        ratios = ", ".join(f"{batch}: {_ratio(parallel, batch):.2f}" for batch in _fitting(parallel))
        print(f"  {parallel:>6}  {ratios}")


def main() -> bool:
    """Prints all; returns whether all is near enough."""
    passed = report("Tetris, Table 1", table_1(), mean_tolerance=0.10)
    passed = report("Tetris, section 2.4", section_2_4()) and passed
    alone = HOSTS.prefill("1", "local", 256_000).memory
    print(f"SP 1, 256k: out of memory in the paper; ours: {alone.arithmetic}\n")
    passed = report("Tetris, Fig. 2", fig_2()) and passed and not alone.fits
    _print_batches()
    return passed


def _main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serving", action="store_true", help="simulate clusters that serve")
    tetris_serving.options(parser)
    given = parser.parse_args()
    if given.serving:
        return tetris_serving.run(given)
    return main()


if __name__ == "__main__":
    sys.exit(not _main())
