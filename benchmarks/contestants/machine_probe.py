"""Measures the machine's speed with PyTorch: bfloat16 products on packed weights, and memory reads.

Each line on stdin names the work. The answer is `per_s`, in floating-point operations or bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch

from contestants.serving import answers

SIZE = 2048
NUM_READ = 1 << 28
"""Number of float32 elements to read, 1 GiB in total: more than the caches hold."""
WORK_S = 1.0


def main() -> None:
    """Answer each line of stdin with one line. Use one thread per core of this process."""
    send = answers()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for line in sys.stdin:
        amount, work = WORKS[json.loads(line)["work"]]()
        send({"per_s": amount * _calls_per_s(work)})


def _product() -> tuple[int, Callable[[], object]]:
    left, right = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16) for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(right, SIZE)  # noqa: SLF001 - there is no public name
    product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    return 2 * SIZE**3, lambda: product(left, packed, None, "none", [], "")


def _reading() -> tuple[int, Callable[[], object]]:
    numbers = torch.ones(NUM_READ)
    return numbers.nbytes, lambda: torch.dot(numbers, numbers)


WORKS = {"product": _product, "read": _reading}


def _calls_per_s(work: Callable[[], object]) -> float:
    """Call `work` once to warm up, then repeatedly for `WORK_S` seconds. Return the calls per second."""
    work()
    start, num_calls = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < WORK_S:
        work()
        num_calls += 1
    return num_calls / seconds


if __name__ == "__main__":
    main()
