"""One rank of a cluster: a device, a share of a model, a KV pool, and the steps that it is sent, first in first out.

It is given all of them, so that the same worker runs in a process of its own or in a thread; see `runtime.rank`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq
from torch import Tensor

from longspan.attn.backends import AttentionBackend
from longspan.attn.comm import CommError, Message, Pending, Transport
from longspan.core.cluster import Cluster
from longspan.core.steps import Forward, Sampled, Scored, TokenLogprobs
from longspan.model.adapter import Model
from longspan.model.trunk import Output
from longspan.runtime import messages
from longspan.runtime.attention import StepAttention
from longspan.runtime.batch import Packed, PromptRows, RankRequest, RankRequests, pack, resolve
from longspan.runtime.block_messages import BlockMessages
from longspan.runtime.layerwise import Layerwise
from longspan.runtime.moves import Moves, StepMoves
from longspan.runtime.pool import KvPool
from longspan.runtime.sampling import Vocabulary, sample, token_logprobs
from longspan.runtime.step_comm import StepComm, StepLanes
from longspan.runtime.timing import Stopwatch, TimedTransport

if TYPE_CHECKING:
    from longspan.runtime.host_pool import HostPool

_HIDDEN_HOP, _SAMPLES_HOP = 0, 1
_LOGITS_TILE = 256
"""Prompt tokens whose logits are made at a time: the logits of 8K tokens would take more memory than most models."""


@dataclass(frozen=True, kw_only=True)
class Transports:
    """A rank's links to the others, one per kind of work, so that none waits for another kind.

    Attributes:
        steps: for the exchanges of a Forward and the ranks of a stage.
        rebalances: for KV that a Forward moves between its members; peers receive in the same step.
        moves: for KV that moves between ranks in different steps; what it starts waits for its sends, too.
        hidden: for hidden states, which a pipeline stage sends to the next; nobody waits until they have left.
        samples: for tokens, which the last stage sends to the first as soon as it has sampled them.
        close: closes them all, when no rank uses any of them.
        meet: makes the sums of these sets of ranks possible, while no step runs. All ranks call it with the same ones,
            in the same order, also those in none of them.
    """

    steps: StepLanes
    rebalances: Transport
    moves: Transport
    hidden: Transport
    samples: Transport
    close: Callable[[], None] = lambda: None
    meet: Callable[[Sequence[Sequence[int]]], None] = lambda _: None


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
        watch: Stopwatch,
        host: HostPool | None = None,
    ) -> None:
        self._rank, self._cluster, self._model, self._pool = rank, cluster, model, pool
        self._instance, self._stage, self._shard = cluster.at(rank)
        num_stages = cluster.pp(self._instance)
        self._is_last, self._most_steps = self._stage + 1 == num_stages, num_stages + 1
        readers = range(num_stages if model.info.reads_tokens else 1)
        self._reads_tokens, self._readers = self._stage in readers, [one for one in readers if one + 1 < num_stages]
        self._device, self._dtype = model.module.device, model.module.dtype
        self._backend, self._layerwise = backend, Layerwise(model)
        self._requests = RankRequests(vocabulary, self._device, samples=self._is_last)
        self._leaving = deque[Pending]()  # what was sent to other stages, oldest first
        self._unread = deque[tuple[tuple[int, ...], Message, Pending]]()  # samples of the last stage, oldest first
        self._watch = watch
        self._lanes = transports.steps.each(lambda lane: TimedTransport(lane, watch))
        self._rebalances = TimedTransport(transports.rebalances, self._watch)
        self._hidden = TimedTransport(transports.hidden, self._watch)
        self._samples = TimedTransport(transports.samples, self._watch)
        self._messages = BlockMessages(pool, cluster, rank)
        self._host, self._moves = host, Moves(self._messages, transports.moves, host)

    @property
    def wakeup(self) -> int:
        """A file descriptor that can be read when there may be something to do besides commands."""
        return self._moves.wakeup

    def serve(self, inbox: Inbox, reports: zmq.Socket[bytes]) -> messages.RunReshard | messages.Measure | None:
        """Works until it is told something else than steps, which it returns, or to stop: then there is none."""
        while True:
            with self._watch.during("controller"):
                new = inbox.receive()
            self._prepare(new)
            for report in self._moves.take_arrived():
                send_report(reports, report)
            match inbox.next():
                case messages.RunForward(step):
                    send_report(reports, self.run(step))
                case messages.RunMoves(moves):
                    for report in self._moves.send(moves):
                        send_report(reports, report)
                case messages.RunFree(step):
                    self._requests.forget(step.request_ids)
                case messages.RunReshard() | messages.Measure() as command:
                    self._read_samples(len(self._unread))
                    while self._leaving:
                        self._leaving.popleft().wait()
                    return command
                case messages.Stop():
                    self._read_samples(len(self._unread))
                    return None

    def _prepare(self, commands: Sequence[messages.Command]) -> None:
        """Expects blocks and clears blocks as soon as commands have come: no step in flight computes with them.

        Both happen here, in the order of the commands: a move may fill a block that was cleared before.
        """
        for command in commands:
            match command:
                case messages.RunMoves(moves):
                    self._moves.expect(moves)
                case messages.RunFree(step):
                    own = [(ref.block, slot) for ref, slot in step.cleared if ref.pool == self._instance]
                    self._pool.clear(own)

    @property
    def is_idle(self) -> bool:
        """Whether no KV is on its way."""
        return self._moves.is_idle

    def close(self) -> None:
        """Ends the threads that move KV, when none is on its way or its transports are closed, and gives the model back
        as it was.

        A process that ends need not call it.
        """
        self._moves.close()
        self._layerwise.close()
        self._model.trunk.release_pool()

    def run(self, forward: Forward) -> messages.Done:
        """Computes this rank's share of a step and samples."""
        packed = pack(
            forward,
            self._requests,
            instance=self._instance,
            block_size=self._pool.block_size,
            device=self._device,
            backend=self._backend,
            host=self._host,
        )
        comm = StepComm(
            self._lanes,
            forward.number,
            cluster=self._cluster,
            rank=self._rank,
            num_layers=self._model.info.num_layers,
        )
        moves = StepMoves(forward, self._messages, rebalances=self._rebalances, moves=self._moves, sent=comm.sent)
        if self._reads_tokens or self._is_last:  # which embed tokens, or count them
            passed_on = {one.request_id for one in packed.unknown if one.source == self._instance}
            holding = [n for n, (ids, *_) in enumerate(self._unread, 1) if not passed_on.isdisjoint(ids)]
            self._read_samples(max(holding, default=0))
            resolve(packed, self._requests, comm.everyone(), self._device)
        attention = StepAttention(
            packed,
            comm,
            pool=self._pool,
            specs=self._model.specs,
            first_kv_heads=self._model.first_kv_heads,
            watch=self._watch,
            layerwise=self._layerwise,
            moves=moves,
            host=self._host,
        )
        sampled: tuple[Sampled, ...] = ()
        scored: tuple[Scored, ...] = ()
        non_finite: tuple[int, ...] = ()
        if len(packed.tokens):
            hidden = self._receive_hidden(packed, comm)
            output = self._model.trunk.run(packed, attention, hidden=hidden, reduce=comm.all_reduce)
            if not self._is_last:
                self._send_hidden(output.result, comm)
                self._expect_samples(packed, comm)
            else:
                tokens = self._sample(packed, output.result)
                self._send_samples(tokens, comm)
                if self._shard == 0:  # every rank of a last stage knows its tokens; one reports them
                    sampled = tuple(self._sampled(packed, output.result, tokens))
                    scored = tuple(self._score(prompt, output) for prompt in packed.prompts)
                    no_numbers = (one.request_id for one in scored if any(isnan(n.logprob) for n in one.logprobs))
                    non_finite = (*self._non_finite(packed, output, tokens), *no_numbers)
        else:
            with self._model.summed_by(comm.all_reduce):
                attention.without_tokens(self._dtype, self._device)
        attention.finish()
        self._lanes.complete_sends()
        self._rebalances.complete_sends()
        return messages.Done(
            rank=self._rank,
            number=forward.number,
            sampled=sampled,
            scored=scored,
            bytes_sent=dict(comm.sent),
            non_finite=non_finite,
            times=self._watch.seconds(),
        )

    def _receive_hidden(self, packed: Packed, comm: StepComm) -> Tensor | None:
        """Waits for the hidden states of this rank's tokens from the stage before; there is none before the first."""
        if self._stage == 0:
            return None
        assert self._model.stage is not None, "only a part of a model comes behind another"
        shape = (1, len(packed.tokens), self._model.stage.width)
        message = Message([(shape, self._dtype)], self._device)
        group = comm.stages(self._hidden, "hidden_states")
        group.start(sends={}, receives={self._stage - 1: message}, hop=_HIDDEN_HOP).wait()
        return message.tensors[0]

    def _send_hidden(self, hidden: Tensor, comm: StepComm) -> None:
        group = comm.stages(self._hidden, "hidden_states")
        self._let_go(group.start(sends={self._stage + 1: Message.of([hidden])}, receives={}, hop=_HIDDEN_HOP))

    def _send_samples(self, tokens: Sequence[int], comm: StepComm) -> None:
        if tokens and self._stage:
            message = Message.of([torch.tensor(tokens, device=self._device)])
            group = comm.stages(self._samples, "tokens")
            self._let_go(group.start(sends=dict.fromkeys(self._readers, message), receives={}, hop=_SAMPLES_HOP))

    def _let_go(self, sent: Pending) -> None:
        """Keeps what was sent until it has left: no more steps than these are in flight."""
        self._leaving.append(sent)
        if len(self._leaving) > self._most_steps:
            self._leaving.popleft().wait()

    def _expect_samples(self, packed: Packed, comm: StepComm) -> None:
        """Begins to receive what the last stage will sample, which a later step of this one may read."""
        if self._reads_tokens and packed.request_ids:
            message = Message([((len(packed.request_ids),), torch.int64)], self._device)
            group = comm.stages(self._samples, "tokens")
            pending = group.start(sends={}, receives={group.size - 1: message}, hop=_SAMPLES_HOP)
            self._unread.append((packed.request_ids, message, pending))
            self._read_samples(len(self._unread) - self._most_steps)

    def _read_samples(self, number: int) -> None:
        """Waits for the samples of some steps, the oldest, and remembers them."""
        for _ in range(number):
            request_ids, message, pending = self._unread.popleft()
            pending.wait()
            self._requests.learn(request_ids, message.tensors[0].tolist())

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

    def _non_finite(self, packed: Packed, output: Output, tokens: Sequence[int]) -> tuple[int, ...]:
        """Lists the requests with final hidden states or logits that are NaN or infinite.

        NaN or infinity in any layer reaches the final hidden state of its token by the residual stream, and then all
        its logits. NaN and infinity are chosen first, see `sample`, so of a row the chosen token's logit is looked at.
        A logit of -inf is a token that the model rules out: it is chosen only if there is no other.
        """
        finite: dict[int, bool] = {}
        if tokens:
            logits = output.result
            chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
            finite.update(zip(packed.request_ids, chosen.isfinite().tolist(), strict=True))
        chunks = [one for one in packed.rows if one[1].stop - one[1].start > 1 or one[0] not in finite]
        if chunks:
            assert output.last_hidden is not None, "such a step is computed layer by layer"
            # A sum is one pass over the numbers, and finite only if all of them are.
            are_finite = output.last_hidden.sum(dim=-1, dtype=torch.float32).isfinite()
            all_finite = torch.stack([are_finite[rows].all() for _, rows in chunks]).tolist()
            for (request_id, _), is_finite in zip(chunks, all_finite, strict=True):
                finite[request_id] = finite.get(request_id, True) and is_finite
        return tuple(request_id for request_id, is_finite in finite.items() if not is_finite)

    def _score(self, prompt: PromptRows, output: Output) -> Scored:
        """Return the logprobs of prompt tokens. Compute their logits one tile of tokens at a time."""
        num_top = self._requests[prompt.request_id].sampling.prompt_logprobs or 0
        found: list[TokenLogprobs] = []
        for start in range(0, len(prompt.rows), _LOGITS_TILE):
            targets = prompt.targets[start : start + _LOGITS_TILE]
            logits = output.logits(prompt.rows[start : start + _LOGITS_TILE])
            found += token_logprobs(logits, targets, [num_top] * len(targets))
        return Scored(request_id=prompt.request_id, positions=prompt.positions, logprobs=tuple(found))


