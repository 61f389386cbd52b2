"""Numbers formatted for tables."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Format a time with its unit and four digits: `1,234 s`, `12.35 s`, `4.568 ms`, `7.5 µs`."""
    if abs(value) >= 1000:
        return f"{value:,.0f} s"
    if abs(value) >= 1 or not value:
        return f"{value:.4g} s"
    return f"{value * 1e3:.4g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.4g} µs"


def number(value: float) -> str:
    """Format a number, without an exponent unless it is tiny: `47,370`, `0.27`."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def quantity(name: str, value: float | None) -> tuple[str, str]:
    """Return the label and text of a value. The name has the unit: `ttft_p50_s` is `ttft_p50` in seconds."""
    is_time = name.endswith("_s") and not name.endswith("_per_s")
    shown = "" if value is None else seconds(value) if is_time else number(value)
    return name.removesuffix("_s") if is_time else name, shown
