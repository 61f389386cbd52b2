"""The KV pools of the hosts of a Ray cluster: one actor per host owns its pools, and outlives the workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import ray
import zmq
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from longspan.core.cluster import Cluster
from longspan.core.steps import Content, MoveKV
from longspan.errors import ParameterError, WorkerLostError
from longspan.runtime import messages
from longspan.runtime.executor.channel import Channel
from longspan.runtime.executor.ray_hosts import RayHosts, open_channel
from longspan.runtime.executor.ray_places import reason_of
from longspan.runtime.executor.ray_pools import OnDisk, PoolActor, PoolsOpened, address_of_host
from longspan.runtime.host_tiers import HostTiers, PoolPlan

_OPEN_TIMEOUT_S = 120.0
"""Seconds for an actor to start and open its pools. Ray starts a process, which imports PyTorch with a disk."""
_CONNECT_TIMEOUT_S = 30.0
"""Seconds for an actor to connect its disk with an executor, after the block that the disk copies."""
_LIST_TIMEOUT_S = 120.0
"""Seconds for an actor to read the headers of all files on its disk."""
_CALL_TIMEOUT_S = 3.0
"""Seconds to wait for a call whose answer is not needed. A silent host delays the engine by this time."""
_CONCURRENCY = 4  # `wait` blocks one thread of an actor


@dataclass(eq=False)
class _Owner:
    """The actor that owns the pools of a host, on a node of Ray."""

    node: str
    actor: ActorHandle
    is_lost: threading.Event = field(default_factory=threading.Event)
    watcher: threading.Thread | None = None


class RayTiers(HostTiers):
    """The pools of all hosts, see `HostTiers`. They stay while their actors run, also when workers are replaced.

    A lost actor counts as a lost worker of its host: the engine starts other workers, and `renew` opens new pools.

    Args:
        plans: of the hosts, by their numbers.

    Raises:
        ParameterError: a host has too little memory or space, or a folder of its disk cannot be used.
        WorkerLostError: an actor does not start.
    """

    def __init__(self, hosts: RayHosts, plans: Sequence[PoolPlan], cluster: Cluster) -> None:
        super().__init__()
        self._hosts, self._plans = hosts, plans
        self._owners: dict[int, _Owner] = {}
        self._link: _Link | None = None
        self._linking = threading.Lock()
        self.memory, self._is_open = (Path(),) * len(plans), False
        try:
            self.renew(cluster)
        except BaseException:
            self.close()
            raise
        self._is_open = True

    def renew(self, cluster: Cluster) -> None:
        lost = [host for host, owner in self._owners.items() if owner.is_lost.is_set()]
        ranks = _first_ranks(cluster)
        nodes = {host: self._hosts.node(cluster.locations[rank]) for host, rank in ranks.items()}
        moved = [host for host, node in nodes.items() if host in self._owners and self._owners[host].node != node]
        self._end({*lost, *moved})
        new = [host for host in ranks if host not in self._owners]
        self.lost_hosts.update(new)
        calls = {host: self._start(host, nodes[host]) for host in new}
        memory, deadline_s = list(self.memory), time.monotonic() + _OPEN_TIMEOUT_S
        try:
            for host, call in calls.items():
                opened = self._opened(call, ranks[host], cluster, deadline_s)
                memory[host], self.are_kept = opened.memory, self.are_kept or opened.is_kept
        except BaseException:
            self._end(new)
            raise
        self.memory = tuple(memory)

    def _opened(self, call: ray.ObjectRef[bytes], rank: int, cluster: Cluster, deadline_s: float) -> PoolsOpened:
        """Return the pools of the host of a rank. Raise ParameterError or WorkerLostError if they do not open."""
        name = self._hosts.name(cluster.locations[rank])
        try:
            answer = ray.get(call, timeout=max(0.0, deadline_s - time.monotonic()))
        except RayError as error:  # also when the time is over
            reason = f"the KV pools of its host {name} do not open: {reason_of(error)}"
            raise WorkerLostError(rank, reason) from error
        opened = msgspec.json.decode(answer, type=PoolsOpened, dec_hook=lambda kind, text: kind(text))
        if opened.parameter is None:
            return opened
        if self._is_open:  # an engine that serves continues without this host
            raise WorkerLostError(rank, f"its host {name} has no KV pools: {opened.parameter} {opened.problem}")
        raise ParameterError(opened.parameter, f"{opened.problem} (host {name})")

    def link(self, channel: Channel, cluster: Cluster) -> _Link:
        """Connect the disks of the cluster's hosts with the channel of an executor, and watch the actors for it."""
        first = _first_ranks(cluster)
        owners = {host: self._owners[host] for host in first}
        disks = {plan.disk_pool: plan.host for plan in self._plans if plan.num_disk_blocks and plan.host in owners}
        contact = msgspec.json.encode(channel.contact)
        calls = {host: owners[host].actor.connect.remote(contact) for host in disks.values()}
        for host, call in calls.items():
            try:
                ray.get(call, timeout=_CONNECT_TIMEOUT_S)
            except RayError as error:
                raise WorkerLostError(first[host], "the process of its host with KV pools was lost") from error
        link = _Link(channel, first, disks, {host: owners[host].actor for host in disks.values()})
        with self._linking:
            self._link = link
        for host, owner in owners.items():
            if owner.is_lost.is_set():
                link.report_loss(host)
        return link

    def saved(self, hosts: Collection[int]) -> dict[int, Iterable[tuple[int, Content]]]:
        disks = {plan.host: plan.disk_pool for plan in self._plans if plan.num_disk_blocks}
        owners = {host: self._owners[host] for host in disks if host in hosts and host in self._owners}
        if not owners:
            return {}
        saved: dict[int, Iterable[tuple[int, Content]]] = {}
        with closing(open_channel()) as channel:
            contact = msgspec.json.encode(channel.contact)
            calls = [owner.actor.list_disk.remote(contact) for owner in owners.values()]
            deadline_s = time.monotonic() + _LIST_TIMEOUT_S
            while len(saved) < len(owners):
                if (data := channel.receive(_CALL_TIMEOUT_S)) is None:
                    if time.monotonic() > deadline_s or any(owner.is_lost.is_set() for owner in owners.values()):
                        raise WorkerLostError(0, "the process of a host with KV pools does not list its disk")
                    continue
                on_disk = msgspec.msgpack.decode(data, type=OnDisk)
                saved[disks[on_disk.host]] = [(block, Content(*content)) for block, content in on_disk.blocks]
            _call(calls)
        return saved

    def clear(self) -> None:
        _call([owner.actor.clear.remote() for owner in self._owners.values()])

    def close(self) -> None:
        """End all actors, which frees their memory and the locks of their folders."""
        if ray.is_initialized():
            _call([owner.actor.close.remote() for owner in self._owners.values()])
        self._end([*self._owners])

    def _end(self, hosts: Collection[int]) -> None:
        """End the actors of some hosts. Their pools are lost."""
        self.lost_hosts.update(hosts)
        for owner in [self._owners.pop(host) for host in hosts]:
            if ray.is_initialized():
                ray.kill(owner.actor)
            if owner.watcher is not None:
                owner.watcher.join(_CALL_TIMEOUT_S)

    def _start(self, host: int, node: str) -> ray.ObjectRef[bytes]:
        """Start the actor of a host. Return its answer in the future."""
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_concurrency": _CONCURRENCY, "max_restarts": 0, "scheduling_strategy": place}
        actor = ray.remote(PoolActor).options(**options).remote()
        owner = self._owners[host] = _Owner(node, actor)
        owner.watcher = threading.Thread(target=self._watch, args=(host, owner), daemon=True)
        owner.watcher.start()
        return actor.open.remote(msgspec.json.encode(self._plans[host]))

    def _watch(self, host: int, owner: _Owner) -> None:
        """Wait for the end of an actor, and report it as the loss of a worker of its host."""
        with suppress(RayError):
            ray.get(owner.actor.wait.remote())
        owner.is_lost.set()
        with self._linking:
            if self._link is not None and self._owners.get(host) is owner:
                self._link.report_loss(host)


