"""The device of a rank, and its links to the other ranks."""

from __future__ import annotations

import torch

from longspan.attn.comm import TorchTransport, meet


def open_device(kind: str, rank: int) -> torch.device:
    """The device of a rank; several ranks share one when there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connect(kind: str, store: str, rank: int, world_size: int, *, timeout_s: float | None = None) -> TorchTransport:
    """Meets the other ranks through the file `store`.

    NCCL needs a device of its own per rank; ranks that share one are connected by gloo through host memory.
    """
    nccl = kind == "cuda" and torch.cuda.device_count() >= world_size
    meet(store, rank, world_size, backend="nccl" if nccl else "gloo", timeout_s=timeout_s)
    return TorchTransport(staged=kind == "cuda" and not nccl)
