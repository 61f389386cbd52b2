"""Hosts for tests: network namespaces of this machine, joined by a bridge.

    with network_hosts(3, gigabits=1) as hosts:
        hosts[0].run("ping", "-c1", hosts[1].address)
        hosts[1].cut()

Each host is a namespace with its own address, loopback interface and ports. The bridge has a namespace, too, so no
packet reaches the machine's own interfaces. This needs root on Linux, and `ip` and `tc` (Debian: iproute2). `why_not`
returns the reason if the hosts cannot be made.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import psutil

INTERFACE = "eth0"
"""The network interface of every host."""
_BRIDGE = "bridge"
_BURST_S, _MIN_BURST = 2.5e-4, 16_384
"""Seconds of a shaped link's rate that it sends at once after a pause, and the least such bytes. `tbf` cannot reach
rates of 1 Gb/s with less, since it then waits more often than a timer can wake it."""
_MAX_PACKET = 15_000
"""Bytes of the largest packet that TCP gives to an interface. `tbf` splits packets larger than a burst into frames of
1,500 bytes. Each frame takes the cores of the ranks about 20 us, which no network card would take."""
_CONGESTION = "reno"
"""Congestion control of TCP. `bbr`, the default of some machines, stalls slow connections that send both ways."""
_QUEUE_S = 1.0
"""Longest wait in the queue of a shaped link. Later packets are dropped."""
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of Linux: the kind of namespace that `Host.inside` enters."""
_END_TIMEOUT_S = 10.0
"""Seconds for killed processes to disappear."""
_COMMAND_TIMEOUT_S = 20.0
"""Seconds for a command of `ip` or `tc`, which take milliseconds."""
_NAME = re.compile(r"longspan-(\d+)-\d+-\w+")
"""Name of a namespace: process id of its owner, number of the network, and number of the host or `switch`."""
_networks = itertools.count()


class HostsError(OSError):
    """This machine cannot make the hosts. The message has the failed command and its error."""


class Listener(NamedTuple):
    """A socket that waits for clients.

    Attributes:
        kind: `tcp` or `udp`.
        address: the address that it listens on. `*` or a zero address means all interfaces.
        pids: the processes that have it open.
    """

    kind: str
    address: str
    port: int
    pids: tuple[int, ...]


