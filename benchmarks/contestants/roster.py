"""The roster says who takes part: by which interpreter, with which options and environment variables."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant is named by its interpreter, options and environment.

    Attributes:
        module: the runner in this folder.
        options: what makes it differ from others with the same runner.
        is_peer: not longspan; ratios are to peers.
    """

    name: str
    module: str
    python: Path
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    is_peer: bool = True


def roster(peers_venv: Path) -> dict[str, Entry]:
    """Lists the contestants by name; `peers_venv` is the environment that `make peers` makes for vLLM.

    vLLM's default binding keeps one core for its scheduler and computes on the others: with two cores, on one.
    `vllm-eager` and `vllm-compiled` compute on all cores, and preload Intel's OpenMP as vLLM itself advises.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    tuned = {"VLLM_CPU_OMP_THREADS_BIND": cores, "LD_PRELOAD": str(peers_venv / "lib" / "libiomp5.so")}
    entries = [
        _longspan("longspan-1", instances=1),
        _longspan("longspan-2", instances=2),
        Entry(name="transformers", module="transformers_loop", python=Path(sys.executable)),
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
        is_peer=False,
    )


def _vllm(name: str, venv: Path, *, eager: bool, environment: dict[str, str]) -> Entry:
    """Enters vLLM, which keeps compiled code inside the environment: its first compiled start takes a minute longer."""
    caches = {"VLLM_CACHE_ROOT": str(venv / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(venv / "cache" / "inductor")}
    return Entry(
        name=name,
        module="vllm_cpu",
        python=venv / "bin" / "python",
        options={"eager": eager},
        environment={"VLLM_NO_USAGE_STATS": "1", **caches, **environment},
    )