def _logprobs(logits: Tensor, tokens: Sequence[int], requests: Sequence[RankRequest]) -> dict[int, TokenLogprobs]:
    wanted = {row: request.sampling.logprobs for row, request in enumerate(requests)}
    num_top = {row: number for row, number in wanted.items() if number is not None}
    if not num_top:
        return {}
    found = token_logprobs(logits[list(num_top)], [tokens[row] for row in num_top], list(num_top.values()))
    return dict(zip(num_top, found, strict=True))


class Inbox:
    """Commands in their order, seen as soon as they have come. The descriptor `wakeup` ends the wait for one, too."""

    def __init__(self, commands: zmq.Socket[bytes]) -> None:
        self._commands = commands
        self._decoder = msgspec.msgpack.Decoder(messages.Command)
        self._waiting: deque[messages.Command] = deque()
        self.watch(None)

    def watch(self, wakeup: int | None) -> None:
        """Lets another descriptor end the wait."""
        self._poller = zmq.Poller()
        for source in (self._commands, wakeup):
            if source is not None:
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
    return messages.Failed(
        rank=rank,
        reason=f"{type(error).__name__}: {error}",
        peer=isinstance(error, CommError),
        memory=_lacks_memory(error),
    )


def _lacks_memory(error: Exception) -> bool:
    """Tell whether memory of the device or the host was not there. PyTorch says so in words only for CPUs."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
