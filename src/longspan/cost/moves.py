"""Seconds of transfers of KV between instances, which may be split between different numbers of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal

from longspan.cost.forward import Roofline
from longspan.cost.topology import Wire

_End = tuple[Wire, Literal["out", "in"], int]
"""Where bytes enter or leave a link: of a device of an instance, or of a host where its devices share the link."""


def moved_s(tokens: Mapping[tuple[int, int], int], line_of: Callable[[int], Roofline]) -> float:
    """Of sending every layer's KV of so many tokens from one instance to another, for all these pairs at once.

    Each rank of a target gets its own heads, and the ranks of a source send equal parts of all that the target gets.
    The busiest device, or host where the devices of one share a link, says how long it takes; both directions of a
    link are used at the same time.

    Args:
        tokens: by source and target.
        line_of: the cost model of an instance.
    """
    loads, latency_s = _loads(tokens, line_of)
    return latency_s + max((load / link.bytes_per_s for (link, _, _), load in loads.items()), default=0.0)


def received_s(tokens: Mapping[tuple[int, int], int], line_of: Callable[[int], Roofline]) -> float:
    """How long that keeps the busiest link of a target busy."""
    loads, _ = _loads(tokens, line_of)
    return max((load / link.bytes_per_s for (link, way, _), load in loads.items() if way == "in"), default=0.0)


def _loads(
    tokens: Mapping[tuple[int, int], int], line_of: Callable[[int], Roofline]
) -> tuple[Mapping[_End, float], float]:
    """Bytes by where they enter or leave a link, and the longest latency."""
    loads = defaultdict[_End, float](float)
    latency_s = 0.0
    for (source, target), number in tokens.items():
        sender, receiver = line_of(source), line_of(target)
        layer, topology = receiver.layer, receiver.topology
        num_bytes = number * layer.kv_bytes * layer.tp * layer.model.attention.num_layers
        out_of, into = sender.topology.host(source), topology.host(target)
        link = topology.inside if out_of == into else topology.between
        latency_s = max(latency_s, link.latency_s)
        if link.shared:
            loads[link, "out", out_of] += num_bytes
            loads[link, "in", into] += num_bytes
        else:
            loads[link, "out", source] += num_bytes / sender.layer.tp
            loads[link, "in", target] += num_bytes / layer.tp
    return loads, latency_s


def exposed_s(move_s: float, layer_s: float, num_layers: int) -> float:
    """What remains of a transfer that goes layer by layer beside the layers before, each of which takes `layer_s`.

    Nothing hides that of the first layer.
    """
    part_s = move_s / num_layers
    return part_s + (num_layers - 1) * max(0.0, part_s - layer_s)
