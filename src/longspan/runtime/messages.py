"""The controller and its workers talk in these msgspec messages, never in pickles."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from longspan.core.cluster import Cluster
from longspan.core.steps import BytesSent, Forward, Free, MoveKV, Sampled, Scored
from longspan.model.files import ModelFiles


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model and options that workers load, wherever they run.

    Attributes:
        kernels: those of our own, compiled; None to compute with PyTorch's.
        host_kernels: likewise, for KV on the hosts of CUDA devices.
        cuda_kernel: the only one of PyTorch's kernels for attention on CUDA; None for the best of each case.
        enforce_eager: compute decode steps layer by layer.
        record_times: measure where the time goes, see `runtime.timing`.
        host_memory: of the pool of each host, see `HostPool`; empty without such pools.
        most_threads: as many as a rank may have, whatever is left by others; None for no bound.
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
    most_threads: int | None = None

    def threads_among(self, num_ranks: int) -> int:
        """Returns the CPU threads of each rank once there are so many: together they have as many as at the start."""
        found = max(1, self.num_threads * self.cluster.num_ranks // num_ranks)
        return found if self.most_threads is None else min(found, self.most_threads)


class RunForward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute a step."""

    step: Forward


class RunMoves(msgspec.Struct, frozen=True, tag="moves"):
    """Sends and receives KV; of moves that stream out of a Forward only their targets hear so."""

    moves: tuple[MoveKV, ...]


class RunFree(msgspec.Struct, frozen=True, tag="free"):
    """Forget requests."""

    step: Free


class RunReshard(msgspec.Struct, frozen=True, tag="reshard"):
    """Take the rank's place in another cluster, as the step of this number says."""

    number: int
    cluster: Cluster


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Say what memory the device has, after what the rank has computed so far."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish and exit."""


Command = RunForward | RunMoves | RunFree | RunReshard | Measure | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has loaded its model and joined the others."""

    rank: int


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one rank and its device after the largest step, in bytes.

    Attributes:
        room_bytes: what its device may still give, before too much of it is used; negative if that is so already.
        pool_bytes: what its KV takes now.
        weight_bytes: what its share of the model takes.
        step_bytes: what the step took besides.
        num_devices: the devices that ranks are on, one after the other.
    """

    room_bytes: int
    pool_bytes: int
    weight_bytes: int
    step_bytes: int
    num_devices: int


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Answers `Measure`."""

    rank: int
    memory: RankMemory


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Reports that a rank's share of a Forward is computed.

    Attributes:
        non_finite: requests for which it computed hidden states or logits that are NaN or infinite.
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
    """A rank has started to send its share of a MoveKV, has all that it gets of it in its pool, or has swapped it."""

    rank: int
    number: int
    bytes_sent: BytesSent


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """Tells that everything a rank sends of a MoveKV has left it."""

    rank: int
    number: int


class Regrouped(msgspec.Struct, frozen=True, tag="regrouped"):
    """A rank has its place in another cluster; `bytes_sent` are those of weights that it had to copy."""

    rank: int
    number: int
    bytes_sent: BytesSent


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """The controller's own lane has made a MoveKV to or from a disk, but for the copies that `failed`, by index."""

    number: int
    num_bytes: int
    failed: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker raised and is about to exit; `peer` when it only noticed that another one is gone, and `memory` when
    its device has none left.
    """

    rank: int
    reason: str
    peer: bool
    memory: bool = False


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A worker ended; negative codes are signals. The controller's own watcher says so."""

    rank: int
    code: int


Report = Ready | Measured | Done | Moved | Sent | Regrouped | Stored | Failed | Exited


def command_address(endpoint: str, rank: int) -> str:
    return f"{endpoint}/commands-{rank}"


def report_address(endpoint: str) -> str:
    return f"{endpoint}/reports"
