"""`alltoall` with unsharded weights on one rank of an instance that is split by tensor parallelism, layer by layer.

Each rank of an instance makes the queries, keys and values of all heads for a slice of its tokens. They are swapped
inside the instance, so that each rank has its heads for all of them, as ever; `alltoall` between the instances follows.
Then outputs are swapped back, each rank finishes its slice, and all ranks get all tokens again. The weights come from
the host's copy, or from the rank's peers, a layer ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from longspan.attn.collectives import Gathering, gather_rows
from longspan.attn.comm import Group, Message
from longspan.attn.exchanges import Call
from longspan.attn.exchanges.alltoall import alltoall
from longspan.attn.member import MemberParts
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import HeadShare, cut_evenly, split_heads
from longspan.core.exchange import ALLTOALL, WeightSource
from longspan.model.sharding import Shard, attention_modules
from longspan.runtime.batch import Channel
from longspan.runtime.layerwise.layers import NAME, StepContext, UnshardedWeights, Weights
from longspan.runtime.step_comm import WEIGHTS


class UnshardedLayers:
    """The channels of one step that need unsharded weights. All ranks of an instance call it alike."""

    def __init__(self, context: StepContext, channels: Sequence[Channel]) -> None:
        self._context = context
        self._parts = {c.number: _from_zero(c.parts) for c in channels}
        shard = context.model.shard
        slices = {c.number: slice(*cut_evenly(c.num_tokens, shard.size)[shard.index]) for c in channels}
        mine = {number: rows for number, rows in slices.items() if rows.stop > rows.start}
        self._arguments = {
            c.number: context.arguments(c, [c.rank], mine[c.number]) for c in channels if c.number in mine
        }
        used = dict.fromkeys(c.exchange.weights for c in channels if c.num_tokens)
        self._sources = {source: self._fetch(source) for source in used}
        self._weights: dict[WeightSource | None, Weights] = {}
        self._start(context.pool.layers[0])

    def begin(self, layer: int) -> None:
        """Waits for the weights of a layer, and starts to fetch those of the next."""
        self._weights = {source: fetched.take(layer) for source, fetched in self._sources.items()}
        self._start(self._context.pool.after(layer))

    def output(self, layer: int, channel: Channel, hidden: Tensor) -> Tensor:
        """Computes the slice of the tokens that is this rank's, and gathers the rest."""
        context = self._context
        model, pool, comm = context.model, context.pool, context.comm
        spec = model.info.specs[layer]
        inside = HeadTokenSwap(comm.inside(ALLTOALL.kind), spec, len(hidden))
        mine = hidden[inside.mine]

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context.watch.during("attention"):
                q, k, v = inside.to_heads(q, k, v)
                channel.store(pool, layer, k, v)
                call = Call(
                    exchange=channel.exchange,
                    group=comm.channel(layer, channel),
                    parts=self._parts[channel.number],
                    q=q,
                    k=k,
                    v=v,
                    kv=pool.layer(layer),
                    spec=model.specs[layer],
                    out=torch.empty_like(q),
                )
                alltoall(call)
                return inside.to_tokens(call.out)

        if not len(mine):  # the module cannot run on none
            q, kv = (hidden.new_empty(heads, 0, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads))
            attend(layer, q, kv, kv)
            return inside.gather(mine)
        arguments = self._arguments[channel.number][layer]
        weights = self._weights[channel.exchange.weights]
        with model.summed_by(lambda complete: complete):  # nothing to sum over the ranks of the instance
            made = context.layers[layer].compute_with(weights, spec, mine, arguments, attend)
        return inside.gather(made)

    def _fetch(self, source: WeightSource | None) -> UnshardedWeights:
        context = self._context
        if source == "host":
            return context.host_weights()
        modules = attention_modules(context.model.module)
        shares = {layer: dict(module.named_parameters()) for layer, module in modules.items()}
        shapes, connect = context.model.attention_shapes, partial(context.comm.inside, WEIGHTS)
        return PeerWeights(shares, context.model.shard, shapes, connect)

    def _start(self, layer: int | None) -> None:
        if layer is not None:
            for source in self._sources.values():
                source.start(layer)


