"""One rank of `test_network.test_lanes_of_their_own`.

Sends between subsets of the ranks on two lanes with separate process groups, as NCCL needs them. Both lanes use
the same tags and ranks, with other numbers. Then it sums over sets of ranks that change, as when clusters change.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from longspan.attn.comm import Group, Message
from longspan.attn.transports import TorchTransport, meet
from longspan.runtime.worker_process import GroupSums, open_lane


def main(store: str, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    meet(store, rank, num_ranks, timeout_s=30)
    met: list[object] = []
    together = dist.all_reduce
    dist.all_reduce = lambda tensor, group: met.append(group) or together(tensor, group=group)
    groups = [open_lane(torch.device("cpu")) for _ in range(2)]
    assert met == groups and len({id(group) for group in groups}) == 2, "all ranks met on each"
    lanes = [TorchTransport(group) for group in groups]
    for source in range(num_ranks):  # two ranks at a time, the later lane first at the target
        target = (source + 1) % num_ranks
        waiting = []
        for number in (0, 1) if rank == source else (1, 0) if rank == target else ():
            message, group = (
                Message([((4,), torch.int64)], torch.device("cpu")),
                Group(lanes[number], range(num_ranks), rank),
            )
            if rank == source:
                message.tensors[0].fill_(10 * source + number)
                group.start(sends={target: message}, receives={}, hop=0)
            else:
                waiting.append((number, message, group.start(sends={}, receives={source: message}, hop=0)))
        for number, message, pending in waiting:
            pending.wait()
            assert message.tensors[0].tolist() == [10 * source + number] * 4
    for lane in lanes:
        lane.complete_sends()
    check_sums(rank)
    dist.barrier()
    dist.destroy_process_group()


def check_sums(rank: int) -> None:
    """Some ranks are in no set, and some sets come again."""
    sums = GroupSums(torch.device("cpu"))
    opened = []
    for groups in ([(0, 1)], [(1, 2)], [(0, 1, 2)], [(0, 1)]):
        sums.meet(groups)
        opened.append(len(dist.distributed_c10d._world.pg_map))
        for members in groups:
            if rank in members:
                terms = torch.full((2, 4), 10.0**rank).t()  # NCCL wants neighbours in memory
                assert sums(members, terms).unique().tolist() == [sum(10.0**member for member in members)]
    assert opened[3] == opened[2], "nothing new"
