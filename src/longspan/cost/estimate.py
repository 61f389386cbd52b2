"""The cost of one prompt, or one decode step, on a cluster, for `longspan estimate`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from longspan.core.exchange import CHAIN, LOCAL, Exchange, decoding
from longspan.core.layouts import shard_span
from longspan.core.runs import Run, chunk_tokens
from longspan.core.splits import cut_evenly
from longspan.cost.architecture import Architecture
from longspan.cost.channels import Channel, Share, Shares, attention_s, cost_of, exchanged_bytes, shares_of
from longspan.cost.forward import Breakdown, Roofline, pipelined_s
from longspan.cost.memory import USED_MEMORY
from longspan.cost.partitions import MAX_SEARCHED, cut, even, search, searched_block
from longspan.cost.shape import ModelShape
from longspan.errors import ParameterError

Phase = Literal["prefill", "decode"]
Fractions = tuple[float, ...] | Literal["search"] | None
_BLOCK = 128
"""Tokens of a block. Pieces of a chain are whole blocks."""
_RESERVED_BYTES = 1.5 * 2**30
"""Memory of each device for the driver's context, libraries' workspaces and buffers of links."""
_HIDDEN_COPIES = 6
"""Hidden states in memory at once: residual, normed, queries, attention output, projected, sum."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device.

    Attributes:
        scores: scores of unfused attention.
        activations: hidden states, and the bytes by which feed-forward activations exceed the scores.
        capacity: memory of the device.
    """

    weights: float
    kv: float
    scores: float
    activations: float
    capacity: float

    @property
    def used(self) -> float:
        return self.weights + self.kv + self.scores + self.activations + _RESERVED_BYTES

    @property
    def fits(self) -> bool:
        return self.used <= self.capacity

    @property
    def kv_room(self) -> float:
        """Bytes available for KV, when `USED_MEMORY` of the device is used."""
        return USED_MEMORY * self.capacity - self.used + self.kv

    @property
    def arithmetic(self) -> str:
        """The sum as text, in GiB."""
        parts = {
            "weights": self.weights,
            "KV": self.kv,
            "scores": self.scores,
            "activations": self.activations,
            "reserved": _RESERVED_BYTES,
        }
        terms = " + ".join(f"{size / 2**30:.1f} {name}" for name, size in parts.items() if size)
        relation = "<=" if self.fits else ">"
        return f"{terms} = {self.used / 2**30:.1f} GiB per GPU {relation} {self.capacity / 2**30:.1f} GiB"


@dataclass(frozen=True, kw_only=True)
class HostKv:
    """KV in the memory of hosts.

    Attributes:
        tokens: number of tokens whose KV fits on all hosts.
        fetch_s: seconds in which each device loads the KV of its own heads and layers over its own bus.
    """

    tokens: int
    fetch_s: float


@dataclass(frozen=True, kw_only=True)
class Drops:
    """The setting of sparse attention of a prompt, and its work relative to the exact exchange.

    Attributes:
        levels: 1 is exact attention.
        drop: the mean drop ratio of each level from 2 on, over KV heads and layers that drop.
        time_share, bytes_share, products_share: the seconds of all layers, the bytes sent, and the attended pairs.
    """

    levels: int
    drop: tuple[float, ...] = ()
    time_share: float = 1.0
    bytes_share: float = 1.0
    products_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The prediction for a prompt or a step.

    Attributes:
        seconds: seconds to the first token, or between tokens.
        lower_bound_s: for a prefill, equation 2 of KV-Runahead from the time of one instance. For a decode step, all
            weights and keys at the memory's full speed.
        flops_per_gpu_s: operations per second and device, with the output head for sampled tokens only.
        mfu: fraction of the peak in 16 bits. Products with fewer bits can exceed it.
        partition: tokens of each instance.
        host: KV in the memory of hosts, if requested.
        drops: of sparse attention, if requested.
    """

    phase: Phase
    seconds: float
    lower_bound_s: float
    breakdown: Breakdown
    bytes_exchanged: float
    memory: Memory
    flops_per_gpu_s: float
    mfu: float
    partition: tuple[int, ...]
    host: HostKv | None = None
    drops: Drops | None = None

    def with_drops(self, drops: Drops, attention_flops: float) -> Estimate:
        """Return the prediction with sparse attention. The output head takes as long.

        Args:
            attention_flops: operations per device of exact attention.
        """
        layers = {name: drops.time_share * spent_s for name, spent_s in self.breakdown.as_dict().items()}
        breakdown = Breakdown(**(layers | {"head_s": self.breakdown.head_s}))
        flops = self.flops_per_gpu_s * self.seconds - (1 - drops.products_share) * attention_flops
        rate = flops / breakdown.total_s
        return replace(
            self,
            seconds=breakdown.total_s,
            breakdown=breakdown,
            bytes_exchanged=drops.bytes_share * self.bytes_exchanged,
            flops_per_gpu_s=rate,
            mfu=self.mfu * rate / self.flops_per_gpu_s,
            drops=drops,
        )

    def as_json(self) -> dict[str, Any]:
        communication_s = self.breakdown.all_reduce_s + self.breakdown.exchange_s
        return {
            "ttft_s" if self.phase == "prefill" else "tbt_s": self.seconds,
            "lower_bound_s": self.lower_bound_s,
            "compute_s": self.seconds - communication_s,
            "exposed_communication_s": communication_s,
            "bytes_exchanged": round(self.bytes_exchanged),
            "memory_gib_per_gpu": self.memory.used / 2**30,
            "fits": self.memory.fits,
            "memory": self.memory.arithmetic,
            "mfu": self.mfu,
            "tflops_per_gpu_s": self.flops_per_gpu_s / 1e12,
            "partition": list(self.partition),
            "breakdown": self.breakdown.as_dict(),
            **({} if self.drops is None else {"csa": asdict(self.drops)}),
            **({} if self.host is None else {"host_kv_tokens": self.host.tokens, "host_fetch_s": self.host.fetch_s}),
        }


