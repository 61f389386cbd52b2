"""Transports that send messages between ranks with torch.distributed."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # public, but not in its __all__

from longspan.attn.comm import OUTBOX_BYTES, Calls, CommError, Pending, Sums


def meet(
    store: str | Store, rank: int, world_size: int, *, backend: str = "gloo", timeout_s: float | None = None
) -> None:
    """Create the process group of all ranks. They find each other by `store`, or by a file of this host with this path.

    gloo listens on the interface of GLOO_SOCKET_IFNAME only, by default the loopback interface. `timeout_s` bounds each
    transfer. The default is PyTorch's.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if isinstance(store, str):
        store = FileStore(store, world_size)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    with polite_threads():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()


@contextmanager
def polite_threads() -> Iterator[None]:
    """Start the threads of this block with SCHED_BATCH, so that they do not preempt the computing thread on wake-up.

    gloo's thread polls a socket while another thread holds the lock of the socket. If it preempts that thread during a
    send, it polls until the next scheduler tick, up to 4 ms later. This works on Linux if the system permits it. Only
    ranks with one thread do it: idle threads of a larger team poll too, and gloo's thread should preempt them.
    """
    is_polite = False
    if hasattr(os, "SCHED_BATCH") and torch.get_num_threads() == 1:
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # new threads inherit it
                is_polite = True
    try:
        yield
    finally:
        if is_polite:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class TorchTransport:
    """Point-to-point on a torch.distributed process group.

    gloo matches messages by tag. NCCL has no tags: each call is one grouped launch, and ranks make their calls in the
    same order.

    Args:
        staged: copy buffers through host memory, for ranks on CUDA devices that gloo connects.
        waits_for_sends: `start` does not wait and makes no grouped launch, and its result also waits for the sends. For
            callers that keep the result, or a thread that does nothing else. Otherwise `complete_sends` waits.
        sums: see `Transport`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        staged: bool = False,
        waits_for_sends: bool = False,
        sums: Sums | None = None,
    ) -> None:
        self._group, self.staged, self._waits_for_sends, self.sums = process_group, staged, waits_for_sends, sums
        self.tagged = dist.get_backend(process_group) != "nccl"
        self._outbox: deque[tuple[dist.Work, Tensor]] = deque()
        self._outbox_bytes = 0

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        if not self.tagged and not self._waits_for_sends:
            return self._start_grouped(sends, receives)
        incoming = []
        outgoing = deque[tuple[dist.Work, Tensor]]() if self._waits_for_sends else self._outbox
        with peer_errors():
            for peer, buffer in receives:
                host = torch.empty_like(buffer, device="cpu") if self.staged else buffer
                incoming.append((_work(dist.irecv(host, peer, self._group, tag)), host, buffer))
            for peer, buffer in sends:
                host = buffer.cpu() if self.staged else buffer
                outgoing.append((_work(dist.isend(host, peer, self._group, tag)), host))
            if self._waits_for_sends:
                return _Transfers([*incoming, *((work, host, host) for work, host in outgoing)])
            self._outbox_bytes += sum(buffer.nbytes for _, buffer in sends)
            while self._outbox_bytes > OUTBOX_BYTES and len(self._outbox) > len(sends):
                self._await_oldest()
        return _Transfers(incoming)

    def complete_sends(self) -> None:
        with peer_errors():
            while self._outbox:
                self._await_oldest()

    def _await_oldest(self) -> None:
        work, host = self._outbox.popleft()
        work.wait()
        self._outbox_bytes -= host.nbytes

    def _start_grouped(self, sends: Calls, receives: Calls) -> Pending:
        ops = [dist.P2POp(dist.isend, buffer, peer, self._group) for peer, buffer in sends]
        ops += [dist.P2POp(dist.irecv, buffer, peer, self._group) for peer, buffer in receives]
        with peer_errors():
            works = dist.batch_isend_irecv(ops)
        buffers = [buffer for _, buffer in (*sends, *receives)]
        return _Transfers(list(zip(works, buffers, buffers, strict=False)))


@dataclass(frozen=True)
class _Transfers:
    """Transfers, each with its work, its buffer on the host, and the buffer of the caller."""

    works: Sequence[tuple[dist.Work, Tensor, Tensor]]

    def wait(self) -> None:
        for work, host, buffer in self.works:
            with peer_errors():
                work.wait()
            if host is not buffer:
                buffer.copy_(host)


@contextmanager
def peer_errors() -> Iterator[None]:
    """Raise CommError for the RuntimeError of torch.distributed on a broken connection or a timeout."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(str(error)) from error


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is a member of the process group"
    return work
