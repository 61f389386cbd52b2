"""The msgspec messages between the controller and its workers. No pickle is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from longspan.core.cluster import Cluster
from longspan.core.steps import BytesSent, Forward, Free, MoveKV, Sampled, Scored
from longspan.model.files import ModelFiles


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model and options that workers load, wherever they run.

    Attributes:
        kernels: the library of our compiled CPU kernels. None to compute with PyTorch's kernels.
        host_kernels: likewise, for KV on the hosts of CUDA devices.
        cuda_kernel: the only allowed PyTorch kernel for attention on CUDA. None to choose the best per case.
        enforce_eager: compute decode steps layer by layer.
        record_times: record seconds per category, see `runtime.timing`.
        host_memory: of the pool of each host, see `HostPool`. Empty without such pools.
        max_threads: upper bound of the threads of a rank. None for no bound.
        is_placed: the locations are real hosts, and each rank sees only its own CUDA device. Otherwise all ranks are on
            this host, and LONGSPAN_HOSTS may imitate more hosts.
    """

    files: ModelFiles
    cluster: Cluster
    device: str
    num_threads: int
    block_size: int
    kernels: Path | None = None
    host_kernels: Path | None = None
    cuda_kernel: Literal["cudnn", "flash", "efficient", "eager"] | None = None
    enforce_eager: bool = False
    record_times: bool = False
    host_memory: tuple[Path, ...] = ()
    max_threads: int | None = None
    is_placed: bool = False

    def threads_among(self, num_ranks: int) -> int:
        """Return the CPU threads of each of `num_ranks` ranks. Their total stays as it was at the start."""
        num_threads = max(1, self.num_threads * self.cluster.num_ranks // num_ranks)
        return num_threads if self.max_threads is None else min(num_threads, self.max_threads)

    def neighbours(self, rank: int, hosts: Sequence[int]) -> list[int]:
        """Return the ranks that share the cores and devices of a rank, and the rank itself, by the `hosts` of ranks."""
        return [other for other, host in enumerate(hosts) if not self.is_placed or host == hosts[rank]]


class RunForward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute a step."""

    step: Forward


class RunMoves(msgspec.Struct, frozen=True, tag="moves"):
    """Send and receive KV. For moves that a Forward streams, only the targets get this message."""

    moves: tuple[MoveKV, ...]


class RunFree(msgspec.Struct, frozen=True, tag="free"):
    """Drop the state of requests."""

    step: Free


class RunReshard(msgspec.Struct, frozen=True, tag="reshard"):
    """Take the rank's place in another cluster. `number` is that of the Reshard step."""

    number: int
    cluster: Cluster


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Report the memory of the device, after all computation so far."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Prepare steps of up to `max_num_seqs` requests of up to `max_model_len` tokens, and answer Ready.

    Up to `max_tokens` tokens of a prompt are in a step.
    """

    max_num_seqs: int
    max_model_len: int
    max_tokens: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish and exit."""


WorkerCommand = RunForward | RunMoves | RunFree | Prepare
"""Spare ranks get none of these commands."""
Command = WorkerCommand | RunReshard | Measure | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has loaded its model, with its `fallbacks`, connected to all ranks, or prepared decode steps."""

    rank: int
    fallbacks: tuple[str, ...] = ()


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """A rank has recorded some of the graphs of its decode steps."""

    rank: int
    num_done: int
    num_graphs: int


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one rank and its device after the largest step, in bytes.

    Attributes:
        available_bytes: free device memory below the limit on used memory. Negative if the limit is exceeded.
        pool_bytes: current size of its KV pool.
        weight_bytes: size of its share of the model.
        step_bytes: temporary memory of the step, at its peak.
        num_devices: number of devices. Ranks are assigned round-robin.
    """

    available_bytes: int
    pool_bytes: int
    weight_bytes: int
    step_bytes: int
    num_devices: int


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The answer of a rank to `Measure`."""

    rank: int
    memory: RankMemory


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A rank has computed its share of a Forward.

    Attributes:
        non_finite: requests with NaN or infinite hidden states or logits.
        times: seconds per category since the start, if recorded.
    """

    rank: int
    number: int
    sampled: tuple[Sampled, ...]
    scored: tuple[Scored, ...]
    bytes_sent: BytesSent
    non_finite: tuple[int, ...] = ()
    times: dict[str, float] = {}


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """A rank has started to send its share of a MoveKV, has received all of it, or has copied it from or to a host."""

    rank: int
    number: int
    bytes_sent: BytesSent


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """A rank has completed all its sends of a MoveKV."""

    rank: int
    number: int


class Regrouped(msgspec.Struct, frozen=True, tag="regrouped"):
    """A rank has taken its place in another cluster. `bytes_sent` counts copied weights."""

    rank: int
    number: int
    bytes_sent: BytesSent


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """A disk lane has executed a MoveKV. `failed` are the indices of failed copies."""

    number: int
    num_bytes: int
    failed: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker raised and is about to exit. `peer`: it lost a peer. `memory`: it ran out of memory."""

    rank: int
    reason: str
    peer: bool
    memory: bool = False


DISCONNECTED = 256
"""In place of the exit code of a worker whose connection has ended. Exit codes are below it."""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A worker or its connection ended, reported by a part of the controller. Negative codes are signals."""

    rank: int
    code: int


Report = Ready | Prepared | Measured | Done | Moved | Sent | Regrouped | Stored | Failed | Exited
