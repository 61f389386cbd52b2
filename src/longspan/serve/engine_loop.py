"""The loop of an engine core: it receives engine requests, runs the engine, and sends the outputs of each step.

When a worker is lost, new workers start and every request resumes exactly at its last token. Recomputed KV is the
same, and random numbers are keyed by position. A request that was running in two losses is assumed to be their cause
and fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import zmq

from longspan.core.fleets import fleet_text
from longspan.core.request import ContextLengthError, FinishReason, Request
from longspan.errors import OutOfMemoryError, ParameterError, WorkerLostError
from longspan.running_requests import RunningRequests
from longspan.serve import messages
from longspan.serve.upkeep import Upkeep
from longspan.service import Service
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import RequestState

_log = logging.getLogger("longspan")
_MAX_LOSSES = 2
"""A request fails if it was running in this number of consecutive losses of workers."""
_MAX_ATTEMPTS = 3
"""Number of consecutive starts of workers that may fail or bring no token."""
_PAUSE_S = 1.0
_STATS_INTERVAL_S = 0.5
_PROGRESS_INTERVAL_S = 1.0
"""Seconds between reports of the progress of prompts, which begin this time after their arrival."""


def serve(setup_json: bytes, folder: str) -> int:
    """Run until a `Quit` message. Return 1 if the engine cannot start or lost workers cannot be replaced, else 0.

    Args:
        setup_json: `EngineSetup` as JSON.
        folder: the folder of the API server's socket.
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
            cache_config=messages.CacheConfig(
                block_size=config.block_size,
                cache_dtype=files.dtype,
                enable_prefix_caching=config.prefix_caching,
            ),
            policy=service.policy_settings,
            stats=stats_of(service, 0),
        )
        socket.send(msgspec.msgpack.encode(started))
        try:
            EngineLoop(service, setup, socket).run()
        except (WorkerLostError, OSError) as error:
            _log.error("lost workers cannot be replaced: %s", error)
            socket.send(msgspec.msgpack.encode(messages.Ended(str(error))))
            return 1
    return 0


@dataclass(kw_only=True, eq=False)
class _Served:
    """A request of the API server, and the part of each choice that was sent.

    Attributes:
        num_reported: computed prompt tokens by the latest report of its progress.
    """

    id: int
    state: RequestState
    sent: list[_Sent]
    num_losses: int = 0
    num_reported: int = 0


@dataclass(kw_only=True)
class _Sent:
    num_characters: int = 0
    num_tokens: int = 0
    finished: bool = False


