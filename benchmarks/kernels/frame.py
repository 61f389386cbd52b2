"""Errors of the cost model against measured kernels: one value per kind, device, dtype and size, and their table."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_HEADER = ("kind", "device", "dtype", "size", "rows", "before", "after", "held-out rows", "held-out framework")
_SCALE = 0.1


@dataclass(frozen=True, kw_only=True)
class KernelErrors:
    """Relative errors (predicted / measured - 1) of one kind of kernel, on one device, in one dtype and size.

    Attributes:
        before: errors of commit 90e53d91. None if it had no such dtype.
        after: errors of the constants in this checkout.
        left_rows: errors on a tenth of the shapes, of constants that were fitted to the others. None if not fitted.
        left_framework: errors on each framework of constants that were fitted to the others. None for one framework.
    """

    kind: str
    device: str
    dtype: str
    size: str
    before: Array | None
    after: Array
    left_rows: Array | None = None
    left_framework: Array | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        errors = [_shown(part) for part in (self.before, self.after, self.left_rows, self.left_framework)]
        return (self.kind, self.device, self.dtype, self.size, str(len(self.after)), *errors)


def print_errors(errors: Iterable[KernelErrors]) -> None:
    """Print a table: mean absolute error and, in brackets, median of the signed errors, in percent."""
    rows = [_HEADER, *(part.cells() for part in errors)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _shown(errors: Array | None) -> str:
    if errors is None or not len(errors):
        return "-"
    return f"{100 * np.abs(errors).mean():.1f} ({100 * np.median(errors):+.1f})"


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the lines of a packed CSV file."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def held_out(number: int) -> NDArray[np.bool_]:
    """Return True for a tenth of `number` rows, always the same ones."""
    return np.random.default_rng(48).permutation(number) % 10 == 0


def minimise(errors: Callable[[Array], Array], at: Array, weights: Array | float = 1.0) -> Array:
    """Minimize the weighted sum of sqrt(1 + (error / 0.1)²) by Levenberg's method, with slopes by finite differences.

    Outliers count linearly, not squared.
    """
    damping, step = 1e-3, 1e-5
    current = errors(at)
    for _ in range(60):
        slopes = np.stack([(errors(at + shift) - current) / step for shift in step * np.eye(len(at))], axis=1)
        influence = weights / np.sqrt(1 + (current / _SCALE) ** 2)
        curvature, slope = slopes.T @ (slopes * influence[:, None]), slopes.T @ (influence * current)
        before = (weights * np.sqrt(1 + (current / _SCALE) ** 2)).sum()
        while damping < 1e9:
            tried = at - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-9), slope)
            missed = errors(tried)
            after = (weights * np.sqrt(1 + (missed / _SCALE) ** 2)).sum()
            if after < before:
                break
            damping *= 4
        else:
            return at
        at, current, damping = tried, missed, damping / 4
        if before - after < 1e-8 * before:
            break
    return at
