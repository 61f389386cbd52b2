"""Measure the speed of links between the hosts of a Ray cluster: one actor per rank, connected like workers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import closing

import msgspec
import ray
from ray.exceptions import RayError

from longspan.core.imitated_hosts import text_of
from longspan.core.locations import Location
from longspan.cost.profile import Transfer
from longspan.errors import WorkerLostError
from longspan.profiling.links import main
from longspan.runtime.contact import Contact
from longspan.runtime.executor.ray_actor import run_dir, use_interface
from longspan.runtime.executor.ray_hosts import RayHosts, open_channel
from longspan.runtime.executor.ray_places import reason_of
from longspan.runtime.store import ControllerStore

_TIMEOUT_S = 300.0
"""Seconds for actors to start, which imports PyTorch, and to time all transfers. A link of 50 Mb/s takes about 90."""


class TimeLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Time transfers as one rank.

    Attributes:
        places: see `profiling.links.main`.
        folder: the name of a folder in which ranks of a host meet.
        contact: of the rendezvous store.
    """

    rank: int
    places: str
    folder: str
    device: str
    contact: Contact


class LinkActor:
    """Lives on the host of its rank. Orders and answers are JSON, so that no class of ours is pickled."""

    def run(self, data: bytes) -> bytes:
        """Execute a `TimeLinks`. Return transfers, which only the first rank has all of."""
        order = msgspec.json.decode(data, type=TimeLinks)
        use_interface()
        prefix = f"{run_dir(order.folder)}/store"
        with closing(ControllerStore(order.contact)) as store:
            return msgspec.json.encode(main(order.rank, order.places, prefix, order.device, store=store))


def time_ray_links(hosts: RayHosts, locations: Sequence[Location], device: str) -> list[Transfer]:
    """Return timed transfers of every kind between ranks at some of the reserved places.

    Raises:
        WorkerLostError: a rank fails, or all ranks take too long.
    """
    folder, deadline_s = f"longspan-{secrets.token_hex(8)}", time.monotonic() + _TIMEOUT_S
    actors = [hosts.actor(location, LinkActor) for location in locations]
    try:
        with closing(open_channel()) as channel:
            orders = [
                TimeLinks(
                    rank=rank,
                    places=text_of(locations),
                    folder=f"{folder}-{location.host}",
                    device=device,
                    contact=channel.contact,
                )
                for rank, location in enumerate(locations)
            ]
            calls = [actor.run.remote(msgspec.json.encode(order)) for actor, order in zip(actors, orders, strict=True)]
            left = dict(zip(calls, orders, strict=True))
            while ready := ray.wait([*left], timeout=max(0.0, deadline_s - time.monotonic()))[0] if left else []:
                _check(ready[0], left.pop(ready[0]).rank)
            if left:
                raise WorkerLostError(min(order.rank for order in left.values()), f"no times after {_TIMEOUT_S:g} s")
            return msgspec.json.decode(ray.get(calls[0]), type=list[Transfer])
    finally:
        for actor in actors:
            ray.kill(actor)


def _check(call: ray.ObjectRef[bytes], rank: int) -> None:
    """Raise WorkerLostError if a finished call has failed."""
    try:
        ray.get(call)
    except RayError as error:
        raise WorkerLostError(rank, f"its links are not measured: {reason_of(error)}") from error
