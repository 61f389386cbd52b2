"""`alltoall` with unsharded weights on one rank of an instance with tensor parallelism, layer by layer.

Each rank of an instance computes the queries, keys and values of all heads for a slice of the instance's tokens. The
ranks exchange them, so that each rank has its heads for all tokens. Then `alltoall` between the instances follows. The
ranks exchange the outputs back, each computes its slice, and all gather all tokens. Weights come from the host's copy
or from the rank's peers, one layer ahead.
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
from longspan.core.exchange import ALLTOALL, WeightSource
from longspan.core.splits import HeadShare, cut_evenly, split_heads
from longspan.model.files import ModelError
from longspan.model.shard import Shard
from longspan.model.sharding import all_weights, attention_modules, pieces
from longspan.runtime.batch import Channel
from longspan.runtime.layerwise.layers import StepContext, Weights
from longspan.runtime.step_comm import WEIGHTS


class UnshardedLayers:
    """The channels of one step that need unsharded weights. All ranks of an instance make the same calls."""

    def __init__(self, context: StepContext, channels: Sequence[Channel]) -> None:
        self._context = context
        self._parts = {c.number: _from_zero(c.parts) for c in channels}
        shard = context.model.shard
        slices = {c.number: slice(*cut_evenly(c.num_tokens, shard.size)[shard.index]) for c in channels}
        own_slices = {number: rows for number, rows in slices.items() if rows.stop > rows.start}
        self._arguments = {
            c.number: context.arguments(c, [c.rank], own_slices[c.number]) for c in channels if c.number in own_slices
        }
        used = dict.fromkeys(c.exchange.weights for c in channels if c.num_tokens)
        self._sources = {source: self._fetch(source) for source in used}
        self._weights: dict[WeightSource | None, Weights] = {}
        self._start(context.pool.layers[0])

    def begin(self, layer: int) -> None:
        """Wait for the weights of a layer, and start to fetch the next layer's."""
        self._weights = {name: source.take(layer) for name, source in self._sources.items()}
        self._start(self._context.pool.after(layer))

    def output(self, layer: int, channel: Channel, hidden: Tensor) -> Tensor:
        """Compute this rank's slice of the tokens, and gather the other slices."""
        context = self._context
        model, pool, comm = context.model, context.pool, context.comm
        spec = model.info.specs[layer]
        inside = HeadTokenSwap(comm.inside(ALLTOALL.kind), spec, len(hidden))
        own_hidden = hidden[inside.own_tokens]

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
                    sinks=model.sinks.get(layer),
                    out=torch.empty_like(q),
                )
                alltoall(call)
                if channel.ratings is not None:
                    channel.ratings.add(call)
                return inside.to_tokens(call.out)

        if not len(own_hidden):  # the module cannot run on zero tokens
            q, kv = (hidden.new_empty(heads, 0, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads))
            attend(layer, q, kv, kv)
            return inside.gather(own_hidden)
        arguments = self._arguments[channel.number][layer]
        weights = self._weights[channel.exchange.weights]
        with model.summed_by(lambda complete: complete):  # nothing to sum over the ranks of the instance
            output = context.layers[layer].compute_with(weights, spec, own_hidden, arguments, attend)
        return inside.gather(output)

    def _fetch(self, source: WeightSource | None) -> HostWeights | PeerWeights:
        context = self._context
        if source == "host":
            return context.host_weights()
        modules = attention_modules(context.model.module, context.model.shard.roles)
        shapes, connect = context.model.attention_shapes, partial(context.comm.inside, WEIGHTS)
        return PeerWeights(lambda layer: all_weights(modules[layer]), context.model.shard, shapes, connect)

    def _start(self, layer: int | None) -> None:
        if layer is not None:
            for source in self._sources.values():
                source.start(layer)


def _from_zero(parts: MemberParts) -> MemberParts:
    """Return contiguous parts with rows that begin at 0."""
    first = parts[0].rows.start
    shifted = [replace(part, rows=slice(part.rows.start - first, part.rows.stop - first)) for part in parts]
    return MemberParts(shifted, parts.backend)