class EngineLoop:
    """Serves one API server over `socket` until it says `Quit`."""

    def __init__(self, service: Service, setup: messages.EngineSetup, socket: zmq.Socket[bytes]) -> None:
        self._service, self._setup, self._socket = service, setup, socket
        self._engine, self._upkeep = service.engine, Upkeep(service, tune_idle=setup.tune_idle)
        self._served: dict[int, _Served] = {}
        self._running: RunningRequests[_Served] = RunningRequests(service.engine)
        self._commands: msgspec.msgpack.Decoder[messages.Command] = msgspec.msgpack.Decoder(messages.Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._num_attempts = self._num_restarts = 0
        self._resharding: messages.SetParallel | None = None
        self._stats_due_s = self._progress_due_s = 0.0
        self._quitting = False
        self._max_wait_s = min(_STATS_INTERVAL_S, setup.engine_timeout_s / 4)
        service.executor.wakeup = socket

    def run(self) -> None:
        """Serve until a `Quit` message.

        Raises:
            WorkerLostError: lost workers cannot be replaced.
        """
        while not self._quitting:
            try:
                self._advance()
            except WorkerLostError as error:
                self._restart(error)

    def _advance(self) -> None:
        """Handle the pending commands and run one step. Without work, wait for a command or a lost worker."""
        while self._socket.poll(0):
            self._handle(self._commands.decode(self._socket.recv()))
            if self._quitting:
                return
        if self._resharding is None and self._service.can_grow():
            self._grow()
        if self._engine.has_unfinished:
            self._step()
            if self._resharding is not None and not self._engine.is_regrouping:
                self._resharded(self._resharding.id)
        else:
            self._engine.check_when_idle()
            self._send_outputs(messages.StepOutputs(), with_stats=True)  # a sign of life
            if not self._upkeep.tune():
                # Raises if a worker is lost, returns if there is a command.
                self._service.executor.poll(self._setup.engine_timeout_s / 4)

    def _handle(self, command: messages.Command) -> None:
        self._upkeep.stop_tuning()
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
            case messages.SetRecording(id, is_on):
                if is_on:
                    self._service.start_recording()
                else:
                    self._service.stop_recording()
                self._send(messages.Timeline(id, is_on))
            case messages.GetTimeline(id, seconds):
                trace = self._service.trace(seconds)
                self._send(messages.Timeline(id, is_on=trace is not None, trace=trace))
            case messages.Quit():
                self._quitting = True

    def _set_policy(self, number: int | None, options: dict[str, str | None]) -> None:
        try:
            self._service.update_policy(options)
            self._send(messages.PolicySet(self._service.policy_settings, number))
        except ValueError as error:
            self._send(messages.Failed(number, str(error)))

    def _set_parallel(self, command: messages.SetParallel) -> None:
        """Begin a change of the fleet. The options are set even if the fleet cannot change."""
        try:
            self._service.reshard(command.parallel, command.options)
            self._resharding = command
            self._send(messages.RequestLength(self._service.max_model_len))
        except ValueError as error:
            if command.options:
                self._set_policy(None, command.options)
            self._send(messages.Failed(command.id, str(error)))
        except RuntimeError:
            self._send(messages.Failed(command.id, "another change is under way: repeat the request when it is done"))

    def _add(self, command: messages.Add) -> None:
        number, engine_request = command.id, command.engine_request
        try:
            if not command.is_accepted and self._why_full(engine_request) is not None:
                self._engine.emit()  # may admit requests that were added just now
                if (reason := self._why_full(engine_request)) is not None:
                    self._send(messages.Failed(number, reason, is_full=True))
                    return
            state = RequestState(engine_request, self._service.input_processor.tokenizer)
            served = _Served(id=number, state=state, sent=[_Sent() for _ in range(engine_request.params.n)])
            self._running.start(served)
        except ValueError as error:  # the fleet has changed, or only the engine checks this
            code = error.code if isinstance(error, ContextLengthError) else None
            reason = f"{'' if code else 'the engine refused the request: '}{error}"
            self._send(messages.Failed(number, reason, "prompt", code=code))
            return
        expected_s = _expected_ttft_s(self._service, served, self._served.values())
        self._served[number] = served
        self._send(messages.Accepted(number, expected_s))

    def _why_full(self, engine_request: EngineRequest) -> str | None:
        """Return why the queue has no capacity for an engine request, or None."""
        max_reqs, max_tokens = self._setup.max_num_queued_reqs, self._setup.max_num_queued_tokens
        load, num_tokens = self._engine.load(), len(engine_request.token_ids)
        if load.num_waiting >= max_reqs:
            return f"{load.num_waiting} requests are waiting, of at most {max_reqs} (--max-num-queued-reqs)"
        # A prompt of any length may wait alone.
        if load.num_waiting and load.num_waiting_tokens + num_tokens > max_tokens:
            sum_ = f"prompts of {load.num_waiting_tokens} tokens are waiting: with another {num_tokens} they would be"
            return f"{sum_} more than {max_tokens} (--max-num-queued-tokens)"
        return None

    def _step(self) -> None:
        """Handle completions of the workers, or wait for one, and send the outputs."""
        touched, outputs = self._running.step(self._max_wait_s), messages.StepOutputs()
        if touched:
            self._num_attempts = 0
        for served, error in touched.items():
            if error is not None:
                self._send(messages.Failed(served.id, f"the tokenizer cannot decode the output: {error!r:.200}"))
                self._drop(served, "error")
                continue
            if (failure := served.state.failure) is not None:  # its output is incomplete
                self._send(messages.failed(served.id, *failure))
                self._drop(served, "error")
                continue
            self._add_deltas(served, outputs)
            if served.state.finished:
                self._forget(served, outputs)
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: messages.StepOutputs, *, with_stats: bool = False) -> None:
        now = time.monotonic()
        if now >= self._progress_due_s:
            self._progress_due_s = now + _PROGRESS_INTERVAL_S
            outputs.progress = _progress(self._served.values(), now - _PROGRESS_INTERVAL_S)
        if with_stats or now >= self._stats_due_s:
            self._stats_due_s = now + self._max_wait_s
            outputs.stats = stats_of(self._service, self._num_restarts)
            self._upkeep.keep_traffic()
        elif not (outputs.deltas or outputs.progress):
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
                outputs.num_cached_tokens += request.metrics.num_cached_tokens
            outputs.tbt_s += request.metrics.tbt_s[max(0, sent.num_tokens - 1) :]  # none before the first token
            if choice.finished and not sent.finished:
                outputs.finished.append(_finished(request, served))
            sent.num_characters += len(delta.text)
            sent.num_tokens, sent.finished = len(request.output), choice.finished

    def _drop(self, served: _Served, reason: FinishReason) -> None:
        """End a request that no client waits for. Blocks of a step in flight are freed when the step completes."""
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
        """Report the new fleet, and end the requests that do not fit on its devices."""
        self._resharding, service = None, self._service
        for served in self._report_failures():
            self._drop(served, "error")
        self._send(messages.RequestLength(service.max_model_len))
        self._send(messages.ParallelSet(fleet_text(service.engine.config.fleet), service.policy_settings, number))

    def _restart(self, error: WorkerLostError) -> None:
        max_restarts = self._setup.max_worker_restarts
        is_replaced = max_restarts is None or self._num_restarts < max_restarts
        _log.error("%s; %s", error, "starting new workers" if is_replaced else "continuing without its instance")
        self._send(messages.Restarting(str(error), is_replaced=is_replaced))
        failed, before = list[_Served](), self._engine.config.fleet
        for served in self._served.values():
            if any(choice.request.group for choice in served.state.choices):
                served.num_losses += 1
                if served.num_losses >= _MAX_LOSSES:
                    failed.append(served)
                    self._send(messages.Failed(served.id, _cause_of_losses(error)))
        if is_replaced:
            self._start_workers(error)
            self._num_restarts += 1
        else:
            self._shrink(error)
        is_changed = not is_replaced or self._engine.config.fleet != before
        if is_changed:
            _log.warning("continuing as %s", fleet_text(self._engine.config.fleet))
            failed += self._report_failures(failed)
        for served in failed:  # after the start, since dropping a request sends `Free` to workers
            self._drop(served, "error")
        self._restarted(is_changed=is_changed)

    def _grow(self) -> None:
        """Continue on more hosts. A loss meanwhile is handled as any other."""
        _log.warning("%s; starting workers on them", reason := "hosts have returned or are new")
        self._send(messages.Restarting(reason))
        self._service.restart()
        self._restarted(is_changed=True)

    def _restarted(self, *, is_changed: bool) -> None:
        """Report new workers, and another fleet if it has changed."""
        self._service.executor.wakeup = self._socket
        self._upkeep.stop_tuning(worker_lost=True)
        self._send(messages.Restarted())
        if is_changed:
            if self._resharding is not None:
                fleet = fleet_text(self._engine.config.fleet)
                problem = f"a worker was lost meanwhile: the other instances serve as {fleet}"
                self._send(messages.Failed(self._resharding.id, problem))
            self._resharded(None)
        self._send_outputs(messages.StepOutputs(), with_stats=True)  # no request runs now

    def _shrink(self, error: WorkerLostError) -> None:
        """Continue on the remaining instances, except instances whose new workers do not start.

        Raises:
            WorkerLostError: the latest loss, if no instance remains or the policy needs more instances.
            OSError: no process can be started.
        """
        lost, num_failures = [error.rank], 0
        while True:
            try:
                self._service.shrink(*lost)
                return
            except ValueError as problem:
                raise _no_part(error, self._setup.max_worker_restarts, problem) from error
            except WorkerLostError as again:
                _log.warning("%s; continuing without its instance, too", again)
                error = again
                lost.append(error.rank)
            except OSError:  # the process that forks workers was lost, too
                num_failures += 1
                if num_failures == _MAX_ATTEMPTS:
                    raise
                _log.exception("workers did not start")
                time.sleep(_PAUSE_S)

    def _report_failures(self, reported: Sequence[_Served] = ()) -> list[_Served]:
        """Report and return the requests that do not fit on the remaining devices, except those `reported` before."""
        failed = []
        for served in self._served.values():
            if served not in reported and (failure := served.state.failure) is not None:
                self._send(messages.failed(served.id, *failure))
                failed.append(served)
        return failed

    def _start_workers(self, error: Exception) -> None:
        while True:
            self._num_attempts += 1
            if self._num_attempts > _MAX_ATTEMPTS:
                raise error
            try:
                self._service.restart()
                return
            except (WorkerLostError, OSError) as again:  # OSError: the process that forks them was lost, too
                error = again
                _log.exception("workers did not start")
                time.sleep(_PAUSE_S)

    def _send(self, report: messages.Report) -> None:
        self._socket.send(self._encoder.encode(report))


