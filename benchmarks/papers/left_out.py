"""Test the constants of attention on cells that they are not fitted to.

    python benchmarks/papers/left_out.py

Two constants of each kind of kernels are fitted to some cells of a paper, and predict all other cells. The constants of
flash are the share of the peak and the cost of a hop. They are fitted to two lengths or sizes of Tetris, Table 1. The
constants of eager are the host's time for a layer and the share of the memory's speed for scores. They are fitted to
columns of KV-Runahead, Table 1. The fit searches no pieces, so it takes half a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import kv_runahead
import tetris
from cells import Cell, mean_error

from longspan.cost import catalog
from longspan.cost.catalog import Efficiency, Kernels

_FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)
Chosen = Callable[[Cell], bool]


def main() -> None:
    """Print the fitted constants, and the errors of all other cells."""
    flash: list[tuple[str, Chosen]] = [
        ("4k and 64k", lambda cell: cell.name.endswith((" 4k", " 64k"))),
        ("16k and 256k", lambda cell: cell.name.endswith((" 16k", " 256k"))),
        ("SP 1 to 4", lambda cell: cell.name.startswith(("SP 1,", "SP 2,", "SP 4,"))),
        ("SP 8 and 16", lambda cell: cell.name.startswith(("SP 8,", "SP 16,"))),
    ]
    for name, chosen in flash:
        _left_out(name, chosen, "flash", ("attention", "hop_us"), _tetris)
    eager: list[tuple[str, Chosen]] = [
        ("llama-7b, TSP, 4 GPUs", lambda cell: "llama-7b, TSP, 4" in cell.name),
        ("llama-7b-gqa8, TSP, 8 GPUs", lambda cell: "gqa8, TSP, 8" in cell.name),
    ]
    for name, chosen in eager:
        _left_out(name, chosen, "eager", ("layer_us", "score_part"), _gathered, kv_runahead.tables_1_and_2)


def _tetris(constants: Efficiency) -> list[Cell]:
    return tetris.table_1(constants)


def _gathered(constants: Efficiency) -> list[Cell]:
    return kv_runahead.tables_1_and_2(constants, methods=("TSP",))


def _left_out(
    name: str,
    chosen: Chosen,
    kernels: Kernels,
    names: tuple[str, str],
    cells: Callable[[Efficiency], list[Cell]],
    tested: Callable[[Efficiency], list[Cell]] | None = None,
) -> None:
    fitted = _fit(lambda constants: mean_error([c for c in cells(constants) if chosen(c)]), kernels, names)
    rest = [cell for cell in (tested or cells)(fitted) if not chosen(cell)]
    values = ", ".join(f"{field} {getattr(fitted.attention[kernels], field):.3g}" for field in names)
    worst = max(rest, key=lambda cell: abs(cell.error))
    errors = f"{len(rest)} other cells: mean error {mean_error(rest):.1%}, {worst.error:+.1%} at worst"
    print(f"{kernels}, fitted to {name}: {values}; {errors}")


def _fit(error: Callable[[Efficiency], float], kernels: Kernels, names: tuple[str, str]) -> Efficiency:
    """Search both constants on three grids, each with a quarter of the previous width."""
    best = catalog.efficiency()
    for width in (1.0, 0.25, 0.0625):
        attention = best.attention[kernels]
        tried = [
            replace(
                attention,
                **{
                    field: getattr(attention, field) * (1 + width * (factor - 1))
                    for field, factor in zip(names, pair, strict=True)
                },
            )
            for pair in product(_FACTORS, _FACTORS)
        ]
        best = min((replace(best, attention={**best.attention, kernels: constants}) for constants in tried), key=error)
    return best


if __name__ == "__main__":
    main()
