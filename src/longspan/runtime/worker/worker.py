"""One rank: a process that owns a device, a model and a KV pool, and computes the steps it is sent, first in first out.

It is forked from a process that has imported this module, see `runtime.forkserver`, and ends when that one does.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from longspan.attn import native
from longspan.attn.comm import CommError
from longspan.core.steps import Forward, MoveKV, Sampled, Scored, TokenLogprobs
from longspan.model.adapter import Model
from longspan.model.files import ModelFiles
from longspan.model.store import DTYPES
from longspan.runtime.kv.block_messages import BlockMessages
from longspan.runtime.kv.pool import KvPool
from longspan.runtime.messages import (
    Command,
    Done,
    Failed,
    Moved,
    Ready,
    Report,
    RunForward,
    RunFree,
    RunMoves,
    Sent,
    Stop,
    WorkerConfig,
    command_address,
    report_address,
)
from longspan.runtime.sampling.penalties import Vocabulary
from longspan.runtime.sampling.sampler import sample, token_logprobs
from longspan.runtime.worker.attention import StepAttention
from longspan.runtime.worker.batch import Packed, PromptRows, pack
from longspan.runtime.worker.network import Network, keep_to_cores, open_device
from longspan.runtime.worker.requests import RankRequest, RankRequests, resolve
from longspan.runtime.worker.step_comm import StepComm
from longspan.runtime.worker.timing import Stopwatch

_log = logging.getLogger("longspan.worker")
_LOGITS_TILE = 256
"""Prompt tokens whose logits are made at a time: the logits of 8K tokens would take more memory than most models."""


class Worker:
    """Computes Forwards."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._device = open_device(config.device, config.rank)
        self._dtype = DTYPES[config.dtype]
        files = ModelFiles(
            name=config.model_name,
            config_dir=Path(config.config_dir),
            weights=Path(config.weights),
            tokenizer_dir=None if config.tokenizer_dir is None else Path(config.tokenizer_dir),
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        fleet = config.fleet
        self._instance, self._tp_index = fleet.place(config.rank)
        self._model = Model.load(files, self._device, tp_index=self._tp_index, tp=fleet.tps[self._instance])
        self._pool = KvPool(
            self._model.specs,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=self._dtype,
            device=self._device,
        )
        info = self._model.info
        self._requests = RankRequests(
            vocab_size=info.vocab_size,
            device=self._device,
            vocabulary=Vocabulary(files, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids),
        )
        self.watch = Stopwatch(enabled=config.record_times, device=self._device)
        self.watch.watch_linear(self._model.module)
        self.network = None
        if fleet.num_ranks > 1:
            messages = BlockMessages(self._pool, info.specs, fleet, config.rank)
            self.network = Network(config, self._device, messages, self.watch)

    def move(self, commands: Sequence[Command]) -> Iterator[Moved | Sent]:
        """Receives KV: posts what new commands say will come, takes in what has come. Reports what has left, too."""
        if self.network is not None:
            for command in commands:
                if isinstance(command, RunMoves):
                    self.network.moves.expect(command.moves)
            yield from self.network.moves.take_arrived()

    def send(self, moves: Sequence[MoveKV]) -> Iterator[Moved]:
        """Sends KV that this rank has."""
        if self.network is not None:
            yield from self.network.moves.send(moves)

    def forget(self, request_ids: tuple[int, ...]) -> None:
        """Drops requests."""
        self._requests.forget(request_ids)

    def run(self, forward: Forward) -> Done:
        """Computes this rank's share and samples what it is asked to."""
        config, info = self._config, self._model.info
        packed = pack(
            forward, self._requests, instance=self._instance, block_size=config.block_size, device=self._device
        )
        comm = StepComm(
            None if self.network is None else self.network.exchange,
            forward.number,
            fleet=config.fleet,
            rank=config.rank,
            hosts=config.hosts,
            num_layers=info.num_layers,
        )
        moves = None if self.network is None else self.network.step_moves(forward, comm.sent)
        resolve(packed.unknown, packed.tokens, self._requests, comm.everyone())
        self._model.reduce = comm.all_reduce
        attention = StepAttention(
            packed, comm, pool=self._pool, specs=self._model.specs, watch=self.watch, model=self._model, moves=moves
        )
        sampled: tuple[Sampled, ...] = ()
        scored: tuple[Scored, ...] = ()
        if len(packed.tokens):
            logits = self._model.forward(packed.tokens, packed.positions, packed.keep, attention, packed.rope_lengths)
            sampled = tuple(self._sample(packed, logits))
            scored = tuple(score_prompt(prompt, self._model, self._requests) for prompt in packed.prompts)
            if self._tp_index > 0:  # every rank of an instance knows its tokens; one tells them
                sampled, scored = (), ()
        else:
            attention.without_tokens(self._dtype, self._device)
        attention.finish()
        if self.network is not None:
            self.network.flush()
        return Done(rank=config.rank, number=forward.number, sampled=sampled, scored=scored, bytes_sent=dict(comm.sent))

    def _sample(self, packed: Packed, logits: Tensor) -> Iterator[Sampled]:
        """One token per row of `logits [n, vocab]`, reported with what its request wants to know of it."""
        if not packed.samples:
            return
        requests = [self._requests[request_id] for request_id in packed.request_ids]
        tokens = sample(logits, [r.draw(wish) for r, wish in zip(requests, packed.samples, strict=True)])
        logprobs = _logprobs(logits, tokens, requests)
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            request.last_token = token
            data = logits[row].cpu().numpy().tobytes() if request.sampling.output_logits else b""
            yield Sampled(
                request_id=packed.request_ids[row],
                token=token,
                logits=data,
                logprobs=logprobs.get(row),
                error=request.error,
            )


def score_prompt(prompt: PromptRows, model: Model, requests: RankRequests) -> Scored:
    """The logprobs of prompt tokens after `Model.forward`, with the logits of a tile of tokens at a time."""
    num_top = requests[prompt.request_id].sampling.prompt_logprobs or 0
    found: list[TokenLogprobs] = []
    for start in range(0, len(prompt.rows), _LOGITS_TILE):
        targets = prompt.targets[start : start + _LOGITS_TILE]
        logits = model.logits(prompt.rows[start : start + _LOGITS_TILE])
        found += token_logprobs(logits, targets, [num_top] * len(targets))
    return Scored(request_id=prompt.request_id, positions=prompt.positions, logprobs=tuple(found))


def _logprobs(logits: Tensor, tokens: Sequence[int], requests: Sequence[RankRequest]) -> dict[int, TokenLogprobs]:
    """By row, of the rows that are to report them."""
    wanted = {row: request.sampling.logprobs for row, request in enumerate(requests)}
    num_top = {row: number for row, number in wanted.items() if number is not None}
    if not num_top:
        return {}
    found = token_logprobs(logits[list(num_top)], [tokens[row] for row in num_top], list(num_top.values()))
    return dict(zip(num_top, found, strict=True))


def main(config: WorkerConfig, lifeline: int) -> None:
    """Runs a worker until it is told to stop, its controller goes away, or it fails.

    The pipe `lifeline` (a file descriptor) is closed at its other end when the controller is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the controller decides
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s rank {config.rank} %(levelname)s %(message)s"
    )
    threading.Thread(target=_exit_with_controller, args=(config.run_dir, lifeline), daemon=True).start()
    context = zmq.Context()
    commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.bind(command_address(config.run_dir, config.rank))
    reports.connect(report_address(config.run_dir))
    try:
        is_complete = _serve(config, commands, reports)
    except Exception as error:  # noqa: BLE001 - whatever it is, the controller must hear of it and the process end
        _log.exception("the worker fails")
        failed = Failed(rank=config.rank, reason=f"{type(error).__name__}: {error}", peer=isinstance(error, CommError))
        _send(reports, failed)
        context.destroy(linger=1000)
        os._exit(1)  # at once, so that the peers' transfers fail instead of waiting for a time-out
    context.destroy(linger=1000)
    if dist.is_initialized() and is_complete:  # otherwise a thread waits in it, and the process just ends
        dist.destroy_process_group()


def _serve(config: WorkerConfig, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> bool:
    """Works until it is told to stop; returns whether no KV was on its way then."""
    torch.set_num_threads(config.num_threads)
    keep_to_cores(config.device, config.rank, config.fleet.num_ranks)
    if config.attention_kernel is not None:
        native.load(Path(config.attention_kernel))
    worker = Worker(config)
    _send(reports, Ready(rank=config.rank))
    _log.info("ready: %s on %s, %d threads", config.model_name, config.device, config.num_threads)
    inbox = Inbox(commands, [] if worker.network is None else [worker.network.moves.wakeup])
    while True:
        with worker.watch.during("controller"):
            new = inbox.receive()
        for report in worker.move(new):
            _send(reports, report)
        match inbox.next():
            case RunForward(step):
                done = worker.run(step)
                _send(reports, msgspec.structs.replace(done, times=worker.watch.seconds()))
            case RunMoves(moves):
                for report in worker.send(moves):
                    _send(reports, report)
            case RunFree(step):
                worker.forget(step.request_ids)
            case Stop():
                return worker.network is None or worker.network.moves.is_idle


class Inbox:
    """Commands in their order, seen as soon as they have come. The descriptors `others` end the wait for one, too."""

    def __init__(self, commands: zmq.Socket[bytes], others: Sequence[int]) -> None:
        self._commands, self._poller = commands, zmq.Poller()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._waiting: deque[Command] = deque()
        for source in (commands, *others):
            self._poller.register(source, zmq.POLLIN)

    def receive(self) -> list[Command]:
        """The commands that have come since; waits for something if there is nothing to do."""
        self._poller.poll(0 if self._waiting else None)
        new = []
        with suppress(zmq.Again):
            while True:
                new.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
        self._waiting.extend(new)
        return new

    def next(self) -> Command | None:
        """What to do now, if anything."""
        return self._waiting.popleft() if self._waiting else None


def _send(reports: zmq.Socket[bytes], report: Report) -> None:
    reports.send(msgspec.msgpack.encode(report))


def _exit_with_controller(run_dir: str, lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written
    _log.warning("the controller is gone")
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(1)