class Host:
    """A network namespace with an address. `network_hosts` makes it.

    Attributes:
        namespace: the name that `ip netns` uses.
        address: the IPv4 address of `INTERFACE`.
    """

    def __init__(self, namespace: str, address: str, switch: str, port: str) -> None:
        self.namespace, self.address = namespace, address
        self._switch, self._port = switch, port

    def command(self, *command: str | os.PathLike[str]) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["ip", "netns", "exec", self.namespace, *(os.fspath(part) for part in command)]

    def popen(self, *command: str | os.PathLike[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401
        """Start a process on this host, with options of `subprocess.Popen`. The end of the network kills it.

        The end of the network finds only processes that have entered the namespace, so this call waits for the entry.
        """
        process: subprocess.Popen[bytes] = subprocess.Popen(self.command(*command), **options)
        network = Path("/run/netns", self.namespace).stat().st_ino
        with suppress(FileNotFoundError):  # the process has ended
            while process.poll() is None and Path(f"/proc/{process.pid}/ns/net").stat().st_ino != network:
                time.sleep(0.001)
        return process

    def run(
        self, *command: str | os.PathLike[str], timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host. Its output is text."""
        return subprocess.run(self.command(*command), capture_output=True, text=True, check=check, timeout=timeout_s)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let sockets that this thread opens in the block belong to this host. They stay there after the block."""
        with Path("/proc/thread-self/ns/net").open() as before, Path("/run/netns", self.namespace).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def listeners(self) -> list[Listener]:
        """Return all TCP and UDP sockets on this host that wait for clients, as `ss` lists them."""
        found = []
        for line in self.run("ss", "-HOtulpn").stdout.splitlines():
            kind, _, _, _, local, *_ = line.split()
            address, _, port = local.rpartition(":")
            pids = tuple(sorted({int(pid) for pid in re.findall(r"pid=(\d+)", line)}))
            found.append(Listener(kind, address.partition("%")[0].strip("[]"), int(port), pids))
        return found

    def received_bytes(self) -> int:
        """Return the bytes that this host has received from other hosts, with all headers."""
        return int(self.run("cat", f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").stdout)

    def limit(self, gigabits: float | None) -> None:
        """Limit this host's sending and receiving, each to this rate in Gb/s, or remove both limits if None."""
        for namespace, interface in ((self.namespace, INTERFACE), (self._switch, self._port)):
            queue = ["tc", "-n", namespace, "qdisc"]
            if gigabits is None:
                _output(*queue, "del", "dev", interface, "root")
            else:
                burst = burst_bytes(gigabits)
                rate = ["rate", f"{gigabits * 1e9:.0f}bit", "burst", f"{burst}b", "latency", f"{_QUEUE_S:g}s"]
                _call(*queue, "replace", "dev", interface, "root", "tbf", *rate)

    def cut(self) -> None:
        """Remove this host from the bridge until `mend`. Open connections stall."""
        _call("ip", "-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Connect this host again."""
        _call("ip", "-n", self._switch, "link", "set", self._port, "up")


def burst_bytes(gigabits: float) -> int:
    """Return the bytes that a link of this rate in Gb/s sends at once after a pause."""
    return max(_MIN_BURST, round(gigabits * 1e9 / 8 * _BURST_S))


@contextmanager
def network_hosts(number: int, *, gigabits: float | None = None) -> Iterator[Sequence[Host]]:
    """Make hosts that reach each other, and no other machine. At the end, kill their processes and remove them.

    They are also removed when the block raises, or if SIGTERM or SIGHUP ends this process. Hosts that a killed process
    has left behind are removed at the next call in any process.

    Args:
        gigabits: the rate of every host's link in Gb/s, see `Host.limit`. By default it is not limited.

    Raises:
        HostsError: this machine cannot make them.
    """
    remove_leftovers()
    network = f"longspan-{os.getpid()}-{next(_networks)}"
    with ExitStack() as made, _exit_on_signals():
        switch = _make_namespace(f"{network}-switch", made)
        _call("ip", "-n", switch, "link", "add", _BRIDGE, "type", "bridge")
        _call("ip", "-n", switch, "link", "set", _BRIDGE, "up")
        hosts = [
            Host(_make_namespace(f"{network}-{index}", made), f"10.99.0.{index + 1}", switch, f"port{index}")
            for index in range(number)
        ]
        for index, host in enumerate(hosts):
            port, namespace = f"port{index}", host.namespace
            ends = f"link add {INTERFACE} netns {namespace} type veth peer name {port} netns {switch}"
            _call("ip", *ends.split())
            _call("ip", "-n", switch, "link", "set", port, "master", _BRIDGE, "up")
            _call("ip", "-n", namespace, "link", "set", INTERFACE, "gso_max_size", str(_MAX_PACKET))
            _call("ip", "-n", namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _call("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            _call("ip", "-n", namespace, "link", "set", "lo", "up")
            _call(*host.command("sysctl", "-w", f"net.ipv4.tcp_congestion_control={_CONGESTION}"))
            if gigabits is not None:
                host.limit(gigabits)
        yield hosts


@cache
def why_not() -> str | None:
    """Return the reason why `network_hosts` cannot work here, or None if it can. The first call tries it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)} (Debian: iproute2)"
    try:
        with network_hosts(1, gigabits=1):
            return None
    except HostsError as error:
        return str(error)


def remove_leftovers() -> None:
    """Remove the namespaces of processes that have ended, with the processes in them."""
    for name in namespaces():
        owner = int(name.split("-")[1])
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(owner).status() != psutil.STATUS_ZOMBIE:
                continue
        _remove(name)


def namespaces() -> list[str]:
    """Return the names of all namespaces that this module has made on this machine."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def _enter(namespace: int) -> None:
    """Move this thread to a network namespace, which is an open file. Python has `os.setns` since 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns failed")


def _make_namespace(name: str, made: ExitStack) -> str:
    _call("ip", "netns", "add", name)
    made.callback(_remove, name)
    return name


def _remove(name: str) -> None:
    """Kill the processes of a namespace, and remove it. Another process may do the same concurrently."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while pids := _output("ip", "netns", "pids", name).split():
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    _output("ip", "netns", "del", name)


def _output(*command: str) -> str:
    """Return the output of a command that may fail."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S).stdout


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in this block, unless they have handlers or this is no main thread."""
    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    defaults = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in defaults:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