def _cause_of_losses(error: WorkerLostError) -> str:
    cause = ", for lack of memory" if isinstance(error, OutOfMemoryError) else ""
    return f"workers were lost {_MAX_LOSSES} times while this request ran{cause}"


def _no_part(error: WorkerLostError, max_restarts: int | None, problem: ValueError) -> WorkerLostError:
    return WorkerLostError(
        error.rank,
        f"{error.reason}; --max-worker-restarts {max_restarts} allows no further replacement, and the other instances "
        f"cannot continue ({problem}): allow more restarts, or start again with more instances",
    )


def _expected_ttft_s(service: Service, served: _Served, before: Iterable[_Served]) -> float | None:
    """Return the predicted time to the first token of a new request, if this machine was profiled."""
    if service.setup.facts.profile is None:
        return None
    from longspan.serve.expected_ttft import expected_ttft_s  # noqa: PLC0415 - needed with a profile only

    requests = (choice.request for other in before for choice in other.state.choices)
    return expected_ttft_s(service, served.state.choices[0].request, requests)


def _progress(requests: Iterable[_Served], arrived_before_s: float) -> list[tuple[int, int, int]]:
    """Return the progress of prompts that have some since the latest report."""
    progress = []
    for served in requests:
        request = served.state.choices[0].request
        num_computed = min(request.num_computed, request.num_prompt)
        if not request.output and request.arrival_s <= arrived_before_s and num_computed > served.num_reported:
            served.num_reported = num_computed
            progress.append((served.id, num_computed, request.num_prompt))
    return progress


