"""One rank during its lifetime: it takes its place in one cluster after another.

Its process, mapped weights and KV memory stay. The links to other ranks stay until a cluster has more ranks. On a CPU
its shares of the model stay too, since they are views of the mapped weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import zmq

from longspan.attn.backends import AttentionBackend, backend_of
from longspan.core.cluster import Cluster
from longspan.core.steps import BytesSent
from longspan.model.adapter import Model
from longspan.model.store import DTYPES, StoredTensors
from longspan.runtime import messages
from longspan.runtime.block_records import BlockRecords, kv_record
from longspan.runtime.pool import KvMemory, KvPool
from longspan.runtime.timing import Stopwatch
from longspan.runtime.worker import Inbox, Transports, Worker, send_report

if TYPE_CHECKING:
    from longspan.model.graph_step import Recording
    from longspan.runtime.device_memory import MemoryProbe


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
        self._recording = recording_of(self._backend, device)
        self._host_backend = self._backend
        if device.type != "cpu":
            self._host_backend = backend_of(torch.device("cpu"), compiled=config.host_kernels is not None)
        self._watch = Stopwatch(enabled=config.record_times, device=device)
        self._kv_memory = KvMemory(device)
        # Map once: overlapping shares then use the same pages. CUDA devices get copies, so no mapping is kept.
        self._stored = StoredTensors(config.files.weights, device) if device.type == "cpu" else None
        self._models: dict[tuple[range, int, int], Model] = {}
        self._host_blocks: BlockRecords | None = None
        self._worker: Worker | None = None
        if rank < config.cluster.num_ranks:
            self._worker, _ = self._take_place(config.cluster)
        self._probe = probe
        if probe is not None:
            probe.begin()

    def serve(self, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> bool:
        """Execute commands until Stop. Return True if no KV was in flight then."""
        inbox = Inbox(commands)
        send_report(reports, messages.Ready(rank=self._rank))
        while (command := self._serve(inbox, reports)) is not None:
            if isinstance(command, messages.Measure):
                send_report(reports, messages.Measured(self._rank, self._memory()))
                continue
            self.close()
            self._worker = None  # frees its share: a device has memory for one share
            self._worker, copied_bytes = self._take_place(command.cluster)
            copied: BytesSent = {("weights_copy", "same_host"): copied_bytes}
            send_report(reports, messages.Regrouped(rank=self._rank, number=command.number, bytes_sent=copied))
        return self._worker is None or self._worker.is_idle

    def close(self) -> None:
        """Close its worker, see `Worker.close`."""
        if self._worker is not None:
            self._worker.close()

    def _memory(self) -> messages.RankMemory:
        from longspan.runtime.device_memory import measured  # noqa: PLC0415 - only on CUDA devices

        assert self._probe is not None, "Measure needs a probe"
        weight_bytes = sum(model.weight_bytes for model in self._models.values())
        return measured(self._probe, pool_bytes=self._kv_memory.num_bytes, weight_bytes=weight_bytes)

    def _serve(self, inbox: Inbox, reports: zmq.Socket[bytes]) -> messages.RunReshard | messages.Measure | None:
        """Execute steps until another command, and return it. A spare rank only waits for the command."""
        if self._worker is not None:
            inbox.watch(self._worker.wakeup)
            return self._worker.serve(inbox, reports)
        inbox.watch(None)
        while True:
            inbox.receive()
            match inbox.next():
                case messages.RunReshard() | messages.Measure() as command:
                    return command
                case messages.Stop():
                    return None

    def _take_place(self, cluster: Cluster) -> tuple[Worker | None, int]:
        """Connect and load this rank for a cluster. Return its worker (None if spare) and the copied weight bytes."""
        config, rank = self._config, self._rank
        if self._transports is None or cluster.num_ranks > self._num_connected:
            if self._transports is not None:
                self._transports.close()
            self._transports, self._num_connected = self._connect(cluster.hosts), cluster.num_ranks
        self._transports.meet(cluster.shard_groups)
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

            config, number = self._config, cluster.hosts[self._rank]
            self._host_blocks = map_blocks(
                config.host_memory[number],
                pool.record,
                num_blocks=cluster.host_blocks[number],
                block_size=pool.block_size,
                dtype=pool.dtype,
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
            whole_steps=not self._config.enforce_eager,
            recording=self._recording,
        )
        self._watch.watch_linear(model.module)
        return model, model.copied_bytes


def recording_of(backend: AttentionBackend, device: torch.device) -> Recording | None:
    """Return how to record steps as CUDA graphs. None on CPUs."""
    if device.type != "cuda":
        return None
    from longspan.model.graph_step import CudaRecorder, Recording  # noqa: PLC0415 - only on CUDA devices

    return Recording(backend=backend, record=CudaRecorder())
