"""One rank during its lifetime: it takes its place in one cluster after another.

Its process, mapped weights and KV memory stay. The links to other ranks stay until a cluster has more ranks. On a CPU
its shares of the model stay too, since they are views of the mapped weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq

from longspan.attn.backends import backend_of
from longspan.core.cluster import Cluster
from longspan.core.steps import BytesSent
from longspan.model.adapter import Model
from longspan.model.store import DTYPES, StoredTensors
from longspan.runtime import messages
from longspan.runtime.block_records import BlockRecords, kv_record
from longspan.runtime.pool import KvMemory, KvPool
from longspan.runtime.timing import Stopwatch
from longspan.runtime.worker import Transports, Worker, send_report

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend
    from longspan.model.recording import Recording
    from longspan.runtime.device_memory import MemoryProbe


_POLL_S = 1e-4
"""Seconds between two looks for commands and for the results of a step on the device. Longer pauses delay tokens."""


class Rank:
    """A rank that serves as a worker in the cluster of `config`, or as a spare rank that waits for a Reshard.

    Args:
        connect: opens links among the ranks, whose hosts are given. All ranks call it at the same time.
        probe: measures the device memory. None if the rank gets no `Measure` command.
    """

    def __init__(
        self,
        config: messages.WorkerConfig,
        rank: int,
        device: torch.device,
        connect: Callable[[Sequence[int]], Transports],
        *,
        probe: MemoryProbe | None = None,
    ) -> None:
        self._config, self._rank, self._device, self._connect = config, rank, device, connect
        self._transports: Transports | None = None
        self._num_connected = 0
        self._backend = backend_of(device, compiled=config.kernels is not None, kernel=config.cuda_kernel)
        if device.type == "cuda":
            from longspan.attn.backends.pytorch_cuda import use_installed_flash  # noqa: PLC0415 - only on CUDA devices

            use_installed_flash(torch.cuda.get_device_capability(device))
        self._recording = recording_of(self._backend, device)
        self._host_backend = self._backend
        if device.type != "cpu":
            self._host_backend = backend_of(torch.device("cpu"), compiled=config.host_kernels is not None)
        self._watch = Stopwatch(enabled=config.record_times, device=device)
        self._kv_memory = KvMemory(device)
        # Map once: overlapping shares then use the same pages. CUDA devices get copies, so no mapping is kept.
        self._stored = StoredTensors(config.files, device) if device.type == "cpu" else None
        self._models: dict[tuple[range, int, int], Model] = {}
        self._host_blocks: BlockRecords | None = None
        self._worker: Worker | None = None
        if rank < config.cluster.num_ranks:
            self._worker, _ = self._take_place(config.cluster)
        self._probe = probe
        if probe is not None:
            probe.begin()

    def serve(self, controller: zmq.Socket[bytes]) -> bool:
        """Execute the controller's commands until Stop. Return True if no KV was in flight then."""
        inbox = Inbox(controller)
        fallbacks = tuple(text for model in self._models.values() for text in model.fallbacks)
        self._send(controller, messages.Ready(self._rank, fallbacks))
        while True:
            worker = self._worker
            with self._watch.during("controller"):
                new = inbox.receive() if worker is None else inbox.receive(worker.wakeup, worker.is_ready)
            if worker is not None:
                worker.prepare(new)
                for report in worker.collect(is_idle=not inbox.has_commands):
                    self._send(controller, report)
            match inbox.next():
                case messages.Stop():
                    for report in () if worker is None else worker.settle(sends=False):
                        self._send(controller, report)
                    return worker is None or worker.is_idle
                case messages.Measure() | messages.RunReshard() as command:
                    for report in () if worker is None else worker.settle(sends=True):
                        self._send(controller, report)
                    del worker  # a device has memory for one share of the model
                    if isinstance(command, messages.Measure):
                        self._send(controller, self._measure())
                    else:
                        self._send(controller, self._regroup(command))
                case command if command is not None and worker is not None:
                    for report in worker.execute(command):
                        self._send(controller, report)

    def _send(self, controller: zmq.Socket[bytes], report: messages.Report) -> None:
        """Send a report, unless the weights that this process has mapped have changed. Raise ModelError then."""
        if self._stored is not None:
            self._stored.check()
        send_report(controller, report)

    def _regroup(self, command: messages.RunReshard) -> messages.Regrouped:
        """Take the place in another cluster."""
        self.close()
        self._worker = None  # frees its share: a device has memory for one share
        self._worker, copied_bytes = self._take_place(command.cluster)
        copied: BytesSent = {("weights_copy", "same_host"): copied_bytes}
        return messages.Regrouped(rank=self._rank, number=command.number, bytes_sent=copied)

    def close(self) -> None:
        """Close its worker, see `Worker.close`."""
        if self._worker is not None:
            self._worker.close()

    def _measure(self) -> messages.Measured:
        from longspan.runtime.device_memory import measured  # noqa: PLC0415 - only on CUDA devices

        assert self._probe is not None, "Measure needs a probe"
        weight_bytes = sum(model.weight_bytes for model in self._models.values())
        memory = measured(self._probe, pool_bytes=self._kv_memory.num_bytes, weight_bytes=weight_bytes)
        return messages.Measured(self._rank, memory)

    def _take_place(self, cluster: Cluster) -> tuple[Worker | None, int]:
        """Connect and load this rank for a cluster. Return its worker (None if spare) and the copied weight bytes."""
        config, rank = self._config, self._rank
        if self._transports is None or cluster.num_ranks > self._num_connected:
            if self._transports is not None:
                self._transports.close()
            self._transports, self._num_connected = self._connect(cluster.hosts), cluster.num_ranks
        self._transports.meet(cluster)
        if cluster.is_spare(rank):
            return None, 0
        instance, stage, shard = cluster.at(rank)
        model, copied_bytes = self._load_shard(cluster)
        dtype = DTYPES[config.files.dtype]
        pool = KvPool(
            kv_record(model.info.specs, config.block_size, dtype),
            num_blocks=cluster.num_blocks[instance],
            block_size=config.block_size,
            dtype=dtype,
            device=self._device,
            shard=shard,
            tp=cluster.tp(instance),
            layers=cluster.layers(instance, stage),
            memory=self._kv_memory,
            backend=self._backend,
        )
        host = None
        if config.host_memory:
            from longspan.runtime.host_pool import HostPool  # noqa: PLC0415 - only with a host tier

            host = HostPool(self._map_host_blocks(cluster, pool), pool, cluster, rank, self._host_backend)
        worker = Worker(
            rank,
            cluster,
            model,
            pool,
            self._transports,
            backend=self._backend,
            files=config.files,
            watch=self._watch,
            host=host,
        )
        return worker, copied_bytes

    def _map_host_blocks(self, cluster: Cluster, pool: KvPool) -> BlockRecords:
        """Map the pool of its host once. The mapping stays when clusters change."""
        if self._host_blocks is None:
            from longspan.runtime.host_pool import map_blocks  # noqa: PLC0415 - only with a host tier

            config, number = self._config, cluster.host_pools.index(cluster.host_pool(cluster.at(self._rank).instance))
            self._host_blocks = map_blocks(
                config.host_memory[number],
                pool.record,
                num_blocks=cluster.host_blocks[number],
                block_size=pool.block_size,
                dtype=pool.dtype,
                cuda=torch.cuda.cudart() if self._device.type == "cuda" else None,
            )
        return self._host_blocks

    def _load_shard(self, cluster: Cluster) -> tuple[Model, int]:
        """Load this rank's layers and shard of the model, if needed. Return them and the copied weight bytes."""
        instance, stage, shard = cluster.at(self._rank)
        layers, tp = cluster.layers(instance, stage), cluster.tp(instance)
        key = layers, shard, tp
        if (loaded := self._models.get(key)) is not None:
            return loaded, 0
        if self._device.type != "cpu":
            self._models.clear()  # a device has memory for one share
        model = self._models[key] = Model(
            self._config.files,
            self._device,
            tp_index=shard,
            tp=tp,
            layers=layers,
            stored=self._stored,
            fused=self._config.kernels is not None,
            triton=self._device.type == "cuda" and find_spec("triton") is not None,
            whole_steps=not self._config.enforce_eager,
            recording=self._recording,
        )
        self._watch.watch_linear(model.module)
        return model, model.copied_bytes


