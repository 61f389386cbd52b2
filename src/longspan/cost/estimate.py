"""What one prompt, or one step of decoding, costs on a cluster: the answer of `longspan estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longspan.core.runs import Layout, Run, deal
from longspan.core.steps import Exchange
from longspan.cost.channels import Channel, Share, chain_share_of, exchanged_bytes, share_of
from longspan.cost.forward import Breakdown, Roofline
from longspan.cost.memory import Memory, memory
from longspan.cost.partition import cut, even, search

Phase = Literal["prefill", "decode"]
Fractions = Sequence[float] | Literal["search"] | None
_BLOCK = 128
"""Pieces of a chain are whole blocks of so many tokens."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is predicted.

    Attributes:
        seconds: to the first token, or between tokens.
        lower_bound_s: of a prefill, equation 2 of KV-Runahead, from the time of one instance; of a decode step, all weights
            and keys at the memory's full speed.
        flops_per_gpu_s: operations per second and device, counted as in Context Parallelism, Appendix A.
        mfu: that as a part of the peak in 16 bits.
        partition: tokens of each instance.
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

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        communication_s = self.breakdown.exposed_communication_s
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
        }


def estimate_prefill(
    model: Roofline, instances: int, exchange: Exchange, length: int, cached: int = 0, fractions: Fractions = None
) -> Estimate:
    """A prompt of `length` tokens of which the first `cached` have been computed, dealt to all instances.

    Chains, and whatever gets fractions, are dealt contiguously, the rest zigzag.

    Raises:
        ValueError: without new tokens, for an exchange that cannot be, or fractions of something that is no chain's.
    """
    new = length - cached
    if new < 1 or cached < 0:
        raise ValueError(f"a prompt has at least 1 new token, but {length} tokens with {cached} cached given")
    exchange = "local" if instances == 1 else exchange
    if instances > 1 and exchange == "local":
        raise ValueError(f"{instances} instances share a prompt by an exchange: choose one, such as ring_kv")
    partition = _partition(model, instances, exchange, new, cached, fractions)
    channel = prefill_channel(exchange, tuple(range(instances)), partition, new, cached)
    found = _times(model, channel)
    slowest = max(found.values(), key=lambda breakdown: breakdown.total_s)
    last = found[channel.group[-1]] if exchange == "chain" else slowest
    alone = prefill_channel("local", (0,), None, new, cached)
    alone_s = _times(model, alone)[0].total_s
    shape = model.layer.model.attention
    pairs = sum(share.pairs for share in channel.shares)
    flops = 2 * model.layer.model.num_parameters * new + 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers
    return _estimate(
        model,
        channel,
        phase="prefill",
        breakdown=last,
        lower_bound_s=alone_s / 2 * (1 / instances + 1 / instances**2),
        flops=flops,
    )


def estimate_decode(model: Roofline, instances: int, exchange: Exchange, length: int, batch: int = 1) -> Estimate:
    """One token of each of `batch` requests, behind `length` tokens each, which lie evenly on all instances.

    Raises:
        ValueError: without tokens or requests, or for an exchange that decoding has no use for.
    """
    if length < 1 or batch < 1:
        raise ValueError(f"decoding is of at least 1 request behind 1 token, but {batch} behind {length} given")
    if exchange == "chain":
        exchange = "ring_q"  # what a chain leaves with its last member is decoded there; spread keys are asked
    channel = decode_channel("local" if instances == 1 else exchange, tuple(range(instances)), length, batch)
    breakdown = max(_times(model, channel).values(), key=lambda one: one.total_s)
    layer, shape = model.layer, model.layer.model.attention
    read = layer.model.weight_bytes * instances + batch * length * shape.kv_bytes * shape.num_layers
    flops = batch * (2 * layer.model.num_parameters + 4 * length * shape.num_heads * shape.head_dim * shape.num_layers)
    bound_s = read / (instances * layer.tp * layer.chip.device.bytes_per_s)
    return _estimate(model, channel, phase="decode", breakdown=breakdown, lower_bound_s=bound_s, flops=flops)


def prefill_channel(
    exchange: Exchange, group: tuple[int, ...], partition: Sequence[int] | None, new: int, cached: int
) -> Channel:
    """The channel of one prompt: pieces of `partition` tokens one after the other, or zigzag ones."""
    members, total = len(group), new + cached
    if partition is None:
        layout: Layout = "zigzag" if members > 1 else "single"
        runs = deal(layout, cached, total, members)
    else:
        ends = [cached + sum(partition[: index + 1]) for index in range(members)]
        runs = tuple((Run(end - tokens, end),) if tokens else () for end, tokens in zip(ends, partition, strict=True))
    if exchange == "chain":
        shares = tuple(chain_share_of(member) for member in runs)
    else:
        shares = tuple(share_of(member, cached=cached / members, width=total) for member in runs)
    return Channel(exchange=exchange, group=group, shares=shares, keys=total, decode=False)


def decode_channel(exchange: Exchange, group: tuple[int, ...], length: int, batch: int) -> Channel:
    """The channel of one token of each request, whose keys lie evenly on all members, and whose homes do, too."""
    members, keys = len(group), batch * length
    shares = []
    for member in range(members):
        queries = batch // members + (member < batch % members)
        held = keys / members
        shares.append(Share(queries=queries, pairs=queries * length, scores=queries * length, held=held))
    return Channel(exchange=exchange, group=group, shares=tuple(shares), keys=keys, decode=True)


def _partition(
    model: Roofline, instances: int, exchange: Exchange, new: int, cached: int, fractions: Fractions
) -> tuple[int, ...] | None:
    if fractions is None:
        return even(new, instances, 1) if exchange == "chain" else None
    if fractions != "search":
        assert not isinstance(fractions, str), "the other word"
        if len(fractions) != instances:
            raise ValueError(f"{len(fractions)} fractions given for {instances} instances: give one for each")
        return cut(fractions, new, 1)
    group = tuple(range(instances))

    def ttft_s(partition: tuple[int, ...]) -> float:
        found = _times(model, prefill_channel(exchange, group, partition, new, cached))
        return found[group[-1]].total_s if exchange == "chain" else max(one.total_s for one in found.values())

    return search(ttft_s, new, instances, min(_BLOCK, max(1, new // (4 * instances))))


def _times(model: Roofline, channel: Channel) -> dict[int, Breakdown]:
    tokens = {instance: share.queries for instance, share in zip(channel.group, channel.shares, strict=True)}
    if channel.decode:
        sampled = dict(tokens)
    else:
        sampled = {channel.group[-1] if channel.exchange == "chain" else channel.group[0]: 1}
    return model.times([channel], tokens, sampled)


def _estimate(
    model: Roofline, channel: Channel, *, phase: Phase, breakdown: Breakdown, lower_bound_s: float, flops: float
) -> Estimate:
    layer, shape = model.layer, model.layer.model.attention
    queries = [share.queries for share in channel.shares]
    sums = 1 if layer.model.parallel else 2
    reduced = sums * 2 * (layer.tp - 1) * sum(queries) * shape.hidden_size * layer.chip.bytes_per_element
    seconds = breakdown.total_s
    rate = flops / seconds / (len(queries) * layer.tp)
    return Estimate(
        phase=phase,
        seconds=seconds,
        lower_bound_s=lower_bound_s,
        breakdown=breakdown,
        bytes_exchanged=shape.num_layers * (exchanged_bytes(layer, channel) + reduced),
        memory=memory(layer, channel, max(queries)),
        flops_per_gpu_s=rate,
        mfu=rate / layer.chip.device.peak(2),
        partition=tuple(queries),
    )
