"""Starts the workers of an engine on this host."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from longspan.core.cluster import Fleet
from longspan.model.cache import cache_root
from longspan.model.files import ModelFiles
from longspan.runtime.local import LocalExecutor, make_run_dir
from longspan.runtime.messages import WorkerConfig

_NUM_LOGS_KEPT = 20


def start_workers(
    files: ModelFiles,
    fleet: Fleet,
    device: str,
    threads: int,
    num_blocks: Sequence[int],
    block_size: int,
    *,
    hosts: tuple[int, ...],
    attention_kernel: Path | None,
    record_times: bool,
    step_timeout_s: float,
) -> LocalExecutor:
    """One worker per rank of `fleet`, ready for steps, with the `num_blocks` of its instance.

    What `hosts` says of each rank decides how bytes are counted.

    Raises:
        WorkerLostError: when a worker does not start.
    """
    run_dir = make_run_dir()
    configs = [
        WorkerConfig(
            rank=rank,
            fleet=fleet,
            run_dir=run_dir,
            model_name=files.name,
            config_dir=str(files.config_dir),
            weights=str(files.weights),
            tokenizer_dir=None if files.tokenizer_dir is None else str(files.tokenizer_dir),
            dtype=files.dtype,
            trust_remote_code=files.trust_remote_code,
            device=device,
            num_threads=threads,
            num_blocks=num_blocks[fleet.place(rank)[0]],
            block_size=block_size,
            hosts=hosts,
            attention_kernel=None if attention_kernel is None else str(attention_kernel),
            record_times=record_times,
        )
        for rank in range(fleet.num_ranks)
    ]
    return LocalExecutor(configs, log_dir=_log_dir(run_dir), step_timeout_s=step_timeout_s)


def _log_dir(run_dir: str) -> Path:
    """A folder for the logs of this engine's workers; of those that nobody writes to only the latest are kept."""
    logs = cache_root() / "logs"
    if logs.is_dir():
        times = {}
        for folder in logs.iterdir():
            with suppress(FileNotFoundError):  # another engine may be doing the same
                times[folder] = folder.stat().st_mtime
        for folder in sorted(times, key=lambda folder: times[folder], reverse=True)[_NUM_LOGS_KEPT:]:
            if not _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)
    return logs / Path(run_dir).name


def _in_use(folder: Path) -> bool:
    """Whether a worker still writes to a log, which it has locked."""
    for path in folder.glob("*.log"):
        try:
            with path.open("rb") as log:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # another engine has removed it, or there are no locks here
            continue
    return False
