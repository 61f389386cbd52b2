"""Write the generated parts of the pages: flags, metrics, refused fields, errors, claims, figures' points, models.

The types that `longspan models` lists are written, too.

`python docs/generate.py` rewrites the pages. `--check` only reports pages that are not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from cyclopts import Group
from cyclopts.argument import Argument
from prometheus_client.parser import text_string_to_metric_families

from longspan.cli.app import app
from longspan.cost import catalog
from longspan.cost.catalog import LinearCurve
from longspan.serve.messages import CacheConfig, Stats
from longspan.serve.metrics import Metrics
from longspan.serve.requests import UNSERVED

_DOCS = Path(__file__).parent
PAGES = sorted(page for folder in ("", "policies", "figures") for page in (_DOCS / folder).glob("*.md"))
_PAPERS = _DOCS.parent / "benchmarks" / "papers"
_CLAIMS, _FIGURES, _POINTS = (_PAPERS / name for name in ("claims.json", "figures.json", "points.toml"))
_PRODUCTS = _DOCS.parent / "src" / "longspan" / "cost" / "data" / "products.toml"
_KERNELS = _DOCS.parent / "benchmarks" / "measured_kernels" / "errors.json"
_MODELS = _DOCS.parent / "tools" / "models.json"
TYPES = _DOCS.parent / "src" / "longspan" / "served_types.json"
"""The exact types of `make models`, for `longspan models`."""
_VERDICTS = ("holds", "fails", "not modelled")
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of what is generated -->)", re.DOTALL)
_LIMITS = "Limits of a request"
Row = tuple[str, ...]


def main() -> int:
    """Write the pages. With `--check`, write nothing and return 1 if a page is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    only_check = parser.parse_args().check
    contents = {page: rewritten(page.read_text("utf-8")) for page in PAGES} | {TYPES: served_types()}
    stale = {page: after for page, after in contents.items() if page.read_text("utf-8") != after}
    if only_check and stale:
        print(f"not up to date: {', '.join(page.name for page in stale)}: run make docs", file=sys.stderr)
        return 1
    for page, after in stale.items():
        page.write_text(after, encoding="utf-8")
    return 0


