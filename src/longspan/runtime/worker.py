"""The worker of one rank: executes steps on a device with a share of the model and a KV pool, first in, first out.

The caller provides device, model and transports, so the same worker runs in a process or a thread, see `runtime.rank`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Self

import msgspec
import torch
import zmq
from torch import Tensor

from longspan.attn.comm import CommError, Message, Pending, Transport
from longspan.core.cluster import Cluster
from longspan.core.steps import Forward, Sampled, Scored, TokenLogprobs
from longspan.model.adapter import Model
from longspan.model.trunk import Output
from longspan.runtime import messages
from longspan.runtime.attention import StepAttention
from longspan.runtime.batch import Packed, PromptRows, RankRequest, RankRequests, fill_unknown_tokens, pack
from longspan.runtime.pool import KvPool
from longspan.runtime.sampling import sample, token_logprobs
from longspan.runtime.step_comm import StepComm, StepLanes
from longspan.runtime.timing import Stopwatch, TimedTransport

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend
    from longspan.attn.memory import Wires
    from longspan.model.files import ModelFiles
    from longspan.runtime.host_pool import HostPool
    from longspan.runtime.layerwise import Layerwise
    from longspan.runtime.moves import Moves, StepMoves

_Results = tuple[tuple[Sampled, ...], tuple[Scored, ...], tuple[int, ...]]
"""Sampled tokens, scored prompts, and the ids of requests with non-finite numbers."""
_HIDDEN_HOP, _SAMPLES_HOP = 0, 1
_LOGITS_TILE = 256
"""Prompt tokens whose logits are computed at once. The logits of 8K tokens would need more memory than most models."""


@dataclass(frozen=True, kw_only=True)
class Transports:
    """A rank's transports, one per kind of work, so that no kind of work waits for another.

    Attributes:
        steps: for the exchanges of a Forward and the ranks of a stage.
        rebalances: for KV that a Forward moves between its members. Peers receive in the same step.
        moves: for KV moves whose ends run in different steps. A `Pending` also waits for its sends.
        hidden: for hidden states sent to the next pipeline stage. The sender does not wait for these sends.
        samples: for sampled tokens, sent from the last stage to the stages that read tokens.
        close: closes all transports, when no rank uses them.
        meet: prepares the lanes that a cluster needs, while no step runs. All ranks call it with the same clusters in
            the same order, also spare ranks.
    """

    steps: StepLanes
    rebalances: Transport
    moves: Transport
    hidden: Transport
    samples: Transport
    close: Callable[[], None] = lambda: None
    meet: Callable[[Cluster], None] = lambda _: None

    @classmethod
    def in_memory(cls, wires: Sequence[Wires], rank: int) -> Self:
        """Return the transports of a thread that is a rank, with wires for exchanges, rebalances, moves and stages."""
        from longspan.attn.memory import MemoryTransport  # noqa: PLC0415 - ranks are processes, except in dry runs

        exchange, rebalances, moves, stages = wires
        return cls(
            steps=StepLanes.one(MemoryTransport(exchange, rank)),
            rebalances=MemoryTransport(rebalances, rank),
            moves=MemoryTransport(moves, rank, waits_for_sends=True),
            hidden=MemoryTransport(stages, rank),
            samples=MemoryTransport(stages, rank),
        )


class Worker:
    """Computes the steps of one rank. The caller closes the transports."""

    def __init__(
        self,
        rank: int,
        cluster: Cluster,
        model: Model,
        pool: KvPool,
        transports: Transports,
        *,
        backend: AttentionBackend,
        files: ModelFiles,
        watch: Stopwatch,
        host: HostPool | None = None,
    ) -> None:
        self._rank, self._cluster, self._model, self._pool = rank, cluster, model, pool
        self._instance, self._stage, self._shard = cluster.at(rank)
        num_stages = cluster.pp(self._instance)
        self._is_last, self._max_steps = self._stage + 1 == num_stages, num_stages + 1
        readers = range(num_stages if model.info.reads_tokens else 1)
        self._reads_tokens, self._readers = self._stage in readers, [s for s in readers if s + 1 < num_stages]
        self._device, self._dtype = model.module.device, model.module.dtype
        self._backend = backend
        self._layerwise: Layerwise | None = None
        self._requests = RankRequests(files, model.info, self._device, samples=self._is_last)
        self._sends = deque[Pending]()  # messages to other stages, oldest first
        self._unread = deque[tuple[tuple[int, ...], Message, Pending]]()  # samples of the last stage, oldest first
        self._watch = watch
        self._lanes = transports.steps.each(lambda lane: TimedTransport(lane, watch))
        self._rebalances = TimedTransport(transports.rebalances, self._watch)
        self._hidden = TimedTransport(transports.hidden, self._watch)
        self._samples = TimedTransport(transports.samples, self._watch)
        self._host = host
        self._moves: Moves | None = None
        if cluster.num_instances > 1 or host is not None:
            from longspan.runtime.block_messages import BlockMessages  # noqa: PLC0415 - only for moves between pools
            from longspan.runtime.moves import Moves  # noqa: PLC0415

            self._moves = Moves(BlockMessages(pool, cluster, rank), transports.moves, host)

    @property
    def wakeup(self) -> int | None:
        """A file descriptor that becomes readable when KV moves may have reports. None without moves."""
        return None if self._moves is None else self._moves.wakeup

    def execute(self, command: messages.WorkerCommand) -> Iterator[messages.Report]:
        """Execute a command, and yield its reports."""
        match command:
            case messages.RunForward(step):
                yield self.run(step)
            case messages.RunMoves(moves):
                assert self._moves is not None, "a cluster with one pool moves no KV"
                yield from self._moves.send(moves)
            case messages.RunFree(step):
                self._requests.forget(step.request_ids)
            case messages.Prepare(max_num_seqs, max_model_len):
                self._model.trunk.prepare(self._pool.kv, max_num_seqs, max_model_len)
                yield messages.Ready(rank=self._rank)

    def arrived(self) -> Sequence[messages.Report]:
        """Return the reports of moves that have completed."""
        return () if self._moves is None else self._moves.take_arrived()

    def settle(self, *, sends: bool) -> None:
        """Read all samples of the last stage. `sends`: wait until all messages to other stages have left, too."""
        self._read_samples(len(self._unread))
        while sends and self._sends:
            self._sends.popleft().wait()

    def prepare(self, commands: Sequence[messages.Command]) -> None:
        """Start receives and clear blocks as soon as commands arrive. No step in flight uses these blocks.

        Both follow the order of the commands, since a move may fill a block that was cleared before.
        """
        for command in commands:
            match command:
                case messages.RunMoves(moves):
                    assert self._moves is not None, "a cluster with one pool moves no KV"
                    self._moves.expect(moves)
                case messages.RunFree(step):
                    own = [(ref.block, slot) for ref, slot in step.cleared if ref.pool == self._instance]
                    self._pool.clear(own)

    @property
    def is_idle(self) -> bool:
        """Whether no KV move is in flight."""
        return self._moves is None or self._moves.is_idle

    def close(self) -> None:
        """End the threads of KV moves and unhook the model. A process that exits need not call this.

        Either no move is in flight, or the transports are closed.
        """
        if self._moves is not None:
            self._moves.close()
        if self._layerwise is not None:
            self._layerwise.close()
        self._model.trunk.release_pool()

    def run(self, forward: Forward) -> messages.Done:
        """Compute this rank's share of a step, and sample."""
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
        moves = self._begin_moves(forward, comm)
        if self._reads_tokens or self._is_last:  # the stage embeds tokens or counts them
            own_ids = {token.request_id for token in packed.unknown if token.source == self._instance}
            needed = [number for number, (ids, *_) in enumerate(self._unread, 1) if not own_ids.isdisjoint(ids)]
            self._read_samples(max(needed, default=0))
            fill_unknown_tokens(packed, self._requests, comm.instances(), self._device)
        attention = StepAttention(
            packed,
            comm,
            pool=self._pool,
            specs=self._model.specs,
            first_kv_heads=self._model.first_kv_heads,
            watch=self._watch,
            layerwise=None if packed.num_alone is None else self._hooked(),
            moves=moves,
            host=self._host,
        )
        sampled, scored, non_finite = self._compute(packed, comm, attention)
        attention.finish()
        self._lanes.complete_sends()
        self._rebalances.complete_sends()
        return messages.Done(
            rank=self._rank,
            number=forward.number,
            sampled=sampled,
            scored=scored if not self._requests.attention else (*scored, *packed.attention()),
            bytes_sent=dict(comm.sent),
            non_finite=non_finite,
            times=self._watch.seconds(),
        )

    def _begin_moves(self, forward: Forward, comm: StepComm) -> StepMoves | None:
        """Copy blocks within the pool, and begin the moves between instances. Return None if there are none."""
        starts = {part.request_id: part.start for part in forward.parts}
        local = [move for move in forward.rebalances if move.is_local]
        for move in local:  # the first block of an admitted request, up to its first new token
            for source, target in move.copies:
                if source.instance == self._instance:
                    num_slots = starts[move.request_id] % self._pool.block_size
                    self._pool.copy_block(source.block, target.block, num_slots)
        if self._moves is None or (len(local) == len(forward.rebalances) and not forward.streams):
            return None
        return self._moves.of_step(forward, self._rebalances, comm.sent)

    def _hooked(self) -> Layerwise:
        """Return the attention layers of the model, hooked for layerwise exchanges at the first call."""
        if self._layerwise is None:
            from longspan.runtime.layerwise import Layerwise  # noqa: PLC0415 - only for layerwise exchanges

            self._layerwise = Layerwise(self._model)
        return self._layerwise

    def _compute(self, packed: Packed, comm: StepComm, attention: StepAttention) -> _Results:
        """Run the model, and send hidden states or samples to other stages. Return the results to report."""
        if not len(packed.tokens):
            with self._model.summed_by(comm.all_reduce):
                attention.without_tokens(self._dtype, self._device)
            return (), (), ()
        hidden = self._receive_hidden(packed, comm)
        output = self._model.trunk.run(packed, attention, hidden=hidden, reduce=comm.all_reduce)
        if not self._is_last:
            self._send_hidden(output.result, comm)
            self._expect_samples(packed, comm)
            return (), (), ()
        tokens = self._sample(packed, output.result)
        self._send_samples(tokens, comm)
        if self._shard:  # every rank of the last stage samples all tokens, the first one reports them
            return (), (), ()
        sampled = tuple(self._sampled(packed, output.result, tokens))
        scored = tuple(self._score(prompt, output) for prompt in packed.prompts)
        nan_ids = (scores.request_id for scores in scored if any(isnan(entry.logprob) for entry in scores.logprobs))
        return sampled, scored, (*self._non_finite(packed, output, tokens), *nan_ids)

    def _receive_hidden(self, packed: Packed, comm: StepComm) -> Tensor | None:
        """Receive the hidden states of this rank's tokens from the previous stage. None on the first stage."""
        if self._stage == 0:
            return None
        assert self._model.stage is not None, "a later stage has a part of the model"
        shape = (1, len(packed.tokens), self._model.stage.width)
        message = Message([(shape, self._dtype)], self._device)
        group = comm.stages(self._hidden, "hidden_states")
        group.start(sends={}, receives={self._stage - 1: message}, hop=_HIDDEN_HOP).wait()
        return message.tensors[0]

    def _send_hidden(self, hidden: Tensor, comm: StepComm) -> None:
        group = comm.stages(self._hidden, "hidden_states")
        self._keep_send(group.start(sends={self._stage + 1: Message.of([hidden])}, receives={}, hop=_HIDDEN_HOP))

    def _send_samples(self, tokens: Sequence[int], comm: StepComm) -> None:
        if tokens and self._stage:
            message = Message.of([torch.tensor(tokens, device=self._device)])
            group = comm.stages(self._samples, "tokens")
            self._keep_send(group.start(sends=dict.fromkeys(self._readers, message), receives={}, hop=_SAMPLES_HOP))

    def _keep_send(self, pending: Pending) -> None:
        """Keep a send until it completes. At most `_max_steps` steps are in flight, so the oldest send completes."""
        self._sends.append(pending)
        if len(self._sends) > self._max_steps:
            self._sends.popleft().wait()

    def _expect_samples(self, packed: Packed, comm: StepComm) -> None:
        """Start to receive the samples of the last stage, which a later step of this stage may read."""
        if self._reads_tokens and packed.request_ids:
            message = Message([((len(packed.request_ids),), torch.int64)], self._device)
            group = comm.stages(self._samples, "tokens")
            pending = group.start(sends={}, receives={group.size - 1: message}, hop=_SAMPLES_HOP)
            self._unread.append((packed.request_ids, message, pending))
            self._read_samples(len(self._unread) - self._max_steps)

    def _read_samples(self, number: int) -> None:
        """Wait for the samples of the oldest `number` steps, and record them."""
        for _ in range(number):
            request_ids, message, pending = self._unread.popleft()
            pending.wait()
            self._requests.learn(request_ids, message.tensors[0].tolist())

    def _sample(self, packed: Packed, logits: Tensor) -> list[int]:
        """Sample one token per row of `logits [n, vocab]`."""
        if not packed.samples:
            return []
        requests = [self._requests[request_id] for request_id in packed.request_ids]
        tokens = sample(logits, [request.draw(s) for request, s in zip(requests, packed.samples, strict=True)])
        for request, token in zip(requests, tokens, strict=True):
            request.last_token = token
        return tokens

    def _sampled(self, packed: Packed, logits: Tensor, tokens: Sequence[int]) -> Iterator[Sampled]:
        """Yield the sampled tokens, with the logits and logprobs that their requests ask for."""
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
        """List the requests with final hidden states or logits `[n, vocab]` that are NaN or infinite.

        The residual stream carries NaN or infinity from any layer to the token's final hidden state and its logits.
        `sample` prefers NaN and infinity, so checking the sampled token's logit is enough. A logit of -inf excludes a
        token: it is sampled only if all logits are -inf.
        """
        finite: dict[int, bool] = {}
        if tokens:
            logits = output.result
            chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
            finite.update(zip(packed.request_ids, chosen.isfinite().tolist(), strict=True))
        chunks = [(i, rows) for i, rows in packed.rows if rows.stop - rows.start > 1 or i not in finite]
        if chunks:
            # The sum needs one pass, and is finite only if all numbers are finite.
            assert output.last_hidden is not None, "such a step is computed layer by layer"
            are_finite = output.last_hidden.sum(dim=-1, dtype=torch.float32).isfinite()
            all_finite = torch.stack([are_finite[rows].all() for _, rows in chunks]).tolist()
            for (request_id, _), is_finite in zip(chunks, all_finite, strict=True):
                finite[request_id] = finite.get(request_id, True) and is_finite
        return tuple(request_id for request_id, is_finite in finite.items() if not is_finite)

    def _score(self, prompt: PromptRows, output: Output) -> Scored:
        """Return the logprobs of prompt tokens. Compute their logits one tile of tokens at a time."""
        num_top = self._requests[prompt.request_id].sampling.prompt_logprobs or 0
        logprobs: list[TokenLogprobs] = []
        for start in range(0, len(prompt.rows), _LOGITS_TILE):
            targets = prompt.targets[start : start + _LOGITS_TILE]
            logits = output.logits(prompt.rows[start : start + _LOGITS_TILE])
            logprobs += token_logprobs(logits, targets, [num_top] * len(targets))
        return Scored(request_id=prompt.request_id, positions=prompt.positions, logprobs=tuple(logprobs))


def _logprobs(logits: Tensor, tokens: Sequence[int], requests: Sequence[RankRequest]) -> dict[int, TokenLogprobs]:
    requested = enumerate(request.sampling.logprobs for request in requests)
    num_top = {row: number for row, number in requested if number is not None}
    if not num_top:
        return {}
    logprobs = token_logprobs(logits[list(num_top)], [tokens[row] for row in num_top], list(num_top.values()))
    return dict(zip(num_top, logprobs, strict=True))


def send_report(controller: zmq.Socket[bytes], report: messages.Report) -> None:
    controller.send(msgspec.msgpack.encode(report))


def failure(rank: int, error: Exception) -> messages.Failed:
    return messages.Failed(
        rank=rank,
        reason=f"{type(error).__name__}: {error}",
        peer=isinstance(error, CommError),
        memory=_lacks_memory(error),
    )


def _lacks_memory(error: Exception) -> bool:
    """Return True for a lack of device or host memory. On CPUs, PyTorch raises it as a RuntimeError with this text."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
