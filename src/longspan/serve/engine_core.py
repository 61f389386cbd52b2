"""The engine process of a server: `python -m longspan.serve.engine_core FOLDER`, its setup a line of JSON on stdin.

It ends when it is told to, and when its standard input closes: that is, with the HTTP face, however that ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field

import msgspec
import zmq

from longspan.core.request import FinishReason, Request
from longspan.errors import WorkerLostError
from longspan.runtime.executor.forkserver import start_server
from longspan.serve.messages import (
    Accepted,
    Add,
    Cancel,
    ChoiceDelta,
    Command,
    Ended,
    EngineSetup,
    Failed,
    NotStarted,
    PolicyRefused,
    PolicySet,
    QueueFull,
    Quit,
    Report,
    Restarted,
    Restarting,
    SetPolicy,
    Started,
    Stats,
    Times,
    Turn,
    Update,
    address,
)
from longspan.service import Deployment
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import Choice, RequestState


def main() -> None:
    """Runs until told to quit; exit code 1 when it cannot start or workers do not come back."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the face decides when to stop
    tempfile.tempdir = folder = sys.argv[1]  # what lies in it is removed with it, whoever of the two is killed
    line = sys.stdin.buffer.readline()
    if not line:  # the face is gone already
        shutil.rmtree(folder, ignore_errors=True)
        return
    setup = msgspec.json.decode(line, type=EngineSetup)
    threading.Thread(target=_end_with_face, args=(folder,), daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("longspan").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    with zmq.Context() as context, closing(context.socket(zmq.PAIR)) as socket:
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(address(folder))
        sys.exit(_serve(setup, socket))


def _serve(setup: EngineSetup, socket: zmq.Socket[bytes]) -> int:
    start_server()  # it imports beside us
    try:
        deployment = Deployment(setup.model, **setup.arguments)
    except (ValueError, WorkerLostError) as error:
        mistake = isinstance(error, ValueError)
        socket.send(msgspec.msgpack.encode(NotStarted(reason=str(error), is_mistake=mistake)))
        return 1
    with deployment:
        files, config = deployment.files, deployment.engine.config
        pools = [deployment.engine.account.pool(instance) for instance in range(config.num_instances)]
        started = Started(
            name=files.name,
            tokenizer_dir=None if deployment.input_processor.tokenizer is None else str(files.tokenizer_dir),
            trust_remote_code=files.trust_remote_code,
            vocab_size=deployment.input_processor.vocab_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.limits.max_num_seqs,
            num_instances=config.num_instances,
            num_kv_blocks=sum(pool.num_blocks for pool in pools),
            block_size=config.block_size,
            worker_pids=list(deployment.worker_pids),
        )
        socket.send(msgspec.msgpack.encode(PolicySet(deployment.policy_settings)))
        socket.send(msgspec.msgpack.encode(started))
        try:
            EngineLoop(deployment, setup, socket).run()
        except (WorkerLostError, OSError):
            logging.getLogger("longspan").exception("workers do not come back")
            return 1
    return 0


def _end_with_face(folder: str) -> None:
    while os.read(sys.stdin.fileno(), 1):  # not by its buffer, whose lock would be held when the process ends
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)  # workers end with their controller


_log = logging.getLogger("longspan")
_MOST_LOSSES = 2
"""A request that runs while so many workers are lost, one after the other, is not tried again."""
_MOST_ATTEMPTS = 3
"""So many starts of workers may fail, or be followed by no token, one after the other."""
_PAUSE_S = 1.0


@dataclass(kw_only=True, eq=False)
class _Client:
    """A request of the HTTP face."""

    id: int
    request_state: RequestState
    told: list[_Told]
    num_losses: int = 0
    scores_told: bool = False


@dataclass(kw_only=True)
class _Told:
    """How much of a choice the face knows."""

    num_characters: int = 0
    num_tokens: int = 0
    finished: bool = False


@dataclass(kw_only=True)
class _News:
    """What a turn has to tell."""

    clients: dict[int, _Client] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    tbt_s: list[float] = field(default_factory=list)