class Inbox:
    """The queue of received commands. `receive` shows them on arrival, `next` removes them in order."""

    def __init__(self, commands: zmq.Socket[bytes]) -> None:
        self._commands = commands
        self._decoder = msgspec.msgpack.Decoder(messages.Command)
        self._waiting: deque[messages.Command] = deque()

    @property
    def has_commands(self) -> bool:
        return bool(self._waiting)

    def receive(self, wakeup: int | None = None, is_ready: Callable[[], bool] | None = None) -> list[messages.Command]:
        """Return newly arrived commands.

        If the queue is empty, wait for a command, for the file descriptor `wakeup`, or until `is_ready` returns True.
        """
        poller = zmq.Poller()
        for source in (self._commands, wakeup):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        if is_ready is None:
            poller.poll(0 if self._waiting else None)
        else:
            while not self._waiting and not poller.poll(0) and not is_ready():
                time.sleep(_POLL_S)
        new = []
        with suppress(zmq.Again):
            while True:
                new.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
        self._waiting.extend(new)
        return new

    def next(self) -> messages.Command | None:
        return self._waiting.popleft() if self._waiting else None


def recording_of(backend: AttentionBackend, device: torch.device) -> Recording | None:
    """Return how to record steps as CUDA graphs. None on CPUs."""
    if device.type != "cuda":
        return None
    from longspan.model.recording import CudaRecorder, Recording  # noqa: PLC0415 - only on CUDA devices

    recorder = CudaRecorder()
    return Recording(backend=backend, record=recorder, between=recorder.between)