def stats_of(service: Service, num_restarts: int) -> messages.Stats:
    engine = service.engine
    load, changes = engine.load(), engine.regrouping
    return messages.Stats(
        num_kv_blocks=sum(engine.config.cluster.num_blocks),
        num_host_blocks=sum(engine.config.cluster.host_blocks),
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_restarts=num_restarts,
        num_preemptions=engine.counts.num_preemptions,
        num_prefix_queries=engine.counts.num_prefix_queries,
        num_prefix_hits=engine.counts.num_prefix_hits,
        num_kv_violations=engine.watch.num_violations,
        num_transitions=0 if changes is None else len(changes.transitions),
        transition_swap_s=0.0 if changes is None else changes.swap_s,
        transition_reshard_s=0.0 if changes is None else changes.reshard_s,
        num_external_queries=engine.counts.num_external_queries,
        num_host_hits=engine.kv.counts.num_hits,
        num_disk_hits=engine.kv.counts.num_disk_hits,
        host_blocks=load.host_blocks,
        disk_blocks=load.disk_blocks,
        block_bytes=service.block_bytes,
        used_blocks=load.used_blocks,
        busy_s=load.busy_s,
        bytes_sent=dict(engine.counts.bytes_sent),
    )


def _finished(request: Request, served: _Served) -> messages.FinishedChoice:
    metrics, reason = request.metrics, request.finish_reason
    assert reason is not None and metrics.finished_s is not None, "it has finished"
    arrival, scheduled, ttft = metrics.arrival_s, metrics.scheduled_s, metrics.ttft_s
    return messages.FinishedChoice(
        id=served.id,
        reason=reason,
        num_prompt_tokens=len(request.prompt),
        num_output_tokens=len(request.output),
        num_cached_tokens=metrics.num_cached_tokens,
        n=len(served.state.choices),
        max_tokens=request.max_tokens,
        is_first_choice=request.choice == 0,
        is_corrupted=request.error == "non_finite",
        queue_s=None if scheduled is None else scheduled - arrival,
        prefill_s=None if scheduled is None or ttft is None else arrival + ttft - scheduled,
        decode_s=None if ttft is None else metrics.finished_s - arrival - ttft,
        ttft_s=ttft,
        e2e_s=metrics.finished_s - arrival,
    )