class _Link:
    """Sends moves of disks to the processes of their hosts by the channel of an executor.

    Args:
        ranks: the first rank of each host. It is reported as lost if the process is lost.
        disks: the host of each disk pool.
        actors: by host with a disk.
    """

    def __init__(
        self, channel: Channel, ranks: Mapping[int, int], disks: Mapping[int, int], actors: Mapping[int, ActorHandle]
    ) -> None:
        self._channel, self._ranks, self.disks, self._actors = channel, ranks, disks, actors
        self._lost: zmq.Socket[bytes] | None = channel.reporter()
        self._reporting = threading.Lock()

    def put(self, move: MoveKV) -> None:
        [disk] = {ref.pool for pair in move.copies for ref in pair} & {*self.disks}
        contents = tuple(Content(content.parent, tuple(content.tokens)) for content in move.contents)
        move = replace(move, contents=contents)
        command = msgspec.msgpack.encode(messages.RunMoves((move,)))
        self._channel.send(address_of_host(self.disks[disk]), command)

    def report_loss(self, host: int) -> None:
        """Report the loss of a process as the loss of a worker. Several threads call it."""
        with self._reporting:
            if self._lost is not None and host in self._ranks:
                reason = "the process of its host with KV pools was lost"
                self._lost.send(msgspec.msgpack.encode(messages.Failed(self._ranks[host], reason, peer=False)))

    def close(self) -> None:
        with self._reporting:
            if self._lost is not None:
                self._lost.close(linger=0)
                self._lost = None
        if ray.is_initialized():
            _call([actor.disconnect.remote() for actor in self._actors.values()])


def _first_ranks(cluster: Cluster) -> dict[int, int]:
    """Return the first rank of each host of a cluster, by the number of the host's pool."""
    first: dict[int, int] = {}
    for rank, location in enumerate(cluster.locations):
        first.setdefault(cluster.hosts_of_pools.index(location.host_id), rank)
    return first


def _call(calls: Sequence[ray.ObjectRef[None]]) -> None:
    """Wait for calls. Calls of lost actors end at once, or after a time limit."""
    if calls:
        ray.wait([*calls], num_returns=len(calls), timeout=_CALL_TIMEOUT_S)
