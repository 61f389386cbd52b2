"""Launch workers as threads of this process, for small models and tests.

They share the interpreter, so all Python code together uses one core. Nothing is forked and no port is opened.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING

import torch

from longspan.attn.memory import Wires
from longspan.runtime.executor.channel import Channel
from longspan.runtime.messages import WorkerConfig
from longspan.runtime.rank import Rank
from longspan.runtime.worker import Transports, failure, send_report

if TYPE_CHECKING:
    from longspan.runtime.device_memory import MemoryProbe

_log = logging.getLogger("longspan.worker")
_END_TIMEOUT_S = 5.0
_numbers = itertools.count()
_loading = threading.Lock()
"""Held while a rank loads: transformers then sets PyTorch's default dtype, which all threads share."""


class ThreadLauncher:
    """Runs one thread per rank. Ranks exchange messages in memory.

    Sets PyTorch's number of threads, which is global, to that of the workers until `clean_up`.
    """

    def __init__(self, config: WorkerConfig) -> None:
        if config.device != "cpu":
            raise ValueError(f"worker threads compute on cpu, not on {config.device}")
        self.cluster, self.config, self.wires = config.cluster, config, (Wires(), Wires(), Wires(), Wires())
        if config.kernels is not None:
            from longspan import native

            native.load(config.kernels)
        self.channel = Channel(f"inproc://longspan-{next(_numbers)}")
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(config.num_threads)

    def start(self, rank: int) -> WorkerThread:
        return WorkerThread(self, rank)

    def transports(self, rank: int, num_ranks: int) -> Transports:  # noqa: ARG002 - wires connect any number of ranks
        """Return the transports of a rank among `num_ranks` ranks."""
        return Transports.in_memory(self.wires, rank)

    def probe(self, rank: int) -> MemoryProbe | None:  # noqa: ARG002 - tests override it
        """Return the memory probe of a rank's device. None: CPU memory is not measured."""
        return None

    def disconnect(self, rank: int) -> None:
        """Close the transports of a rank, so that it waits for no rank and no rank waits for it."""
        for wires in self.wires:
            wires.close(rank)

    def hint(self, rank: int) -> str:
        return f"see the log of process {os.getpid()} for rank {rank}"

    def clean_up(self) -> None:
        torch.set_num_threads(self._threads_before)


class WorkerThread:
    """A worker in a thread. It cannot be killed: it ends after its step, or when its transports close."""

    def __init__(self, launcher: ThreadLauncher, rank: int) -> None:
        self.pid = os.getpid()
        self._launcher, self._config, self._rank, self._code = launcher, launcher.config, rank, 1
        self._controller = launcher.channel.contact.connect(launcher.channel.context, rank)
        self._thread = threading.Thread(target=self._run, name=f"longspan rank {rank}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> int:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"rank {self._rank} still runs after {timeout_s} s")
        return self._code

    def kill(self) -> None:
        """End the links of the rank, so that no peer waits for it, and it waits for no peer."""
        self._launcher.disconnect(self._rank)

    def destroy(self) -> None:
        """Close its transports and wait for its end. Abandons a thread that does not end."""
        self.kill()
        try:
            self.wait(_END_TIMEOUT_S)
        except TimeoutError:
            _log.exception("rank %d hangs, so its thread is abandoned", self._rank)

    def _run(self) -> None:
        rank = None
        try:
            with _loading:
                rank = Rank(
                    self._config,
                    self._rank,
                    torch.device("cpu"),
                    lambda hosts: self._launcher.transports(self._rank, len(hosts)),
                    probe=self._launcher.probe(self._rank),
                )
            rank.serve(self._controller)
            self._code = 0
        except Exception as error:  # noqa: BLE001 - report any error to the controller
            _log.exception("rank %d failed", self._rank)
            send_report(self._controller, failure(self._rank, error))
        finally:
            self.kill()
            if rank is not None:
                rank.close()
            self._controller.close()
