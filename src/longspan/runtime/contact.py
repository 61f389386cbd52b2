"""The address of the controller for its workers, and the keys of an encrypted connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import zmq

GREETING = b""
"""The first message of a worker. No report is empty."""


class Keys(msgspec.Struct, frozen=True):
    """Keys of CURVE in the text form Z85: of the controller, and the pair of all workers of a run."""

    server: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return "Keys(...)"  # logs and tracebacks must not show them

    def encrypt(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a worker's socket. Connecting must follow, since ZeroMQ reads the keys then."""
        socket.curve_serverkey = self.server.encode()
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """The controller as its workers reach it.

    Attributes:
        address: ZeroMQ address of the socket for commands and reports.
        store: ZeroMQ address of the rendezvous store. None if the ranks meet by files of the run folder.
        keys: None for sockets within a host, which only the user can open.
    """

    address: str
    store: str | None = None
    keys: Keys | None = None

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], rank: int) -> zmq.Socket[bytes]:
        """Return the socket of a worker for commands and reports. The controller sends no command before the greeting.

        ZeroMQ stores the rank as the routing id, by which the controller addresses the worker.
        """
        import zmq  # noqa: PLC0415 - the command line loads this module

        socket = context.socket(zmq.DEALER)
        socket.sndhwm = socket.rcvhwm = 0  # no queue limits: the engine limits steps in flight
        socket.routing_id = str(rank).encode()
        if self.keys is not None:
            from longspan.runtime.heartbeats import send_heartbeats  # noqa: PLC0415 - for connections over TCP

            self.keys.encrypt(socket)
            send_heartbeats(socket)
        socket.connect(self.address)
        socket.send(GREETING)
        return socket
