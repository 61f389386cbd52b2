"""The device of a rank, and its links to the other ranks."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from longspan.attn.comm import TorchTransport, meet


def open_device(kind: str, rank: int) -> torch.device:
    """The device of a rank; several ranks share one when there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def keep_to_cores(kind: str, rank: int, num_ranks: int) -> None:
    """Where ranks that compute on one CPU thread each fill the machine, a rank's threads from now on stay on its core.

    So gloo's thread, which interrupts nobody (`polite_threads`), never waits for another rank to stop computing. Linux
    only, and where the system allows it.
    """
    if kind == "cpu" and torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if num_ranks == len(cores):
            with suppress(OSError):
                os.sched_setaffinity(0, {cores[rank]})


def connect(kind: str, store: str, rank: int, world_size: int, *, timeout_s: float | None = None) -> TorchTransport:
    """Meets the other ranks through the file `store`.

    NCCL needs a device of its own per rank; ranks that share one are connected by gloo through host memory.
    """
    nccl = kind == "cuda" and torch.cuda.device_count() >= world_size
    meet(store, rank, world_size, backend="nccl" if nccl else "gloo", timeout_s=timeout_s)
    return TorchTransport(staged=kind == "cuda" and not nccl)
