"""Compare every causal language model type of transformers, tiny and random, with longspan's answer in five layouts.

    python tools/models.py [--types TYPE ...] [--jobs N] [--limit SECONDS] [--file PATH]

Each cell of the table has one of these verdicts:

- `exact`: the tokens and logits of the unmodified transformers model, in float32, greedy;
- `refused`: longspan raised an error with the reason at the start;
- `wrong`: the answer is different;
- `lost`: the start failed without one of longspan's own errors, a worker was lost, or the answer timed out;
- `not tried`: transformers itself cannot compute with the tiny configuration.

Results are stored in `tools/models.json` with two hashes: of the class's source and tiny configuration, and of
longspan's model code. Rows with unchanged hashes are not run again, unless `--types` names them. The exit status is 1
if a cell is wrong or lost. `docs/generate.py` writes `docs/models.md` from the results.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
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
from tiny_models import auto_class, without_timm, write_checkpoint
from transformers import CONFIG_MAPPING, PreTrainedConfig

from longspan import LLM, SamplingParams
from longspan.errors import ParameterError
from longspan.model.files import ModelError, one_line
from longspan.outputs import RequestOutput

RESULTS = ROOT / "tools" / "models.json"
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
_SPLIT_HEADS = ("tp2", "gather_hidden")

_MAX_TOKENS = 4
_random = np.random.default_rng(0)
_PROMPTS = tuple(_random.integers(3, tiny_types.VOCABULARY - 1, length).tolist() for length in (5, 63, 97))
"""Below and above a window, a block, and the tokens of a step."""
_CHANGED = slice(-20, -4)
"""Positions of the last prompt that its last token attends to in the windows of all layers."""
_GREEDY = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0, ignore_eos=True, output_logits=True)
_SAMPLING = [_GREEDY, _GREEDY, replace(_GREEDY, prompt_logprobs=0)]
_ENGINE = {"skip_tokenizer_init": True, "block_size": 16, "max_num_batched_tokens": 48, "dtype": "float32"}
_MAX_WEIGHTS = 20_000_000
"""Elements. A larger configuration is a mistake in `tiny_types`."""
_GENERIC = ("masking_utils", "modeling_rope_utils", "cache_utils", "modeling_layers", "integrations/moe")
_PACKAGES = ("attn", "model", "runtime")

_LOG = re.compile(r" \(see the log of process.*")

Cell = dict[str, str]
"""`verdict`, and `reason` unless the verdict is exact."""


@dataclass(frozen=True, kw_only=True, order=True)
class Row:
    """A configuration of a type: the default, or one of its variants."""

    kind: str
    variant: str = ""

    @property
    def name(self) -> str:
        """The row's name in files and on the page."""
        return f"{self.kind}, {self.variant}" if self.variant else self.kind


def main() -> int:
    """Fill in the table. Return 1 if a cell is wrong or lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="run only these types, also with stored results")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one cell")
    parser.add_argument("--file", type=Path, default=RESULTS, help="the results, read and rewritten")
    args = parser.parse_args()
    if unknown := sorted({*(args.types or ())} - {*tiny_types.causal_types()}):
        parser.error(f"transformers {transformers.__version__} has no causal language model {', '.join(unknown)}")
    rows = [row for row in all_rows() if args.types is None or row.kind in args.types]
    stored = _read(args.file)
    keys = {row: keys_of(row) for row in rows}
    todo = [row for row in rows if args.types or not keys[row].items() <= stored.get(row.name, {}).items()]
    print(f"{len(rows)} rows, {len(todo)} of them to be run")
    for number, (row, cells) in enumerate(run(todo, args.jobs, args.limit, is_quiet=args.types is None), 1):
        stored[row.name] = {**keys[row], "cells": cells}
        _write(args.file, stored)
        shown = "  ".join(f"{name} {cell['verdict']}" for name, cell in cells.items())
        print(f"{number}/{len(todo)} {row.name}: {shown}", flush=True)
    faults = [
        f"{row.name} {name}: {cell['verdict']}: {cell['reason']}"
        for row in rows
        for name, cell in stored[row.name]["cells"].items()
        if cell["verdict"] in FAULTS
    ]
    print(*faults, f"{len(faults)} cells are wrong or lost", sep="\n")
    return int(bool(faults))


def all_rows() -> list[Row]:
    """Return the rows of the table: every type, and all variants."""
    kinds = [Row(kind=kind) for kind in tiny_types.causal_types()]
    variants = [(kind, variant) for kind, of_kind in tiny_types.VARIANTS.items() for variant in of_kind]
    return sorted(kinds + [Row(kind=kind, variant=variant) for kind, variant in variants])


def keys_of(row: Row) -> dict[str, str]:
    """Return a row's hashes: of transformers' classes with the tiny configuration, and of longspan's model code."""
    folder = Path(inspect.getfile(CONFIG_MAPPING[row.kind])).parent
    paths = [path for kind in ("configuration", "modeling") for path in sorted(folder.glob(f"{kind}_*.py"))]
    paths += [Path(transformers.__file__).parent / f"{name}.py" for name in _GENERIC]
    fields = json.dumps(tiny_types.tiny_fields(row.kind, row.variant), sort_keys=True)
    return {"source": _hash(paths, fields), "longspan": _own_hash()}


