"""Launch workers on the hosts of a Ray cluster: one actor per rank, which runs the same worker process as on one host.

Ray places the actors and watches them. Commands, reports and the rendezvous use the encrypted channel, and tensors use
torch.distributed. Ray's object store carries no tensors.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from longspan.core.cluster import Cluster
from longspan.core.fleets import Fleet
from longspan.core.locations import Location
from longspan.core.placement import (
    RACK_LABEL,
    PlacedHost,
    Placement,
    Racks,
    bundles_of_groups,
    group_sizes,
    largest_share,
    near_hosts,
    rank_groups,
)
from longspan.errors import ParameterError, WorkerLostError
from longspan.model.source import ALIAS
from longspan.runtime.contact import Contact
from longspan.runtime.executor.channel import Channel
from longspan.runtime.executor.forkserver import StartWorker
from longspan.runtime.executor.ray_actor import RankActor, RankStarted, StartRank, address_of
from longspan.runtime.executor.ray_places import LookOut, Place, Reservation, answering, reason_of
from longspan.runtime.executor.secure_channel import SecureChannel
from longspan.runtime.messages import WorkerConfig

if TYPE_CHECKING:
    from longspan.runtime.executor.ray_tiers import RayTiers
    from longspan.runtime.host_tiers import PoolPlan

_PLACE_TIMEOUT_S = 60.0
"""Seconds to wait for CPUs and devices that other jobs of the cluster use, or that an autoscaler adds."""
_START_TIMEOUT_S = 1800.0
"""Seconds for an actor to prepare the model. A host may have to download it."""
_CONNECT_TIMEOUT_S = 5.0
"""Seconds to connect to the address of a Ray cluster, which takes milliseconds in a local network."""
_CHECK_S = 2.0
"""Seconds between checks for lost hosts while actors start."""
_END_TIMEOUT_S = 2.0
"""Seconds for Ray to confirm the end of a killed actor."""
_LOST = -signal.SIGKILL
"""Exit code of a worker whose actor or host was lost. The worker exits with its actor."""
_CONCURRENCY = 4  # `wait` blocks one thread of an actor
_log = logging.getLogger("longspan")
_connecting = threading.Lock()
_num_users = 0
"""Number of open `RayHosts` of this process, if this process has connected to Ray. Guarded by `_connecting`."""
_is_ours = False


class RayHosts:
    """CPUs and devices that Ray has reserved for the ranks of an engine. `close` releases them.

    Args:
        clusters: the cluster, or the clusters of all phases on the same ranks.
        racks: the racks of hosts.
        address: of the Ray cluster. None: RAY_ADDRESS, a cluster that runs on this machine, or a new one.
        device: `cuda` reserves one GPU per rank.
        threads: CPUs per rank. None: the largest equal number on CPUs, and 1 with GPUs.
        load_format: see `model.source.prepare`.
        seed: of dummy weights.

    Raises:
        ParameterError: there is no such Ray cluster, or it has too few CPUs or devices.
    """

    def __init__(
        self,
        clusters: Sequence[Cluster],
        *,
        racks: Racks,
        address: str | None,
        device: str,
        threads: int | None,
        load_format: str,
        seed: int,
    ) -> None:
        self._uses_gpus, self._load_format, self._seed = device == "cuda", load_format, seed
        with ExitStack() as acquired:
            _connect(address)
            acquired.callback(_disconnect)
            groups = rank_groups(clusters)
            nodes = _nodes()
            cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes.values()]
            self._threads = threads or (1 if self._uses_gpus else largest_share(cpus, groups))
            self._own_node: str = ray.get_runtime_context().get_node_id()
            self._names: dict[str, str] = {}  # by node
            self._hosts: list[str] = []  # the node of each host number
            self._places: list[Place] = []  # by the device of a location
            self._config: WorkerConfig | None = None
            racks.check(map(_placed, nodes.values()))
            self._racks = racks
            self._sizes = [len(group) for group in groups]  # of the bundles
            near = near_hosts(group_sizes(clusters), self._capacities(), self._racks_of(nodes))
            bundles, chosen = [self._resources(size) for size in self._sizes], [*chain.from_iterable(near or ())]
            self._reserved = Reservation(bundles, chosen)
            acquired.callback(self._reserved.close)
            if not self._reserved.wait(_PLACE_TIMEOUT_S):
                raise _too_small(groups, self._resources(1), nodes.values())
            locations = self._locations(clusters, _nodes(), self._reserved.nodes())
            assert locations is not None, "there is a bundle for each group"
            self.placement = Placement(locations=locations, threads=self._threads)
            _log.info("hosts of the ranks, by Ray: %s", self.names(self.placement.of(clusters[0])))
            self._look_out = LookOut(self.usable, self._prepare)
            acquired.callback(self._look_out.close)
            self._acquired = acquired.pop_all()

    def launch(self, config: WorkerConfig) -> RayLauncher:
        """Start the actors of all ranks of a cluster. Raise WorkerLostError if the host of a rank was lost."""
        self.check(config.cluster)
        self._config = config = msgspec.structs.replace(config, is_placed=True)
        return RayLauncher(self, config)

    def check(self, cluster: Cluster) -> None:
        """Raise WorkerLostError if a host of the cluster is lost, or Ray has moved its reservation."""
        usable = self.usable()
        for rank, location in enumerate(cluster.locations):
            if not self._is_usable(location, usable):
                name = self.name(location)
                raise WorkerLostError(rank, f"Ray lost or moved its place on host {name}, or the host does not answer")

    def covers(self, cluster: Cluster, usable: Mapping[int, str]) -> bool:
        """Return True if usable bundles hold all ranks of a cluster where they are."""
        return all(self._is_usable(location, usable) for location in cluster.locations)

    def _is_usable(self, location: Location, usable: Mapping[int, str]) -> bool:
        place = self._places[location.device]
        return usable.get(place.bundle) == place.node

    def usable(self) -> dict[int, str]:
        """Return the bundles that live hosts have, with their nodes. Waits a second for hosts that do not answer."""
        nodes, by_bundle = _nodes(), self._reserved.nodes()
        live = answering({node: nodes[node] for node in {*by_bundle.values()} if node in nodes})
        return {bundle: node for bundle, node in by_bundle.items() if node in live}

    def placed(self, fleet: Sequence[Cluster], usable: Mapping[int, str]) -> Fleet | None:
        """Return the fleet with locations in some of the usable bundles, or None if it needs more of them.

        Hosts keep their numbers. A new host gets the number of a lost one.
        """
        locations = self._locations(fleet, _nodes(), usable)
        if locations is None:
            return None
        return tuple(replace(cluster, locations=locations[: cluster.num_ranks]) for cluster in fleet)

    def look_out(self, usable: Mapping[int, str] | None) -> None:
        """Look for places besides these bundles from now on, or stop looking if None. `has_news` returns True then."""
        if usable is None:
            self._look_out.close()
        else:
            self._look_out.begin(usable)

    def has_news(self) -> bool:
        """Return True once more places can be used than when `look_out` was called."""
        return self._look_out.has_news

    def open_tiers(self, plans: Sequence[PoolPlan], cluster: Cluster) -> RayTiers:
        """Open the KV pools of the hosts of a cluster. Raise ParameterError if a host has too little for its pools."""
        from longspan.runtime.executor.ray_tiers import RayTiers  # noqa: PLC0415 - needed with a host tier only

        return RayTiers(self, plans, cluster)

    def node(self, location: Location) -> str:
        """Return the id of Ray's node at a location."""
        return self._places[location.device].node

    def name(self, location: Location) -> str:
        """Return the name of the host of a rank."""
        return self._name(self._places[location.device].node)

    def names(self, cluster: Cluster) -> str:
        """Return the names and addresses of the hosts of a cluster."""
        nodes = _nodes()
        used = dict.fromkeys(self._places[location.device].node for location in cluster.locations)
        return ", ".join(f"{self._name(node)} ({nodes[node]['NodeManagerAddress']})" for node in used if node in nodes)

    def _name(self, node: str) -> str:
        return self._names.get(node, node)

    def _capacities(self) -> dict[str, int]:
        """Return the number of ranks that each node has the free resources for."""
        needed = self._resources(1)
        return {
            node: int(min(free.get(name, 0.0) / number for name, number in needed.items()))
            for node, free in available_resources_per_node().items()
        }

    def _racks_of(self, nodes: Mapping[str, dict[str, Any]]) -> dict[str, int]:
        """Return the racks of nodes, in order of proximity."""
        return self._racks.in_order({node: _placed(nodes[node]) for node in nodes}, self._own_node)

    def _locations(
        self, clusters: Sequence[Cluster], nodes: Mapping[str, dict[str, Any]], by_bundle: Mapping[int, str]
    ) -> tuple[Location, ...] | None:
        """Assign bundles to groups of ranks, so that neighbouring groups are near. None: there are too few."""
        self._names |= {node: str(nodes[node]["NodeManagerHostname"]) for node in nodes}
        used = {*by_bundle.values()}
        racks = self._racks_of({node: nodes[node] for node in used & nodes.keys()})
        racks |= dict.fromkeys(sorted(used - racks.keys()), 0)
        if (bundles := bundles_of_groups(group_sizes(clusters), self._sizes, by_bundle, racks)) is None:
            return None
        locations: list[Location] = []
        for group, bundle in zip(rank_groups(clusters), bundles, strict=True):
            host = self._host_number(by_bundle[bundle], racks)
            for slot in range(len(group)):
                place = Place(bundle, slot, by_bundle[bundle])
                if place not in self._places:
                    self._places.append(place)
                locations.append(Location(rack=racks[place.node], host=host, device=self._places.index(place)))
        return tuple(locations)

    def _host_number(self, node: str, live: Collection[str]) -> int:
        if node not in self._hosts:
            free = [number for number, other in enumerate(self._hosts) if other not in live]
            number = free[0] if free else len(self._hosts)
            self._hosts[number : number + 1] = [node]
        return self._hosts.index(node)

    def _prepare(self, bundle: int, end: threading.Event) -> bool:
        """Prepare the model at a place, so that the engine pauses for a short time only when it uses the place.

        Return False also if `end` is set, or the place is lost.
        """
        config = self._config
        assert config is not None, "an engine looks for places after its first start"
        command = StartWorker(config, 0, Contact(address=""), "", Path())
        actor, deadline_s = self._actor(bundle), time.monotonic() + _START_TIMEOUT_S
        try:
            call = actor.prepare.remote(self.order(command))
            while not ray.wait([call], timeout=_CHECK_S)[0]:
                if end.is_set() or bundle not in self.usable():
                    return False
                if time.monotonic() > deadline_s:
                    raise GetTimeoutError(f"the model is not prepared after {_START_TIMEOUT_S:g} s")
            reason = bytes(ray.get(call)).decode()
        except RayError as error:
            reason = reason_of(error)
        finally:
            if ray.is_initialized():  # else this would start a cluster
                ray.kill(actor)
        if reason:
            _log.warning("a new host cannot be used: %s", reason)
        return not reason

    def actor(self, location: Location, kind: type = RankActor) -> ActorHandle:
        """Create the actor of a rank, at its location."""
        return self._actor(self._places[location.device].bundle, kind)

    def _actor(self, bundle: int, kind: type = RankActor) -> ActorHandle:
        return (
            ray.remote(kind)
            .options(
                num_cpus=self._threads,
                num_gpus=int(self._uses_gpus),
                max_concurrency=_CONCURRENCY,
                max_restarts=0,
                scheduling_strategy=self._reserved.place(bundle),
            )
            .remote()
        )

    def order(self, command: StartWorker) -> bytes:
        """Return the order to start a worker, for its actor."""
        order = StartRank(command=command, load_format=self._load_format, seed=self._seed)
        return msgspec.json.encode(order, enc_hook=os.fspath)

    def close(self) -> None:
        """Release CPUs and devices, and leave the Ray cluster. A cluster that was started for this process ends."""
        self._acquired.close()

    def _resources(self, num_ranks: int) -> dict[str, float]:
        gpus = {"GPU": float(num_ranks)} if self._uses_gpus else {}
        return {"CPU": float(self._threads * num_ranks), **gpus}


