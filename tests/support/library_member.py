"""One of three ranks of `test_attn_library.test_process_groups`.

Two process groups that share ranks alternate in exchanges on real gloo connections. Nothing waits between the calls,
and the last one is followed at once by the end of the process.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from test_attn_library import EXCHANGES, case, compare

from longspan import attn


def main(store: str, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    pair = dist.new_group([1, 2])
    with pytest.raises(ValueError, match=r"'cpu:gloo', but one of gloo, nccl is needed: for example join"):
        attn.join(dist.new_group(backend="cpu:gloo"))
    with attn.join(hosts=[0, 0, 1]) as everyone:
        if everyone.rank == 0:
            with pytest.raises(ValueError, match="rank 0 is not in this process group"):
                attn.join(pair)
            take_turns([everyone])
        else:
            with attn.join(pair) as two:
                assert (two.rank, two.size) == (everyone.rank - 1, 2)
                take_turns([everyone, two])
        with pytest.raises(ValueError, match=r"hosts \(0, 1\) are 2, but the group has 3 members"):
            attn.join(hosts=[0, 1])
        links = {link for _, link in everyone.sent}
        assert links == ({"other_host"} if everyone.rank == 2 else {"same_host", "other_host"})
    dist.destroy_process_group()


def take_turns(groups: list[attn.Members]) -> None:
    for number in range(2):
        for group in groups:
            for name, exchange in EXCHANGES.items():
                spec, batch = case(random.Random(number), group.size, name)
                compare(exchange, group, spec, batch)
