"""One of two stages of `test_network.test_hidden_states_sent_to_another_stage_are_freed`."""

from __future__ import annotations

import weakref

import torch

from longspan.attn.comm import Group, Message
from longspan.runtime.worker_process import open_transports


def main(apart: bool, store: str, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    hosts = range(num_ranks) if apart else (0,) * num_ranks
    found = open_transports(device, rank, hosts, store)
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
    found.close()
