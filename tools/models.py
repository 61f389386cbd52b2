"""Compares every causal language model type of transformers, tiny and random, with longspan's answer in five layouts.

    python tools/models.py [--types TYPE ...] [--jobs N] [--limit SECONDS] [--file PATH]

Each cell of the table says one of these:

- `exact`: the tokens and logits of the unmodified transformers model, in float32, greedy;
- `refused`: longspan said at the start why it does not serve this;
- `wrong`: it answered something else;
- `lost`: the start failed without a reason of longspan's own, a worker was lost, or no answer came in time;
- `not tried`: transformers itself cannot compute with the tiny configuration.

Results are kept in `docs/models.json` with a hash of the class's source, of its tiny configuration and of longspan's
model code. Rows whose hashes still hold are not run again, unless they are named. Any cell that is wrong or lost makes
the exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "support")]

import numpy as np
import tiny_types
import torch
import transformers
from engines import ThreadLLM
from oracle import TOLERANCE, Expected, Oracle, assert_exact
from tiny_models import write_checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING

from longspan import SamplingParams
from longspan.errors import ParameterError
from longspan.model.files import ModelError, one_line

RESULTS = ROOT / "docs" / "models.json"
CELLS: dict[str, dict[str, Any]] = {
    "1": {"instances": 1},
    "2": {"instances": 2, "policy": "context", "policy_options": {"threshold": "20"}},
    "tp2": {"instances": 1, "tp": 2},
    "pp2": {"instances": 1, "pp": 2},
    "gather_hidden": {
        "instances": 2,
        "policy": "context",
        "policy_options": {"threshold": "20", "exchange": "gather_hidden"},
    },
}
FAULTS = ("wrong", "lost")

_MAX_TOKENS = 4
_random = np.random.default_rng(0)
_PROMPTS = tuple(_random.integers(3, tiny_types.VOCABULARY - 1, length).tolist() for length in (5, 63, 97))
"""Below and above a window, a block, and the tokens of a step."""
_CHANGED = -10
"""A position of the last prompt that the windows of all layers show to its last token."""
_SAMPLING = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0, ignore_eos=True, output_logits=True)
_ENGINE = {"skip_tokenizer_init": True, "block_size": 16, "max_num_batched_tokens": 48, "dtype": "float32"}
_MAX_WEIGHTS = 20_000_000
"""Elements. A larger configuration is a mistake in `tiny_types`."""
_GENERIC = ("masking_utils", "modeling_rope_utils", "cache_utils", "modeling_layers", "integrations/moe")
_PACKAGES = ("attn", "model", "runtime")

Cell = dict[str, str]
"""`verdict`, and `reason` unless that is exact."""


@dataclass(frozen=True, kw_only=True, order=True)
class Row:
    """A configuration of a type: the usual one, or one of its variants."""

    kind: str
    variant: str = ""

    @property
    def name(self) -> str:
        """The row's name in files and on the page."""
        return f"{self.kind}, {self.variant}" if self.variant else self.kind


