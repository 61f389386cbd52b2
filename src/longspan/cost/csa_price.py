"""The price of sparse attention: one formula, for the choice of settings and for the cost of steps.

A prompt by the sparse form of an exchange takes the seconds of the exact exchange, by the cost of steps, times a share.
The share is a ratio of two sums of CSPS §3.2.6: the pipeline of a layer, summed over layers, and the rest by tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

import msgspec

from longspan.core.exchange import ALLTOALL, LOCAL, Exchange
from longspan.core.link_classes import SAME_HOST, LinkClass
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import drops_in
from longspan.cost.architecture import ModelShape
from longspan.cost.csa_pipeline import LinkSpeed, Members, MemberWork, Rates, layer_time, member_works
from longspan.cost.profile import Profile

_NO_LINK = LinkSpeed(math.inf)


def prompt_s(
    setting: SparseSetting | None, num_tokens: int, partition: int, members: Members, kind: str = ALLTOALL.kind
) -> float:
    """Predict T_a + R L_in of a prompt that members share, each with a partition.

    Messages of `gather_hidden` are the same with and without drops. Only its attention takes less time.

    Args:
        setting: the drops. None is the exact exchange.
        kind: the exact exchange.
    """
    hosts, shape, rates = members
    messages_s = 0.0
    if kind != ALLTOALL.kind:
        received = 2 * shape.hidden_size * shape.bytes_per_element + shape.kv_bytes / len(hosts)
        link = rates.inside if len(set(hosts)) == 1 else rates.between
        messages_s = shape.num_layers * (len(hosts) - 1) * min(partition, num_tokens) * received / link.bytes_per_s
        rates = msgspec.structs.replace(rates, inside=_NO_LINK, between=_NO_LINK)
        members = members._replace(rates=rates)
    layers = range(shape.num_layers)
    rated = [setting is not None and drops_in(layer, (layers,)) for layer in layers]
    by_layer = [None if setting is None else _in_layer(setting, layer, drops=rated[layer]) for layer in layers]
    pieces = (1,) if setting is None else setting.micro_partitions or (1,) * len(setting.segments)
    attention_s = 0.0
    alike = Counter(zip(by_layer, rated, [*rated[1:], False], strict=True))
    for (layer_setting, is_rated, is_sampled), num_layers in alike.items():
        work = _busiest(layer_setting, num_tokens, partition, members)
        attention_s += num_layers * layer_time(work, pieces, rates, rated=is_rated, samples=is_sampled)
    return messages_s + (attention_s + rates.rest_s * num_tokens)


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
    """Predict the seconds of a prompt by the sparse form of an exchange, relative to the exact exchange."""
    setting, kind = exchange.sparse, exchange.exact_form.kind
    assert setting is not None, f"{exchange} has no setting"
    partition = max(setting.partition, -(-num_tokens // len(members.hosts)))
    setting = setting._replace(partition=partition)
    sparse_s, exact_s = (prompt_s(form, num_tokens, partition, members, kind) for form in (setting, None))
    return sparse_s / exact_s if exact_s else 1.0


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
