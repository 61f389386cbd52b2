"""Tetris: Table 1 (prefill of Llama 3 8B) and Fig. 2 (decoding), beside the cost model.

    python benchmarks/papers/tetris.py
    python benchmarks/papers/tetris.py --serving    # Figures 8 to 13, see tetris_serving.py

The paper's 4k is read as 4,000 tokens. It does not say at which lengths and batches Fig. 2's "up to" was measured. Here
(a) is taken at the largest batch (of powers of two, of 16k tokens each) that still fits, where each ratio is largest;
(b) at the largest that fits into one GPU, 32 requests.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import tetris_serving
from cells import Cell, Setting, report

from longspan.cost.efficiency import Efficiency

_LENGTHS = (4, 16, 64, 256)
_TABLE_1 = {
    1: (0.28, 1.29, 9.05, None),
    2: (0.16, 0.69, 4.61, 50.07),
    4: (0.13, 0.39, 2.43, 24.77),
    8: (0.21, 0.31, 1.37, 12.81),
    16: (0.39, 0.46, 0.96, 7.02),
}
_FIG_2A = {"tp1": 5.73, "tp2": 3.87, "tp4": 1.93}
_FIG_2B = {"8": 1.83, "4xtp2": 1.41, "2xtp4": 1.15}
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = 16_000
_ONE_GPU = 32

HOSTS = Setting(model="llama-3-8b", hardware="a100-sxm-80g", hosts=2)
HOST = Setting(model="llama-3-8b", hardware="a100-sxm-80g")


def table_1(constants: Efficiency | None = None) -> list[Cell]:
    """All cells but the one that does not fit."""
    hosts = replace(HOSTS, constants=constants)
    return [
        Cell(
            name=f"SP {size}, {thousands}k",
            paper=paper,
            ours=hosts.prefill(str(size), "ring_kv", 1000 * thousands).seconds,
            tolerance=0.25,
        )
        for size, row in _TABLE_1.items()
        for thousands, paper in zip(_LENGTHS, row, strict=True)
        if paper is not None
    ]


def fig_2() -> list[Cell]:
    """How much slower decoding is than on (SP 1, TP 8)."""
    cells = []
    for parallel, paper in _FIG_2A.items():
        batch = max(batch for batch in _BATCHES if HOST.decode(parallel, _TOKENS, batch).memory.fits)
        cells.append(_slower(f"(a) {parallel}, {batch} x 16k", parallel, paper, batch))
    return cells + [_slower(f"(b) {parallel}", parallel, paper, _ONE_GPU) for parallel, paper in _FIG_2B.items()]


def _slower(name: str, parallel: str, paper: float, batch: int) -> Cell:
    ratio = HOST.decode(parallel, _TOKENS, batch).seconds / HOST.decode("tp8", _TOKENS, batch).seconds
    return Cell(name=name, paper=paper, ours=ratio, tolerance=0.20, unit="x")


def main() -> bool:
    """Prints both; returns whether all is near enough."""
    passed = report("Tetris, Table 1", table_1(), mean_tolerance=0.10)
    alone = HOSTS.prefill("1", "local", 256_000).memory
    print(f"SP 1, 256k: out of memory in the paper; ours: {alone.arithmetic}\n")
    return report("Tetris, Fig. 2", fig_2()) and passed and not alone.fits


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
