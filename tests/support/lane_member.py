"""One rank of `test_network.test_lanes_of_their_own`.

Sends between subsets of the ranks on two lanes with separate process groups, as NCCL needs them. Both lanes use
the same tags and ranks, with other numbers. Then it sums over sets of ranks that change, as when clusters change, and
moves messages between all pairs at once.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from longspan.attn.comm import Group, Message
from longspan.attn.transports import TorchTransport, meet
from longspan.core.cluster import Cluster
from longspan.runtime.nccl_lanes import GroupSums, PairLanes, open_lane


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
    check_moves(rank)
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


def check_moves(rank: int) -> None:
    """Each rank sends to all peers and receives from them, in threads, as KV moves do. Pairs are opened once."""
    lanes, sent = PairLanes(torch.device("cpu"), rank), []
    send = dist.send
    dist.send = lambda tensor, peer, group: sent.append(peer) or send(tensor, peer, group)
    opened = []
    for spec in ("1xtp2", "2xtp1", "3", "3"):
        lanes.meet(Cluster.of(spec))
        opened.append((lanes.num_own, len(sent)))
    pairs = [0, rank < 2, 2, 2]
    assert opened == [(2 * num, 2 * [0, rank == 0, 2 - rank, 2 - rank][at]) for at, num in enumerate(pairs)]
    arrived: dict[int, list[int]] = {}

    def exchange(peer: int, *, sends: bool) -> None:
        message = Message([((4,), torch.int64)], torch.device("cpu"))
        group = Group(lanes.transport, range(3), rank)
        for number in range(3):
            if sends:
                message.tensors[0].fill_(10 * rank + number)
                group.start(sends={peer: message}, receives={}, hop=number).wait()
            else:
                group.start(sends={}, receives={peer: message}, hop=number).wait()
                arrived.setdefault(peer, []).append(int(message.tensors[0][3]))

    peers = [peer for peer in range(3) if peer != rank]
    threads = [
        threading.Thread(target=exchange, args=(peer,), kwargs={"sends": sends})
        for sends in (False, True)
        for peer in peers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert arrived == {peer: [10 * peer + number for number in range(3)] for peer in peers}
