"""Launch workers as processes of this host, with a private folder for their sockets and one log each."""

from __future__ import annotations

import fcntl
import logging
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from longspan.model.files import cache_root
from longspan.runtime.child import make_run_dir
from longspan.runtime.executor.channel import Channel
from longspan.runtime.executor.forkserver import StartWorker, WorkerProcess, start_server
from longspan.runtime.messages import WorkerConfig

_NUM_LOGS_KEPT = 20
_log = logging.getLogger("longspan")


class ProcessLauncher:
    """Forks one process per rank.

    Args:
        listen: an address of this host, for encrypted sockets over TCP. None for sockets in the run folder.
    """

    def __init__(self, config: WorkerConfig, *, listen: str | None = None) -> None:
        self.cluster, self._config = config.cluster, config
        with ExitStack() as acquired:
            self._run_dir = make_run_dir()
            acquired.callback(self.clean_up)
            self._log_dir = log_dir(self._run_dir)
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                text = "logs of workers are removed when they end, since %s cannot be created (%s)"
                _log.info(text, self._log_dir, error)
                self._log_dir = Path(self._run_dir)
            self.channel = self._open_channel(listen)
            acquired.pop_all()

    def start(self, rank: int) -> WorkerProcess:
        return start_server().start(self.command(rank))

    def command(self, rank: int) -> StartWorker:
        """Return the command that starts a rank."""
        return StartWorker(self._config, rank, self.channel.contact, self._run_dir, self._log(rank))

    def hint(self, rank: int) -> str:
        return f"log: {self._log(rank)}"

    def clean_up(self) -> None:
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def _open_channel(self, listen: str | None) -> Channel:
        if listen is None:
            return Channel(f"ipc://{self._run_dir}/controller")
        from longspan.runtime.executor.secure_channel import SecureChannel  # noqa: PLC0415 - not for one host

        return SecureChannel(listen)

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"rank{rank}.log"


def log_dir(run_dir: str) -> Path:
    """Return the folder for this engine's logs. Removes old folders without open logs, except the latest ones."""
    logs = cache_root() / "logs"
    if logs.is_dir():
        times = {}
        for folder in logs.iterdir():
            with suppress(FileNotFoundError):  # another engine may remove it concurrently
                times[folder] = folder.stat().st_mtime
        for folder in sorted(times, key=lambda folder: times[folder], reverse=True)[_NUM_LOGS_KEPT:]:
            if not _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)
    return logs / Path(run_dir).name


def _in_use(folder: Path) -> bool:
    for path in folder.glob("*.log"):
        try:
            with path.open("rb") as log:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # another engine has removed it, or the file system has no locks
            continue
    return False
