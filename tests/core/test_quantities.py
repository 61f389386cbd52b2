"""Tables show numbers without exponents, and times with units."""

from __future__ import annotations

import pytest

from longspan.core.quantities import number, seconds


@pytest.mark.parametrize(
    ("value", "shown"), [(47_370.2, "47,370"), (0.27, "0.27"), (12, "12"), (1_000_000, "1,000,000"), (999.96, "1000")]
)
def test_numbers(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0 s"),
        (4.5678e-3, "4.568 ms"),
        (7.5e-6, "7.5 µs"),
        (12.3456, "12.35 s"),
        (1234.5, "1,234 s"),
        (0.5, "500 ms"),
    ],
)
def test_times(value: float, shown: str) -> None:
    assert seconds(value) == shown
