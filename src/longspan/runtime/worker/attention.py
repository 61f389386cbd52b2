"""The attention of one Forward on one rank: writes the new KV, then runs each channel's exchange, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from longspan.attn.comm import Group
from longspan.attn.exchanges.alltoall import alltoall
from longspan.attn.exchanges.chain import ChainStart, chain, chain_start
from longspan.attn.exchanges.gather_kv import gather_kv
from longspan.attn.exchanges.local import local
from longspan.attn.exchanges.ring_kv import ring_kv
from longspan.attn.exchanges.ring_q import ring_q
from longspan.attn.member import MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import ALLTOALL, CHAIN, GATHER_HIDDEN, GATHER_KV, LOCAL, RING_KV, RING_Q, Exchange
from longspan.layerwise.gather_hidden import GatherHidden
from longspan.layerwise.unsharded_alltoall import UnshardedStep
from longspan.model.adapter import Model
from longspan.runtime.kv.moves import StepMoves
from longspan.runtime.kv.pool import KvPool
from longspan.runtime.worker.batch import Channel, Packed, Slots
from longspan.runtime.worker.step_comm import StepComm
from longspan.runtime.worker.timing import Stopwatch

_EXCHANGES: dict[Exchange, Callable[[Group, MemberParts, Tensor, PagedKv, AttnSpec, Tensor], None]] = {
    RING_KV: ring_kv,
    RING_Q: ring_q,
    ALLTOALL: alltoall,
    GATHER_KV: gather_kv,
    GATHER_KV._replace(dense=True): partial(gather_kv, dense=True),
}


class StepAttention:
    """Callable for the model: `(layer, q, k, v) -> out`, all `[heads, tokens, head_dim]`."""

    def __init__(
        self,
        packed: Packed,
        comm: StepComm,
        *,
        pool: KvPool,
        specs: Sequence[AttnSpec],
        watch: Stopwatch,
        model: Model | None = None,
        moves: StepMoves | None = None,
    ) -> None:
        self._packed, self._comm, self._pool, self._specs, self._watch = packed, comm, pool, specs, watch
        self._model, self._moves = model, moves
        self._stores_late = any(channel.exchange.stores_after for channel in packed.channels)
        self.num_alone = packed.num_alone
        self._shared = [channel for channel in packed.channels if channel.exchange.is_layerwise]
        hidden = [channel for channel in self._shared if channel.exchange == GATHER_HIDDEN]
        self._rotary = {channel.number: _rotary(channel, model, packed.tokens.device) for channel in hidden}
        self._whole: UnshardedStep | None = None
        if len(hidden) < len(self._shared):
            assert model is not None, "layers are shared by ranks that have a model"
            self._whole = UnshardedStep(packed, comm, model=model, pool=pool, store=self._store_parts, watch=watch)
        self._chains: dict[int, ChainStart] = {}
        self._start_chains(0)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's packed tokens."""
        with self._watch.during("attention"):
            self._settle(layer)
            self._store(layer, self._packed.slots, k, v)
            self._stream(layer - 1 if self._stores_late else layer)
            out = torch.empty_like(q)
            kv = self._pool.layer(layer)
            for channel in self._packed.channels:
                if channel.exchange == CHAIN:
                    self._chain(layer, channel, q, k, v, out)
                elif not channel.exchange.is_layerwise:
                    self._exchange(layer, channel, q, kv, out)
            self._start_chains(layer + 1)
            return out

    def finish(self) -> None:
        """After the last layer: what is left to do once all that it computed is stored."""
        self._stream(len(self._specs) - 1)

    def without_tokens(self, dtype: torch.dtype, device: torch.device) -> None:
        """Takes part in every layer's exchanges when this rank has no token; the model itself cannot run on none."""
        for layer in range(len(self._specs)):
            self._attend_nothing(layer, dtype, device)
            if self._shared:
                assert self._model is not None, "layers are shared by ranks that have a model"
                width = self._model.module.config.hidden_size
                self._share(layer, torch.empty(0, width, dtype=dtype, device=device))

    def share(self, layer: int, hidden: Tensor) -> Tensor:
        """The output of a layer's attention for the tokens of `SHARED` exchanges, see `model.shared_layers`."""
        if not self.num_alone:  # the model has not asked for the other exchanges
            self._attend_nothing(layer, hidden.dtype, hidden.device)
        return self._share(layer, hidden)

    def _share(self, layer: int, hidden: Tensor) -> Tensor:
        if self._whole is not None:
            self._whole.begin(layer)
        outputs, start = [], 0
        for channel in self._shared:
            rows = slice(start, start + channel.num_tokens)
            if channel.exchange == GATHER_HIDDEN:
                outputs.append(self._gather_hidden(layer, channel, hidden[rows]))
            else:
                assert self._whole is not None, "it has the other shared channels"
                outputs.append(self._whole.output(layer, channel, hidden[rows]))
            start = rows.stop
        return torch.cat(outputs)

    def _gather_hidden(self, layer: int, channel: Channel, hidden: Tensor) -> Tensor:
        assert self._model is not None, "layers are shared by ranks that have a model"
        group, kv = self._comm.channel(layer, channel), self._pool.layer(layer)
        shared = GatherHidden(group, channel.parts, kv, self._specs[layer])

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self._watch.during("attention"):
                out, keys, values = shared.attend(q, k, v)
                self._store_parts(layer, channel, keys, values)
                return out

        gathered = shared.gather(hidden)
        rotary, layers = self._rotary[channel.number], self._model.shared_layers
        return shared.scatter(layers[layer].compute(gathered, rotary, attend, index=channel.rank, size=group.size))

    def _attend_nothing(self, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        spec = self._specs[layer]
        q = torch.empty(spec.num_heads, 0, spec.head_dim, dtype=dtype, device=device)
        kv = torch.empty(spec.num_kv_heads, 0, spec.head_dim, dtype=dtype, device=device)
        self(layer, q, kv, kv)

    def _settle(self, layer: int) -> None:
        """KV that the Forward brings to its members is in the pool, in this layer, before anybody reads it."""
        if self._moves is not None:
            self._moves.settle(layer)

    def _stream(self, layer: int) -> None:
        """Sends on what is in the pool up to this layer."""
        if self._moves is not None:
            self._moves.stream(layer)

    def _start_chains(self, layer: int) -> None:
        """What chains can send and receive of a layer before anything of it is computed."""
        if layer < len(self._specs):
            for channel in self._packed.channels:
                if channel.exchange == CHAIN:
                    self._settle(layer)
                    group, kv = self._comm.channel(layer, channel), self._pool.layer(layer)
                    self._chains[channel.number] = chain_start(group, channel.parts, kv, self._specs[layer])

    def _chain(self, layer: int, channel: Channel, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        group, kv, spec = self._comm.channel(layer, channel), self._pool.layer(layer), self._specs[layer]
        started = self._chains.pop(channel.number)
        found = chain(group, channel.parts, q, k, v, kv, spec, out, started=started)
        for (keys, values), slots in zip(found, channel.slots, strict=True):
            self._store(layer, slots, keys, values)

    def _store_parts(self, layer: int, channel: Channel, k: Tensor, v: Tensor) -> None:
        """All new keys and values of this member's tokens of a shared channel."""
        start = 0
        for slots in channel.slots:
            rows = slice(start, start + len(slots.rows))
            self._store(layer, slots, k[:, rows], v[:, rows])
            start = rows.stop

    def _store(self, layer: int, slots: Slots, k: Tensor, v: Tensor) -> None:
        if len(slots.rows) == k.shape[1]:  # all of them
            self._pool.write(layer, slots.blocks, slots.offsets, k, v)
        elif len(slots.rows):
            self._pool.write(layer, slots.blocks, slots.offsets, k[:, slots.rows], v[:, slots.rows])

    def _exchange(self, layer: int, channel: Channel, q: Tensor, kv: PagedKv, out: Tensor) -> None:
        spec = self._specs[layer]
        if channel.exchange == LOCAL:
            local(channel.parts, q, kv, spec, out)
        else:
            _EXCHANGES[channel.exchange](self._comm.channel(layer, channel), channel.parts, q, kv, spec, out)


def _rotary(channel: Channel, model: Model | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the gathered tokens of a channel, see `GatherHidden`."""
    assert model is not None, "layers are shared by ranks that have a model"
    positions: list[int] = []
    lengths: list[int] = []
    for member in range(len(channel.members)):
        for part, length in zip(channel.parts, channel.rope_lengths, strict=True):
            positions += [position for run in part.q_runs[member] for position in run.positions]
            lengths += [length] * (len(positions) - len(lengths))
    return model.rotary(torch.tensor(positions, device=device), torch.tensor(lengths, device=device))
