"""The engine core as the API server sees it: a child process, and the socket between the two."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from longspan.runtime.child import make_run_dir, start_child
from longspan.serve import messages

if TYPE_CHECKING:
    from longspan.serve.request_recorder import RequestRecorder

ENGINE_MODULE = "longspan.serve.engine_core"
_REPORTS: msgspec.msgpack.Decoder[messages.Report] = msgspec.msgpack.Decoder(messages.Report)


class CoreProcess:
    """A child process that runs an engine core, see `open_core`."""

    def __init__(
        self, process: subprocess.Popen[bytes], socket: zmq.asyncio.Socket, recorder: RequestRecorder | None
    ) -> None:
        self._process, self._socket, self._recorder = process, socket, recorder

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: messages.Command) -> None:
        """Put a command into the socket's own queue, which has no bound."""
        if self._recorder is not None:
            self._recorder.sent(command)
        # The asyncio socket's own method: after a plain `zmq.Socket.send`, an incoming message would wake no task.
        sent = asyncio.ensure_future(self._socket.send(msgspec.msgpack.encode(command), zmq.NOBLOCK))
        error = sent.exception()
        # zmq.Again: the process has just ended. The next engine core gets the command from `_replay`.
        if error is not None and not isinstance(error, zmq.Again):
            raise error

    async def receive(self) -> messages.Report:
        report = _REPORTS.decode(await self._socket.recv())
        if self._recorder is not None:
            self._recorder.received(report)
        return report

    async def is_silent(self, timeout_s: float) -> bool:
        """Return True if no report arrives within `timeout_s`.

        A process that was stopped, such as by SIGSTOP, finds its timeout expired before any report can arrive. The
        second wait is for such reports.
        """
        return not (await self._socket.poll(int(timeout_s * 750)) or await self._socket.poll(int(timeout_s * 250)))

    async def ended(self) -> int:
        """Wait in a thread of its own until the process has ended. Return its exit code."""
        return await run_sync(self._process.wait, abandon_on_cancel=True, limiter=CapacityLimiter(1))


@contextlib.asynccontextmanager
async def open_core(setup: messages.EngineSetup, recorder: RequestRecorder | None = None) -> AsyncIterator[CoreProcess]:
    """Start an engine core. At the end of the block, kill it and remove its folder. Its workers end with it.

    Args:
        recorder: gets all commands and reports.

    Raises:
        OSError: the process, the socket or the folder cannot be made.
    """
    folder, context = make_run_dir(), zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.PAIR)
        socket.sndhwm = socket.rcvhwm = 0
        socket.bind(messages.address(folder))
        process = start_child(ENGINE_MODULE, folder)
        assert process.stdin is not None, "a child has a pipe"
        core = CoreProcess(process, socket, recorder)
        try:
            with contextlib.suppress(BrokenPipeError):  # the process has ended already
                process.stdin.write(msgspec.json.encode(setup) + b"\n")
                process.stdin.flush()
            yield core
        finally:
            process.kill()
            await asyncio.create_task(core.ended())
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
    finally:
        context.destroy(linger=0)
        shutil.rmtree(folder, ignore_errors=True)
