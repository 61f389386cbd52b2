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
_HEADER = (
    "kind",
    "device",
    "dtype",
    "source",
    "size",
    "rows",
    "before",
    "after",
    "rows held out",
    "framework held out",
)
_COLUMNS = ("before", "after", "left_rows", "left_framework")
_SCALE = 0.1


@dataclass(frozen=True, kw_only=True)
class KernelErrors:
    """Relative errors (predicted / measured - 1) of one kind of kernel, on one device, in one dtype and size.

    Attributes:
        before: errors of commit 90e53d91. None if it had no such dtype.
        after: errors of the constants in this checkout.
        left_rows: errors on a tenth of the shapes, of constants that were fitted to nine tenths. None if not fitted.
        left_framework: errors of constants that were fitted to other frameworks. None without another one.
        source: the framework whose kernels were measured.
        minor: whether the sizes are left out of the summary, because layers of models do not have them.
    """

    kind: str
    device: str
    dtype: str
    size: str
    before: Array | None
    after: Array
    left_rows: Array | None = None
    left_framework: Array | None = None
    source: str = ""
    minor: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        errors = [_shown(getattr(self, name)) for name in _COLUMNS]
        return (self.kind, self.device, self.dtype, self.source, self.size, str(len(self.after)), *errors)


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


def summary(errors: Iterable[KernelErrors]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of a table with the mean absolute errors of each kind, device and dtype, in percent."""
    parts: dict[tuple[str, str, str], list[KernelErrors]] = {}
    for part in errors:
        if not part.minor:
            parts.setdefault((part.kind, part.device, part.dtype), []).append(part)
    rows = []
    for key, own in parts.items():
        columns = ([getattr(part, name) for part in own] for name in _COLUMNS)
        rows.append((*key, *(_mean([values for values in column if values is not None]) for column in columns)))
    return ("kind", "device", "dtype", "before", "after", "shapes held out", "framework held out"), rows


def _mean(parts: list[Array]) -> str:
    values = np.concatenate([np.zeros(0), *parts])
    return f"{100 * np.abs(values).mean():.1f} %" if len(values) else "—"


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the lines of a packed CSV file."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def held_out(number: int) -> NDArray[np.bool_]:
    """Return True for a tenth of `number` rows, always the same ones."""
    left: NDArray[np.bool_] = np.random.default_rng(48).permutation(number) % 10 == 0
    return left


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