@dataclass(frozen=True, kw_only=True)
class PromptShape:
    """`batch` equal prompts of `new` tokens after `cached` tokens, sharded over a group."""

    exchange: Exchange
    group: tuple[int, ...]
    new: int
    cached: int
    batch: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ParameterError("batch", f"must be at least 1, but {self.batch} given", self.batch)
        if self.new < 1 or self.cached < 0:
            total = self.new + self.cached
            problem = f"must be more than the cached tokens, but {total} given with {self.cached} cached"
            raise ParameterError("context", problem, total)
        if len(self.group) > 1 and self.exchange == LOCAL:
            raise ValueError(f"{len(self.group)} instances share a prompt by an exchange: choose one, such as ring_kv")

    def channel(self, partition: Sequence[int] | None, shape: ModelShape) -> Channel:
        members, total = len(self.group), self.new + self.cached
        if partition is None:
            runs = shard_span("zigzag" if members > 1 else "single", self.cached, total, members)
        else:
            ends = accumulate(partition, initial=self.cached)
            runs = tuple((Run(start, end),) if end > start else () for start, end in pairwise(ends))
        every = shares_of(self.exchange, runs, self.cached, total, shape)
        shares = Shares.of([share.times(self.batch) for share in every])
        keys = self.batch * shape.seen(total, self.new)
        return Channel(exchange=self.exchange, group=self.group, shares=shares, keys=keys, decode=False)


def attention_flops(shape: ModelShape, pairs: float) -> float:
    """Return the operations of attention over these pairs of a query and a key, in all layers."""
    return pairs * shape.pair_flops * shape.num_layers


def estimate_prefill(
    model: Roofline,
    instances: int,
    exchange: Exchange,
    length: int,
    cached: int = 0,
    *,
    fractions: Fractions = None,
    batch: int = 1,
) -> Estimate:
    """Predict `batch` prompts of `length` tokens, of which the first `cached` have KV, sharded over all instances.

    Chains, and prompts with fractions, are sharded contiguously. Other prompts are sharded zigzag.

    Raises:
        ValueError: there are no new tokens, prompts or exchange, the number of fractions differs, or a search has too
            many instances.
    """
    if instances == 1:
        exchange = LOCAL
    prompt = PromptShape(
        exchange=exchange, group=tuple(range(instances)), new=length - cached, cached=cached, batch=batch
    )
    channel = prompt.channel(_partition(model, prompt, fractions), model.layer.model.attention)
    at_once = channel
    if model.hops:
        last, at_once = _pipelined(model, prompt, fractions)
    else:
        last = _last(_times(model, channel, batch), exchange)
    alone = replace(prompt, exchange=LOCAL, group=(0,)).channel(None, model.layer.model.attention)
    alone_s = _times(model, alone, batch)[0].total_s
    products = model.layer.model.products_flops(prompt.new * batch, batch)
    flops = products + attention_flops(model.layer.model.attention, sum(channel.shares.pairs))
    return _estimate(
        model,
        channel,
        phase="prefill",
        breakdown=last,
        lower_bound_s=alone_s / len(model.stages) / 2 * (1 / instances + 1 / instances**2),
        flops=flops,
        at_once=at_once,
    )


