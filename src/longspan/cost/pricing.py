"""Prices of work by the cost of steps: copies of KV, the work of phases, and predicted profiles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_Q, Exchange
from longspan.core.layouts import shard_span
from longspan.core.link_classes import LinkClass
from longspan.core.runs import Run, SpanShards, chunk_tokens
from longspan.core.splits import ParallelSpec, cut_evenly
from longspan.core.steps import Forward, MoveKV, MoveWay, Part, Sample
from longspan.cost.flows import DISK_BYTES_PER_S, alone_s
from longspan.cost.forward import pipelined_s
from longspan.cost.partitions import cut
from longspan.cost.profile import Decode, Prefill, Profile
from longspan.cost.profile_key import ProfileKey
from longspan.cost.shape import Hardware, ModelShape
from longspan.cost.step_cost import StepCost
from longspan.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class SwapPrice:
    """Prices copies of KV from a host, or its disk, to an instance, and the recomputation of the same tokens.

    Attributes:
        block_s: seconds to copy a block from the host to an instance.
        load_s: seconds to copy a block from a disk to its host.
        recompute_s: seconds of `(new, cached)` tokens on one instance.
    """

    block_s: float
    load_s: float
    recompute_s: Callable[[int, int], float]

    @classmethod
    def of(cls, cost: StepCost, cluster: Cluster, slow: float = 1.0) -> SwapPrice:
        """Price by the cost of steps.

        Args:
            slow: the factor by which instances take longer than their cost.

        Raises:
            ParameterError: for a profile without links.
        """
        host = cluster.host_pool(0)
        disk = cluster.disk_pool(host)

        @lru_cache(maxsize=4096)
        def prefill_s(new_tokens: int, cached_tokens: int) -> float:
            return slow * _prefill_s(cost, 1, LOCAL, new_tokens, cached_tokens)

        prefill_s(1, 0)  # a cost that cannot price it raises here
        load_s = 0.0 if disk is None else _block_s(cost, disk, host, "load")
        return cls(block_s=_block_s(cost, host, 0, "in"), load_s=load_s, recompute_s=prefill_s)

    @classmethod
    def typical(cls, shape: ModelShape, speeds: Hardware, *, token_flops: float, block_bytes: float) -> SwapPrice:
        """Price by speeds of devices and links, for a machine without a profile.

        Args:
            token_flops: operations of a token without attention.
        """
        pair_flops = shape.pair_flops * shape.num_layers

        def prefill_s(new: int, cached: int) -> float:
            return new * (token_flops + pair_flops * (cached + new / 2)) / speeds.flops_per_s

        load_s = block_bytes / DISK_BYTES_PER_S
        return cls(block_s=block_bytes / speeds.bytes_per_s, load_s=load_s, recompute_s=prefill_s)


def whole_prompt_s(
    cost: StepCost, exchange: Exchange, group: tuple[int, ...], num_tokens: int, slow: float = 1.0
) -> float | None:
    """Price a step that computes a whole prompt on a group, without the output head.

    Return None if the cost is a profile without measurements of such groups.
    """
    runs = shard_span("contiguous", 0, num_tokens, len(group), head=0)
    try:
        return slow * _whole_s(cost, Forward(number=1, parts=(_part(group, exchange, 0, runs),)))
    except ParameterError:
        return None


class PricedPhases:
    """Prices the work of the clusters of both phases by the cost of steps, with all devices busy.

    Args:
        slow: the factor by which instances take longer than their cost.

    Raises:
        ParameterError: for a cost that lacks instances of one cluster, or links.
    """

    def __init__(self, cost: StepCost, phases: Sequence[Cluster], block_size: int, slow: float = 1.0) -> None:
        self._costs = {one.spec: cost.resharded(one) for one in phases}
        self._other = {phases[0].spec: phases[1], phases[1].spec: phases[0]}
        self._swaps = {one.spec: SwapPrice.of(self._costs[one.spec], one) for one in phases}
        self._block_size, self._slow = block_size, slow
        self._stage_s = lru_cache(maxsize=4096)(self._find_stage_s)
        for one in phases:
            self.prefill_s(one, 1, 1)  # a cost that cannot price a cluster raises here

    def prefill_s(self, cluster: Cluster, num_tokens: int, length: int) -> float:
        """Return the seconds of `num_tokens` in prompts of a `length` that keep all stages busy."""
        return num_tokens / length / cluster.num_instances * self._stage_s(cluster.spec, 0, length)

    def decode_s(self, cluster: Cluster, num_seqs: int, length: int) -> float:
        """Return the seconds to decode a token of each of `num_seqs` requests, in rounds if devices lack KV blocks."""
        max_seqs = max(1, cluster.num_blocks[0] // -(-length // self._block_size))
        at_once = max(1, min(max_seqs, -(-num_seqs // cluster.num_instances)))
        num_stages, per_stage = cluster.pp(0), -(-at_once // cluster.pp(0))
        rounds = max(1.0, num_seqs / (at_once * cluster.num_instances))
        return rounds * num_stages * self._stage_s(cluster.spec, per_stage, length)

    def reshard_s(self, cluster: Cluster) -> float:
        return self._costs[self._other[cluster.spec].spec].reshard(cluster).seconds

    def swap_s(self, cluster: Cluster, num_blocks: int) -> float:
        return num_blocks * self._swaps[cluster.spec].block_s / cluster.num_instances

    def _find_stage_s(self, spec: ParallelSpec, num_decodes: int, length: int) -> float:
        """Return the seconds of the slowest stage of one instance with a prompt, or with `num_decodes` decodes."""
        forward = _decodes(num_decodes, length) if num_decodes else _prefill(1, LOCAL, length, 0)
        return self._slow * max(self._costs[spec].stage_seconds(forward)[0])


def _block_s(cost: StepCost, source: int, target: int, way: MoveWay) -> float:
    """Return the seconds of one further block in a move."""
    pair = BlockRef(source, 0), BlockRef(target, 0)
    moves = (MoveKV(number=1, request_id=0, copies=(pair,) * number, way=way) for number in (1, 2))
    one_s, two_s = (alone_s(cost.flows(move)) for move in moves)
    return two_s - one_s


def predicted_profile(
    cost: StepCost,
    profile_key: ProfileKey,
    *,
    num_instances: int,
    classes: Mapping[int, LinkClass],
    prompts: Iterable[tuple[int, int]],
    exchanges: Sequence[Exchange],
    sizes: Collection[int] = (),
    pieces: Pieces | None = None,
) -> Profile:
    """Return a predicted profile of a machine from its cost, so that policies choose as on the real machine.

    Prefills of (new, cached) tokens take one step, or several that fill the stages. They are on one instance, and on
    groups of 2, 4, 8 and so on. Decodes are on one instance, and of one request on each of these groups.

    Args:
        classes: the class of links in the group of each size, which has the first instances.
        sizes: sizes of further groups. Sizes above the cluster's are left out.
        pieces: returns the fractions of a chain for its members and the length of a whole prompt. Even if empty.
    """
    powers = {2**power for power in range(num_instances.bit_length())}
    wanted = {size for size in powers.union(sizes) if 1 <= size <= num_instances}
    prefills = [
        Prefill(
            members=members,
            exchange=str(exchange),
            new_tokens=new,
            cached_tokens=cached,
            link_class=classes[members],
            seconds=(_prefill_s(cost, members, exchange, new, cached, pieces if exchange.traits.skewed else None),),
        )
        for members in sorted(wanted | {num_instances})
        for exchange in (exchanges if members > 1 else (LOCAL,))
        for new, cached in prompts
    ]
    alone = [(1, LOCAL, batch) for batch in _BATCHES]
    shared = [(members, RING_Q, 1) for members in sorted((wanted | {num_instances}) - {1})]
    decodes = [
        Decode(
            members=members,
            exchange=str(exchange),
            batch=batch,
            context_tokens=context,
            link_class=classes[members],
            seconds=(_whole_s(cost, _decodes(batch, context, members)),),
        )
        for members, exchange, batch in (*alone, *shared)
        for context in _CONTEXTS
    ]
    return Profile(profile_key=profile_key, prefills=tuple(prefills), decodes=tuple(decodes))


Pieces = Callable[[int, int], tuple[float, ...] | None]
_BATCHES, _CONTEXTS = (1, 16, 64), (1024, 16384)
"""The decodes that are predicted."""


def _whole_s(cost: StepCost, forward: Forward) -> float:
    return max(map(sum, cost.stage_seconds(forward).values()))


def _prefill_s(
    cost: StepCost, members: int, exchange: Exchange, new: int, cached: int, pieces: Pieces | None = None
) -> float:
    fractions = None if pieces is None else pieces(members, new)
    if fractions:  # after cached tokens, as policies cut them
        share = new / (new + cached)
        fractions = tuple([share * fraction + (1 - share) / members for fraction in fractions])
    whole = cost.stage_seconds(_prefill(members, exchange, new, cached, fractions))
    num_stages = max(map(len, whole.values()))
    if num_stages == 1:
        return max(stages[0] for stages in whole.values())
    number = -(-new // chunk_tokens(new, num_stages))
    chunks = [
        cost.stage_seconds(_prefill(members, exchange, stop - start, cached + start)).values()
        for start, stop in cut_evenly(new, number)
    ]
    return pipelined_s([max(chunk, key=sum) for chunk in chunks])


def _decodes(number: int, length: int, members: int = 1) -> Forward:
    group, exchange = tuple(range(members)), LOCAL if members == 1 else RING_Q
    runs, sample = ((Run(length - 1, length),), *[()] * (members - 1)), Sample(instance=0, position=length)
    parts = [_part(group, exchange, length - 1, runs, request_id=i, sample=sample) for i in range(number)]
    return Forward(number=1, parts=tuple(parts))


def _prefill(
    members: int, exchange: Exchange, new: int, cached: int, fractions: tuple[float, ...] | None = None
) -> Forward:
    runs = shard_span(exchange.traits.layouts[0], cached, cached + new, members, head=0)
    if fractions:
        ends = accumulate(cut(fractions, new, 1), initial=cached)
        runs = tuple([(Run(start, stop),) if stop > start else () for start, stop in pairwise(ends)])
    return Forward(number=1, parts=(_part(tuple(range(members)), exchange, cached, runs),))


def _part(
    group: tuple[int, ...],
    exchange: Exchange,
    start: int,
    runs: SpanShards,
    *,
    request_id: int = 0,
    sample: Sample | None = None,
) -> Part:
    num_tokens = sum(len(run) for own in runs for run in own)
    return Part(
        request_id=request_id,
        start=start,
        stop=start + num_tokens,
        tokens=range(num_tokens),
        group=group,
        runs=runs,
        exchange=exchange,
        first_block=0,
        blocks=(),
        sample=sample,
    )