class RayLauncher:
    """Starts the workers of one run by actors at the reserved places."""

    def __init__(self, hosts: RayHosts, config: WorkerConfig) -> None:
        self.cluster, self._hosts, self._logs = config.cluster, hosts, dict[int, str]()
        model = config.files.name
        if model != ALIAS and (path := Path(model).expanduser()).exists():  # actors have another working folder
            config = msgspec.structs.replace(config, files=replace(config.files, name=str(path.absolute())))
        with ExitStack() as acquired:
            self._actors = [hosts.actor(location) for location in self.cluster.locations]
            acquired.callback(self.clean_up)
            self.channel: Channel = open_channel()
            acquired.callback(self.channel.close)
            folder = f"longspan-{secrets.token_hex(8)}"
            self._starting = []
            for rank, (actor, host) in enumerate(zip(self._actors, self.cluster.hosts, strict=True)):
                command = StartWorker(config, rank, self.channel.contact, f"{folder}-{host}", Path())
                self._starting.append(actor.start.remote(hosts.order(command)))
            acquired.pop_all()

    def start(self, rank: int) -> RayWorker:
        """Wait until the actor of a rank has started its worker. All actors start at the same time."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not ray.wait([self._starting[rank]], timeout=_CHECK_S)[0]:
            self._hosts.check(self.cluster)
            if time.monotonic() > deadline_s:
                raise WorkerLostError(rank, f"its actor does not start within {_START_TIMEOUT_S:g} s")
        try:
            started = msgspec.json.decode(ray.get(self._starting[rank]), type=RankStarted)
        except RayError as error:
            self._hosts.check(self.cluster)
            raise WorkerLostError(rank, f"its actor does not start: {reason_of(error)}") from error
        if started.error is not None:
            raise WorkerLostError(rank, f"it does not start: {started.error}")
        self._logs[rank] = started.log
        return RayWorker(self._actors[rank], started.pid)

    def hint(self, rank: int) -> str:
        return f"log: {self._logs.get(rank, 'none')} on host {self._hosts.name(self.cluster.locations[rank])}"

    def clean_up(self) -> None:
        """End all actors. At the exit of the interpreter, Ray has ended them."""
        for actor in self._actors if ray.is_initialized() else ():
            ray.kill(actor)
        self._actors.clear()


class RayWorker:
    """The controller's handle of a worker process on another host."""

    def __init__(self, actor: ActorHandle, pid: int) -> None:
        self.pid, self._actor, self._code = pid, actor, actor.wait.remote()
        self._killed_s = inf

    def wait(self, timeout_s: float | None = None) -> int:
        """Return its exit code. The host of a killed worker may be silent, so its end needs no confirmation."""
        deadline_s = inf if timeout_s is None else time.monotonic() + timeout_s
        while ray.is_initialized() and time.monotonic() < self._killed_s + _END_TIMEOUT_S:
            try:
                code: int = ray.get(self._code, timeout=min(max(0.0, deadline_s - time.monotonic()), _CHECK_S))
            except GetTimeoutError as error:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(f"worker process {self.pid} still runs after {timeout_s} s") from error
            except RayError:
                break
            else:
                return code
        return _LOST

    def kill(self) -> None:
        if ray.is_initialized():
            self._killed_s = min(self._killed_s, time.monotonic())
            ray.kill(self._actor)

    def destroy(self) -> None:
        self.kill()
        with suppress(TimeoutError):
            self.wait(_END_TIMEOUT_S)


