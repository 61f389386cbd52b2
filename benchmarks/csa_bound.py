"""Check the bound of `--max-accuracy-loss` on texts that no tuning has seen.

    OMP_NUM_THREADS=1 python benchmarks/csa_bound.py [--texts first] [--json FILE] [--require]    # 5 minutes

The texts are the docstrings of 20 installed packages. A window of each has 768 to 2,048 tokens. Each window is scored
exactly on one instance, then by `--csa auto --max-accuracy-loss 1` on groups. These are 2, 3 and 4 instances of one
host, and 2 x 2 instances of two emulated hosts. A pair of a text and a group holds if its perplexity rises by at most
1 %.

The table has the largest gain of each group, and the share of bytes and of products that its setting saves. The share
of pairs that hold has a Wilson interval of 95 %, as if pairs were independent. `--json` stores each result, and skips
stored ones. With --require, the exit code is 1 unless 95 % of the pairs hold.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan import LLM, evals

FIRST = (
    *("anyio", "click", "cyclopts", "fastapi", "filelock", "fsspec", "huggingface_hub", "jinja2", "mpmath", "networkx"),
    *("numpy", "packaging", "psutil", "pydantic", "pygments", "rich", "sympy", "torch", "tqdm", "transformers"),
)
HELD_OUT = (
    *(
        "_pytest",
        "accelerate",
        "h11",
        "hypothesis",
        "jsonschema",
        "markdown_it",
        "msgspec",
        "narwhals",
        "openai",
        "pip",
    ),
    *("playwright", "plotly", "prometheus_client", "pypdf", "requests", "safetensors", "setuptools", "typer"),
    *("urllib3", "werkzeug"),
)
TEXTS = {"first": FIRST, "held-out": HELD_OUT}
"""Packages. The margin of `LossModel` was chosen with the first ones."""
LENGTHS = (1024, 2048, 1536, 768)
"""Tokens of a window and of its answer, for the first text, the second, and in a cycle from there on."""
EXACT = "exact"
GROUPS = {EXACT: ("1", "1"), "2": ("2", "1"), "3": ("3", "1"), "4": ("4", "1"), "2 x 2": ("4", "2")}
"""The number of instances and of hosts."""
BOUND, SHARE = 1.0, 0.95
_MIN_DOCSTRING, _MAX_TEXT = 200, 20_000
"""Characters of a docstring, and of a text."""
_Z = statistics.NormalDist().inv_cdf(0.975)


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A text on a group. `num_tokens` is the length of the window, and `nll` its mean negative log-likelihood."""

    model: str
    csa: str
    text: str
    group: str
    num_tokens: int
    nll: float
    levels: int = 1
    mean_drop_ratio: float = 0.0
    bytes_saved_share: float = 0.0
    products_saved_share: float = 0.0


def main() -> int:
    """Score all missing pairs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--csa", default="auto")
    parser.add_argument("--texts", choices=TEXTS, default="held-out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--require", action="store_true")
    args = parser.parse_args()
    rows: list[Scored] = []
    if args.json is not None and args.json.exists():
        stored = msgspec.json.decode(args.json.read_bytes(), type=list[Scored])
        rows = [
            row for row in stored if (row.model, row.csa) == (args.model, args.csa) and row.text in TEXTS[args.texts]
        ]
    for group, (parallel, hosts) in GROUPS.items():
        missing = [
            package for package in TEXTS[args.texts] if (package, group) not in {(row.text, row.group) for row in rows}
        ]
        os.environ["LONGSPAN_HOSTS"] = hosts
        for row in _scored(args, group, parallel, missing) if missing else ():
            rows.append(row)
            if args.json is not None:
                args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return int(not _report(rows) and args.require)


def _scored(args: argparse.Namespace, group: str, parallel: str, packages: Sequence[str]) -> Iterator[Scored]:
    given: dict[str, object] = {}
    if group != EXACT:
        given = {"policy": "csps", "csa": args.csa, "max_accuracy_loss": BOUND, "policy_options": {"threshold": "512"}}
    with LLM(args.model, parallel=parallel, threads_per_rank=1, enable_prefix_caching=False, **given) as llm:  # type: ignore[arg-type]
        for package in tqdm(packages, desc=group, unit="text", dynamic_ncols=True, disable=None):
            length = LENGTHS[TEXTS[args.texts].index(package) % len(LENGTHS)]
            text = evals.Text.of(llm, docstrings(package))
            [prompt] = evals.perplexity_prompts(text, length, num_samples=1)
            [output] = llm.generate([prompt], evals.perplexity_params(num_top=1), use_tqdm=False)
            nll = statistics.fmean(evals.scored(length, output).negative_log_likelihoods())
            saved = llm.sparse_savings(output)
            row = Scored(model=args.model, csa=args.csa, text=package, group=group, num_tokens=length, nll=nll)
            if saved is not None:
                row = msgspec.structs.replace(
                    row,
                    levels=saved.num_levels,
                    mean_drop_ratio=saved.mean_drop_ratio,
                    bytes_saved_share=saved.bytes_saved_share,
                    products_saved_share=saved.attention_flops_saved_share,
                )
            yield row


def docstrings(package: str) -> str:
    """Return the long docstrings of a package, in order of its files, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"install {package}"
    [folder] = map(Path, spec.submodule_search_locations)
    texts: list[str] = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                texts += [text] * (len(text) >= _MIN_DOCSTRING)
        if sum(map(len, texts)) >= _MAX_TEXT:
            break
    return "\n\n".join(texts)


def wilson(num_held: int, num_pairs: int) -> tuple[float, float]:
    """Return the Wilson interval of 95 % of a share."""
    share, square = num_held / num_pairs, _Z**2 / num_pairs
    half = _Z * math.sqrt(share * (1 - share) / num_pairs + square / (4 * num_pairs))
    return tuple((share + square / 2 + sign * half) / (1 + square) for sign in (-1, 1))  # type: ignore[return-value]


def gain(row: Scored, exact: Scored) -> float:
    """Return the gain of perplexity in per cent."""
    return 100 * math.expm1(row.nll - exact.nll)


def _report(rows: Sequence[Scored]) -> bool:
    """Print the gains by group, and return whether enough pairs hold."""
    exact = {row.text: row for row in rows if row.group == EXACT}
    pairs = sorted((row for row in rows if row.group != EXACT), key=lambda row: list(GROUPS).index(row.group))
    table = Table(title=f"Perplexity over exact attention, with --max-accuracy-loss {BOUND:g}", title_justify="left")
    for name in ("group", "texts", "hold", "mean, %", "largest, %", "dropped", "products saved", "bytes saved"):
        table.add_column(name, justify="right")
    for group, of_group in groupby(pairs, key=lambda row: row.group):
        own = list(of_group)
        gains = [gain(row, exact[row.text]) for row in own]
        shares = [
            statistics.fmean(getattr(row, name) for row in own)
            for name in ("mean_drop_ratio", "products_saved_share", "bytes_saved_share")
        ]
        held = sum(one <= BOUND for one in gains)
        cells = (str(len(own)), str(held), f"{statistics.fmean(gains):.2f}", f"{max(gains):.2f}")
        table.add_row(group, *cells, *(f"{share:.1%}" for share in shares))
    Console(width=120).print(table)
    num_held = sum(gain(row, exact[row.text]) <= BOUND for row in pairs)
    low, high = wilson(num_held, len(pairs))
    print(f"{num_held} of {len(pairs)} pairs hold: {num_held / len(pairs):.1%}, interval {low:.1%} to {high:.1%}")
    return num_held >= SHARE * len(pairs)


if __name__ == "__main__":
    sys.exit(main())
