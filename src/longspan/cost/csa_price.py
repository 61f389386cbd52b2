"""The price of sparse attention: one formula, for the choice of settings and for the cost of steps.

A prompt by the sparse form of an exchange takes the seconds of the exact exchange, by the cost of steps, times a share.
The share is a ratio of two sums of CSPS §3.2.6: the pipeline of a layer, summed over layers, and the rest by tokens.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import msgspec

from longspan.core.exchange import ALLTOALL, ALLTOALL_SPARSE, LOCAL, Exchange
from longspan.core.link_classes import SAME_HOST, LinkClass
from longspan.core.runs import SpanShards, coalesce
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import drops_in
from longspan.cost.csa_pipeline import (
    LinkSpeed,
    Members,
    MemberWork,
    Rates,
    layer_time,
    member_works,
    whole_prompt,
)
from longspan.cost.hidden_pipeline import HiddenWork, exposed_s, pair_shares, tokens_of
from longspan.cost.profile import Profile
from longspan.cost.shape import ModelShape

_NO_LINK = LinkSpeed(math.inf)
_PROFILED_DROP = 0.25
"""The drop ratio of prompts that a profile measures with sparse attention. Other ratios are predicted from it."""
PROFILED_CSA = json.dumps({"levels": 2, "drop": _PROFILED_DROP})
"""The settings of these prompts, as of option `csa`."""


def prompt_s(
    setting: SparseSetting | None,
    num_tokens: int,
    partition: int,
    members: Members,
    kind: str = ALLTOALL.kind,
) -> float:
    """Predict T_a + R L_in of a whole prompt that members share, each with a partition. See `step_s`."""
    runs = whole_prompt(num_tokens, partition, len(members.hosts))
    return step_s(setting, runs, runs, members, kind)


def step_s(
    setting: SparseSetting | None,
    q_runs: SpanShards,
    kv_runs: SpanShards,
    members: Members,
    kind: str = ALLTOALL.kind,
    num_pieces: int = 1,
) -> float:
    """Predict the seconds of a step that computes some tokens of a prompt.

    Messages of `gather_hidden` are the same with and without drops. Only its attention takes less time.

    Args:
        setting: the drops. None is the exact exchange.
        q_runs, kv_runs: the new tokens of each member, and all its tokens.
        kind: the exact exchange.
        num_pieces: the micro-partitions of `gather_hidden` without a setting.
    """
    hosts, shape, rates = members
    is_hidden = kind != ALLTOALL.kind
    if is_hidden:
        members = members._replace(rates=msgspec.structs.replace(rates, inside=_NO_LINK, between=_NO_LINK))
    pieces = (1,) if setting is None else setting.micro_partitions or (1,) * len(setting.segments)
    attention_s = 0.0
    for layer in _layers(setting, shape.num_layers):
        work = _busiest(layer.setting, q_runs, kv_runs, members)
        layer_s = layer_time(work, pieces, members.rates, rated=layer.is_rated, samples=layer.is_sampled)
        attention_s += layer.number * layer_s
    num_tokens, messages_s = sum(len(run) for own in q_runs for run in own), 0.0
    if is_hidden and len(hosts) > 1:
        num_pieces = num_pieces if setting is None else max(setting.micro_partitions, default=1)
        work_s = attention_s / shape.num_layers, rates.projected_s * num_tokens / shape.num_layers
        messages_s = shape.num_layers * _hidden_messages_s(q_runs, num_pieces, work_s, members._replace(rates=rates))
    return messages_s + (attention_s + rates.rest_s * num_tokens)


def _hidden_messages_s(runs: SpanShards, num_pieces: int, work_s: tuple[float, float], members: Members) -> float:
    """Return the seconds of a layer in which a member waits for messages of `gather_hidden`.

    Args:
        runs: the new tokens of each member.
        work_s: seconds of attention, and of projections, of one member in the layer.
    """
    hosts, shape, rates = members
    start, tokens = tokens_of(runs, num_pieces)
    attention_s, projected_s = work_s
    total = max(1, sum(map(sum, tokens)))
    work = HiddenWork(
        tokens=tokens,
        computed_s=[
            share * attention_s + sum(counts) / total * projected_s
            for share, counts in zip(pair_shares(tokens, start), tokens, strict=True)
        ],
        gathered_bytes=shape.hidden_size * shape.bytes_per_element,
        returned_bytes=shape.hidden_size * shape.bytes_per_element + shape.kv_bytes / len(hosts),
    )
    return exposed_s(work, rates.inside if len(set(hosts)) == 1 else rates.between)


class _Layers(NamedTuple):
    """Layers with equal work: their setting, and whether they rate keys and send samples for the next layer."""

    number: int
    setting: SparseSetting | None
    is_rated: bool
    is_sampled: bool


def _layers(setting: SparseSetting | None, num_layers: int) -> list[_Layers]:
    layers = range(num_layers)
    rated = [setting is not None and drops_in(layer, (layers,)) for layer in layers]
    mean = None
    if setting is not None:  # micro-partitions change no counts
        mean = setting._replace(drop=((mean_ratios(setting, num_layers),),), micro_partitions=())
    return [
        _Layers(number, mean if is_rated or mean is None else mean.exact, is_rated, is_sampled)
        for (is_rated, is_sampled), number in Counter(zip(rated, [*rated[1:], False], strict=True)).items()
    ]


def work_shares(
    setting: SparseSetting, q_runs: SpanShards, kv_runs: SpanShards, members: Members
) -> tuple[float, float]:
    """Return the bytes and the attended pairs of a step, relative to exact `alltoall`. Ratings are no pairs."""
    totals = []
    for form in (setting, None):
        num_bytes = pairs = 0.0
        for layer in _layers(form, members.shape.num_layers):
            for work in member_works(layer.setting, q_runs, kv_runs, members.hosts, members.shape):
                traffic = [part for one in work.tokens.values() for part in one.cut(1)]
                samples = work.samples.values() if layer.is_sampled else ()
                num_bytes += layer.number * sum(part.leaving for part in (*traffic, *work.results.values(), *samples))
                far = sum(work.at_once.values()) + sum(work.by_piece.values())
                pairs += layer.number * (work.near_pairs + far)
        totals.append((num_bytes, pairs))
    (num_bytes, pairs), (exact_bytes, exact_pairs) = totals
    return num_bytes / exact_bytes if exact_bytes else 1.0, pairs / exact_pairs


def mean_ratios(setting: SparseSetting, num_layers: int) -> tuple[float, ...]:
    """Return the mean ratio of each level from 2 on, over KV heads and layers that drop. Counts are linear in it."""
    layers = range(num_layers)
    by_layer = Counter(setting.drop[min(n, len(setting.drop) - 1)] for n in layers if drops_in(n, (layers,)))
    means = [0.0] * len(setting.segments)
    for by_head, count in by_layer.items():
        for level in range(len(means)):
            ratio = math.fsum(ratios[level] for ratios in by_head) / len(by_head)
            means[level] += count / by_layer.total() * ratio
    return tuple(means)


@lru_cache(maxsize=2**14)
def _busiest(setting: SparseSetting | None, q_runs: SpanShards, kv_runs: SpanShards, members: Members) -> MemberWork:
    """Return the work of the member that takes longest without micro-partitions. All members wait for it."""
    pieces = (1,) * (1 if setting is None else len(setting.segments))
    works = member_works(setting, q_runs, kv_runs, members.hosts, members.shape)
    return max(works, key=lambda work: layer_time(work, pieces, members.rates))


@lru_cache(maxsize=2**12)
def time_share(exchange: Exchange, start: int, q_runs: SpanShards, members: Members) -> float:
    """Predict the seconds of a step with drops or micro-partitions, relative to the exact exchange.

    See `behind` for the `start` tokens of earlier steps.
    """
    setting, kind = exchange.sparse, exchange.exact_form.kind
    kv_runs = behind(start, q_runs)
    own_s = step_s(setting, q_runs, kv_runs, members, kind, exchange.micro_partitions)
    exact_s = step_s(None, q_runs, kv_runs, members, kind)
    return own_s / exact_s if exact_s else 1.0


def behind(start: int, q_runs: SpanShards) -> SpanShards:
    """Return the tokens of each member after a step, if the `start` tokens before it are spread evenly, in order."""
    earlier = whole_prompt(start, -(-start // len(q_runs)), len(q_runs))
    return tuple(coalesce([*old, *new]) for old, new in zip(earlier, q_runs, strict=True))


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


def measured_over_predicted(
    profile: Profile, members: Members, kind: str = ALLTOALL.kind, between: LinkClass = SAME_HOST
) -> float:
    """Return the seconds of measured sparse prompts, relative to predicted seconds: the median over lengths.

    It is 1 if none were measured, and for other exchanges than `alltoall`.
    """
    own, size, ratios = profile.over(between), len(members.hosts), list[float]()
    measured = [prefill for prefill in own.prefills if prefill.kind == (size, ALLTOALL_SPARSE)]
    for prefill in measured if kind == ALLTOALL.kind else ():
        exact = own.find(msgspec.structs.replace(prefill, exchange=ALLTOALL.kind))
        if exact is not None:
            partition = -(-prefill.new_tokens // size)
            setting = SparseSetting(partition, (1,), (((_PROFILED_DROP,),),), "kv")
            runs = whole_prompt(prefill.new_tokens, partition, size)
            share = time_share(ALLTOALL.sparse_form(setting), 0, runs, members)
            ratios.append(prefill.median_s / (exact.median_s * share))
    return statistics.median(ratios) if ratios else 1.0


def _link_speed(profile: Profile, shape: ModelShape, link_class: LinkClass) -> LinkSpeed:
    link = profile.link("point_to_point", 2, link_class)
    return LinkSpeed(profile.speeds(shape, link_class).bytes_per_s, 0.0 if link is None else max(0.0, link.start_s))