class EngineLoop:
    """Serves one HTTP face over `socket` until it says `Quit`."""

    def __init__(self, deployment: Deployment, setup: EngineSetup, socket: zmq.Socket[bytes]) -> None:
        self._deployment, self._setup, self._socket = deployment, setup, socket
        self._engine = deployment.engine
        self._clients: dict[int, _Client] = {}
        self._choices: dict[int, tuple[_Client, int]] = {}  # by request id of the engine
        self._commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._num_attempts = self._num_restarts = 0
        self._stats_due_s = 0.0
        self._quitting = False
        self._most_wait_s = min(setup.stats_interval_s, setup.engine_timeout_s / 4)
        deployment.executor.wakeup = socket

    def run(self) -> None:
        """Until told to quit.

        Raises:
            WorkerLostError: when workers do not come back.
        """
        while not self._quitting:
            try:
                self._turn()
            except WorkerLostError as error:
                self._restart(error)

    def _turn(self) -> None:
        """Takes commands and a completion, whichever come; waits for one of them when there is nothing else to do."""
        while self._socket.poll(0):
            self._obey(self._commands.decode(self._socket.recv()))
            if self._quitting:
                return
        news = _News()
        if self._engine.has_unfinished:
            for request in self._engine.step(self._most_wait_s):
                self._take(request, news)
                self._num_attempts = 0
        else:
            self._tell(news, at_once=True)
            # Raises when a worker is lost, ends when there is a command; and the face is to hear that we live.
            self._deployment.executor.poll(self._setup.engine_timeout_s / 4)
            return
        self._tell(news)

    def _obey(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Cancel(id):
                if id in self._clients:
                    self._drop(self._clients[id], "abort")
            case SetPolicy(id, options):
                self._set_policy(id, options)
            case Quit():
                self._quitting = True

    def _add(self, command: Add) -> None:
        number = command.id
        try:
            engine_request = command.engine_request()
            if not command.is_accepted and (reason := self._why_full(engine_request)) is not None:
                self._send(QueueFull(number, reason))
                return
            request_state = RequestState(engine_request, self._deployment.input_processor.tokenizer)
            request_state.start(self._engine)
        except ValueError as error:  # the face has checked it, but what it overlooked must not end all the others
            self._send(Failed(number, f"the engine refused the request: {error}"))
            return
        client = _Client(id=number, request_state=request_state, told=[_Told() for _ in request_state.choices])
        self._clients[number] = client
        for index, choice in enumerate(request_state.choices):
            self._choices[choice.request.id] = client, index
        self._send(Accepted(number))

    def _set_policy(self, number: int, options: dict[str, str]) -> None:
        try:
            self._deployment.update_policy(options)
        except ValueError as error:
            self._send(PolicyRefused(number, str(error)))
        else:
            self._send(PolicySet(self._deployment.policy_settings, number))

    def _why_full(self, engine_request: EngineRequest) -> str | None:
        """Why the queue has no room for a job; None if it has."""
        most_requests, most_tokens = self._setup.max_num_queued_reqs, self._setup.max_num_queued_tokens

        def reason() -> str | None:
            load, num_tokens = self._engine.load(), len(engine_request.token_ids)
            if most_requests is not None and load.num_waiting >= most_requests:
                return f"{load.num_waiting} requests are waiting, of at most {most_requests} (--max-num-queued-reqs)"
            # Whatever its length, a prompt may wait alone.
            if most_tokens is not None and load.num_waiting and load.num_waiting_tokens + num_tokens > most_tokens:
                return (
                    f"prompts of {load.num_waiting_tokens} tokens are waiting: with another {num_tokens} they would be "
                    f"more than {most_tokens} (--max-num-queued-tokens)"
                )
            return None

        if reason() is None:
            return None
        self._engine.emit()  # some that were added just now need not wait
        return reason()

    def _take(self, request: Request, news: _News) -> None:
        """A request of the engine has got a token."""
        if request.id not in self._choices:
            return
        client, index = self._choices[request.id]
        client.request_state.choices[index].take_new_tokens(self._engine)
        news.clients[client.id] = client

    def _tell(self, news: _News, *, at_once: bool = False) -> None:
        self._fail_stuck(news)
        updates = [(client.id, self._update(client, news)) for client in news.clients.values()]
        for client in news.clients.values():
            if client.request_state.finished:
                self._forget(client)
        now = time.monotonic()
        due = at_once or now >= self._stats_due_s
        if due:
            self._stats_due_s = now + self._most_wait_s
        if updates or due:
            self._send(
                Turn(
                    updates=updates,
                    ended=news.ended,
                    ttft_s=news.ttft_s,
                    num_prompt_tokens=news.num_prompt_tokens,
                    tbt_s=news.tbt_s,
                    stats=self._stats() if due else None,
                )
            )

    def _fail_stuck(self, news: _News) -> None:
        """A choice that cannot go on (no token fits its grammar) is no answer: its request fails with all choices."""
        for client in list(news.clients.values()):
            if (reason := client.request_state.stuck) is not None:
                del news.clients[client.id]
                self._send(Failed(client.id, reason, "structured_outputs"))
                self._drop(client, "error")

    def _update(self, client: _Client, news: _News) -> Update:
        request_state, first = client.request_state, not client.scores_told
        client.scores_told = True
        changes = [
            self._choice_update(index, choice, told, news)
            for index, (choice, told) in enumerate(zip(request_state.choices, client.told, strict=True))
            if choice.num_taken > told.num_tokens or choice.finished > told.finished
        ]
        return Update(
            choices=changes,
            prompt_logprobs=request_state.prompt_logprobs() if first else None,
            num_cached_tokens=request_state.choices[0].request.metrics.num_cached_tokens,
            finished=request_state.finished,
        )

    def _choice_update(self, index: int, choice: Choice, told: _Told, news: _News) -> ChoiceDelta:
        request, text, done = choice.request, choice.text, told.num_tokens
        update = ChoiceDelta(
            index=index,
            text=text[told.num_characters :],
            token_ids=request.output[done:],
            logprobs=None if request.params.logprobs is None else choice.logprobs[done:],
            finish_reason=request.finish_reason,
            stop_reason=choice.stop_reason,
        )
        self._time(request, done, news)
        told.num_characters, told.num_tokens = len(text), len(request.output)
        if choice.finished and not told.finished:
            told.finished = True
            news.ended.append(_ended(choice.request, self._choices[request.id][0]))
        return update

    def _time(self, request: Request, done: int, news: _News) -> None:
        """The times of a choice's tokens from the `done`-th on."""
        metrics = request.metrics
        if request.choice == 0 and done == 0 and metrics.ttft_s is not None:
            news.ttft_s.append(metrics.ttft_s)
            news.num_prompt_tokens += len(request.prompt)
        news.tbt_s += metrics.tbt_s[max(0, done - 1) :]  # the first token has none

    def _drop(self, client: _Client, reason: FinishReason) -> None:
        """Ends a request that nobody waits for; blocks that a step in flight names are freed when it completes."""
        ended = []
        for choice, told in zip(client.request_state.choices, client.told, strict=True):
            if not told.finished:
                self._engine.finish(choice.request, reason)
                ended.append(_ended(choice.request, client))
        self._forget(client)
        self._send(Turn(ended=ended))

    def _forget(self, client: _Client) -> None:
        del self._clients[client.id]
        for choice in client.request_state.choices:
            del self._choices[choice.request.id]

    def _restart(self, error: WorkerLostError) -> None:
        _log.error("%s; starting new workers", error)
        self._send(Restarting(str(error)))
        failed = []
        for client in self._clients.values():
            if any(choice.request.group for choice in client.request_state.choices):
                client.num_losses += 1
                if client.num_losses >= _MOST_LOSSES:
                    failed.append(client)
                    self._send(Failed(client.id, f"workers were lost {_MOST_LOSSES} times while this request ran"))
        self._start_workers(error)
        for client in failed:  # not before: the engine tells workers to free what they hold, and there were none
            self._drop(client, "error")
        self._num_restarts += 1
        self._send(Restarted())
        self._tell(_News(), at_once=True)  # nothing runs any more

    def _start_workers(self, error: Exception) -> None:
        while True:
            self._num_attempts += 1
            if self._num_attempts > _MOST_ATTEMPTS:
                raise error
            try:
                self._deployment.restart()
            except (WorkerLostError, OSError) as again:  # OSError: the process that forks them was lost, too
                error = again
                _log.exception("workers did not start")
                time.sleep(_PAUSE_S)
            else:
                self._deployment.executor.wakeup = self._socket
                return

    def _stats(self) -> Stats:
        load = self._engine.load()
        return Stats(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
            num_restarts=self._num_restarts,
            num_preemptions=self._engine.num_preemptions,
            num_prefix_queries=self._engine.num_prefix_queries,
            num_prefix_hits=self._engine.num_prefix_hits,
            used_blocks=load.used_blocks,
            busy_s=load.busy_s,
            bytes_sent=dict(self._engine.bytes_sent),
            worker_pids=list(self._deployment.worker_pids),
        )

    def _send(self, report: Report) -> None:
        self._socket.send(self._encoder.encode(report))


def _ended(request: Request, client: _Client) -> Ended:
    metrics, reason = request.metrics, request.finish_reason
    assert reason is not None and metrics.finished_s is not None, "it has ended"
    arrival, scheduled, ttft = metrics.arrival_s, metrics.scheduled_s, metrics.ttft_s
    return Ended(
        id=client.id,
        reason=reason,
        num_prompt_tokens=len(request.prompt),
        num_output_tokens=len(request.output),
        is_first_choice=request.choice == 0,
        times=Times(
            queue_s=None if scheduled is None else scheduled - arrival,
            prefill_s=None if scheduled is None or ttft is None else arrival + ttft - scheduled,
            decode_s=None if ttft is None else metrics.finished_s - arrival - ttft,
            ttft_s=ttft,
            e2e_s=metrics.finished_s - arrival,
        ),
    )


if __name__ == "__main__":
    main()
