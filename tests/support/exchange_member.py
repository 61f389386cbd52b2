"""One rank of `test_faults.test_processes`.

Exchanges over real connections with random delays, compares with one device, and meets a message that
is too short. Then it exchanges until rank 1 has killed itself. The remaining ranks exit with 0 after a CommError.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Sequence

import torch
from test_exchanges import outputs, spec_of
from transports import FaultyTransport

from longspan.attn.check import Request
from longspan.attn.comm import CommError, Group, Message, Transport
from longspan.core.layouts import shard_span
from longspan.runtime.worker_process import open_transports

SPEC = spec_of(window=70)


def main(hosts: Sequence[int], store: str, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    transport = open_transports(torch.device("cpu"), rank, hosts, store).steps.exchange
    faulty = FaultyTransport(transport, seed=rank, max_delay_s=0.02)
    tags = itertools.count(0, 40)
    for round_number in range(6):
        for members in {tuple(range(num_ranks)), (1, 0)}:
            check(faulty, members, rank, round_number, next(tags))
    faulty.complete_sends()
    transport.complete_sends()
    meet_short_message(transport, rank, next(tags))
    until_killed(transport, num_ranks, rank, tags)


def check(transport: FaultyTransport, members: tuple[int, ...], rank: int, seed: int, tag: int) -> None:
    """A chunk by several exchanges, then one token by ring_q, in a group that need not be all ranks."""
    if rank not in members:
        return
    me, draw = members.index(rank), random.Random(seed)
    start, stop = draw.randrange(100), draw.randrange(100, 300)
    cached, chunk = shard_span("zigzag", 0, start, len(members)), shard_span("zigzag", start, stop, len(members))
    token = shard_span("single", stop, stop + 1, len(members), head=seed % len(members))
    chunks = [(name, chunk, (cached, chunk)) for name in ("ring_kv", "gather_kv", "alltoall")]
    for number, (name, queries, held) in enumerate((*chunks, ("ring_q", token, (cached, chunk, token)))):
        runs = tuple(tuple(run for one in held for run in one[m]) for m in range(len(members)))
        request = Request(q_runs=queries, kv_runs=runs, seed=seed)
        group = Group(transport, members, me, tags=range(tag + 10 * number, tag + 10 * number + 10))
        [out] = outputs(name, group, [request], SPEC)
        torch.testing.assert_close(out.double(), request.wanted(me, SPEC), atol=1e-5, rtol=0)


def meet_short_message(transport: Transport, rank: int, tag: int) -> None:
    """Gloo accepts a short message in place of a longer one. The trailer and shared memory do not."""
    message = Message([((3 if rank else 2,), torch.float32)], torch.device("cpu"))
    if rank == 0:
        Group(transport, (0, 1), 0, tags=range(tag, tag + 20)).start(sends={1: message}, receives={}, hop=0)
        transport.complete_sends()
    elif rank == 1:
        try:
            Group(transport, (0, 1), 1, tags=range(tag, tag + 20)).start(sends={}, receives={0: message}, hop=0).wait()
        except CommError:
            return
        raise AssertionError("a short message passed for a long one")


def until_killed(transport: Transport, num_ranks: int, rank: int, tags: itertools.count[int]) -> None:
    spans = shard_span("zigzag", 0, 200, num_ranks)
    request = Request(q_runs=spans, kv_runs=spans, seed=0)
    killed = random.Random(5).randrange(3, 9)
    try:
        for number in range(1000):
            if rank == 1 and number == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            outputs(
                "ring_kv",
                Group(transport, range(num_ranks), rank, tags=range(first := next(tags), first + 20)),
                [request],
                SPEC,
            )
    except CommError as error:
        print(f"CommError: {error}", flush=True)
        os._exit(0)  # at once, as a worker does: its peers see the closed connection
    raise AssertionError("no peer noticed")