def rewritten(text: str) -> str:
    """Return the page with its generated parts up to date."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", text)


def _flags() -> str:
    panels: dict[str, list[Row]] = {}
    for argument in _arguments():
        if (title := _title(argument)) != _LIMITS:
            panels.setdefault(title, []).append(_flag(argument))
    head = ("flag", "`LONGSPAN_...`", "default", "description")
    return "\n".join(f"**{title}**\n\n{_table(head, rows)}" for title, rows in panels.items())


def _limits() -> str:
    rows = [_flag(argument) for argument in _arguments() if _title(argument) == _LIMITS]
    return _table(("flag", "`LONGSPAN_...`", "default", "bound"), rows)


def _arguments() -> list[Argument]:
    return app["serve"].assemble_argument_collection()


def _title(argument: Argument) -> str:
    [group] = cast(tuple[Group], argument.parameter.group)
    return group.name


def _flag(argument: Argument) -> Row:
    [variable] = cast(tuple[str], argument.parameter.env_var)
    names = " ".join(f"`{name}`" for name in argument.names)
    metavar = argument.parameter.metavar or "|".join(argument.get_choices() or ())
    default = str(argument.parameter.show_default or "")
    if default and argument.field_info.default is not None:
        default = f"`{default}`"
    shown = f"{names} `{metavar}`" if metavar else names
    description = (argument.parameter.help or "").replace("[", "\\[")  # brackets would be links
    return shown, f"`{variable.removeprefix('LONGSPAN_')}`", default, description


def _metrics() -> str:
    stats = Stats(num_kv_blocks=1, used_blocks=[0], busy_s=[0.0], bytes_sent={("ring_kv", "same_host"): 0})
    cache_config = CacheConfig(block_size=1, cache_dtype="", enable_prefix_caching=True)
    metrics = Metrics("longspan:", "", stats, cache_config)
    rows = []
    for family in text_string_to_metric_families(metrics.text().decode()):
        name = f"`{family.name}{'_total' if family.type == 'counter' else ''}`"
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
        rows.append((name, family.type, ", ".join(f"`{label}`" for label in sorted(labels)), family.documentation))
    return _table(("name", "type", "labels", "description"), sorted(rows))


def _refused() -> str:
    rows = [
        (f"`{name}`", ", ".join(f"`{_json(value)}`" for value in neutral), instead)
        for name, (neutral, instead) in UNSERVED.items()
    ]
    return _table(("field", "neutral values, and `null`", "otherwise"), rows)


def _computed_errors() -> str:
    rows = [(error.what, error.wanted, f"{error.mean:g} %", error.worst) for error in catalog.errors()[0]]
    return _table(("", "wanted", "mean error", "worst"), rows)


def _product_constants() -> str:
    """Return the constants of measured products. Entries that name another one are left out."""
    table = tomllib.loads(_PRODUCTS.read_text(encoding="utf-8"))
    head = tuple(LinearCurve.__dataclass_fields__)
    rows = [
        (f"{generation}, {weights}", *(f"{curve[name]:g}" if name in curve else "—" for name in head))
        for generation, formats in table.items()
        for weights, curve in formats.items()
        if isinstance(curve, dict)
    ]
    return _table(("", *(f"`{name}`" for name in head)), rows)


def _kernel_errors() -> str:
    """Return the table that benchmarks/kernel_errors.py has stored."""
    table = json.loads(_KERNELS.read_text(encoding="utf-8"))
    return _table(tuple(table["head"]), [tuple(row) for row in table["rows"]])


def _served_errors() -> str:
    rows = []
    for error in catalog.errors()[1]:
        values = (error.ttft_p50, error.ttft_p90, error.tbt_p50, error.tbt_p90)
        rows.append((f"`{error.policy}`", *(f"{value:+g} %".replace("-", "−") for value in values)))
    return _table(("", "TTFT P50", "TTFT P90", "TBT P50", "TBT P90"), rows)


def _claims() -> str:
    stored = json.loads(_CLAIMS.read_text(encoding="utf-8"))
    papers = stored["papers"].items()
    numbers = []
    for paper, claims in papers:
        counted = (sum(claim["verdict"] == verdict for claim in claims) for verdict in _VERDICTS)
        numbers.append((paper, *map(str, counted), str(sum(claim["weak"] for claim in claims))))
    parts = [_table(("paper", *_VERDICTS, "of these weak"), numbers)]
    parts.append(_table(("rule", "a claim holds when"), list(stored["rules"].items())))
    head = ("where", "claim", "the paper", "ours", "rule", "verdict")
    parts += [f"## {paper}\n\n{_table(head, [_claim(claim) for claim in claims])}" for paper, claims in papers]
    return "\n".join(parts)


def _claim(claim: dict[str, str]) -> Row:
    says = f"{claim['says']}<br> *{claim['why']}*" if claim["why"] else claim["says"]
    verdict = f"**{claim['verdict']}**" if claim["verdict"] == "fails" else claim["verdict"]
    verdict += (", weak" if claim["weak"] else "") + (", required" if claim["required"] else "")
    return (claim["where"], says, claim["paper"], claim["ours"], claim["rule"], verdict)


def _stored_table(name: str) -> str:
    """Return a table that `make claims` has stored."""
    table = json.loads(_CLAIMS.read_text(encoding="utf-8"))["tables"][name]
    return _table(tuple(table["head"]), [tuple(row) for row in table["rows"]])


def _stored_tables() -> list[str]:
    return list(json.loads(_CLAIMS.read_text(encoding="utf-8"))["tables"])


def figure_name(paper: str) -> str:
    """Return the name of a paper's page of figures, and of its picture."""
    return paper.lower().replace(" ", "-")


def _figures(paper: str) -> str:
    """Return the sources of the paper's numbers by panel, and the panels and figures that are not drawn."""
    panels: list[dict[str, Any]] = json.loads(_FIGURES.read_text(encoding="utf-8"))[paper]
    entries = tomllib.loads(_POINTS.read_text(encoding="utf-8"))[paper]
    by_name = {name: entry for entry in entries for name in entry["names"]}
    rows = [(panel["name"], panel["title"], _given(by_name[panel["name"]])) for panel in panels]
    skipped = [(", ".join(entry["names"]), entry["skip"]) for entry in entries if "skip" in entry]
    missing: dict[str, list[str]] = {}
    for panel in panels:
        if panel["missing"]:
            missing.setdefault(panel["missing"], []).append(panel["name"].split(",")[0])
    for command, names in missing.items():
        skipped.append((f"{', '.join(dict.fromkeys(names))}, by load", f"the stored run is older: `{command}`"))
    parts = [_table(("panel", "content", "the paper's numbers"), rows), "Not drawn:\n", _table(("", "reason"), skipped)]
    return "\n".join(parts)