class HeadTokenSwap:
    """Exchanges heads for tokens in one layer. All ranks call `to_heads`, `to_tokens` and `gather`, in this order.

    Args:
        group: the ranks of the instance.
        spec: of the whole layer.
        num_tokens: of the instance.

    Attributes:
        own_tokens: this rank's slice of the tokens.
    """

    def __init__(self, group: Group, spec: AttnSpec, num_tokens: int) -> None:
        self._group, self._spec = group, spec
        self._shares = split_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self._slices = [slice(first, last) for first, last in cut_evenly(num_tokens, group.size)]
        self._counts = [tokens.stop - tokens.start for tokens in self._slices]
        self.own_tokens = self._slices[group.rank]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange q, k, v with all heads and this rank's tokens for q, k, v with its heads and all tokens.

        All are `[heads, tokens, head_dim]`.
        """
        me, dim = self._group.rank, self._spec.head_dim
        cut = [[x[h.start : h.stop] for x, h in zip((q, k, v), _kinds(share), strict=True)] for share in self._shares]
        sends = {rank: Message.of(cut[rank]) for rank in self._group.peers}
        receives = {
            rank: Message.empty([(len(heads), self._counts[rank], dim) for heads in _kinds(self._shares[me])], q)
            for rank in self._group.peers
        }
        self._group.start(sends=sends, receives=receives, hop=0).wait()
        by_rank = [cut[me] if rank == me else receives[rank].tensors for rank in range(self._group.size)]
        queries, keys, values = (torch.cat(tensors, dim=1) for tensors in zip(*by_rank, strict=True))
        return queries, keys, values

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange `[own heads, all tokens, head_dim]` for `[all heads, own tokens, head_dim]`."""
        me, dim = self._group.rank, self._spec.head_dim
        sends = {rank: Message.of([out[:, self._slices[rank]]]) for rank in self._group.peers}
        shapes = [(len(share.heads), self._counts[me], dim) for share in self._shares]
        receives = {rank: Message.empty([shapes[rank]], out) for rank in self._group.peers}
        self._group.start(sends=sends, receives=receives, hop=1).wait()
        ranks = range(self._group.size)
        return torch.cat([out[:, self.own_tokens] if rank == me else receives[rank].tensors[0] for rank in ranks])

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the outputs of all ranks to `[tokens, width]`."""
        return gather_rows(self._group, rows, self._counts, hop=2)


def _kinds(share: HeadShare) -> tuple[range, range, range]:
    return share.heads, share.kv_heads, share.kv_heads


class HostWeights:
    """Weights from the mapped weight file: views on CPUs, copies on a side stream on CUDA devices.

    Before its first copy, a layer is pinned in host memory and stays there, so each rank pins all attention layers.
    Even and odd layers share one device buffer each.
    """

    def __init__(self, stored: Callable[[int], Weights], device: torch.device) -> None:
        self._stored, self._device = stored, device
        self._layers: dict[int, Weights] = {}
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        self._buffers: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def start(self, layer: int) -> None:
        """Start to copy a layer to a CUDA device, from pinned memory. Does nothing on CPUs.

        The previous layer may still be in computation, all earlier layers are complete.
        """
        if self._stream is None:
            return
        if layer not in self._layers:
            self._layers[layer] = {name: weight.pin_memory() for name, weight in self._stored(layer).items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # earlier layers have used the buffer
        buffer = self._buffers[layer % 2]
        with torch.cuda.stream(self._stream):
            for name, weight in self._layers[layer].items():
                if name not in buffer or buffer[name].shape != weight.shape:
                    buffer[name] = torch.empty_like(weight, device=self._device)
                buffer[name].copy_(weight, non_blocking=True)

    def take(self, layer: int) -> Weights:
        """Return a layer's weights: views on CPUs, else copies for which later work on the current stream waits.

        They are valid for later computation, until `start(layer + 2)`.
        """
        if self._stream is None:
            if layer not in self._layers:
                self._layers[layer] = self._stored(layer)
            return self._layers[layer]
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._buffers[layer % 2]


class PeerWeights:
    """Gathers weights from the shares of the instance's ranks. `connect` returns a new group for each layer.

    All ranks of the instance start and take the same layers in the same order. Meanwhile a rank keeps its `share`.
    """

    def __init__(
        self,
        share: Callable[[int], Weights],
        shard: Shard,
        shapes: Callable[[int], Mapping[str, torch.Size]],
        connect: Callable[[], Group],
    ) -> None:
        self._share, self._shard, self._connect = share, shard, connect
        self._layouts = cache(lambda layer: share_layouts(shard, layer, shapes(layer)))
        self._pending: dict[int, tuple[Gathering, list[Message], Weights]] = {}

    def start(self, layer: int) -> None:
        """Start to send this rank's share of a layer, and to receive the other shares."""
        share, layouts = self._share(layer), self._layouts(layer)
        blocks = [empty_share(layout, share) for layout in layouts]
        blocks[self._shard.index] = share_message(layouts[self._shard.index], share)
        self._pending[layer] = Gathering(self._connect(), blocks), blocks, share

    def take(self, layer: int) -> Weights:
        """Wait for the shares of a layer, and return them joined."""
        gathering, blocks, share = self._pending.pop(layer)
        gathering.wait()
        return joined_weights(self._layouts(layer), share, blocks)


