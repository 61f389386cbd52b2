"""Clients of ZeroMQ without the keys of a run, on hosts of a test."""

from __future__ import annotations

import zmq
from hosts import Host, Listener
from zmq.utils.monitor import recv_monitor_message


def refuses(client: Host, listener: Listener) -> bool:
    """Return True if a port takes connections of a host, but no client without keys, or with other keys."""
    address = f"tcp://{listener.address}:{listener.port}"
    events = [handshake(client, address, curve=curve) for curve in (False, True)]
    return all(zmq.Event.CONNECTED in seen and zmq.Event.HANDSHAKE_SUCCEEDED not in seen for seen in events)


def handshake(host: Host, address: str, *, curve: bool) -> set[zmq.Event]:
    """Connect a client of ZeroMQ without the keys of the run. Return the events of its connection in half a second."""
    with host.inside():  # the context starts its thread in this block, and that thread connects
        context = zmq.Context[zmq.Socket[bytes]]()
        client = context.socket(zmq.DEALER)
    try:
        if curve:
            client.curve_serverkey, _ = zmq.curve_keypair()
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        monitor = client.get_monitor_socket()
        client.connect(address)
        client.send(b"a report")
        events = set[zmq.Event]()
        while monitor.poll(500) and not events & {zmq.Event.DISCONNECTED, zmq.Event.CLOSED}:
            events.add(recv_monitor_message(monitor)["event"])
        assert not client.poll(0), "no answer"
        return events
    finally:
        context.destroy(linger=0)
