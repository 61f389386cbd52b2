"""What the controller and its workers say to each other: msgspec messages, never pickle."""

from __future__ import annotations

import msgspec

from longspan.core.steps import BytesSent, Forward, Free, Sampled, Scored


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker is told when it starts.

    Attributes:
        rank: `instance * tp + tp_index`, of `world_size` in all.
        tp: ranks per instance, which share its weights and its KV heads.
        run_dir: private folder of this engine: sockets and the rendezvous file. Gone after shutdown.
        tokenizer_dir: for structured outputs; None when the model comes without tokenizer files.
        attention_kernel: the compiled `attn.native`; None to compute with PyTorch's kernels.
        hosts: the host of every rank.
        record_times: measure where the time goes, see `runtime.timing`.
    """

    rank: int
    world_size: int
    tp: int
    run_dir: str
    model_name: str
    config_dir: str
    weights: str
    tokenizer_dir: str | None
    dtype: str
    trust_remote_code: bool
    device: str
    num_threads: int
    num_blocks: int
    block_size: int
    hosts: tuple[int, ...]
    attention_kernel: str | None = None
    record_times: bool = False


class RunForward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute a step."""

    step: Forward


class RunFree(msgspec.Struct, frozen=True, tag="free"):
    """Forget requests."""

    step: Free


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish and exit."""


Command = RunForward | RunFree | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has loaded its model and joined the others."""

    rank: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A rank's share of a Forward is computed. `times` are seconds per category since the start, if recorded."""

    rank: int
    number: int
    sampled: tuple[Sampled, ...]
    scored: tuple[Scored, ...]
    bytes_sent: BytesSent
    times: dict[str, float] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker raised and is about to exit; `peer` when it only noticed that another one is gone."""

    rank: int
    reason: str
    peer: bool


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A worker process ended; negative codes are signals. Said by the controller's own watcher."""

    rank: int
    code: int


Report = Ready | Done | Failed | Exited


def command_address(run_dir: str, rank: int) -> str:
    """Where a worker receives commands."""
    return f"ipc://{run_dir}/commands-{rank}"


def report_address(run_dir: str) -> str:
    """Where the controller receives reports."""
    return f"ipc://{run_dir}/reports"
