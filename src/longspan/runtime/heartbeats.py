"""Heartbeats of connections over TCP in both directions, and the exit of a worker whose controller is lost.

ZeroMQ sends and checks heartbeats in a thread of its own, so computation does not delay them. After a silence it closes
the connection, as it does after a reset by the peer.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import recv_monitor_message

INTERVAL_S = 2.0
SILENCE_S = 10.0
"""Seconds without a message from the peer after which its connection ends. Several lost packets in a row, or a process
without a core, must not end it."""
LOST_CONTROLLER = 3
"""Exit code of a worker whose controller is lost."""
_log = logging.getLogger("longspan.worker")


def send_heartbeats(socket: zmq.Socket[bytes]) -> None:
    """Send heartbeats on the later connections of a socket, and close silent connections."""
    socket.heartbeat_ivl = round(INTERVAL_S * 1000)
    socket.heartbeat_timeout = socket.heartbeat_ttl = round(SILENCE_S * 1000)


@contextmanager
def exits_without_controller(socket: zmq.Socket[bytes]) -> Iterator[None]:
    """Exit this process if the connection of a socket ends within the block: the rest may hang in a transfer."""
    events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
    thread = threading.Thread(target=_watch, args=(events,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        socket.disable_monitor()
        thread.join()


def _watch(events: zmq.Socket[bytes]) -> None:
    """Wait for the end of the connection or of the monitor. This thread owns the socket from now on."""
    with events:
        if recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED:
            _log.error("the connection to the controller has ended: the worker exits")
            os._exit(LOST_CONTROLLER)
