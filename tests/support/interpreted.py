"""Comparisons in a process where Triton interprets: whether it does is decided when it is imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

Run = Callable[..., None]
"""Run a function of a module there with its arguments. Its failures are raised here."""


@contextmanager
def interpreting_process() -> Iterator[Run]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_interpret) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
