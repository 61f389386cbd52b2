"""One rank: a device, a model and a KV pool, and the steps that it is sent, computed first in first out.

It is given all of them, so that the same worker runs in a process of its own or in a thread; see `load_worker`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import torch
import zmq
from torch import Tensor

from longspan.attn.backends import AttentionBackend, backend_of
from longspan.attn.comm import CommError, Transport
from longspan.core.cluster import Cluster
from longspan.core.steps import Forward, Sampled, Scored, TokenLogprobs
from longspan.model.adapter import Model
from longspan.model.store import DTYPES
from longspan.runtime import messages
from longspan.runtime.attention import StepAttention
from longspan.runtime.batch import Packed, PromptRows, RankRequest, RankRequests, pack, resolve
from longspan.runtime.layerwise import Layerwise
from longspan.runtime.moves import BlockMessages, Moves, StepMoves
from longspan.runtime.pool import KvPool
from longspan.runtime.sampling import Vocabulary, sample, token_logprobs
from longspan.runtime.step_comm import StepComm
from longspan.runtime.timing import Stopwatch, TimedTransport

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
    """Computes the steps of one rank with its share of a model, a KV pool and transports that it is given."""

    def __init__(
        self,
        rank: int,
        cluster: Cluster,
        model: Model,
        pool: KvPool,
        transports: Transports,
        *,
        backend: AttentionBackend,
        vocabulary: Vocabulary,
        record_times: bool,
    ) -> None:
        self._rank, self._cluster, self._model, self._pool = rank, cluster, model, pool
        self._instance, _, self._shard = cluster.at(rank)
        self._device, self._dtype = model.module.device, model.module.dtype
        self._backend, self._layerwise = backend, Layerwise(model)
        self._requests = RankRequests(vocabulary, self._device)
        self._watch = Stopwatch(enabled=record_times, device=self._device)
        self._watch.watch_linear(model.module)
        self._exchange = TimedTransport(transports.exchange, self._watch)
        self._rebalances = TimedTransport(transports.rebalances, self._watch)
        self._messages = BlockMessages(pool, model.info.specs, cluster, rank)
        self._moves = Moves(self._messages, transports.moves)

    def serve(self, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> bool:
        """Works until it is told to stop; returns whether no KV was on its way then."""
        send_report(reports, messages.Ready(rank=self._rank))
        inbox = Inbox(commands, self._moves.wakeup)
        while True:
            with self._watch.during("controller"):
                new = inbox.receive()
            for command in new:
                if isinstance(command, messages.RunMoves):  # what will come is received whatever is computed meanwhile
                    self._moves.expect(command.moves)
            for report in self._moves.take_arrived():
                send_report(reports, report)
            match inbox.next():
                case messages.RunForward(step):
                    send_report(reports, self._run(step))
                case messages.RunMoves(moves):
                    for report in self._moves.send(moves):
                        send_report(reports, report)
                case messages.RunFree(step):
                    self._requests.forget(step.request_ids)
                case messages.Stop():
                    return self._moves.is_idle

    def close(self) -> None:
        """Ends the threads that move KV, once its transports are closed, and gives the model back as it was.

        A process that ends need not call it.
        """
        self._moves.close()
        self._layerwise.close()

    def _run(self, forward: Forward) -> messages.Done:
        """Computes this rank's share of a step and samples."""
        packed = pack(
            forward,
            self._requests,
            instance=self._instance,
            block_size=self._pool.block_size,
            device=self._device,
            backend=self._backend,
        )
        comm = StepComm(
            self._exchange,
            forward.number,
            cluster=self._cluster,
            rank=self._rank,
            num_layers=self._model.info.num_layers,
        )
        moves = StepMoves(forward, self._messages, rebalances=self._rebalances, moves=self._moves, sent=comm.sent)
        resolve(packed, self._requests, comm.everyone())
        attention = StepAttention(
            packed,
            comm,
            pool=self._pool,
            specs=self._model.specs,
            watch=self._watch,
            layerwise=self._layerwise,
            moves=moves,
        )
        sampled: tuple[Sampled, ...] = ()
        scored: tuple[Scored, ...] = ()
        with self._model.summed_by(comm.all_reduce):
            if len(packed.tokens):
                row = packed.tokens, packed.positions, packed.keep
                logits = self._model.forward(*row, attention, packed.rope_lengths)
                tokens = self._sample(packed, logits)
                if self._shard == 0:  # every rank of an instance knows its tokens; one reports them
                    sampled = tuple(self._sampled(packed, logits, tokens))
                    scored = tuple(self._score(prompt) for prompt in packed.prompts)
            else:
                attention.without_tokens(self._dtype, self._device)
        attention.finish()
        for transport in (self._exchange, self._rebalances):  # whose peers receive in the same step
            transport.complete_sends()
        return messages.Done(
            rank=self._rank,
            number=forward.number,
            sampled=sampled,
            scored=scored,
            bytes_sent=dict(comm.sent),
            times=self._watch.seconds(),
        )

    def _sample(self, packed: Packed, logits: Tensor) -> list[int]:
        """Samples one token per row of `logits [n, vocab]`."""
        if not packed.samples:
            return []
        requests = [self._requests[request_id] for request_id in packed.request_ids]
        tokens = sample(logits, [r.draw(one) for r, one in zip(requests, packed.samples, strict=True)])
        for request, token in zip(requests, tokens, strict=True):
            request.last_token = token
        return tokens

    def _sampled(self, packed: Packed, logits: Tensor, tokens: Sequence[int]) -> Iterator[Sampled]:
        """Reports sampled tokens, each with what its request wants to know of it."""
        requests = [self._requests[request_id] for request_id in packed.request_ids]
        logprobs = _logprobs(logits, tokens, requests)
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            data = logits[row].cpu().numpy().tobytes() if request.sampling.output_logits else b""
            yield Sampled(
                request_id=packed.request_ids[row],
                token=token,
                logits=data,
                logprobs=logprobs.get(row),
                error=request.error,
            )

    def _score(self, prompt: PromptRows) -> Scored:
        """Returns the logprobs of prompt tokens after `Model.forward`; makes logits a tile of tokens at a time."""
        num_top = self._requests[prompt.request_id].sampling.prompt_logprobs or 0
        found: list[TokenLogprobs] = []
        for start in range(0, len(prompt.rows), _LOGITS_TILE):
            targets = prompt.targets[start : start + _LOGITS_TILE]
            logits = self._model.logits(prompt.rows[start : start + _LOGITS_TILE])
            found += token_logprobs(logits, targets, [num_top] * len(targets))
        return Scored(request_id=prompt.request_id, positions=prompt.positions, logprobs=tuple(found))