def _from_zero(parts: MemberParts) -> MemberParts:
    """Returns the parts with rows that count from the first of them, which follow each other."""
    first = parts[0].rows.start
    moved = [replace(part, rows=slice(part.rows.start - first, part.rows.stop - first)) for part in parts]
    return MemberParts(moved, parts.backend)


class HeadTokenSwap:
    """One layer of one rank. All ranks of the instance call `to_heads`, `to_tokens` and `gather`, in this order.

    Args:
        group: the ranks of the instance.
        spec: of the whole layer.
        num_tokens: of the instance.

    Attributes:
        mine: the slice of the tokens that is this rank's.
    """

    def __init__(self, group: Group, spec: AttnSpec, num_tokens: int) -> None:
        self._group, self._spec = group, spec
        self._shares = split_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self._slices = [slice(first, last) for first, last in cut_evenly(num_tokens, group.size)]
        self._counts = [tokens.stop - tokens.start for tokens in self._slices]
        self.mine = self._slices[group.rank]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Swaps queries, keys and values of all heads for this rank's tokens against those of its heads for all tokens.

        All are `[heads, tokens, head_dim]`.
        """
        me, dim = self._group.rank, self._spec.head_dim
        cut = [[x[h.start : h.stop] for x, h in zip((q, k, v), _kinds(share), strict=True)] for share in self._shares]
        leaving = {rank: Message.of(cut[rank]) for rank in self._group.peers}
        coming = {
            rank: Message.empty([(len(heads), self._counts[rank], dim) for heads in _kinds(self._shares[me])], q)
            for rank in self._group.peers
        }
        self._group.start(sends=leaving, receives=coming, hop=0).wait()
        by_rank = [cut[me] if rank == me else coming[rank].tensors for rank in range(self._group.size)]
        queries, keys, values = (torch.cat(tensors, dim=1) for tensors in zip(*by_rank, strict=True))
        return queries, keys, values

    def to_tokens(self, out: Tensor) -> Tensor:
        """Swaps outputs of this rank's heads for all tokens against `[all heads, this rank's tokens, head_dim]`."""
        me, dim = self._group.rank, self._spec.head_dim
        leaving = {rank: Message.of([out[:, self._slices[rank]]]) for rank in self._group.peers}
        shapes = [(len(share.heads), self._counts[me], dim) for share in self._shares]
        coming = {rank: Message.empty([shapes[rank]], out) for rank in self._group.peers}
        self._group.start(sends=leaving, receives=coming, hop=1).wait()
        ranks = range(self._group.size)
        return torch.cat([out[:, self.mine] if rank == me else coming[rank].tensors[0] for rank in ranks])

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers what every rank made of its tokens, `[tokens, width]`."""
        return gather_rows(self._group, rows, self._counts, hop=2)


def _kinds(share: HeadShare) -> tuple[range, range, range]:
    return share.heads, share.kv_heads, share.kv_heads


class HostWeights:
    """Takes weights from the mapped weight file: views of it on CPUs; on CUDA devices copies, made on a stream.

    What is copied is first pinned, layer by layer, and stays so: each rank has the weights of all attention layers once
    in the memory of its host. Even and odd layers have a buffer each on the device.
    """

    def __init__(self, stored: Callable[[int], Weights], device: torch.device) -> None:
        self._stored, self._device = stored, device
        self._layers: dict[int, Weights] = {}
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        self._rooms: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def start(self, layer: int) -> None:
        """Pins and copies a layer on CUDA devices; on CPUs there is nothing to fetch."""
        if self._stream is None:
            return
        if layer not in self._layers:
            self._layers[layer] = {name: weight.pin_memory() for name, weight in self._stored(layer).items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # who used the buffer before is done with it
        room = self._rooms[layer % 2]
        with torch.cuda.stream(self._stream):
            for name, weight in self._layers[layer].items():
                if name not in room or room[name].shape != weight.shape:
                    room[name] = torch.empty_like(weight, device=self._device)
                room[name].copy_(weight, non_blocking=True)

    def take(self, layer: int) -> Weights:
        """Returns the views, or the copies, which are complete for what is computed from now on."""
        if self._stream is None:
            if layer not in self._layers:
                self._layers[layer] = self._stored(layer)
            return self._layers[layer]
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._rooms[layer % 2]


class PeerWeights:
    """Gathers weights from the ranks of the instance, which have a share each; `connect` makes a group for every layer.

    All ranks of the instance start and take the same layers in the same order.
    """

    def __init__(
        self,
        shares: Mapping[int, Weights],
        shard: Shard,
        shapes: Callable[[int], Mapping[str, torch.Size]],
        connect: Callable[[], Group],
    ) -> None:
        self._shares, self._shard, self._connect = shares, shard, connect
        self._layouts = cache(lambda layer: share_layouts(shard, layer, shapes(layer)))
        self._pending: dict[int, tuple[Gathering, list[Message]]] = {}

    def start(self, layer: int) -> None:
        """Sends this rank's share of a layer to the others, and begins to receive theirs."""
        share, layouts = self._shares[layer], self._layouts(layer)
        blocks = [share_room(layout, share) for layout in layouts]
        blocks[self._shard.index] = share_message(layouts[self._shard.index], share)
        self._pending[layer] = Gathering(self._connect(), blocks), blocks

    def take(self, layer: int) -> Weights:
        """Joins the shares once they are here."""
        gathering, blocks = self._pending.pop(layer)
        gathering.wait()
        return joined_weights(self._layouts(layer), self._shares[layer], blocks)


Layout = Mapping[str, tuple[int, Sequence[tuple[int, int]]]]
"""Maps a parameter to the dimension of its cut, and to the stretches of a rank's share that no rank before it has."""


def share_layouts(shard: Shard, layer: int, shapes: Mapping[str, torch.Size]) -> Sequence[Layout]:
    """Returns what each rank sends of a layer's attention, whose unsharded parameters have these shapes.

    All ranks send equally many stretches of a parameter, and none of what every rank has completely.
    """
    layouts: list[dict[str, tuple[int, list[tuple[int, int]]]]] = []
    known: dict[str, list[int]] = {}
    for index in range(shard.size):
        layouts.append({})
        for name, shape in shapes.items():
            if (pieces := replace(shard, index=index).pieces(f"layers.{layer}.{NAME}.{name}", shape)) is None:
                continue
            dim, ranges = pieces
            stops, start, stretches = known.setdefault(name, [0] * len(ranges)), 0, []
            for kind, own in enumerate(ranges):
                first = min(len(own), max(0, stops[kind] - own.start))
                stretches.append((start + first, start + len(own)))
                start, stops[kind] = start + len(own), max(stops[kind], own.stop)
            layouts[-1][name] = dim, stretches
    return layouts


def share_room(layout: Layout, like: Weights) -> Message:
    """Allocates a message for what a rank sends; `like` is the share of any rank."""
    shapes = []
    for name, (dim, stretches) in layout.items():
        for start, stop in stretches:
            shape = list(like[name].shape)
            shape[dim] = stop - start
            shapes.append((tuple(shape), like[name].dtype))
    return Message(shapes, next(iter(like.values())).device)


def share_message(layout: Layout, share: Weights) -> Message:
    """Fills `share_room` from the rank's own share."""
    return Message.of(
        [
            share[name].narrow(dim, start, stop - start)
            for name, (dim, stretches) in layout.items()
            for start, stop in stretches
        ]
    )


def joined_weights(layouts: Sequence[Layout], share: Weights, messages: Sequence[Message]) -> dict[str, Tensor]:
    """Joins the weights of a layer from the messages of all ranks, and from `share` what every rank has completely."""
    rooms = [iter(message.tensors) for message in messages]
    whole = dict(share)
    for name, (dim, stretches) in layouts[0].items():
        pieces = [[next(room) for _ in stretches] for room in rooms]
        whole[name] = torch.cat([piece for kind in zip(*pieces, strict=True) for piece in kind], dim)
    return whole