def main() -> int:
    """Fills in the table; returns 1 if a cell is wrong or lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="run only these, also those that are known")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one cell")
    parser.add_argument("--file", type=Path, default=RESULTS, help="the results, which are read and rewritten")
    asked = parser.parse_args()
    if unknown := sorted({*(asked.types or ())} - {*tiny_types.causal_types()}):
        parser.error(f"transformers {transformers.__version__} has no causal language model {', '.join(unknown)}")
    rows = [row for row in all_rows() if asked.types is None or row.kind in asked.types]
    known = _read(asked.file)
    keys = {row: keys_of(row) for row in rows}
    todo = [row for row in rows if asked.types or not keys[row].items() <= known.get(row.name, {}).items()]
    print(f"{len(rows)} rows, {len(todo)} of them to be run")
    for number, (row, cells) in enumerate(_run(todo, asked.jobs, asked.limit, is_quiet=asked.types is None), 1):
        known[row.name] = {**keys[row], "cells": cells}
        _write(asked.file, known)
        shown = "  ".join(f"{name} {cell['verdict']}" for name, cell in cells.items())
        print(f"{number}/{len(todo)} {row.name}: {shown}", flush=True)
    faults = [
        f"{row.name} {name}: {cell['verdict']}: {cell['reason']}"
        for row in rows
        for name, cell in known[row.name]["cells"].items()
        if cell["verdict"] in FAULTS
    ]
    print(*faults, f"{len(faults)} cells are wrong or lost", sep="\n")
    return int(bool(faults))


def all_rows() -> list[Row]:
    """Returns the rows of the table: every type, and the variants of some."""
    kinds = [Row(kind=kind) for kind in tiny_types.causal_types()]
    return sorted(kinds + [Row(kind=kind, variant=one) for kind, of in tiny_types.VARIANTS.items() for one in of])


def keys_of(row: Row) -> dict[str, str]:
    """Returns the hashes that a row's results belong to: of transformers' classes and the tiny configuration, and of
    longspan's model code.
    """
    config = CONFIG_MAPPING[row.kind]
    classes = {config, MODEL_FOR_CAUSAL_LM_MAPPING[config]}
    paths = sorted({Path(inspect.getfile(one)) for one in classes})
    paths += [Path(transformers.__file__).parent / f"{name}.py" for name in _GENERIC]
    fields = json.dumps(tiny_types.tiny_fields(row.kind, row.variant), sort_keys=True, default=str)
    own = [path for package in _PACKAGES for path in sorted((ROOT / "src" / "longspan" / package).rglob("*.py"))]
    return {"source": _hash(paths, fields), "longspan": _hash(own)}


def _hash(paths: Sequence[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    if not file.is_file():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return found


def _write(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes all results at once, so that a run that is stopped leaves a whole file."""
    names = {row.name: row for row in all_rows()}
    known = {name: rows[name] for name in sorted(rows, key=lambda name: names.get(name, Row(kind=name))) if name in names}
    text = json.dumps({"transformers": transformers.__version__, "rows": known}, indent=1)
    draft = file.with_suffix(".draft")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(file)


# ---------------------------------------------------------------- processes


@dataclass(eq=False)
class _Job:
    """A process that fills in the cells of a row, one after the other."""

    row: Row
    process: BaseProcess
    results: Connection
    deadline: float
    cells: dict[str, Cell] = field(default_factory=dict)


def _run(rows: Sequence[Row], jobs: int, limit_s: float, *, is_quiet: bool) -> Iterator[tuple[Row, dict[str, Cell]]]:
    """Yields rows as they are filled in. A process that ends or hangs loses one cell; the next goes on behind it."""
    waiting, running = [*reversed(rows)], set[_Job]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.add(_start(waiting.pop(), {}, limit_s, is_quiet=is_quiet))
        soonest = min(job.deadline for job in running)
        ready = wait([job.results for job in running], max(0.0, soonest - time.monotonic()))
        for job in [*running]:
            lost = None
            if job.results in ready:
                try:
                    name, cell = job.results.recv()
                    job.cells[name], job.deadline = cell, time.monotonic() + limit_s
                except EOFError:
                    job.process.join()
                    lost = f"the process ended with exit code {job.process.exitcode}"
            elif job.deadline <= time.monotonic():
                lost = f"no answer in {limit_s:g} s"
            if lost is None:
                continue
            job.process.kill()
            job.process.join()
            running.remove(job)
            if missing := [name for name in CELLS if name not in job.cells]:
                job.cells[missing[0]] = {"verdict": "lost", "reason": lost}
            if len(job.cells) < len(CELLS):
                running.add(_start(job.row, job.cells, limit_s, is_quiet=is_quiet))
            else:
                yield job.row, {name: job.cells[name] for name in CELLS}


def _start(row: Row, cells: dict[str, Cell], limit_s: float, *, is_quiet: bool) -> _Job:
    # A fork of this process, which has imported all that is needed and computed nothing: it starts at once.
    context = multiprocessing.get_context("fork")
    results, sender = context.Pipe(duplex=False)
    missing = [name for name in CELLS if name not in cells]
    process = context.Process(target=_fill, args=(row, missing, sender), kwargs={"is_quiet": is_quiet}, daemon=True)
    process.start()
    sender.close()
    return _Job(row=row, process=process, results=results, deadline=time.monotonic() + limit_s, cells=cells)


# ---------------------------------------------------------------- one row


