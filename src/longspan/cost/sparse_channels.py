"""Seconds and bytes per layer of the sparse forms of exchanges, see `channels.py`.

Only the cost of a sparse form imports this module.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from longspan.core.exchange import ALLTOALL_SPARSE, GATHER_HIDDEN, GATHER_HIDDEN_SPARSE
from longspan.core.runs import Run
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import Heads, SparseWork, work_of_layer
from longspan.cost.architecture import ModelShape
from longspan.cost.channels import Channel, ChannelTime, ExchangeCost, by_heads_s, channel_time, cost_of, register_cost
from longspan.cost.roofline import Layer
from longspan.cost.topology import Topology


def _alltoall(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Prices kept tokens, as a mean over layers. Tokens travel while each member attends its own partition."""
    exact, kept = _work(layer, channel)
    attended_s, members = by_heads_s(layer, channel), len(channel.group)
    near_s, far_s = (attended_s * pairs / exact.num_pairs for pairs in (kept.near_pairs, kept.far_pairs))
    shape = layer.model.attention
    part = layer.heads / shape.num_heads / members / shape.num_layers  # of a rank, in a layer
    sent_s, returned_s = (topology.alltoall_s(part * n, channel.group) for n in (kept.sent_bytes, kept.returned_bytes))
    return ChannelTime(attention_s=near_s + far_s, exposed_s=max(0.0, sent_s - near_s) + returned_s)


def _alltoall_bytes(layer: Layer, channel: Channel) -> float:
    _, kept = _work(layer, channel)
    return kept.num_bytes / layer.model.attention.num_layers


def _gather_hidden(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Prices the messages of the exact exchange, and attention to kept tokens."""
    time = channel_time(layer, topology, channel, cost_of(GATHER_HIDDEN))
    exact, kept = _work(layer, channel)
    return replace(time, attention_s=time.attention_s * (kept.num_pairs / exact.num_pairs))


def _work(layer: Layer, channel: Channel) -> tuple[SparseWork, SparseWork]:
    """Returns the work of all layers without drops and with them."""
    setting = channel.exchange.sparse
    assert setting is not None, f"{channel.exchange} has a setting"
    return _work_of(setting, tuple(channel.shares.queries), layer.model.attention, layer.bytes_per_element)


@lru_cache(maxsize=2**10)
def _work_of(
    setting: SparseSetting, queries: tuple[int, ...], shape: ModelShape, element_bytes: float
) -> tuple[SparseWork, SparseWork]:
    """Returns the work of a prompt that members compute in order."""
    ends = list(accumulate(queries, initial=0))
    runs = tuple((Run(first, last),) if first < last else () for first, last in pairwise(ends))
    heads, layers = Heads(shape.num_heads, shape.num_kv_heads), shape.num_layers
    work = (
        [
            work_of_layer(one, runs, runs, layer, (range(layers),), heads, shape.head_dim, round(element_bytes))
            for layer in range(layers)
        ]
        for one in (setting.exact, setting)
    )
    exact, kept = (sum(found, SparseWork()) for found in work)
    return exact, kept


register_cost(ALLTOALL_SPARSE, ExchangeCost(num_bytes=_alltoall_bytes, time=_alltoall))
register_cost(GATHER_HIDDEN_SPARSE, ExchangeCost(num_bytes=cost_of(GATHER_HIDDEN).num_bytes, time=_gather_hidden))
