"""The actor that owns the KV pools of one host: memory that the workers of the host map, and files on its disk."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import zmq

from longspan import limits
from longspan.errors import ParameterError
from longspan.runtime import messages
from longspan.runtime.contact import Contact
from longspan.runtime.disk_pool import DiskLane, DiskPool, open_disk
from longspan.runtime.host_tiers import HostMemory, PoolPlan
from longspan.runtime.pool import PROCESS_BYTES

_REPORTS = "inproc://longspan-disk-reports"
_LINGER_MS = 10_000
"""Milliseconds to send the last reports before a connection closes."""


class PoolsOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a host pool as a path on its host, or the `problem` of a `parameter` that prevented it.

    Attributes:
        is_kept: whether the disk is read-only.
    """

    memory: Path = Path()
    is_kept: bool = False
    parameter: str | None = None
    problem: str = ""


class OnDisk(msgspec.Struct, frozen=True):
    """Block, parent and tokens of each content of the disk of a host, the least recently used first."""

    host: int
    blocks: tuple[tuple[int, tuple[bytes, tuple[int, ...]]], ...]


def address_of_host(host: int) -> int:
    """Return the number by which a channel addresses the process of a host. Ranks have the numbers from 0."""
    return -1 - host


class PoolActor:
    """Owns the pools of its host until it ends. The kernel frees the memory and the lock of the folder in any case.

    Ray may call its methods from several threads. Orders and answers are JSON of msgspec, so that no class of ours is
    pickled. Tokens of prompts, which name the contents of a disk, only use the encrypted channel.
    """

    def __init__(self) -> None:
        self._acquired = ExitStack()
        self._plan: PoolPlan | None = None
        self._disk: DiskPool | None = None
        self._link: _Link | None = None

    def open(self, order: bytes) -> bytes:
        """Open the pools of a `PoolPlan`. Return a `PoolsOpened`."""
        try:
            opened = self._open(msgspec.json.decode(order, type=PoolPlan))
        except ParameterError as error:
            opened = PoolsOpened(parameter=error.parameter, problem=error.problem)
        return msgspec.json.encode(opened, enc_hook=str)

    def connect(self, contact: bytes) -> None:
        """Serve the disk by the channel of an executor, which replaces the previous one."""
        self.disconnect()
        assert self._disk is not None and self._plan is not None, "the disk is open"
        self._link = _Link(msgspec.json.decode(contact, type=Contact), self._plan, self._disk)

    def list_disk(self, contact: bytes) -> None:
        """Send an `OnDisk` by a channel."""
        assert self._disk is not None and self._plan is not None, "the disk is open"
        host, contents = self._plan.host, self._disk.contents()
        blocks = tuple((block, (content.parent, tuple(content.tokens))) for block, content in contents)
        with zmq.Context() as context:
            controller = msgspec.json.decode(contact, type=Contact).connect(context, address_of_host(host))
            controller.send(msgspec.msgpack.encode(OnDisk(host, blocks)))
            controller.close(linger=_LINGER_MS)

    def disconnect(self) -> None:
        """Drop the copies that have not started, and wait for the current one."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def clear(self) -> None:
        """Remove all blocks from the disk."""
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Release the pools."""
        self.disconnect()
        self._acquired.close()

    def wait(self) -> None:
        """Wait until the actor ends."""
        threading.Event().wait()

    def _open(self, plan: PoolPlan) -> PoolsOpened:
        needed = plan.num_blocks * plan.record.block_bytes
        available = max(0, limits.memory().available - PROCESS_BYTES)
        if needed > available:
            problem = f"needs {needed / 2**30:.1f} GiB, but {available / 2**30:.1f} are available: allow less"
            raise ParameterError("host_kv_gib", problem)
        self._plan, memory = plan, self._acquired.enter_context(closing(HostMemory(needed)))
        if plan.num_disk_blocks:
            self._disk = self._acquired.enter_context(closing(open_disk(plan, memory.path)))
        return PoolsOpened(memory=memory.path, is_kept=self._disk is not None and self._disk.is_kept)


class _Link:
    """Serves the disk of a host for one executor, on a thread."""

    def __init__(self, contact: Contact, plan: PoolPlan, disk: DiskPool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._reports.bind(_REPORTS)
        self._stored, self._stop = self._context.socket(zmq.PUSH), self._context.socket(zmq.PUSH)
        for socket in (self._stored, self._stop):
            socket.connect(_REPORTS)
        self._controller = contact.connect(self._context, address_of_host(plan.host))
        report = self._stored.send
        self._lane = DiskLane({plan.disk_pool: disk}, lambda stored: report(msgspec.msgpack.encode(stored)))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._lane.close()
        self._stop.send(b"")
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def _serve(self) -> None:
        """Execute moves and send reports, until `close`. This thread owns the controller's socket."""
        poller, decoder = zmq.Poller(), msgspec.msgpack.Decoder(messages.RunMoves)
        for socket in (self._controller, self._reports):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._reports in ready:
                report = self._reports.recv()
                if not report:
                    return
                self._controller.send(report)
            if self._controller in ready:
                for move in decoder.decode(self._controller.recv()).moves:
                    self._lane.put(move)
