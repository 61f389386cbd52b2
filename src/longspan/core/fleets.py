"""The fleet of an engine: its text, its phases, and the smaller fleets that can replace it.

A fleet is one cluster, or two clusters on the same ranks: one prefills and the other decodes, in alternating phases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from operator import mul
from typing import NoReturn

from longspan.core.cluster import Cluster
from longspan.errors import ParameterError

Fleet = tuple[Cluster, ...]
"""One cluster, or the clusters of the prefill phase and the decode phase."""
_ROLES = re.compile(r"\s*(\S+)\s+prefill\s*\+\s*(\S+)\s+decode\s*")


def parse_fleet(text: str) -> Cluster:
    """Parse a parallel spec such as `2xtp2`, or a prefill and a decode spec such as `2 prefill + tp2 decode`.

    Raises:
        ValueError: `text` has neither form.
    """
    roles = _ROLES.fullmatch(text)
    return Cluster.of(text) if roles is None else Cluster.of(*roles.groups())


def fleet_text(fleet: Fleet) -> str:
    """Write a fleet as `parse_fleet` reads it."""
    return str(replace(fleet[0], decode_spec=fleet[1].spec, locations=(), num_blocks=()) if fleet[1:] else fleet[0])


def in_phases(cluster: Cluster) -> tuple[Cluster, Cluster]:
    """Return the prefill and decode clusters that share the devices of a cluster with roles, in alternating phases.

    Raises:
        ParameterError: the instances have no roles, or both specs are equal.
    """
    if cluster.decode_spec is None:
        problem = "needs `decode_parallel`, too: they alternate on the same devices"
        raise ParameterError("prefill_parallel", problem)
    if cluster.decode_spec == cluster.spec:
        problem = f"{cluster.spec} equals `prefill_parallel`: give another spec, or `parallel` and another `policy`"
        raise ParameterError("decode_parallel", problem, str(cluster.spec))
    specs = cluster.spec, cluster.decode_spec
    num_ranks, num_pools = max(spec.num_ranks for spec in specs), max(spec.instances for spec in specs)
    prefill, decode = (
        Cluster(spec=spec, num_spare=num_ranks - spec.num_ranks, num_device_pools=num_pools) for spec in specs
    )
    return prefill, decode


def parts(fleet: Fleet) -> Iterator[Fleet]:
    """Yield a fleet without its spare ranks, then its parts, largest first.

    A part lacks the last instances of some roles or phases. Each role and each phase keeps at least one instance.
    """
    groups = [(cluster, group) for cluster in fleet for group in (cluster.prefill, cluster.decode) if group]
    sizes = [len(cluster.ranks(group.start)) for cluster, group in groups]
    choices = product(*([group[:count] for count in range(len(group), 0, -1)] for _, group in groups))
    largest_first = sorted(choices, key=lambda choice: -sum(map(mul, map(len, choice), sizes)))
    for kept in largest_first:
        if not fleet[1:]:
            yield (_only(fleet[0], chain.from_iterable(kept)),)
            continue
        clusters = tuple(map(_only, fleet, kept))
        if clusters[0].spec != clusters[1].spec:
            num_ranks = max(one.num_ranks for one in clusters)
            locations = fleet[0].locations[:num_ranks]
            yield tuple(replace(one, num_spare=num_ranks - one.num_ranks, locations=locations) for one in clusters)


def without(fleet: Fleet, rank: int) -> Fleet:
    """Return the fleet that remains after the loss of a rank, and with it of its instance.

    A spare rank replaces a lost rank. With phases, the largest part with fewer ranks remains. Ranks are renumbered.

    Raises:
        ParameterError: a role or phase has no other instance.
    """
    first = fleet[0]
    whole = next(parts(fleet))
    if whole[0].num_ranks < first.num_ranks:
        return whole
    if fleet[1:]:
        smaller = next((part for part in parts(fleet) if part[0].num_ranks < first.num_ranks), None)
        return smaller or _refuse(fleet, f"needs all of its {first.num_ranks} ranks in one of its phases")
    lost = first.at(rank).instance
    peers = first.decode if lost in first.decode else first.prefill
    if len(peers) == 1:
        role = "" if not first.has_roles else "decode " if lost in first.decode else "prefill "
        _refuse(fleet, f"has no other {role}instance")
    return (_only(first, [instance for instance in first.instances if instance != lost]),)


def _refuse(fleet: Fleet, problem: str) -> NoReturn:
    text = fleet_text(fleet)
    raise ParameterError("parallel", f"{text} {problem}: restart all workers", text)


def _only(cluster: Cluster, instances: Iterable[int]) -> Cluster:
    """Return a cluster with some of its instances, in their order, and without spare ranks.

    Pools of hosts keep their numbers.
    """
    kept = list(instances)
    num_decode, decode = sum(instance in cluster.decode for instance in kept), cluster.decode_spec
    ranks = [rank for instance in kept for rank in cluster.ranks(instance)]
    return replace(
        cluster,
        spec=replace(cluster.spec, instances=len(kept) - num_decode),
        decode_spec=None if decode is None else replace(decode, instances=num_decode),
        locations=tuple([cluster.locations[rank] for rank in ranks]) if cluster.locations else (),
        num_blocks=tuple([cluster.num_blocks[instance] for instance in kept]) if cluster.num_blocks else (),
        num_spare=0,
        num_device_pools=cluster.host_pools.start,
        pool_hosts=cluster.hosts_of_pools if cluster.host_blocks else (),
    )