def open_channel() -> SecureChannel:
    """Open a channel on the interface of this process's Ray node, or the one of the environment."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return SecureChannel(address_of(interface) if interface else ray.util.get_node_ip_address())


def _connect(address: str | None) -> None:
    """Connect to Ray, unless this process is connected. Keeps the signal handlers, which Ray replaces."""
    global _num_users, _is_ours  # noqa: PLW0603 - Ray has one connection per process
    with _connecting:
        if not ray.is_initialized():
            _check_address(address or os.environ.get("RAY_ADDRESS", ""))
            is_main = threading.current_thread() is threading.main_thread()
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                ray.init(address, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError, RayError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise _no_cluster(address, reason) from error
            finally:
                for number, handler in handlers.items() if is_main else ():
                    signal.signal(number, handler)
            _is_ours = True
        elif _is_of_host(address or "") and address != (used := ray.get_runtime_context().gcs_address):
            _log.warning("ray_address %s is not used, since this process has a connection to Ray at %s", address, used)
        _num_users += 1


def _check_address(address: str) -> None:
    """Raise ParameterError if no process listens at `host:port`. Ray itself would wait for minutes."""
    if not _is_of_host(address):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def _is_of_host(address: str) -> bool:
    """Return True for `host:port`, unlike `auto`, `local` and `ray://...`."""
    _, colon, port = address.rpartition(":")
    return bool(colon) and "/" not in address and port.isdecimal()


def _no_cluster(address: str | None, reason: str) -> ParameterError:
    problem = f"has no Ray cluster ({reason}): run `ray start` on its hosts, or check the address and token"
    return ParameterError("ray_address", problem, address)


def _disconnect() -> None:
    global _num_users, _is_ours  # noqa: PLW0603 - see above
    with _connecting:
        _num_users -= 1
        if _is_ours and not _num_users:
            _is_ours = False
            ray.shutdown()


def _nodes() -> dict[str, dict[str, Any]]:
    """Return the nodes that Ray considers alive, by their ids."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _too_small(groups: Sequence[range], per_rank: dict[str, float], nodes: Iterable[dict[str, Any]]) -> ParameterError:
    num_ranks, resources = groups[-1].stop, ", ".join(f"{number:g} {name}" for name, number in per_rank.items())
    largest = max(map(len, groups))
    names = sorted(per_rank)
    hosts = "; ".join(", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in names) for node in nodes)
    problem = (
        f"is ray, but its cluster has no free place for {num_ranks} ranks with {resources} each, of which up to "
        f"{largest} share a host. Its hosts have: {hosts}. Use fewer ranks or `threads_per_rank`, add hosts, or try "
        "again after other jobs have released their resources"
    )
    return ParameterError("executor", problem, "ray")


def _placed(node: dict[str, Any]) -> PlacedHost:
    return PlacedHost(address=node["NodeManagerAddress"], label=node["Labels"].get(RACK_LABEL))
