"""The loop of an engine core: it takes engine requests, runs the engine, and sends what each step brings.

When a worker is lost, new ones are started and every request goes on where it was, exactly: tokens that were sent stay
sent, since recomputing gives the same KV and random numbers are keyed by position. A request that was running in two
losses is taken for their cause and fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import zmq

from longspan.core.fleets import fleet_text
from longspan.core.request import ContextLengthError, FinishReason, Request
from longspan.errors import OutOfMemoryError, ParameterError, WorkerLostError
from longspan.running_requests import RunningRequests
from longspan.serve import messages
from longspan.service import Service
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import RequestState

_log = logging.getLogger("longspan")
_MAX_LOSSES = 2
"""A request fails that was running in this many losses of workers, one after the other."""
_MAX_ATTEMPTS = 3
"""The number of starts of workers that may fail, or be followed by no token, one after the other."""
_PAUSE_S = 1.0
_STATS_INTERVAL_S = 0.5


def serve(setup_json: bytes, folder: str) -> int:
    """Runs until told to quit; returns 1 when it cannot start or workers do not come back, else 0.

    Args:
        setup_json: `EngineSetup` as JSON.
        folder: where the API server listens.
    """
    setup = msgspec.json.decode(setup_json, type=messages.EngineSetup)
    with zmq.Context() as context, closing(context.socket(zmq.PAIR)) as socket:
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(messages.address(folder))
        return _run(setup, socket)


def _run(setup: messages.EngineSetup, socket: zmq.Socket[bytes]) -> int:
    try:
        service = Service(setup.engine, max_worker_restarts=setup.max_worker_restarts)
    except (ValueError, WorkerLostError) as error:
        report = messages.NotStarted(reason=str(error), is_mistake=isinstance(error, ValueError))
        if isinstance(error, ParameterError):
            report = messages.NotStarted(reason=error.problem, is_mistake=True, parameter=error.parameter)
        socket.send(msgspec.msgpack.encode(report))
        return 1
    with closing(service):
        files, config = service.files, service.engine.config
        started = messages.Started(
            name=files.name,
            tokenizer_dir=None if service.input_processor.tokenizer is None else str(files.tokenizer_dir),
            trust_remote_code=files.trust_remote_code,
            vocab_size=service.input_processor.vocab_size,
            max_model_len=service.max_model_len,
            max_num_seqs=config.max_num_seqs,
            parallel=fleet_text(config.fleet),
            num_instances=config.cluster.num_instances,
            num_kv_blocks=sum(config.cluster.num_blocks),
            block_size=config.block_size,
            policy=service.policy_settings,
        )
        socket.send(msgspec.msgpack.encode(started))
        try:
            EngineLoop(service, setup, socket).run()
        except (WorkerLostError, OSError) as error:
            _log.error("workers do not come back: %s", error)
            socket.send(msgspec.msgpack.encode(messages.Ended(str(error))))
            return 1
    return 0


@dataclass(kw_only=True, eq=False)
class _Served:
    """A request of the API server, and how much of each choice was sent to it."""

    id: int
    state: RequestState
    sent: list[_Sent]
    num_losses: int = 0


@dataclass(kw_only=True)
class _Sent:
    num_characters: int = 0
    num_tokens: int = 0
    finished: bool = False


class EngineLoop:
    """Serves one API server over `socket` until it says `Quit`."""

    def __init__(self, service: Service, setup: messages.EngineSetup, socket: zmq.Socket[bytes]) -> None:
        self._service, self._setup, self._socket = service, setup, socket
        self._engine = service.engine
        self._served: dict[int, _Served] = {}
        self._running: RunningRequests[_Served] = RunningRequests(service.engine)
        self._commands: msgspec.msgpack.Decoder[messages.Command] = msgspec.msgpack.Decoder(messages.Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._num_attempts = self._num_restarts = 0
        self._resharding: messages.SetParallel | None = None
        self._stats_due_s, self._quitting = 0.0, False
        self._most_wait_s = min(_STATS_INTERVAL_S, setup.engine_timeout_s / 4)
        service.executor.wakeup = socket

    def run(self) -> None:
        """Serves until told to quit.

        Raises:
            WorkerLostError: when workers do not come back.
        """
        while not self._quitting:
            try:
                self._advance()
            except WorkerLostError as error:
                self._restart(error)

    def _advance(self) -> None:
        """Takes commands and a completion, whichever come; waits for one of them when there is nothing else to do."""
        while self._socket.poll(0):
            self._handle(self._commands.decode(self._socket.recv()))
            if self._quitting:
                return
        if self._engine.has_unfinished:
            self._step()
            if self._resharding is not None and not self._engine.is_regrouping:
                self._resharded(self._resharding.id)
        else:
            self._engine.check_when_idle()
            self._send_outputs(messages.StepOutputs(), with_stats=True)  # the API server is to hear that we live
            # Raises when a worker is lost, ends when there is a command.
            self._service.executor.poll(self._setup.engine_timeout_s / 4)

    def _handle(self, command: messages.Command) -> None:
        match command:
            case messages.Add():
                self._add(command)
            case messages.Cancel(id):
                if id in self._served:
                    self._drop(self._served[id], "abort")
            case messages.SetPolicy(id, options):
                self._set_policy(id, options)
            case messages.SetParallel():
                self._set_parallel(command)
            case messages.Quit():
                self._quitting = True

    def _set_policy(self, number: int | None, options: dict[str, str | None]) -> None:
        try:
            self._service.update_policy(options)
            self._send(messages.PolicySet(self._service.policy_settings, number))
        except ValueError as error:
            self._send(messages.Failed(number, str(error)))

    def _set_parallel(self, command: messages.SetParallel) -> None:
        """Begin a change of the fleet. Its options are set also if the fleet cannot change."""
        try:
            self._service.reshard(command.parallel, command.options)
            self._resharding = command
            self._send(messages.RequestLength(self._service.max_model_len))
        except ValueError as error:
            if command.options:
                self._set_policy(None, command.options)
            self._send(messages.Failed(command.id, str(error)))
        except RuntimeError:
            self._send(messages.Failed(command.id, "another change is under way: ask again once it is done"))

    def _add(self, command: messages.Add) -> None:
        number, engine_request = command.id, command.engine_request
        try:
            if not command.is_accepted and (reason := self._why_full(engine_request)) is not None:
                self._send(messages.Failed(number, reason, is_full=True))
                return
            state = RequestState(engine_request, self._service.input_processor.tokenizer)
            served = _Served(id=number, state=state, sent=[_Sent() for _ in range(engine_request.params.n)])
            self._running.start(served)
        except ValueError as error:  # the fleet has changed meanwhile, or the check of the API server lacks something
            code = error.code if isinstance(error, ContextLengthError) else None
            reason = f"{'' if code else 'the engine refused the request: '}{error}"
            self._send(messages.Failed(number, reason, "prompt", code=code))
            return
        self._served[number] = served
        self._send(messages.Accepted(number))

    def _why_full(self, engine_request: EngineRequest, *, is_retry: bool = False) -> str | None:
        """Returns why the queue has no room for an engine request, or None if it has."""
        most, most_tokens = self._setup.max_num_queued_reqs, self._setup.max_num_queued_tokens
        load, num_tokens = self._engine.load(), len(engine_request.token_ids)
        if load.num_waiting >= most:
            reason = f"{load.num_waiting} requests are waiting, of at most {most} (--max-num-queued-reqs)"
        # Whatever its length, a prompt may wait alone.
        elif load.num_waiting and load.num_waiting_tokens + num_tokens > most_tokens:
            words = f"prompts of {load.num_waiting_tokens} tokens are waiting: with another {num_tokens} they would be"
            reason = f"{words} more than {most_tokens} (--max-num-queued-tokens)"
        else:
            return None
        if is_retry:
            return reason
        self._engine.emit()  # some that were added just now need not wait
        return self._why_full(engine_request, is_retry=True)

    def _step(self) -> None:
        """Takes completions of the workers, or waits for one, and sends what they brought."""
        touched, outputs = self._running.step(self._most_wait_s), messages.StepOutputs()
        if touched:
            self._num_attempts = 0
        for served, error in touched.items():
            if error is not None:
                self._send(messages.Failed(served.id, f"the tokenizer cannot decode the output: {error!r:.200}"))
                self._drop(served, "error")
                continue
            if (failure := served.state.failure) is not None:  # an output without an end is no answer
                self._send(messages.failed(served.id, *failure))
                self._drop(served, "error")
                continue
            self._add_deltas(served, outputs)
            if served.state.finished:
                self._forget(served, outputs)
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: messages.StepOutputs, *, with_stats: bool = False) -> None:
        now = time.monotonic()
        if with_stats or now >= self._stats_due_s:
            self._stats_due_s = now + self._most_wait_s
            outputs.stats = self._stats()
        elif not outputs.deltas:
            return
        self._send(outputs)

    def _add_deltas(self, served: _Served, outputs: messages.StepOutputs) -> None:
        for index, (choice, sent) in enumerate(zip(served.state.choices, served.sent, strict=True)):
            if choice.num_taken == sent.num_tokens and choice.finished == sent.finished:
                continue
            delta = messages.delta_of(
                served.id,
                served.state,
                index,
                text_start=sent.num_characters,
                token_start=sent.num_tokens,
                with_prompt=not any(other.num_tokens for other in served.sent),
            )
            outputs.deltas.append(delta)
            request = choice.request
            if request.choice == 0 and sent.num_tokens == 0 and request.metrics.ttft_s is not None:
                outputs.ttft_s.append(request.metrics.ttft_s)
                outputs.num_prompt_tokens += len(request.prompt)
            outputs.tbt_s += request.metrics.tbt_s[max(0, sent.num_tokens - 1) :]  # the first token has none
            if choice.finished and not sent.finished:
                outputs.finished.append(_finished(request, served))
            sent.num_characters += len(delta.text)
            sent.num_tokens, sent.finished = len(request.output), choice.finished

    def _drop(self, served: _Served, reason: FinishReason) -> None:
        """Ends a request that nobody waits for; blocks that a step in flight names are freed when it completes."""
        outputs = messages.StepOutputs()
        for choice, sent in zip(served.state.choices, served.sent, strict=True):
            if not sent.finished:
                self._engine.finish(choice.request, reason)
                outputs.finished.append(_finished(choice.request, served))
        self._forget(served, outputs)
        self._send(outputs)

    def _forget(self, served: _Served, outputs: messages.StepOutputs) -> None:
        outputs.longest_outputs.append(max(len(choice.request.output) for choice in served.state.choices))
        del self._served[served.id]
        self._running.forget(served)

    def _resharded(self, number: int | None) -> None:
        """Tells that other instances serve now, and ends what they have no room for."""
        self._resharding, service = None, self._service
        for served in self._outgrown(()):
            self._drop(served, "error")
        self._send(messages.RequestLength(service.max_model_len))
        self._send(messages.ParallelSet(fleet_text(service.engine.config.fleet), service.policy_settings, number))

    def _restart(self, error: WorkerLostError) -> None:
        most = self._setup.max_worker_restarts
        does_without = most is not None and self._num_restarts >= most
        _log.error("%s; %s", error, "going on without its instance" if does_without else "starting new workers")
        self._send(messages.Restarting(str(error), is_replaced=not does_without))
        failed = []
        for served in self._served.values():
            if any(choice.request.group for choice in served.state.choices):
                served.num_losses += 1
                if served.num_losses >= _MAX_LOSSES:
                    failed.append(served)
                    cause = ", for lack of memory" if isinstance(error, OutOfMemoryError) else ""
                    reason = f"workers were lost {_MAX_LOSSES} times while this request ran{cause}"
                    self._send(messages.Failed(served.id, reason))
        if does_without:
            self._shrink(error)
            failed += self._outgrown(failed)
        else:
            self._start_workers(error)
            self._num_restarts += 1
        for served in failed:  # not before: the engine tells workers to free what they hold, and there were none
            self._drop(served, "error")
        self._send(messages.Restarted())
        if does_without:
            if self._resharding is not None:
                problem = f"a worker was lost meanwhile: the others serve on as {fleet_text(self._engine.config.fleet)}"
                self._send(messages.Failed(self._resharding.id, problem))
            self._resharded(None)
        self._send_outputs(messages.StepOutputs(), with_stats=True)  # nothing runs any more

    def _shrink(self, error: WorkerLostError) -> None:
        """Serves on by the instances that are left. An instance whose new worker does not start is left out, too.

        Raises:
            WorkerLostError: the latest loss, when no instance is left or the policy needs more of them.
            OSError: when no process can be started.
        """
        lost, num_failures = [error.rank], 0
        while True:
            try:
                self._service.shrink(*lost)
                break
            except ValueError as problem:
                most = self._setup.max_worker_restarts
                reason = (
                    f"{error.reason}; --max-worker-restarts {most} allows no further replacement, and the others "
                    f"cannot go on ({problem}): allow more restarts, or start anew with more instances"
                )
                raise WorkerLostError(error.rank, reason) from error
            except WorkerLostError as again:
                _log.warning("%s; going on without its instance, too", again)
                error = again
                lost.append(error.rank)
            except OSError:  # the process that forks workers was lost, too
                num_failures += 1
                if num_failures == _MAX_ATTEMPTS:
                    raise
                _log.exception("workers did not start")
                time.sleep(_PAUSE_S)
        self._service.executor.wakeup = self._socket
        _log.warning("going on as %s", fleet_text(self._engine.config.fleet))

    def _outgrown(self, told: Sequence[_Served]) -> list[_Served]:
        """Tells of requests that have ended since the devices that are left have no room for them, unless that is
        told.
        """
        found = []
        for served in self._served.values():
            if served in told:
                continue
            if (failure := served.state.failure) is not None:
                self._send(messages.failed(served.id, *failure))
                found.append(served)
        return found

    def _start_workers(self, error: Exception) -> None:
        while True:
            self._num_attempts += 1
            if self._num_attempts > _MAX_ATTEMPTS:
                raise error
            try:
                self._service.restart()
            except (WorkerLostError, OSError) as again:  # OSError: the process that forks them was lost, too
                error = again
                _log.exception("workers did not start")
                time.sleep(_PAUSE_S)
            else:
                self._service.executor.wakeup = self._socket
                return

    def _stats(self) -> messages.Stats:
        load = self._engine.load()
        return messages.Stats(
            num_kv_blocks=sum(self._engine.config.cluster.num_blocks),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_restarts=self._num_restarts,
            num_preemptions=self._engine.counts.num_preemptions,
            num_prefix_queries=self._engine.counts.num_prefix_queries,
            num_prefix_hits=self._engine.counts.num_prefix_hits,
            num_kv_violations=self._engine.watch.num_violations,
            num_external_queries=self._engine.counts.num_external_queries,
            num_host_hits=self._engine.kv.counts.num_hits,
            num_disk_hits=self._engine.kv.counts.num_disk_hits,
            host_blocks=load.host_blocks,
            disk_blocks=load.disk_blocks,
            block_bytes=self._service.block_bytes,
            used_blocks=load.used_blocks,
            busy_s=load.busy_s,
            bytes_sent=dict(self._engine.counts.bytes_sent),
        )

    def _send(self, report: messages.Report) -> None:
        self._socket.send(self._encoder.encode(report))


def _finished(request: Request, served: _Served) -> messages.FinishedChoice:
    metrics, reason = request.metrics, request.finish_reason
    assert reason is not None and metrics.finished_s is not None, "it has finished"
    arrival, scheduled, ttft = metrics.arrival_s, metrics.scheduled_s, metrics.ttft_s
    return messages.FinishedChoice(
        id=served.id,
        reason=reason,
        num_prompt_tokens=len(request.prompt),
        num_output_tokens=len(request.output),
        is_first_choice=request.choice == 0,
        queue_s=None if scheduled is None else scheduled - arrival,
        prefill_s=None if scheduled is None or ttft is None else arrival + ttft - scheduled,
        decode_s=None if ttft is None else metrics.finished_s - arrival - ttft,
        ttft_s=ttft,
        e2e_s=metrics.finished_s - arrival,
    )
