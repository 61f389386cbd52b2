"""Hosts in network namespaces: traffic, rates, cuts, and namespaces that are removed in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from math import inf, nan
from pathlib import Path

import hosts as hosts_module
import psutil
import pytest
from hosts import Host, HostsError, namespaces, network_hosts, remove_leftovers, why_not

PYTHON = (sys.executable, "-SEc")
PORT = 5000
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    num_bytes, start_s = len(peer.recv(1 << 16)), time.monotonic()
    while data := peer.recv(1 << 16):
        num_bytes += len(data)
    print(num_bytes, time.monotonic() - start_s)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as peer:
    peer.sendall(bytes(int(sys.argv[3])))
"""
OWNER = """
import hosts, subprocess, sys, time
with hosts.network_hosts(2) as made:
    child = made[0].popen("sleep", "1000")
    print(*(host.namespace for host in made), child.pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module", autouse=True)
def permitted() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def pair() -> Iterator[Sequence[Host]]:
    with network_hosts(2) as hosts:
        yield hosts


def sent(hosts: Sequence[Host], num_bytes: int) -> tuple[int, float]:
    """Send bytes from the second host to the first. Return the received bytes, and the seconds from first to last."""
    first, second = hosts
    with first.popen(*PYTHON, RECEIVE, first.address, str(PORT), stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "listening\n"
        second.run(*PYTHON, SEND, first.address, str(PORT), str(num_bytes))
        received, seconds = receiver.stdout.read().split()
    return int(received), float(seconds)


def quickest(hosts: Sequence[Host], num_bytes: int, expected_s: float) -> float:
    """Return the seconds of the quickest of three transfers, or of the first that takes about the expected time."""
    best_s = inf
    for _ in range(3):
        received, seconds = sent(hosts, num_bytes)
        assert received == num_bytes
        best_s = min(best_s, seconds)
        if best_s < 1.1 * expected_s:
            break
    return best_s


def own_namespaces() -> list[str]:
    return [name for name in namespaces() if name.startswith(f"longspan-{os.getpid()}-")]


def start_owner() -> tuple[subprocess.Popen[str], list[str], int]:
    """Start a process with two hosts. Return it with their names and the process that runs on the first."""
    folder = Path(hosts_module.__file__).parent
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=folder)
    assert owner.stdout is not None
    *names, pid = owner.stdout.readline().split()
    return owner, names, int(pid)


def test_a_byte_reaches_the_other_host(pair: Sequence[Host]) -> None:
    assert sent(pair, 1)[0] == 1


def test_a_host_reaches_neither_this_machine_nor_the_internet(pair: Sequence[Host]) -> None:
    routes = pair[0].run("ip", "route").stdout.splitlines()
    assert len(routes) == 1 and routes[0].startswith("10.99.0.0/24")
    assert not subprocess.run(["ip", "route", "show", "10.99.0.0/24"], capture_output=True, check=True).stdout


def test_a_limited_link_has_its_rate_and_the_limit_can_be_removed(pair: Sequence[Host]) -> None:
    """In both directions, within 20 %. The first 25 KB are not delayed. A busy machine gets three tries."""
    num_bytes, gigabits = 5_000_000, 0.2
    expected_s = num_bytes * 8 / (gigabits * 1e9)
    for limited in pair:
        limited.limit(gigabits)
        seconds = quickest(pair, num_bytes, expected_s)
        limited.limit(None)
        assert seconds == pytest.approx(expected_s, rel=0.2)
    assert quickest(pair, num_bytes, 0.0) < expected_s / 2


def test_a_cut_link_stops_traffic_until_it_is_mended(pair: Sequence[Host]) -> None:
    connect = (*PYTHON, "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=0.3)", pair[1].address)
    assert "ConnectionRefusedError" in pair[0].run(*connect, check=False).stderr
    pair[1].cut()
    assert "ConnectionRefusedError" not in pair[0].run(*connect, check=False).stderr
    pair[1].mend()
    assert "ConnectionRefusedError" in pair[0].run(*connect, check=False).stderr


def test_nothing_is_left_after_an_error_in_the_block() -> None:
    before, children = own_namespaces(), list[subprocess.Popen[bytes]]()

    def start_and_raise() -> None:
        with network_hosts(2) as hosts:
            children.append(hosts[1].popen("sleep", "1000"))
            assert len(own_namespaces()) == len(before) + 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start_and_raise()
    assert own_namespaces() == before
    assert children[0].wait(10) == -signal.SIGKILL


def test_nothing_is_left_if_a_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_namespaces()
    monkeypatch.setattr(hosts_module, "_QUEUE_S", nan)
    with pytest.raises(HostsError, match="tbf"), network_hosts(2, gigabits=1):
        pass
    assert own_namespaces() == before


def test_sigterm_removes_hosts_and_their_processes() -> None:
    owner, names, child = start_owner()
    with owner:
        owner.terminate()
    assert owner.returncode == 128 + signal.SIGTERM
    assert not set(names) & set(namespaces())
    assert not psutil.pid_exists(child)


def test_hosts_of_a_killed_process_are_removed_at_the_next_start() -> None:
    owner, names, child = start_owner()
    with owner:
        remove_leftovers()
        assert set(names) <= set(namespaces()), "the hosts of a running process stay"
        owner.kill()
    assert set(names) <= set(namespaces())
    with network_hosts(1):
        assert not set(names) & set(namespaces())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)