def _last(times: dict[int, Breakdown], exchange: Exchange) -> Breakdown:
    """Return the breakdown of the member that ends last."""
    return times[max(times)] if exchange.traits.skewed else max(times.values(), key=lambda member: member.total_s)


def _pipelined(model: Roofline, prompt: PromptShape, fractions: Fractions) -> tuple[Breakdown, Channel]:
    """Return the last stage's breakdown for a prompt in chunks through all stages, and the last channel."""
    number = -(-prompt.new // chunk_tokens(prompt.new, len(model.stages)))
    cuts = cut_evenly(prompt.new, number)
    chunks = [replace(prompt, new=stop - start, cached=prompt.cached + start) for start, stop in cuts]
    channels = [chunk.channel(_partition(model, chunk, fractions), model.layer.model.attention) for chunk in chunks]
    total, by_stage = Breakdown(), []
    for channel in channels:
        last = _last(_times(model, channel, prompt.batch), prompt.exchange)
        if channel is not channels[-1]:
            last = replace(last, head_s=0.0)
        total += last
        by_stage.append(model.by_stage(last.total_s - last.head_s, last.head_s, max(channel.shares.queries)))
    part = len(model.stages[-1]) / model.layer.model.attention.num_layers
    return total.of_stage(part, pipelined_s(by_stage)), channels[-1]


def host_kv(model: Roofline, instances: int, num_hosts: int, gib: float, context: int, batch: int = 1) -> HostKv:
    """Predict the tokens that `gib` of each host hold, and the seconds to load the KV of `batch` requests.

    Raises:
        ParameterError: no token fits.
    """
    shape, layer = model.layer.model.attention, model.layer
    token_bytes = shape.kv_bytes * shape.num_layers
    if not gib * 2**30 >= token_bytes:
        raise ParameterError("host_kv_gib", f"{gib:g} holds no token of {token_bytes:,.0f} bytes: allow more", gib)
    rank_bytes = layer.kv_bytes * max(map(len, model.stages))
    fetch_s = layer.device.bus.latency_s + batch * context * rank_bytes / (instances * layer.device.bus.bytes_per_s)
    return HostKv(tokens=int(num_hosts * gib * 2**30 // token_bytes), fetch_s=fetch_s)


def estimate_decode(model: Roofline, instances: int, exchange: Exchange, length: int, batch: int = 1) -> Estimate:
    """Predict one token of each of `batch` requests, after `length` tokens each, spread evenly over all instances.

    After a chain all KV is on its last member, which decodes alone.

    Raises:
        ValueError: there are no tokens or requests, or the exchange is `gather_hidden`, which does not decode.
    """
    if length < 1 or batch < 1:
        raise ValueError(
            f"decoding needs at least 1 request and 1 token, but {batch} requests of {length} tokens given"
        )
    if exchange.traits.keeps == "later":
        instances = 1
    if instances > 1 and not exchange.traits.decodes:
        kinds = ", ".join(other.kind for other in decoding())
        raise ValueError(f"exchange {exchange.kind} is for prompts only: choose one of {kinds} to decode")
    shape = model.layer.model.attention
    channel = decode_channel(LOCAL if instances == 1 else exchange, tuple(range(instances)), length, batch, shape)
    breakdown, num_groups = _last(_times(model, channel), LOCAL), min(batch, len(model.stages))
    if model.hops:  # groups of requests alternate, to keep all stages busy
        grouped = decode_channel(channel.exchange, channel.group, length, -(-batch // num_groups), shape)
        breakdown = _last(_times(model, grouped), LOCAL)
        tokens = max(grouped.shares.queries)
        stages_s = model.by_stage(breakdown.total_s - breakdown.head_s, breakdown.head_s, tokens)
        part = len(model.stages[-1]) / model.layer.model.attention.num_layers
        breakdown = breakdown.of_stage(part, max(sum(stages_s), num_groups * max(stages_s)))
    layer, tokens_at_once = model.layer, -(-batch // (instances * num_groups))
    keys_bytes = batch * shape.seen(length) * shape.kv_bytes * shape.num_layers
    read = layer.model.read_bytes(tokens_at_once) * instances + keys_bytes / num_groups
    flops = layer.model.products_flops(batch, batch) + attention_flops(shape, batch * shape.seen(length))
    bound_s = read / (instances * layer.tp * layer.device.bytes_per_s)
    return _estimate(
        model, channel, phase="decode", breakdown=breakdown, lower_bound_s=bound_s, flops=flops, at_once=channel
    )


def decode_channel(
    exchange: Exchange, group: tuple[int, ...], length: int, batch: int, shape: ModelShape | None = None
) -> Channel:
    """Return the channel of one token per request. Keys and owners are spread evenly over members."""
    members, seen = len(group), length if shape is None else shape.seen(length)
    queries = [batch // members + (member < batch % members) for member in range(members)]
    pairs = [number * seen for number in queries]
    shares = Shares(queries=queries, pairs=pairs, scores=pairs, held=[batch * length / members] * members)
    return Channel(exchange=exchange, group=group, shares=shares, keys=batch * seen, decode=True)


def _partition(model: Roofline, prompt: PromptShape, fractions: Fractions) -> tuple[int, ...] | None:
    members = len(prompt.group)
    if fractions is None:
        return even(prompt.new, members, 1) if prompt.exchange.traits.in_order else None
    if not isinstance(fractions, tuple):
        return _searched(model, prompt)
    if len(fractions) != members:
        raise ParameterError("fractions", f"must be one for each of {members} instances, but {len(fractions)} given")
    return cut(fractions, prompt.new, 1)


def searched_fractions(model: Roofline, members: int, length: int, *, align: int = _BLOCK) -> tuple[float, ...]:
    """Search the fractions of a prompt for a chain of the first `members` instances, in multiples of `searched_block`.

    Raises:
        ParameterError: for more instances than `MAX_SEARCHED`.
    """
    prompt = PromptShape(group=tuple(range(members)), exchange=CHAIN, new=length, cached=0, batch=1)
    return tuple(piece / length for piece in _searched(model, prompt, align))


def levelled_fractions(model: Roofline, members: int, length: int) -> tuple[float, ...]:
    """Return the fractions of a chain's pieces that take equal time alone.

    A search from these pieces gains a few per cent, and takes seconds for 8 members.
    """
    prompt = PromptShape(group=tuple(range(members)), exchange=CHAIN, new=length, cached=0, batch=1)
    return tuple(piece / length for piece in _levelled(model, prompt, 1))


def _searched(model: Roofline, prompt: PromptShape, align: int = _BLOCK) -> tuple[int, ...]:
    """Return the better of two searches, from even pieces and from pieces that take equal time alone."""

    def ttft_s(partition: tuple[int, ...]) -> float:
        return _last(
            _times(model, prompt.channel(partition, model.layer.model.attention), prompt.batch), prompt.exchange
        ).total_s

    members = len(prompt.group)
    if members > MAX_SEARCHED:
        problem = (
            f"are searched for up to {MAX_SEARCHED} instances, but {members} given, which would take minutes: give "
            "fractions, or leave them out (even pieces for a chain, else zigzag)"
        )
        raise ParameterError("fractions", problem)
    block = searched_block(prompt.new, members, align)
    seeds = (None, _levelled(model, prompt, block))
    partitions = (search(ttft_s, prompt.new, members, block, seed) for seed in seeds)
    return min(partitions, key=ttft_s)


def _levelled(model: Roofline, prompt: PromptShape, block: int) -> tuple[int, ...]:
    """Return pieces of equal cost. Earlier pieces attend to fewer keys, so they are longer."""
    layer, members = model.layer, len(prompt.group)
    token_s = (layer.before(prompt.new).total_s + layer.behind(prompt.new).total_s) / prompt.new
    whole = Share(queries=prompt.new, pairs=prompt.new**2, scores=prompt.new**2, held=prompt.new)
    score_s = attention_s(layer, whole, keys=prompt.new) / prompt.new**2
    pieces: list[float] = []
    low, high = 0.0, prompt.new * (token_s + score_s * (prompt.new + prompt.cached))
    for _ in range(50):
        level, start, pieces = (low + high) / 2, prompt.cached, []
        for _ in range(members):
            linear = token_s + score_s * start
            piece = (math.sqrt(linear**2 + 4 * score_s * level) - linear) / (2 * score_s)
            pieces.append(piece)
            start += math.ceil(piece)
        low, high = (level, high) if sum(pieces) < prompt.new else (low, level)
    total = sum(pieces)
    return cut([piece / total for piece in pieces], prompt.new, block)


def _times(model: Roofline, channel: Channel, batch: int = 1) -> dict[int, Breakdown]:
    tokens = dict(zip(channel.group, channel.shares.queries, strict=True))
    if channel.decode:
        sampled = dict(tokens)
    else:  # one token of each prompt
        sampled = {channel.group[-1] if channel.exchange.traits.skewed else channel.group[0]: batch}
    return model.times([channel], tokens, sampled)


def _estimate(
    model: Roofline,
    channel: Channel,
    *,
    phase: Phase,
    breakdown: Breakdown,
    lower_bound_s: float,
    flops: float,
    at_once: Channel,
) -> Estimate:
    """Complete an estimate by bytes, memory and rates. `at_once` is the channel, or the last chunk of a pipeline."""
    layer, shape = model.layer, model.layer.model.attention
    queries = channel.shares.queries
    passes = min(sum(queries), len(model.stages)) if channel.decode else sum(queries) / sum(at_once.shares.queries)
    passed = len(model.hops) * layer.tp * sum(queries) * shape.hidden_size * layer.bytes_per_element
    summed = passes * sum(model.summing(number / passes)[1] for number in queries)
    seconds = breakdown.total_s
    rate = flops / seconds / (len(queries) * layer.tp * len(model.stages))
    return Estimate(
        phase=phase,
        seconds=seconds,
        lower_bound_s=lower_bound_s,
        breakdown=breakdown,
        bytes_exchanged=shape.num_layers * exchanged_bytes(layer, channel) + summed + passed,
        memory=memory(model, at_once, max(at_once.shares.queries)),
        flops_per_gpu_s=rate,
        mfu=rate / layer.device.peak("bfloat16"),
        partition=tuple(queries),
    )


def memory(line: Roofline, channel: Channel, tokens: float) -> Memory:
    """Return the memory of the fullest rank, when its group has computed a channel's queries and has all its keys.

    Args:
        tokens: number of tokens that the busiest instance computes at once.
    """
    layer, most_layers = line.layer, max(map(len, line.stages))
    attention = layer.attention
    held, copies = max(channel.shares.held), 1.0
    if attention.unfused and len(channel.group) > 1 and cost_of(channel.exchange).copies_kv:
        held, copies = max(held, channel.keys), attention.kv_copies
    scores = max(channel.shares.scores) * layer.heads * attention.score_buffer_bytes
    hidden, wide = activation_bytes(layer.model, tokens, layer.tp)
    return Memory(
        weights=max(layer.model.rank_bytes(layers, layer.tp) for layers in line.stages),
        kv=copies * held * layer.kv_bytes * most_layers,
        scores=scores,
        activations=hidden + max(0.0, wide - scores),
        capacity=layer.device.memory_bytes,
    )


def full_step(line: Roofline, tokens: int) -> Memory:
    """Return the memory of the fullest rank while its instance computes a prompt of `tokens` tokens."""
    shares = Shares.of(shares_of(LOCAL, ((Run(0, tokens),),), 0, tokens))
    return memory(line, Channel(exchange=LOCAL, group=(0,), shares=shares, keys=tokens, decode=False), tokens)


def activation_bytes(model: Architecture, tokens: float, tp: int) -> tuple[float, float]:
    """Return the bytes of hidden states, and of feed-forward activations, on a rank that computes `tokens` tokens."""
    shape, matrices = model.attention, 4 if model.gated else 2
    hidden = _HIDDEN_COPIES * tokens * shape.hidden_size * shape.bytes_per_element
    width = model.intermediate_size / tp
    if (experts := model.experts) is not None:  # outputs of experts are stored before they are summed
        routed = experts.per_token * (matrices * experts.intermediate_size / tp + shape.hidden_size)
        width = max(width, (routed + matrices * experts.shared_size / tp) / matrices)
    return hidden, matrices * tokens * width * shape.bytes_per_element


def whole_prompt_tokens(needed_bytes: Callable[[int], float], free_bytes: float, *, least: int, longest: int) -> int:
    """Return the maximum tokens of a step for whole prompts: as memory allows, from `least` to `longest`.

    Args:
        needed_bytes: returns the memory of a rank for a number of tokens. It must not decrease.
    """
    return least + max(0, bisect_right(range(least, longest + 1), free_bytes, key=needed_bytes) - 1)
