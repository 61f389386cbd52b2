"""The price of sparse attention: one formula, for the choice of settings and for the cost of steps.

A prompt by the sparse form of an exchange takes the seconds of the exact exchange, by the cost of steps, times a share.
The share is a ratio of two sums of CSPS §3.2.6: the pipeline of a layer, summed over layers, and the rest by tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import pairwise

import msgspec

from longspan.core.exchange import ALLTOALL, GATHER_HIDDEN, LOCAL, Exchange
from longspan.core.layouts import shard_span
from longspan.core.link_classes import SAME_HOST, LinkClass
from longspan.core.runs import Run, SpanShards
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import drops_in
from longspan.cost.architecture import ModelShape
from longspan.cost.csa_pipeline import LinkSpeed, Members, MemberWork, Rates, layer_time, member_works
from longspan.cost.hidden_pipeline import HiddenWork, exposed_s, pair_shares, tokens_of
from longspan.cost.profile import Profile

_NO_LINK = LinkSpeed(math.inf)


def prompt_s(
    setting: SparseSetting | None,
    num_tokens: int,
    partition: int,
    members: Members,
    kind: str = ALLTOALL.kind,
    num_pieces: int = 1,
) -> float:
    """Predict T_a + R L_in of a prompt that members share, each with a partition.

    Messages of `gather_hidden` are the same with and without drops. Only its attention takes less time.

    Args:
        setting: the drops. None is the exact exchange.
        kind: the exact exchange.
        num_pieces: the micro-partitions of `gather_hidden` without a setting.
    """
    hosts, shape, rates = members
    is_hidden = kind != ALLTOALL.kind
    if is_hidden:
        members = members._replace(rates=msgspec.structs.replace(rates, inside=_NO_LINK, between=_NO_LINK))
    layers = range(shape.num_layers)
    rated = [setting is not None and drops_in(layer, (layers,)) for layer in layers]
    by_layer = [None if setting is None else _in_layer(setting, layer, drops=rated[layer]) for layer in layers]
    pieces = (1,) if setting is None else setting.micro_partitions or (1,) * len(setting.segments)
    attention_s = 0.0
    alike = Counter(zip(by_layer, rated, [*rated[1:], False], strict=True))
    for (layer_setting, is_rated, is_sampled), num_layers in alike.items():
        work = _busiest(layer_setting, num_tokens, partition, members)
        attention_s += num_layers * layer_time(work, pieces, members.rates, rated=is_rated, samples=is_sampled)
    messages_s = 0.0
    if is_hidden:
        num_pieces = num_pieces if setting is None else max(setting.micro_partitions, default=1)
        runs = _partitions(num_tokens, partition, len(hosts))
        if setting is None and num_pieces > 1:
            runs = shard_span(GATHER_HIDDEN.traits.layouts[0], 0, num_tokens, len(hosts), head=0)
        work_s = attention_s / shape.num_layers, rates.projected_s * num_tokens / shape.num_layers
        messages_s = shape.num_layers * _hidden_messages_s(runs, num_pieces, work_s, members._replace(rates=rates))
    return messages_s + (attention_s + rates.rest_s * num_tokens)


def _partitions(num_tokens: int, partition: int, members: int) -> SpanShards:
    starts = [min(num_tokens, member * partition) for member in range(members + 1)]
    return tuple((Run(*ends),) if ends[0] < ends[1] else () for ends in pairwise(starts))


def _hidden_messages_s(runs: SpanShards, num_pieces: int, work_s: tuple[float, float], members: Members) -> float:
    """Return the seconds of a layer in which a member waits for messages of `gather_hidden`.

    Args:
        work_s: seconds of attention, and of projections, of one member in the layer.
    """
    hosts, shape, rates = members
    if len(hosts) == 1:
        return 0.0
    tokens, (attention_s, projected_s) = tokens_of(runs, num_pieces), work_s
    total = max(1, sum(map(sum, tokens)))
    work = HiddenWork(
        tokens=tokens,
        computed_s=[
            share * attention_s + sum(counts) / total * projected_s
            for share, counts in zip(pair_shares(tokens), tokens, strict=True)
        ],
        gathered_bytes=shape.hidden_size * shape.bytes_per_element,
        returned_bytes=shape.hidden_size * shape.bytes_per_element + shape.kv_bytes / len(hosts),
    )
    return exposed_s(work, rates.inside if len(set(hosts)) == 1 else rates.between)


def _in_layer(setting: SparseSetting, layer: int, *, drops: bool) -> SparseSetting:
    """Return the setting of one layer, without micro-partitions: they change no counts."""
    ratios = setting.drop[min(layer, len(setting.drop) - 1)]
    one = setting._replace(drop=(ratios,), micro_partitions=())
    return one if drops else one.exact


@lru_cache(maxsize=2**14)
def _busiest(setting: SparseSetting | None, num_tokens: int, partition: int, members: Members) -> MemberWork:
    """Return the work of the member that takes longest without micro-partitions. All members wait for it."""
    pieces = (1,) * (1 if setting is None else len(setting.segments))
    works = member_works(setting, num_tokens, partition, members.hosts, members.shape)
    return max(works, key=lambda work: layer_time(work, pieces, members.rates))


@lru_cache(maxsize=2**12)
def time_share(exchange: Exchange, num_tokens: int, members: Members) -> float:
    """Predict the seconds of a prompt with drops or micro-partitions, relative to the exact exchange."""
    setting, kind = exchange.sparse, exchange.exact_form.kind
    partition = -(-num_tokens // len(members.hosts))
    if setting is not None:
        partition = max(setting.partition, partition)
        setting = setting._replace(partition=partition)
    own_s = prompt_s(setting, num_tokens, partition, members, kind, exchange.micro_partitions)
    exact_s = prompt_s(None, num_tokens, partition, members, kind)
    return own_s / exact_s if exact_s else 1.0


def rates_of_profile(profile: Profile, shape: ModelShape, members: int, between: LinkClass = SAME_HOST) -> Rates | None:
    """Return the speeds of a member by a profile, which times prompts on one instance.

    Seconds proportional to the length are split evenly over the members. Seconds proportional to its square are
    attention. A link that was not measured has the typical speed. Return None if no attention time was measured.

    Args:
        between: the class of links between the hosts of the members. With one host it is `same_host`.
    """
    alone = profile.over(between).fits().get((1, LOCAL))
    if alone is None or not alone.pair_s:
        return None
    inside, outside = (_link_speed(profile, shape, link_class) for link_class in (SAME_HOST, between))
    pairs_per_s = shape.num_heads * shape.num_layers / alone.pair_s
    return Rates(inside=inside, between=outside, pairs_per_s=pairs_per_s, rest_s=alone.token_s / members)


def _link_speed(profile: Profile, shape: ModelShape, link_class: LinkClass) -> LinkSpeed:
    link = profile.link("point_to_point", 2, link_class)
    return LinkSpeed(profile.speeds(shape, link_class).bytes_per_s, 0.0 if link is None else max(0.0, link.start_s))
