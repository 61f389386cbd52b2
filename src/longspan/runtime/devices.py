"""The device of a rank, and its links to the other ranks."""

from __future__ import annotations

import os

import torch

from longspan.attn.comm import TorchTransport, meet


def open_device(kind: str, rank: int) -> torch.device:
    """The device of a rank; several ranks share one when there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def keep_to_cores(rank: int, num_ranks: int, num_threads: int) -> None:
    """Where the threads of all ranks fill this machine, those of a rank that start from now on stay on its own cores.

    Elsewhere a message would often wait for the scheduler's next tick, since the thread that takes it wakes up where
    another rank computes. Linux only.
    """
    if num_ranks > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if num_ranks * num_threads == len(cores):
            os.sched_setaffinity(0, cores[rank * num_threads : (rank + 1) * num_threads])


def connect(kind: str, store: str, rank: int, world_size: int, *, timeout_s: float | None = None) -> TorchTransport:
    """Meets the other ranks through the file `store`.

    NCCL needs a device of its own per rank; ranks that share one are connected by gloo through host memory.
    """
    nccl = kind == "cuda" and torch.cuda.device_count() >= world_size
    meet(store, rank, world_size, backend="nccl" if nccl else "gloo", timeout_s=timeout_s)
    return TorchTransport(staged=kind == "cuda" and not nccl)