@cache
def _own_hash() -> str:
    package = ROOT / "src" / "longspan"
    return _hash([Path(__file__), *(path for name in _PACKAGES for path in sorted((package / name).rglob("*.py")))])


def _hash(paths: Sequence[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    if not file.is_file():
        return {}
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return rows


def _write(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the file atomically, so that an interrupted run leaves a complete file."""
    names = {row.name: row for row in all_rows()}
    ordered = {
        name: rows[name] for name in sorted(rows, key=lambda name: names.get(name, Row(kind=name))) if name in names
    }
    text = json.dumps({"transformers": transformers.__version__, "rows": ordered}, indent=1)
    draft = file.with_suffix(".draft")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(file)


# ---------------------------------------------------------------- processes


@dataclass(eq=False)
class _Job:
    """A process that fills in the cells of a row in their order."""

    row: Row
    process: BaseProcess
    results: Connection
    deadline: float
    cells: dict[str, Cell]

    @property
    def missing(self) -> list[str]:
        """The cells without a result, in their order."""
        return [name for name in CELLS if name not in self.cells]

    def take(self, limit_s: float, *, is_ready: bool) -> str | None:
        """Read the next cell if it is ready. Return an error text if the process ended or hangs, and None otherwise."""
        if is_ready:
            try:
                name, self.cells[name] = self.results.recv()
            except EOFError:
                self.process.join()
                return f"the process ended with exit code {self.process.exitcode}"
            self.deadline = time.monotonic() + limit_s
        elif self.deadline <= time.monotonic():
            return f"no answer in {limit_s:g} s"
        return None


def run(rows: Sequence[Row], jobs: int, limit_s: float, *, is_quiet: bool) -> Iterator[tuple[Row, dict[str, Cell]]]:
    """Yield completed rows. If a process ends or hangs, its current cell is lost. A new process fills in the next."""
    with tempfile.TemporaryDirectory(prefix="longspan-models-") as folder:
        start = partial(_start, folder=folder, limit_s=limit_s, is_quiet=is_quiet)
        waiting, running = [*reversed(rows)], set[_Job]()
        while waiting or running:
            while waiting and len(running) < jobs:
                running.add(start(waiting.pop(), {}))
            soonest = min(job.deadline for job in running)
            ready = wait([job.results for job in running], max(0.0, soonest - time.monotonic()))
            for job in [*running]:
                if (lost := job.take(limit_s, is_ready=job.results in ready)) is None:
                    continue
                job.process.kill()
                job.process.join()
                running.remove(job)
                if missing := job.missing:
                    job.cells[missing[0]] = {"verdict": "lost", "reason": lost}
                if job.missing:
                    running.add(start(job.row, job.cells))
                else:
                    yield job.row, {name: job.cells[name] for name in CELLS}


def _start(row: Row, cells: dict[str, Cell], *, folder: str, limit_s: float, is_quiet: bool) -> _Job:
    # A fork of this process, which has imported all modules and computed nothing, starts immediately. A fork of a
    # process that has mapped more memory than the host has fails: call `run` in a process of its own.
    context = multiprocessing.get_context("fork")
    results, sender = context.Pipe(duplex=False)
    missing = [name for name in CELLS if name not in cells]
    options = {"folder": folder, "is_quiet": is_quiet}
    process = context.Process(target=_fill, args=(row, missing, sender), kwargs=options, daemon=True)
    process.start()
    sender.close()
    return _Job(row=row, process=process, results=results, deadline=time.monotonic() + limit_s, cells=cells)


# ---------------------------------------------------------------- one row


def _fill(row: Row, names: Sequence[str], results: Connection, *, folder: str, is_quiet: bool) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if is_quiet:
        logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        os.environ["LONGSPAN_CACHE"] = str(Path(own) / "cache")
        for name, cell in fill(row, Path(own), names):
            results.send((name, cell))


def fill(row: Row, folder: Path, names: Sequence[str] = tuple(CELLS)) -> Iterator[tuple[str, Cell]]:
    """Yield the named cells of a row, whose checkpoints are written to `folder`.

    In layouts that split heads, uneven shares of heads are also tested if even shares are exact.
    """
    model = TinyModel(row, folder / "even")
    uneven = None
    for name in names:
        cell = model.cell(name)
        if name in _SPLIT_HEADS and cell["verdict"] == "exact":
            uneven = uneven or TinyModel(row, folder / "uneven", even=False)
            other = uneven.cell(name)
            if other["verdict"] in (*FAULTS, "refused"):
                verdict = "exact" if other["verdict"] == "refused" else other["verdict"]
                cell = {"verdict": verdict, "reason": f"with 6 query heads and 3 KV heads: {other['reason']}"}
        yield name, cell


class TinyModel:
    """A checkpoint of a row's configuration, and its expected answers."""

    def __init__(self, row: Row, folder: Path, *, even: bool = True) -> None:
        self._name, self._folder = row.name, folder
        self._problem: str | None = None
        self._expected: list[Expected] = []
        self._logprobs = np.empty(0)
        try:
            self._problem = _write_model(tiny_types.tiny_config(row.kind, row.variant, even=even), folder)
        except Exception as error:  # noqa: BLE001 - of any class of transformers
            self._problem = one_line(error)

    def cell(self, name: str) -> Cell:
        """Start an engine, compare its answers, and return the verdict."""
        if not (self._folder / "config.json").is_file():
            return {"verdict": "not tried", "reason": f"no tiny configuration: {self._problem}"}
        try:
            llm = ThreadLLM(str(self._folder), threads_per_rank=1, **_ENGINE, **CELLS[name])
        except (ModelError, ParameterError) as error:
            return {"verdict": "refused", "reason": str(error).replace(str(self._folder), "the folder")}
        except Exception as error:  # noqa: BLE001 - it is recorded
            return self._lost(name, error)
        self._expect()
        try:
            return {"verdict": "not tried", "reason": self._problem} if self._problem else self._compared(llm)
        except Exception as error:  # noqa: BLE001 - it is recorded
            return self._lost(name, error)
        finally:
            with suppress(Exception):
                llm.shutdown()

    def _compared(self, llm: LLM) -> Cell:
        answers = llm.generate([*_PROMPTS], _SAMPLING, use_tqdm=False)
        try:
            for answer, expected in zip(answers, self._expected, strict=True):
                assert_exact(answer, expected)
            self._assert_prompt_exact(answers[-1])
        except AssertionError as error:
            return {"verdict": "wrong", "reason": str(error)}
        return {"verdict": "exact"}

    def _lost(self, name: str, error: Exception) -> Cell:
        logging.getLogger(__name__).error("%s %s", self._name, name, exc_info=error)
        return {"verdict": "lost", "reason": _LOG.sub("", one_line(error))}

    def _assert_prompt_exact(self, answer: RequestOutput) -> None:
        """Compare the log-probability of each token of the last prompt, except for the first, which has none."""
        assert answer.prompt_logprobs is not None
        pairs = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        logprobs = [scored[token].logprob for token, scored in pairs if scored is not None]
        expected = self._logprobs[range(len(logprobs)), answer.prompt_token_ids[1:]]
        difference = float(np.abs(np.array(logprobs) - expected).max())
        assert difference <= TOLERANCE, f"log-probabilities of the prompt differ by {difference:.2g}"

    def _expect(self) -> None:
        """Compute the expected answers with transformers, and check that equal answers are meaningful."""
        if self._problem is not None or self._expected:
            return
        try:
            oracle = Oracle(self._folder)
            self._expected = [oracle.complete(prompt, _MAX_TOKENS) for prompt in _PROMPTS]
            self._logprobs = oracle.logprobs(_PROMPTS[-1])
            self._problem = _weakness(oracle)
        except Exception as error:  # noqa: BLE001 - of any class of transformers
            self._problem = f"transformers does not compute with it: {one_line(error)}"


def _write_model(config: PreTrainedConfig, folder: Path) -> str | None:
    """Write a checkpoint and return None. If there can be no model, write only the configuration and return why."""
    config.save_pretrained(folder)
    written = (folder / "config.json").read_bytes()
    try:
        with torch.device("meta"), without_timm():
            skeleton = auto_class(config).from_config(config)
    except Exception as error:  # noqa: BLE001 - of any class of transformers
        return f"transformers builds no model of it: {one_line(error)}"
    if (number := sum(weight.numel() for weight in skeleton.parameters())) > _MAX_WEIGHTS:
        return f"its tiny configuration has {number} weights"
    write_checkpoint(config, folder)
    if skeleton.config.model_type != config.model_type:
        # The model is a part of the type's model, and the type's checkpoints have the configuration of the whole model.
        (folder / "config.json").write_bytes(written)
    return None


def _weakness(oracle: Oracle) -> str | None:
    """Return a reason why equal answers prove nothing, or None. The prompt must matter, and the cache must not."""
    prompt = list(_PROMPTS[-1])
    expected = oracle.complete(prompt, _MAX_TOKENS)
    anew = oracle.logprobs([*prompt, *expected.token_ids])[-_MAX_TOKENS - 1 : -1]
    cached = [torch.tensor(logits).log_softmax(-1).numpy() for logits in expected.logits]
    if not np.isfinite(anew).all():
        return "its logits are not finite"
    if (difference := float(np.abs(anew - np.stack(cached)).max())) > TOLERANCE / 2:
        return f"transformers itself differs by {difference:.2g} with and without its cache"
    prompt[_CHANGED] = [token + 1 for token in prompt[_CHANGED]]
    if float(np.abs(oracle.complete(prompt, 1).logits[0] - expected.logits[0]).max()) < 10 * TOLERANCE:
        return "its answers hardly depend on the prompt"
    return None


if __name__ == "__main__":
    sys.exit(main())
