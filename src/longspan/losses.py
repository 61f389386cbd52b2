"""The fleet of an engine after a loss: without lost instances, on the remaining hosts, or with returned hosts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from longspan.core.fleets import Fleet, fleet_text, parts, without
from longspan.errors import ParameterError, WorkerLostError
from longspan.resolve import ResolvedEngine

if TYPE_CHECKING:  # needs Ray
    from longspan.runtime.executor.ray_hosts import RayHosts

Resolve = Callable[[ResolvedEngine, Fleet], ResolvedEngine]
"""Resolves the chosen policy for another fleet. Raises ValueError if the policy does not support it."""
_PLACE_TIMEOUT_S = 60.0
"""Seconds to wait for a host if the live hosts cannot hold any instance. Ray needs about 15 s to move places away from
a killed node, and 65 s from a node whose link is cut."""
_PAUSE_S = 0.5
_log = logging.getLogger("longspan")


def without_ranks(setup: ResolvedEngine, ranks: tuple[int, ...], fleet: Fleet, resolve: Resolve) -> ResolvedEngine:
    """Resolve the largest fleet without the instances of lost ranks. Raise ValueError if there is none.

    Each rank has its number in the cluster without the instances of the previous ranks.
    """
    for rank in ranks:
        fleet = without(fleet, rank)
    return largest_part(setup, fleet, resolve)


def largest_part(setup: ResolvedEngine, fleet: Fleet, resolve: Resolve) -> ResolvedEngine:
    """Resolve the largest part of a fleet that the policy can serve on. Raise its last error if there is none."""
    refused: ValueError | None = None
    for part in parts(fleet):
        try:
            return resolve(setup, part)
        except ValueError as error:
            refused = error
    assert refused is not None, "a fleet has parts"
    raise refused


def check_smaller(setup: ResolvedEngine, resolve: Resolve, spec: str | None) -> None:
    """Raise ParameterError if the engine cannot lose any of its instances. `spec`: of a re-shard, not of a start."""
    cluster = setup.config.cluster
    try:
        for instance in cluster.instances:
            without_ranks(setup, (cluster.ranks(instance).start,), setup.config.fleet, resolve)
    except ValueError as error:
        if spec is None:
            problem = f"is 0, but after the loss of a worker the rest cannot serve ({error}): allow 1 or more"
            raise ParameterError("max_worker_restarts", problem, 0) from None
        problem = f"{spec} cannot serve without a lost worker, and `max_worker_restarts` is 0 ({error})"
        remedy = "choose more instances, or start a new engine with `max_worker_restarts` of 1 or more"
        raise ParameterError("parallel", f"{problem}: {remedy}", spec) from None


def on_live_hosts(setup: ResolvedEngine, wanted: Fleet, hosts: RayHosts, resolve: Resolve) -> ResolvedEngine:
    """Resolve the largest part of the wanted fleet that live hosts have places for. Reserves its places.

    Returns `setup` itself if all its places can be used again. Looks for places of the rest from then on.

    Raises:
        WorkerLostError: no host has had a place for 60 s.
    """
    deadline_s = time.monotonic() + _PLACE_TIMEOUT_S
    while (found := _on_live_hosts(setup, wanted, hosts, usable := hosts.usable(), resolve)) is None:
        if time.monotonic() > deadline_s:
            text = f"no live host has had a place for any instance of {fleet_text(wanted)} for {_PLACE_TIMEOUT_S:g} s"
            raise WorkerLostError(0, text)
        time.sleep(_PAUSE_S)
    is_whole = _num_ranks(found.config.fleet) == _num_ranks(wanted)
    if found is not setup:
        rest = "" if is_whole else ", and looking for places of the rest"
        _log.warning("continuing as %s on %s%s", found.config.cluster, hosts.names(found.config.cluster), rest)
    hosts.look_out(None if is_whole else usable)
    return found


def can_grow(setup: ResolvedEngine, wanted: Fleet, hosts: RayHosts, resolve: Resolve) -> bool:
    """Return True if live hosts have places for a larger part of the wanted fleet than now."""
    if not hosts.has_news():
        return False
    usable = hosts.usable()
    found = _on_live_hosts(setup, wanted, hosts, usable, resolve)
    if found is not None and _num_ranks(found.config.fleet) > _num_ranks(setup.config.fleet):
        return True
    hosts.look_out(usable)
    return False


def _on_live_hosts(
    setup: ResolvedEngine, wanted: Fleet, hosts: RayHosts, usable: dict[int, str], resolve: Resolve
) -> ResolvedEngine | None:
    if setup.config.fleet == wanted and hosts.covers(wanted[0], usable):
        return setup
    for part in parts(wanted):
        if (fleet := hosts.placed(part, usable)) is None:
            continue
        if fleet == setup.config.fleet:
            return setup
        try:
            return resolve(setup, fleet)
        except ValueError as error:
            _log.info("%s cannot serve: %s", fleet_text(fleet), error)
    return None


def _num_ranks(fleet: Fleet) -> int:
    return max(cluster.num_ranks - cluster.num_spare for cluster in fleet)
