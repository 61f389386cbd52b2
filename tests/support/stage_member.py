"""One of two stages of `test_network.test_what_has_left_for_another_stage_is_not_kept`."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from longspan.attn.comm import Group, Message
from longspan.core.cluster import Cluster
from longspan.runtime import worker_process


def main(store: str, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    config: Any = SimpleNamespace(device="cpu", cluster=Cluster.of("pp2"))
    found = worker_process._transports(config, rank, config.cluster.num_ranks, store, device)
    for transport in (found.hidden, found.samples):
        group, message = Group(transport, range(num_ranks), rank), Message([((1000,), torch.int64)], device)
        buffer = weakref.ref(message.buffer)
        if rank == 0:
            pending = group.start(sends={1: message}, receives={}, hop=0)
        else:
            pending = group.start(sends={}, receives={0: message}, hop=0)
        pending.wait()
        del pending, message
        assert buffer() is None
    dist.barrier()
    dist.destroy_process_group()