def _fill(row: Row, names: Sequence[str], results: Connection, *, is_quiet: bool) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if is_quiet:
        logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="longspan-models-") as folder:
        os.environ["LONGSPAN_CACHE"] = folder
        for name, cell in fill(row, Path(folder) / "model", names):
            results.send((name, cell))


def fill(row: Row, folder: Path, names: Sequence[str] = tuple(CELLS)) -> Iterator[tuple[str, Cell]]:
    """Yields the named cells of a row, whose checkpoint is written to `folder`."""
    model = TinyModel(row, folder)
    for name in names:
        yield name, model.cell(name)


class TinyModel:
    """A checkpoint of a row's configuration, and the answers that are expected of it."""

    def __init__(self, row: Row, folder: Path) -> None:
        self._name, self._folder = row.name, folder
        self._problem: str | None = None
        self._expected: list[Expected] | None = None
        try:
            self._problem = _write_model(row, folder)
        except Exception as error:  # noqa: BLE001 - of any class of transformers
            self._problem = one_line(error)

    def cell(self, name: str) -> Cell:
        """Starts an engine and compares its answers, if it starts."""
        if not (self._folder / "config.json").is_file():
            return {"verdict": "not tried", "reason": f"no tiny configuration: {self._problem}"}
        try:
            llm = ThreadLLM(str(self._folder), threads_per_rank=1, **_ENGINE, **CELLS[name])
        except (ModelError, ParameterError) as error:
            return {"verdict": "refused", "reason": str(error).replace(str(self._folder), "the folder")}
        except Exception as error:  # noqa: BLE001 - it is recorded
            return self._lost(name, error)
        try:
            self._expect()
            if self._problem is not None:
                return {"verdict": "not tried", "reason": self._problem}
            answers = llm.generate(list(_PROMPTS), _SAMPLING, use_tqdm=False)
            for answer, expected in zip(answers, self._expected or (), strict=True):
                assert_exact(answer, expected)
        except AssertionError as error:
            return {"verdict": "wrong", "reason": str(error)}
        except Exception as error:  # noqa: BLE001 - it is recorded
            return self._lost(name, error)
        finally:
            with suppress(Exception):
                llm.shutdown()
        return {"verdict": "exact"}

    def _lost(self, name: str, error: Exception) -> Cell:
        logging.getLogger(__name__).error("%s %s", self._name, name, exc_info=error)
        return {"verdict": "lost", "reason": one_line(error)}

    def _expect(self) -> None:
        """Asks transformers for the answers, and checks that they are worth comparing."""
        if self._problem is not None or self._expected is not None:
            return
        try:
            oracle = Oracle(self._folder)
            self._expected = [oracle.complete(prompt, _MAX_TOKENS) for prompt in _PROMPTS]
            self._problem = _weakness(oracle)
        except Exception as error:  # noqa: BLE001 - of any class of transformers
            self._problem = f"transformers does not compute with it: {one_line(error)}"


def _write_model(row: Row, folder: Path) -> str | None:
    """Writes a checkpoint, or the configuration alone when it is of no use, and returns the reason then."""
    config = tiny_types.tiny_config(row.kind, row.variant)
    config.save_pretrained(folder)
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - of any class of transformers
        return f"transformers builds no model of it: {one_line(error)}"
    if (number := sum(weight.numel() for weight in skeleton.parameters())) > _MAX_WEIGHTS:
        return f"its tiny configuration has {number} weights"
    write_checkpoint(config, folder)
    return None


def _weakness(oracle: Oracle) -> str | None:
    """Returns why equal answers would say nothing: the last prompt's end must matter, and the cache must not."""
    prompt = list(_PROMPTS[-1])
    expected = oracle.complete(prompt, _MAX_TOKENS)
    anew = oracle.logprobs([*prompt, *expected.token_ids])[-_MAX_TOKENS - 1 : -1]
    cached = [torch.tensor(logits).log_softmax(-1).numpy() for logits in expected.logits]
    if (difference := float(np.abs(anew - np.stack(cached)).max())) > TOLERANCE / 2:
        return f"transformers itself differs by {difference:.2g} with and without its cache"
    prompt[_CHANGED] += 1
    if float(np.abs(oracle.complete(prompt, 1).logits[0] - expected.logits[0]).max()) < 10 * TOLERANCE:
        return "its answers hardly depend on the prompt"
    return None


if __name__ == "__main__":
    sys.exit(main())