def _given(entry: dict[str, Any]) -> str:
    if "none" in entry:
        return f"*{entry['none']}*"
    points = [f"{name} {', '.join(f'{x}: {y:g}' for x, y in line)}" for name, line in entry.get("points", {}).items()]
    ranges = [f"{name} {' to '.join(_ends(ends))}" for name, ends in entry.get("ranges", {}).items()]
    marks = [f"{name} at {x:,}" for name, x in entry.get("marks", {}).items()]
    return "<br> ".join([*(f"{text}." for text in (*points, *ranges, *marks)), f"*{entry['source']}*"])


def _ends(ends: Sequence[float]) -> list[str]:
    return list(dict.fromkeys(f"{end:g}" for end in ends))


def _models() -> str:
    stored = json.loads(_MODELS.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, dict[str, str]]] = {name: row["cells"] for name, row in stored["rows"].items()}
    cells = list(next(iter(rows.values())))
    reasons: dict[str, int] = {}
    types, variants = ([name for name in rows if (", " in name) == has_words] for has_words in (False, True))
    tables = [
        _table((head, *cells), [(f"`{name}`", *_verdicts(rows[name], reasons, types)) for name in names])
        for head, names in (("type", types), ("type, variant", variants))
    ]
    verdicts = sorted({cell["verdict"] for row in rows.values() for cell in row.values()})
    numbers = [
        (verdict, *(str(sum(rows[name][cell]["verdict"] == verdict for name in types)) for cell in cells))
        for verdict in verdicts
    ]
    notes = [(str(number), reason) for reason, number in reasons.items()]
    return "\n".join(
        (
            f"The table has {len(types)} types of transformers {stored['transformers']}.\n",
            _table(("types that are", *cells), numbers),
            "## Types\n\n" + tables[0],
            "## Variants\n\n" + tables[1],
            "## Reasons\n\n" + _table(("number", "reason"), notes),
        )
    )


def served_types() -> str:
    """Return the layouts in which each type is exact, as a JSON object with a line per type."""
    stored = json.loads(_MODELS.read_text(encoding="utf-8"))
    exact = {
        name: [layout for layout, cell in row["cells"].items() if cell["verdict"] == "exact"]
        for name, row in stored["rows"].items()
        if ", " not in name
    }
    lines = (f"  {json.dumps(kind)}: {json.dumps(layouts)}" for kind, layouts in exact.items() if layouts)
    head = f'{{\n "transformers": {json.dumps(stored["transformers"])},\n "types": {{\n'
    return head + ",\n".join(lines) + "\n }\n}\n"


def _verdicts(row: dict[str, dict[str, str]], reasons: dict[str, int], types: Sequence[str]) -> Iterator[str]:
    """Yield the text of each cell of a row, and number new reasons. Types share a reason that differs by name only."""
    for cell in row.values():
        verdict = f"**{cell['verdict']}**" if cell["verdict"] in {"wrong", "lost"} else cell["verdict"]
        if reason := cell.get("reason"):
            first, _, rest = reason.partition(" ")
            shared = f"the type {rest}".removeprefix("the type is not supported: ") if first in types else reason
            verdict += f" [{reasons.setdefault(shared, len(reasons) + 1)}]"
        yield verdict


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


FIGURES = {paper: figure_name(paper) for paper in json.loads(_FIGURES.read_text(encoding="utf-8"))}
PARTS: dict[str, Callable[[], str]] = {
    "flags": _flags,
    "limits": _limits,
    "metrics": _metrics,
    "refused": _refused,
    "computed_errors": _computed_errors,
    "kernel_errors": _kernel_errors,
    "product_constants": _product_constants,
    "served_errors": _served_errors,
    "claims": _claims,
    "models": _models,
    **{name: partial(_stored_table, name) for name in _stored_tables()},
    **{f"figures_{name.replace('-', '_')}": partial(_figures, paper) for paper, name in FIGURES.items()},
}

if __name__ == "__main__":
    sys.exit(main())
