"""The roster of contestants: interpreters, options and environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from contestants.serving import Submission


class Side(Enum):
    """The side of a contestant. Required ratios compare the best of `OURS` with the best of `THEIRS`."""

    OURS = "ours"
    THEIRS = "theirs"
    OTHER = "other"


def anything(_submissions: Sequence[Submission]) -> bool:
    return True


def alike(submissions: Sequence[Submission]) -> bool:
    """Return True for a batch of prompts of one length."""
    return len({len(submission.prompt) for submission in submissions}) == 1


def one_by_one(submissions: Sequence[Submission]) -> bool:
    """Return True for a single prompt."""
    return len(submissions) == 1


def first_token(submissions: Sequence[Submission]) -> bool:
    """Return True for a single prompt with one new token, so without decoding."""
    return [submission.new_tokens for submission in submissions] == [1]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant with its interpreter, options and environment.

    Attributes:
        module: the runner in this folder.
        options: arguments of its `start`, different for each contestant with the same runner.
        core: the only core that it may use. None allows all.
        takes: returns True for jobs that it supports.
    """

    name: str
    module: str
    python: Path
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    core: str | None = None
    side: Side = Side.OTHER
    takes: Callable[[Sequence[Submission]], bool] = anything


def roster(peers_venv: Path) -> dict[str, Entry]:
    """Return the contestants by name. `peers_venv` is the environment with vLLM and llama.cpp, built by `make peers`.

    vLLM's default binding reserves one core for its scheduler and computes on all remaining cores: with two cores, on
    one. `vllm-eager` and `vllm-compiled` compute on all cores, and preload Intel's OpenMP as vLLM's documentation
    advises. `longspan-1core` is the baseline for two instances on two cores.
    """
    cores = [*map(str, sorted(os.sched_getaffinity(0)))]
    tuned = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(cores), "LD_PRELOAD": str(peers_venv / "lib" / "libiomp5.so")}
    entries = [
        _longspan("longspan-1", instances=1),
        _longspan("longspan-2", instances=2),
        replace(_longspan("longspan-1core", instances=1), core=cores[0], side=Side.OTHER, takes=first_token),
        _quantised("int8"),
        _quantised("int4"),
        Entry(name="transformers", module="transformers_loop", python=Path(sys.executable), takes=alike),
        Entry(name="llama-cpp", module="llama_loop", python=peers_venv / "bin" / "python", takes=one_by_one),
        _vllm("vllm-eager", peers_venv, eager=True, environment=tuned),
        _vllm("vllm-compiled", peers_venv, eager=False, environment=tuned),
        _vllm("vllm-default", peers_venv, eager=False, environment={}),
    ]
    return {entry.name: entry for entry in entries}


def _longspan(name: str, *, instances: int) -> Entry:
    return Entry(
        name=name,
        module="longspan_llm",
        python=Path(sys.executable),
        options={"instances": instances},
        side=Side.OURS,
    )


def _quantised(quantization: str) -> Entry:
    """Return longspan with quantized weights, a peer of llama.cpp. The comparison with vLLM ignores it."""
    entry = _longspan(f"longspan-{quantization}", instances=1)
    return replace(entry, options={**entry.options, "quantization": quantization}, side=Side.OTHER, takes=one_by_one)


def _vllm(name: str, venv: Path, *, eager: bool, environment: dict[str, str]) -> Entry:
    """Return vLLM with its caches inside the environment. Its first compiled start takes a minute longer."""
    caches = {"VLLM_CACHE_ROOT": str(venv / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(venv / "cache" / "inductor")}
    return Entry(
        name=name,
        module="vllm_cpu",
        python=venv / "bin" / "python",
        options={"eager": eager},
        environment={"VLLM_NO_USAGE_STATS": "1", **caches, **environment},
        side=Side.THEIRS,
    )