Layout = Mapping[str, tuple[int, Sequence[tuple[int, int]]]]
"""Maps a parameter to its sharded dimension, and to the ranges of a rank's share that no lower rank has."""


def share_layouts(shard: Shard, layer: int, shapes: Mapping[str, torch.Size]) -> Sequence[Layout]:
    """Return the layout that each rank sends of a layer's attention. `shapes` belong to unsharded parameters.

    All ranks send equally many ranges of a parameter. They send no parameter that every rank has completely. Raise
    ModelError if the ranges of all ranks, one kind after the other, are not the whole parameter.
    """
    layouts: list[dict[str, tuple[int, list[tuple[int, int]]]]] = []
    sent_stops: dict[str, list[int]] = {}
    firsts: dict[str, list[int]] = {}
    for index in range(shard.size):
        layouts.append({})
        for name, shape in shapes.items():
            if (cut := pieces(replace(shard, index=index), f"{shard.attention_path(layer)}.{name}", shape)) is None:
                continue
            dim, ranges = cut
            starts = firsts.setdefault(name, [own.start for own in ranges])
            stops, start, slices = sent_stops.setdefault(name, [0] * len(ranges)), 0, []
            for kind, own in enumerate(ranges if len(ranges) == len(stops) else ()):
                first = min(len(own), max(0, stops[kind] - own.start))
                slices.append((start + first, start + len(own)))
                start, stops[kind] = start + len(own), max(stops[kind], own.stop)
            layouts[-1][name] = dim, slices
            if len(ranges) != len(stops) or (index == shard.size - 1 and [0, *stops] != [*starts, shape[dim]]):
                raise ModelError(f"peers cannot join {name}, whose heads are mixed: leave out weights=peers")
    return layouts


def empty_share(layout: Layout, like: Weights) -> Message:
    """Allocate a message for a rank's share. `like` is the share of any rank."""
    shapes = []
    for name, (dim, slices) in layout.items():
        for start, stop in slices:
            shape = list(like[name].shape)
            shape[dim] = stop - start
            shapes.append((tuple(shape), like[name].dtype))
    return Message(shapes, next(iter(like.values())).device)


def share_message(layout: Layout, share: Weights) -> Message:
    """Build the message of the rank's own share, with the shapes of `empty_share`."""
    return Message.of(
        [
            share[name].narrow(dim, start, stop - start)
            for name, (dim, slices) in layout.items()
            for start, stop in slices
        ]
    )


def joined_weights(layouts: Sequence[Layout], share: Weights, messages: Sequence[Message]) -> dict[str, Tensor]:
    """Join the weights of a layer from all ranks' messages. Unsharded parameters are taken from `share`."""
    tensors = [iter(message.tensors) for message in messages]
    whole = dict(share)
    for name, (dim, slices) in layouts[0].items():
        pieces = [[next(of_rank) for _ in slices] for of_rank in tensors]
        whole[name] = torch.cat([piece for kind in zip(*pieces, strict=True) for piece in kind], dim)
    return whole
