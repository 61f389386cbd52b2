"""Compile the Triton kernels of the kernel tests, many at a time. `tools/gpu_check.py` sets the paths it needs.

Each case of `kernel_cases.triton_cases` is run once in a pool of processes, which leaves its kernels in Triton's cache
on disk. A result that differs is not an error here, since the tests report it. If a kernel cannot be compiled or
started, the exit code is 1.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import triton
from kernel_cases import triton_cases

MAX_PROCESSES = 12
"""Each has a context on the device, which takes half a gigabyte and some seconds: more of them do not pay."""


def main() -> int:
    """Run all cases and return the exit code."""
    cases, begun_s = triton_cases(), time.monotonic()
    errors = run(cases)
    compiled = len([*Path(triton.knobs.cache.dir).rglob("*.cubin")])
    print(f"{compiled} kernels of {len(cases)} cases in {time.monotonic() - begun_s:.1f} s")
    for name, error in errors.items():
        print(f"{name}: {error}")
    return 1 if errors else 0


def run(cases: dict[str, Callable[[], None]]) -> dict[str, str]:
    """Run cases in processes forked from this one, which has not touched the device. Return the errors by case."""
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(cases))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"), initializer=_quiet) as pool:
        futures = {pool.submit(_error_of, case): name for name, case in cases.items()}
        return {futures[done]: error for done in as_completed(futures) if (error := done.result())}


def _quiet() -> None:
    torch.set_num_threads(1)


def _error_of(case: Callable[[], None]) -> str | None:
    try:
        case()
    except AssertionError:
        return None
    except Exception as error:  # noqa: BLE001 - of any kind that a compiler or a driver has; all are reported
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
