"""The worker of one rank: executes steps on a device with a share of the model and a KV pool, first in, first out.

The caller provides device, model and transports, so the same worker runs in a process or a thread, see `runtime.rank`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec
import torch
import zmq
from torch import Tensor

from longspan.attn.comm import CommError, Message, Pending, Transport
from longspan.core.cluster import Cluster
from longspan.core.steps import Forward
from longspan.model.adapter import Model
from longspan.model.trunk import Output
from longspan.runtime import messages
from longspan.runtime.attention import StepAttention
from longspan.runtime.batch import Packed, RankRequest, RankRequests, pack
from longspan.runtime.pool import KvPool
from longspan.runtime.results import Results, results_of
from longspan.runtime.sampling import sample, sample_on_device
from longspan.runtime.step_comm import StepComm, StepLanes
from longspan.runtime.timing import Stopwatch, TimedTransport
from longspan.runtime.unknown_tokens import fill_unknown_tokens, needs_host

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend
    from longspan.attn.memory import Wires
    from longspan.model.files import ModelFiles
    from longspan.runtime.host_pool import HostPool
    from longspan.runtime.layerwise import Layerwise
    from longspan.runtime.moves import Moves, StepMoves
    from longspan.runtime.run_ahead import UnreadStep

_HIDDEN_HOP, _SAMPLES_HOP = 0, 1


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
        self._runs_ahead = num_stages == 1 and not watch.enabled and runs_ahead(self._device)
        self._unread_step: UnreadStep | None = None
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
        """Execute a command, and yield its reports. Reports of the step before come first if they were not read."""
        if isinstance(command, messages.RunForward):
            yield from self.run(command.step)
            return
        yield from self.finish()
        match command:
            case messages.RunMoves(moves):
                assert self._moves is not None, "a cluster with one pool moves no KV"
                yield from self._moves.send(moves)
            case messages.RunFree(step):
                self._requests.forget(step.request_ids)
            case messages.Prepare(max_num_seqs, max_model_len, max_tokens):
                if self._pool.kv:
                    self._backend.prepare(self._pool.kv[0], {*self._model.specs}, max_tokens, max_model_len)
                for num_done, num_graphs in self._prepare(max_num_seqs, max_model_len):
                    yield messages.Prepared(self._rank, num_done, num_graphs)
                yield messages.Ready(rank=self._rank)

    def _prepare(self, max_num_seqs: int, max_model_len: int) -> Iterator[tuple[int, int]]:
        """Prepare decode steps. All ranks do it at the same time, since recorded sums are also made."""
        sums = self._comm(0).recorded_sums() if self._cluster.tp(self._instance) > 1 else None
        by_pieces = self._cluster.num_instances > 1 or self._host is not None
        return self._model.trunk.prepare(self._pool.kv, max_num_seqs, max_model_len, sums=sums, by_pieces=by_pieces)

    def _comm(self, number: int) -> StepComm:
        num_layers = self._model.info.num_layers
        return StepComm(self._lanes, number, cluster=self._cluster, rank=self._rank, num_layers=num_layers)

    def collect(self, *, is_idle: bool) -> Iterator[messages.Report]:
        """Yield the reports of completed moves, and if no command waits, of a step whose results have become ready."""
        yield from () if self._moves is None else self._moves.take_arrived()
        if is_idle and self._unread_step is not None and self._unread_step.copy.is_ready():
            yield from self.finish()

    def settle(self, *, sends: bool) -> Iterator[messages.Report]:
        """Read all samples of the last stage. `sends`: wait until all messages to other stages have left, too.

        Yield the report of the latest step if it was not read.
        """
        yield from self.finish()
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
        self._unread_step = None
        if self._moves is not None:
            self._moves.close()
        if self._layerwise is not None:
            self._layerwise.close()
        self._model.trunk.release_pool()

    def finish(self) -> Iterator[messages.Done]:
        """Wait for the results of the latest step if they were not read, and yield its report."""
        unread, self._unread_step = self._unread_step, None
        if unread is not None:
            yield unread.read(self._requests)

    @property
    def is_ready(self) -> Callable[[], bool] | None:
        """Returns whether the results of the latest step are on the host. None if they were read."""
        return None if self._unread_step is None else self._unread_step.copy.is_ready

    def run(self, forward: Forward) -> Iterator[messages.Done]:
        """Launch this rank's share of a step. Yield the reports of steps whose results the host has read."""
        packed = pack(
            forward,
            self._requests,
            instance=self._instance,
            block_size=self._pool.block_size,
            device=self._device,
            backend=self._backend,
            host=self._host,
        )
        if needs_host(packed, self._instance):
            yield from self.finish()
        comm = self._comm(forward.number)
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
            sinks=self._model.sinks,
            watch=self._watch,
            layerwise=None if packed.num_alone is None else self._hooked(),
            moves=moves,
            host=self._host,
        )
        output = self._forward(packed, comm, attention)
        stays = self._runs_ahead and output is not None and packed.is_decode
        stays = stays and not any(request.reads_tokens for request in self._sampling(packed))
        sampled, scored, non_finite = ((), (), ()) if output is None or stays else self._results(packed, output, comm)
        attention.finish()
        self._lanes.complete_sends()
        self._rebalances.complete_sends()
        done = messages.Done(
            rank=self._rank,
            number=forward.number,
            sampled=sampled,
            scored=scored if not self._requests.attention else (*scored, *packed.attention()),
            bytes_sent=dict(comm.sent),
            non_finite=non_finite,
            times=self._watch.seconds(),
        )
        unread = self._sample_later(packed, output.result, done) if output is not None and stays else None
        yield from self.finish()
        if unread is None:
            yield done
        self._unread_step = unread

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

    def _forward(self, packed: Packed, comm: StepComm, attention: StepAttention) -> Output | None:
        """Run the model. Stages before the last send hidden states, and return None, as ranks without tokens do."""
        if not len(packed.tokens):
            with self._model.summed_by(comm.all_reduce):
                attention.without_tokens(self._dtype, self._device)
            return None
        hidden = self._receive_hidden(packed, comm)
        output = self._model.trunk.run(packed, attention, hidden=hidden, reduce=comm.all_reduce)
        if self._is_last:
            return output
        self._send_hidden(output.result, comm)
        self._expect_samples(packed, comm)
        return None

    def _results(self, packed: Packed, output: Output, comm: StepComm) -> Results:
        """Sample, and send samples to other stages. Return the results to report."""
        tokens = self._sample(packed, output.result)
        self._send_samples(tokens, comm)
        if self._shard:  # every rank of the last stage samples all tokens, the first one reports them
            return (), (), ()
        return results_of(packed, output, tokens, self._requests)

    def _sampling(self, packed: Packed) -> list[RankRequest]:
        return [self._requests[request_id] for request_id in packed.request_ids]

    def _sample_later(self, packed: Packed, logits: Tensor, done: messages.Done) -> UnreadStep:
        """Sample one token per row of `logits [n, vocab]` on the device. The host reads the tokens later."""
        from longspan.runtime.run_ahead import UnreadStep  # noqa: PLC0415 - only on CUDA devices

        requests = self._sampling(packed)
        draws = [request.draw(one) for request, one in zip(requests, packed.samples, strict=True)]
        unread = UnreadStep.of(packed, logits, sample_on_device(logits, draws), done, is_reported=not self._shard)
        for row, request in enumerate(requests):
            request.on_device = unread.tokens, row
        return unread

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
        requests = self._sampling(packed)
        tokens = sample(logits, [request.draw(s) for request, s in zip(requests, packed.samples, strict=True)])
        for request, token in zip(requests, tokens, strict=True):
            request.last_token, request.on_device = token, None
        return tokens


def runs_ahead(device: torch.device) -> bool:
    """Return whether steps are launched before the results of the step before are read."""
    return device.type == "cuda"


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