def load_worker(config: messages.WorkerConfig, rank: int, device: torch.device, transports: Transports) -> Worker:
    files, cluster = config.files, config.cluster
    instance, _, shard = cluster.at(rank)
    model = Model(files, device, tp_index=shard, tp=cluster.tp(instance))
    pool = KvPool(
        model.specs,
        num_blocks=cluster.num_blocks[instance],
        block_size=config.block_size,
        dtype=DTYPES[files.dtype],
        device=device,
    )
    vocabulary = Vocabulary(files, size=model.info.vocab_size, eos_token_ids=model.info.eos_token_ids)
    return Worker(
        rank,
        cluster,
        model,
        pool,
        transports,
        backend=backend_of(device, compiled=config.attention_kernel is not None),
        vocabulary=vocabulary,
        record_times=config.record_times,
    )


def _logprobs(logits: Tensor, tokens: Sequence[int], requests: Sequence[RankRequest]) -> dict[int, TokenLogprobs]:
    wanted = {row: request.sampling.logprobs for row, request in enumerate(requests)}
    num_top = {row: number for row, number in wanted.items() if number is not None}
    if not num_top:
        return {}
    found = token_logprobs(logits[list(num_top)], [tokens[row] for row in num_top], list(num_top.values()))
    return dict(zip(num_top, found, strict=True))


class Inbox:
    """Commands in their order, seen as soon as they have come. The descriptor `wakeup` ends the wait for one, too."""

    def __init__(self, commands: zmq.Socket[bytes], wakeup: int) -> None:
        self._commands, self._poller = commands, zmq.Poller()
        self._decoder = msgspec.msgpack.Decoder(messages.Command)
        self._waiting: deque[messages.Command] = deque()
        for source in (commands, wakeup):
            self._poller.register(source, zmq.POLLIN)

    def receive(self) -> list[messages.Command]:
        """Takes the commands that have come; waits for something if there is nothing to do."""
        self._poller.poll(0 if self._waiting else None)
        new = []
        with suppress(zmq.Again):
            while True:
                new.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
        self._waiting.extend(new)
        return new

    def next(self) -> messages.Command | None:
        return self._waiting.popleft() if self._waiting else None


def send_report(reports: zmq.Socket[bytes], report: messages.Report) -> None:
    reports.send(msgspec.msgpack.encode(report))


def failure(rank: int, error: Exception) -> messages.Failed:
    return messages.Failed(rank=rank, reason=f"{type(error).__name__}: {error}", peer=isinstance(error, CommError))
