"""The actor of one rank: prepares the model on its host, and starts and watches the rank's worker process there."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import ray

from longspan.model.files import ModelFiles, cache_root
from longspan.runtime.child import MAX_PARENT
from longspan.runtime.executor.forkserver import StartWorker, WorkerProcess, start_server
from longspan.runtime.executor.processes import log_dir

_LINGER_S = 10.0
"""Seconds for the controller to receive the exit code before the actor ends."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class StartRank(msgspec.Struct, frozen=True, kw_only=True):
    """Start a worker on the host of the actor, with that host's own files of the model.

    Attributes:
        command: it has paths of the controller's host, except `run_dir`: a name in the host's folder for
            temporary files.
        load_format: see `model.source.prepare`.
        seed: of dummy weights.
    """

    command: StartWorker
    load_format: str
    seed: int


class RankStarted(msgspec.Struct, frozen=True):
    """The process id and the log file of a started worker, or the `error` that prevented its start."""

    pid: int = 0
    log: str = ""
    error: str | None = None


class RankActor:
    """Lives on the host of its rank. Ray may call its methods from several threads.

    Orders and answers are JSON of msgspec, so that no class of ours is pickled.
    """

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    def start(self, order: bytes) -> bytes:
        """Start the worker, by a `StartRank`. Return a `RankStarted`."""
        try:
            started = self._start(msgspec.json.decode(order, type=StartRank, dec_hook=_path))
        except (OSError, ValueError) as error:
            started = RankStarted(error=f"{type(error).__name__}: {error}")
        return msgspec.json.encode(started)

    def prepare(self, order: bytes) -> bytes:
        """Prepare the model of a `StartRank` on this host. Return the error, or nothing."""
        try:
            _prepared(msgspec.json.decode(order, type=StartRank, dec_hook=_path))
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}".encode()
        return b""

    def wait(self) -> int:
        """Wait until the worker ends, and return its exit code. The actor ends later, as it has no other task.

        If the controller is lost, nothing else would end the actor and release its CPUs.
        """
        assert self._worker is not None, "it was started"
        code = self._worker.wait()
        ending = threading.Timer(_LINGER_S, os._exit, (0,))
        ending.daemon = True
        ending.start()
        return code

    def _start(self, order: StartRank) -> RankStarted:
        use_interface()
        start_server()  # it imports while the model is prepared
        command, files = order.command, _prepared(order)
        kernels = None
        if command.config.kernels is not None:
            from longspan import native  # noqa: PLC0415 - for our own kernels only

            kernels = native.build(cache_root() / "native")
        config = msgspec.structs.replace(command.config, files=files, kernels=kernels)
        log = log_dir(command.run_dir) / f"rank{command.rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = msgspec.structs.replace(command, config=config, run_dir=run_dir(command.run_dir), log=log)
        self._worker = start_server().start(command)
        return RankStarted(pid=self._worker.pid, log=str(log))


def _prepared(order: StartRank) -> ModelFiles:
    """Prepare the model from this host's own path or cache. Raise ValueError if its contents differ."""
    from longspan.model.source import prepare  # noqa: PLC0415 - the controller does not need it here

    config = order.command.config
    expected = config.files
    files = prepare(
        expected.name,
        dtype=expected.dtype,
        load_format=order.load_format,
        device=config.device,
        seed=order.seed,
        quantization=expected.quantization,
        trust_remote_code=expected.trust_remote_code,
    )
    if files.weights.parent.name != expected.weights.parent.name:
        raise ValueError(
            f"the model {expected.name!r} on host {socket.gethostname()} differs from the controller's, or versions of "
            "longspan or transformers differ: install the same on every host"
        )
    return files


def _path(kind: type[Path], text: str) -> Path:
    return kind(text)


def run_dir(name: str) -> str:
    """Return the path on this host of a folder for sockets: in TMPDIR, or in /tmp if that is too long."""
    parent = tempfile.gettempdir()
    return str(Path(parent if len(parent) < MAX_PARENT else "/tmp", name))  # noqa: S108 - private


def use_interface() -> None:
    """Let gloo and NCCL use the interface of this Ray node, in this process and its children."""
    for name in _INTERFACES:
        os.environ.setdefault(name, interface_of(ray.util.get_node_ip_address()))


def interface_of(address: str) -> str:
    """Return the name of this host's network interface with an address. Raise OSError if there is none."""
    for name, given in _addresses():
        if given == address:
            return name
    raise OSError(f"no network interface of host {socket.gethostname()} has the address {address}")


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this host. Raise OSError if it has none."""
    for name, address in _addresses():
        if name == interface:
            return address
    raise OSError(f"no network interface {interface} of host {socket.gethostname()} has an IPv4 address")


def _addresses() -> Iterator[tuple[str, str]]:
    for name, addresses in psutil.net_if_addrs().items():
        yield from ((name, each.address) for each in addresses if each.family == socket.AF_INET)
