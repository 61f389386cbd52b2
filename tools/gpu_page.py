"""Print a page for docs/experiments from the report of a GPU check: python tools/gpu_page.py out/report.json

The tables come from the report. The author writes the decision. Give several reports to compare cards:
each has its own tables. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_CEILINGS = {
    "product_bfloat16_tflops": "product of bfloat16 matrices, TFLOP/s",
    "product_float32_tflops": "product of float32 matrices, TFLOP/s",
    "read_and_written_gb_per_s": "copy on the device, read and written, GB/s",
    "host_to_device_gb_per_s": "pinned memory to the device, GB/s",
    "device_to_host_gb_per_s": "device to pinned memory, GB/s",
}


def main() -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    args = parser.parse_args()
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in args.reports]
    print("\n".join(page(reports)))
    return 0


def page(reports: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a page of Markdown."""
    yield "# What does a GPU measure?"
    yield from ("", f"**Date** {min(report['started'] for report in reports)[:10]}.")
    yield from ("", "## Question", "", "Which checks pass on this card, and which share of its ceilings is reached?")
    yield from ("", "## Set-up", "")
    for report in reports:
        yield f"- {_set_up(report)}"
    for report in reports:
        title = _card(report) if len(reports) > 1 else "Tables"
        yield from ("", f"## {title}", *_tables(report))
    yield from ("", "## Decision", "")


def _results(report: Row) -> dict[str, Row]:
    return {check["name"]: check.get("results", {}) for check in report["checks"]}


def _versions(report: Row) -> Row:
    versions: Row = _results(report).get("versions", {}).get("versions", {})
    return versions


def _card(report: Row) -> str:
    return str(_versions(report).get("device") or "an unknown card")


def _set_up(report: Row) -> str:
    versions = _versions(report)
    packages = {name: version for name, version in versions.get("packages", {}).items() if version}
    listed = ", ".join(f"{name} {version}" for name, version in packages.items())
    cards = versions.get("cards") or [{}]
    driver = cards[0].get("driver_version", "unknown")
    return (
        f"`scripts/gpu_check.sh {report['mode']}` on {_card(report)}: driver {driver}, CUDA {versions.get('cuda')}, "
        f"Python {versions.get('python')}, {listed}. The run was {report['state']} after {report['seconds']:.0f} s."
    )


def _tables(report: Row) -> Iterator[str]:
    results = _results(report)
    yield from _table("Checks", ("check", "status", "seconds", "notes"), [*map(_check_row, report["checks"])])
    ceilings = results.get("ceilings", {}).get("ceilings", {})
    rows = [(label, f"{ceilings[name]:.0f}") for name, label in _CEILINGS.items() if name in ceilings]
    yield from _table("Ceilings", ("", "measured"), rows)
    yield from _table("Aims: shares of the ceilings", ("aim", "wanted", "reached"), [*map(_aim_row, report["aims"])])
    parts = {
        name: numbers for name, check in results.items() for part, numbers in check.items() if part.startswith("8b_")
    }
    title = "Seconds to the first token of the 8B shape, the first time; warm; share of the measured product (MFU)"
    yield from _by_part(title, parts, "prompts", ("length",), _prompt_cell)
    title = "Milliseconds between tokens of the 8B shape; share of the measured copy"
    yield from _by_part(title, parts, "steps", ("context", "batch"), _step_cell)
    title = "GB/s at which the decode kernel reads KV of one layer; share of the measured copy"
    yield from _by_part(title, parts, "reads", ("context", "batch"), _read_cell)
    yield from _table(
        "A prompt of the 8B shape among chats that decode",
        ("length", "chats", "TTFT, s", "TBT P50, s", "TBT P99, s"),
        [_mixed_row(row) for row in results.get("8b_mixed", {}).get("8b_mixed", {}).get("mixed", [])],
    )
    yield from _table(
        "Simulated and real times", ("policy", "", "real, s", "simulated, s", "error"), [*_twin_rows(results)]
    )


def _check_row(check: Row) -> tuple[str, ...]:
    tests = check.get("results", {}).get("tests")
    notes = ""
    if tests:
        skipped = sum(tests["skipped"].values())
        notes = f"{tests['passed']} passed, {tests['num_failed']} failed, {skipped} skipped"
    elif check["status"] not in {"passed", "not run"} and check.get("tail"):
        notes = f"`{check['tail'][-1].strip()[:120]}`".replace("|", "\\|")
    seconds = f"{check['seconds']:.0f}" if "seconds" in check else ""
    return (check["name"], check["status"], seconds, notes)


def _aim_row(aim: Row) -> tuple[str, ...]:
    share = "not measured" if aim["share"] is None else f"{aim['share']:.0%}"
    return (aim["aim"], f"{aim['wanted']:.0%}", share)


def _twin_rows(results: Mapping[str, Row]) -> Iterator[tuple[str, ...]]:
    for row in results.get("twin", {}).get("twin", {}).get("rows", []):
        for name, real_s in row["real"].items():
            simulated_s = row["simulated"][name]
            yield (row["policy"], name, f"{real_s:.4f}", f"{simulated_s:.4f}", f"{simulated_s / real_s - 1:+.1%}")


def _mixed_row(row: Row) -> tuple[str, ...]:
    tbt = (f"{row[name]:.3f}" if row["num_chats"] else "—" for name in ("tbt_p50_s", "tbt_p99_s"))
    return (f"{row['length']:,}", f"{row['num_chats']}", f"{row['ttft_s']:.3g}", *tbt)


def _by_part(
    title: str, parts: Mapping[str, Row], rows: str, keys: Sequence[str], cell: Callable[[Row], str]
) -> Iterator[str]:
    """Yield a table with a column for each part that measured such rows, and a line for each key."""
    columns = {
        name: {tuple(row[key] for key in keys): cell(row) for row in numbers[rows]}
        for name, numbers in parts.items()
        if numbers.get(rows)
    }
    every = sorted({key for column in columns.values() for key in column})
    lines = [(*(f"{n:,}" for n in key), *(column.get(key, "—") for column in columns.values())) for key in every]
    yield from _table(title, (*keys, *columns), lines)


def _prompt_cell(prompt: Row) -> str:
    mark = "~" if prompt["num_computed"] < prompt["length"] else ""
    times = [f"{mark}{seconds:.3g}" for seconds in (prompt["first_s"], *prompt["warm_s"])]
    return ", ".join(times) + ("" if prompt["mfu"] is None else f"; {prompt['mfu']:.0%}")


def _step_cell(step: Row) -> str:
    return f"{step['ms']:.2f}" + ("" if step["share"] is None else f"; {step['share']:.0%}")


def _read_cell(read: Row) -> str:
    return f"{read['gb_per_s']:.0f}" + ("" if read["share"] is None else f"; {read['share']:.0%}")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"{title}:", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns))
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.exit(main())
