"""The control plane over TCP: encrypted sockets that only the workers of a run can use, and a rendezvous store."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from longspan.runtime import messages
from longspan.runtime.contact import Contact, Keys
from longspan.runtime.executor.channel import Channel
from longspan.runtime.heartbeats import send_heartbeats
from longspan.runtime.store import StoreTable

_DOMAIN = "longspan"
_ZAP, _STOP = "inproc://zeromq.zap.01", "inproc://longspan-stop"
_CURVE_MECHANISM = b"CURVE"
_JOIN_TIMEOUT_S = 5.0
_log = logging.getLogger("longspan")


class SecureChannel(Channel):
    """A channel over TCP, encrypted and authenticated by CURVE with keys made for one run.

    The controller accepts the public key of the workers only, and a worker accepts the controller's key only. A thread
    checks the keys of new connections (ZAP, ZeroMQ's protocol for that) and serves the rendezvous store.

    Both ends send heartbeats. If a connection ends, messages may be lost, so the controller reports its worker as
    ended, and the worker exits. A worker does not connect again.

    Args:
        address: the address of the interface to listen on. The system chooses the ports.
    """

    def __init__(self, address: str) -> None:
        self._thread: threading.Thread | None = None
        self._open: set[int] = set()
        """File descriptors of open connections. The system uses them again for later connections."""
        self._ranks: dict[int, int] = {}  # by file descriptor of the connection
        super().__init__(f"tcp://{address}:*")
        self._ends = self.reporter()

    def _bind(self, address: str) -> Contact:
        public, secret = zmq.curve_keypair()
        worker_public, worker_secret = zmq.curve_keypair()
        keys = Keys(public.decode(), worker_public.decode(), worker_secret.decode())
        self._stop = self.context.socket(zmq.PUSH)
        self._stop.sndtimeo = round(_JOIN_TIMEOUT_S * 1000)
        self._stop.bind(_STOP)
        store = self.context.socket(zmq.ROUTER)
        for socket in (self._workers, store):
            socket.curve_server = True
            socket.curve_secretkey = secret
            socket.zap_domain = _DOMAIN.encode()
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else ZeroMQ accepts all keys if nothing checks them
        zap = self.context.socket(zmq.REP)
        zap.bind(_ZAP)  # before the other sockets, which would refuse all keys
        store.bind(address)
        where = store.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=_serve, args=(zap, store, worker_public), daemon=True)
        self._thread.start()
        send_heartbeats(self._workers)
        self._events = self._workers.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._workers.bind(address)
        return Contact(address=self._workers.get_string(zmq.LAST_ENDPOINT), store=where, keys=keys)

    def _read(self) -> bytes:
        sender, report = self._workers.recv_multipart(copy=False)
        if not report.bytes:
            self._take_events()  # of an earlier connection with the same descriptor
            connection, rank = int(sender.get(zmq.SRCFD)), int(sender.bytes)
            self._greet(rank)
            if connection in self._open:
                self._ranks[connection] = rank
            else:
                self._report_end(rank)
        return report.bytes

    def _ended(self) -> bytes:
        self._take_events()
        return b""

    def _take_events(self) -> None:
        """Take the starts and ends of all connections so far, in their order. Report the ends of workers."""
        assert self._events is not None, "the sockets are bound"
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            connection = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(connection)
                continue
            self._open.discard(connection)
            if connection in self._ranks:  # else it was refused by its key, or sent no greeting
                self._report_end(self._ranks.pop(connection))

    def _report_end(self, rank: int) -> None:
        if rank >= 0:  # else a process with KV pools, which Ray watches
            self._ends.send(msgspec.msgpack.encode(messages.Exited(rank, messages.DISCONNECTED)))

    def close(self) -> None:
        if self._thread is not None and not self.context.closed:
            with suppress(zmq.Again):  # the thread has failed
                self._stop.send(b"")
            self._thread.join(_JOIN_TIMEOUT_S)
        super().close()


def _serve(zap: zmq.Socket[bytes], store: zmq.Socket[bytes], accepted_key: bytes) -> None:
    """Check keys and serve the store until the channel closes. This thread owns these sockets.

    Malformed requests are logged and get no answer, so one client cannot end the rendezvous of the rest.
    """
    table, refused = StoreTable(), set[bytes]()
    with zap, store, zap.context.socket(zmq.PULL) as stop:
        stop.connect(_STOP)
        poller = zmq.Poller()
        for socket in (zap, store, stop):
            socket.linger = 0
            poller.register(socket, zmq.POLLIN)
        while stop not in (ready := dict(poller.poll())):
            if zap in ready:
                zap.send_multipart(_checked(zap.recv_multipart(), accepted_key, refused))
            if store in ready:
                client, *_, request = store.recv_multipart()
                try:
                    for waiting, answer in table.take(client, request):
                        store.send_multipart([waiting, b"", answer])
                except (msgspec.MsgspecError, ValueError) as error:
                    _log.warning("the rendezvous store ignores a request that it cannot read: %s", error)


def _checked(request: list[bytes], accepted_key: bytes, refused: set[bytes]) -> list[bytes]:
    """Answer a ZAP request of version 1.0: accept a connection with the key, and refuse any other.

    `refused` are the addresses that the log names already, since clients connect again and again.
    """
    version, request_id, _, address, _, mechanism, *credentials = request
    is_accepted = mechanism == _CURVE_MECHANISM and credentials == [z85.decode(accepted_key)]
    if not is_accepted and address not in refused:
        refused.add(address)
        _log.warning("refused a connection from %s, since its key is not of this run", address.decode())
    status = (b"200", b"OK") if is_accepted else (b"400", b"unknown key")
    return [version, request_id, *status, b"", b""]
