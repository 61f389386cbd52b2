"""One rank: a device, a model and a KV pool, and the steps that it is sent, computed first in first out.

It is given all of them, so that the same worker runs in a process of its own or in a thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import torch
import zmq
from torch import Tensor

from longspan.attn.comm import CommError, Transport
from longspan.core.cluster import Cluster
from longspan.core.steps import Forward, Link, MoveKV, Sampled, Scored, TokenLogprobs
from longspan.layerwise.step import Layerwise
from longspan.model.adapter import Model
from longspan.model.store import DTYPES
from longspan.runtime.kv.block_messages import BlockMessages
from longspan.runtime.kv.moves import Moves, StepMoves
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
)
from longspan.runtime.sampling.penalties import Vocabulary
from longspan.runtime.sampling.sampler import sample, token_logprobs
from longspan.runtime.worker.attention import StepAttention
from longspan.runtime.worker.batch import Packed, PromptRows, pack
from longspan.runtime.worker.requests import RankRequest, RankRequests, resolve
from longspan.runtime.worker.step_comm import MoveComm, StepComm
from longspan.runtime.worker.timing import Stopwatch, TimedTransport

_LOGITS_TILE = 256
"""Prompt tokens whose logits are made at a time: the logits of 8K tokens would take more memory than most models."""


@dataclass(frozen=True, kw_only=True)
class Transports:
    """A rank's links to the others, one per kind of work, so that none waits for another kind.

    Attributes:
        exchange: for the exchanges of a Forward and the ranks of an instance; peers receive in the same step.
        rebalances: for KV that a Forward moves between its members; peers receive in the same step.
        moves: for KV that moves between ranks in different steps; what it starts waits for its sends, too.
    """

    exchange: Transport
    rebalances: Transport
    moves: Transport


class Worker:
    """Computes the steps of one rank with a model, a KV pool and transports that it is given.

    Args:
        model: the rank's share of it.
        transports: None when there is no other rank.
        vocabulary: for structured outputs; without one, no request may have a grammar.
    """

    def __init__(
        self,
        rank: int,
        cluster: Cluster,
        model: Model,
        pool: KvPool,
        transports: Transports | None,
        *,
        vocabulary: Vocabulary | None = None,
        record_times: bool = False,
    ) -> None:
        self.rank, self._cluster = rank, cluster
        self._instance, _, self._tp_index = cluster.at(rank)
        self._model, self._pool = model, pool
        self._layerwise = Layerwise(model)
        self._device, self._dtype = model.module.device, model.module.dtype
        self._requests = RankRequests(vocab_size=model.info.vocab_size, device=self._device, vocabulary=vocabulary)
        self.watch = Stopwatch(enabled=record_times, device=self._device)
        self.watch.watch_linear(model.module)
        self.network = None
        if transports is not None:
            messages = BlockMessages(pool, model.info.specs, cluster, rank)
            self.network = Network(transports, messages, self.watch, rank=rank, hosts=cluster.hosts)

    @classmethod
    def load(cls, config: WorkerConfig, rank: int, device: torch.device, transports: Transports | None) -> Worker:
        """Makes a worker that owns its model and its pool, on `device`."""
        files, cluster = config.files, config.cluster
        instance, _, tp_index = cluster.at(rank)
        model = Model.load(files, device, tp_index=tp_index, tp=cluster.tp(instance))
        pool = KvPool(
            model.specs,
            num_blocks=cluster.num_blocks(instance),
            block_size=config.block_size,
            dtype=DTYPES[files.dtype],
            device=device,
        )
        return cls(
            rank,
            cluster,
            model,
            pool,
            transports,
            vocabulary=Vocabulary(files, vocab_size=model.info.vocab_size, eos_token_ids=model.info.eos_token_ids),
            record_times=config.record_times,
        )

    def serve(self, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> bool:
        """Works until it is told to stop; returns whether no KV was on its way then."""
        send_report(reports, Ready(rank=self.rank))
        inbox = Inbox(commands, [] if self.network is None else [self.network.moves.wakeup])
        while True:
            with self.watch.during("controller"):
                new = inbox.receive()
            for report in self.move(new):
                send_report(reports, report)
            match inbox.next():
                case RunForward(step):
                    done = self.run(step)
                    send_report(reports, msgspec.structs.replace(done, times=self.watch.seconds()))
                case RunMoves(moves):
                    for report in self.send(moves):
                        send_report(reports, report)
                case RunFree(step):
                    self.forget(step.request_ids)
                case Stop():
                    return self.network is None or self.network.moves.is_idle

    def close(self) -> None:
        """Ends the threads that move KV, once its transports are closed. A process that ends need not call it."""
        if self.network is not None:
            self.network.moves.close()

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
        """Forgets all of these requests."""
        self._requests.forget(request_ids)

    def run(self, forward: Forward) -> Done:
        """Computes this rank's share and samples what it is asked to."""
        info = self._model.info
        packed = pack(
            forward, self._requests, instance=self._instance, block_size=self._pool.block_size, device=self._device
        )
        comm = StepComm(
            None if self.network is None else self.network.exchange,
            forward.number,
            cluster=self._cluster,
            rank=self.rank,
            num_layers=info.num_layers,
        )
        moves = None if self.network is None else self.network.step_moves(forward, comm.sent)
        resolve(packed.unknown, packed.tokens, self._requests, comm.everyone())
        self._model.reduce = comm.all_reduce
        attention = StepAttention(
            packed,
            comm,
            pool=self._pool,
            specs=self._model.specs,
            watch=self.watch,
            layerwise=self._layerwise,
            moves=moves,
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
            self.network.complete_sends()
        return Done(rank=self.rank, number=forward.number, sampled=sampled, scored=scored, bytes_sent=dict(comm.sent))

    def _sample(self, packed: Packed, logits: Tensor) -> Iterator[Sampled]:
        """Samples one token per row of `logits [n, vocab]`, reported with what its request wants to know of it."""
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
    """Returns the logprobs of prompt tokens after `Model.forward`, with the logits of a tile of tokens at a time."""
    num_top = requests[prompt.request_id].sampling.prompt_logprobs or 0
    found: list[TokenLogprobs] = []
    for start in range(0, len(prompt.rows), _LOGITS_TILE):
        targets = prompt.targets[start : start + _LOGITS_TILE]
        logits = model.logits(prompt.rows[start : start + _LOGITS_TILE])
        found += token_logprobs(logits, targets, [num_top] * len(targets))
    return Scored(request_id=prompt.request_id, positions=prompt.positions, logprobs=tuple(found))


def _logprobs(logits: Tensor, tokens: Sequence[int], requests: Sequence[RankRequest]) -> dict[int, TokenLogprobs]:
    """Returns logprobs by row, of the rows that are to report them."""
    wanted = {row: request.sampling.logprobs for row, request in enumerate(requests)}
    num_top = {row: number for row, number in wanted.items() if number is not None}
    if not num_top:
        return {}
    found = token_logprobs(logits[list(num_top)], [tokens[row] for row in num_top], list(num_top.values()))
    return dict(zip(num_top, found, strict=True))


class Network:
    """One rank's end of all messages; waiting for those of a Forward counts as such in `watch`."""

    def __init__(
        self, transports: Transports, messages: BlockMessages, watch: Stopwatch, *, rank: int, hosts: Sequence[int]
    ) -> None:
        self.exchange = TimedTransport(transports.exchange, watch)
        self._rebalance = TimedTransport(transports.rebalances, watch)
        self._rebalances = MoveComm(
            self._rebalance, "kv_balance", rank=rank, hosts=hosts, num_layers=messages.num_layers
        )
        self.moves = Moves(messages, transports.moves, rank=rank, hosts=hosts)
        self._messages = messages

    def step_moves(self, forward: Forward, sent: Counter[tuple[str, Link]]) -> StepMoves:
        """Makes this rank's end of what a Forward moves; counts what it sends in `sent`."""
        return StepMoves(forward, self._messages, rebalances=self._rebalances, moves=self.moves, sent=sent)

    def complete_sends(self) -> None:
        """Waits until what a Forward has sent to its members has left, since they receive it in the same step."""
        self.exchange.complete_sends()
        self._rebalance.complete_sends()


class Inbox:
    """Commands in their order, seen as soon as they have come. The descriptors `others` end the wait for one, too."""

    def __init__(self, commands: zmq.Socket[bytes], others: Sequence[int]) -> None:
        self._commands, self._poller = commands, zmq.Poller()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._waiting: deque[Command] = deque()
        for source in (commands, *others):
            self._poller.register(source, zmq.POLLIN)

    def receive(self) -> list[Command]:
        """Takes the commands that have come since; waits for something if there is nothing to do."""
        self._poller.poll(0 if self._waiting else None)
        new = []
        with suppress(zmq.Again):
            while True:
                new.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
        self._waiting.extend(new)
        return new

    def next(self) -> Command | None:
        """Takes what to do now, if anything."""
        return self._waiting.popleft() if self._waiting else None


def send_report(reports: zmq.Socket[bytes], report: Report) -> None:
    """Tells the controller."""
    reports.send(msgspec.msgpack.encode(report))


def failure(rank: int, error: Exception) -> Failed:
    """Says why a worker ends, and whether another one is to blame."""
    return Failed(rank=rank, reason=f"{type(error).__name__}: {error}", peer=isinstance(error, CommError))
