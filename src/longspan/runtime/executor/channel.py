"""The controller's end of the control plane: a ROUTER socket, to which every worker connects a DEALER socket."""

from __future__ import annotations

import time
from collections import defaultdict

import zmq

from longspan.runtime.contact import Contact

_MAX_POLL_S = 2e6  # ZeroMQ counts milliseconds in 32 bits
_LOCAL = "inproc://longspan-reports"


class Channel:
    """Sends commands to workers and receives their reports. One thread uses it at a time.

    A ROUTER drops messages to a worker that is not connected. So commands wait here until the worker's greeting.

    Attributes:
        context: of all sockets of the controller.
        contact: how workers connect.
    """

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.sndhwm = self.context.rcvhwm = 0  # no queue limits: the engine limits steps in flight
        self._unsent = defaultdict[int, list[bytes]](list)
        self._connected: set[int] = set()
        self._events: zmq.Socket[bytes] | None = None
        try:
            self._local, self._workers = self.context.socket(zmq.PULL), self.context.socket(zmq.ROUTER)
            self._local.bind(_LOCAL)
            self.contact = self._bind(address)
        except BaseException:
            self.close()
            raise

    def _bind(self, address: str) -> Contact:
        self._workers.bind(address)
        return Contact(address=address)

    def reporter(self) -> zmq.Socket[bytes]:
        """Return a socket by which another thread of this process sends reports. That thread closes it."""
        socket = self.context.socket(zmq.PUSH)
        socket.connect(_LOCAL)
        return socket

    def send(self, rank: int, command: bytes) -> None:
        """Send a command without waiting. Commands to a worker that has ended are dropped."""
        if rank in self._connected:
            self.send_now(rank, command)
        else:
            self._unsent[rank].append(command)

    def send_now(self, rank: int, command: bytes) -> None:
        """Send a command before all waiting commands. It is dropped if the worker is not connected."""
        self._workers.send_multipart([str(rank).encode(), command])

    def receive(self, timeout_s: float | None, wakeup: zmq.Socket[bytes] | int | None = None) -> bytes | None:
        """Return the next report. None after the timeout, or as soon as `wakeup` is readable."""
        poller = zmq.Poller()
        for source in (self._local, self._workers, self._events, wakeup):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        deadline_s = None if timeout_s is None else time.monotonic() + min(max(0.0, timeout_s), _MAX_POLL_S)
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = dict(poller.poll(None if left_s is None else int(left_s * 1000)))
            if self._local in ready:  # few: ends of workers and completed copies of a disk
                return self._local.recv()
            if self._workers in ready:
                report = self._read()
            elif self._events in ready:
                report = self._ended()
            else:
                return None
            if report:
                return report

    def _read(self) -> bytes:  # empty after a greeting
        routing_id, report = self._workers.recv_multipart()
        if not report:
            self._greet(int(routing_id))
        return report

    def _ended(self) -> bytes:
        raise NotImplementedError("local connections end with their worker")

    def _greet(self, rank: int) -> None:
        self._connected.add(rank)
        for command in self._unsent.pop(rank, ()):
            self.send_now(rank, command)

    def close(self) -> None:
        """Close all sockets. All other threads must have closed theirs. Can be called again."""
        self.context.destroy(linger=0)
