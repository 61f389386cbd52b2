"""Launch workers on the hosts of a Ray cluster: one actor per rank, which runs the same worker process as on one host.

Ray places the actors and watches them. Commands, reports and the rendezvous use the encrypted channel, and tensors use
torch.distributed. Ray's object store carries no tensors.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.core.placement import (
    RACK_LABEL,
    PlacedHost,
    Placement,
    Racks,
    in_order_of_hosts,
    largest_share,
    rank_groups,
)
from longspan.errors import ParameterError, WorkerLostError
from longspan.model.source import ALIAS
from longspan.runtime.executor.channel import Channel
from longspan.runtime.executor.forkserver import StartWorker
from longspan.runtime.executor.ray_actor import RankActor, RankStarted, StartRank, address_of
from longspan.runtime.executor.secure_channel import SecureChannel
from longspan.runtime.messages import WorkerConfig

_PLACE_TIMEOUT_S = 60.0
"""Seconds to wait for CPUs and devices that other jobs of the cluster use, or that an autoscaler adds."""
_START_TIMEOUT_S = 1800.0
"""Seconds for an actor to prepare the model. A host may have to download it."""
_CHECK_S = 2.0
"""Seconds between checks for lost hosts while actors start."""
_END_TIMEOUT_S = 5.0
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
            nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
            cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes.values()]
            self._threads = threads or (1 if self._uses_gpus else largest_share(cpus, groups))
            reserved = placement_group([self._resources(len(group)) for group in groups], strategy="PACK")
            acquired.callback(remove_placement_group, reserved)
            if not reserved.wait(_PLACE_TIMEOUT_S):
                raise _too_small(groups, self._resources(1), nodes.values())
            by_bundle = placement_group_table(reserved)["bundles_to_node_id"]
            racks.check(map(_placed, nodes.values()))
            places = {node["NodeID"]: _placed(node) for node in ray.nodes() if node["NodeID"] in by_bundle.values()}
            rack_of = racks.in_order(places, ray.get_runtime_context().get_node_id())
            self._nodes = order = [*rack_of]
            hosts = [order.index(by_bundle[bundle]) for bundle in range(len(groups))]
            self._reserved, self._bundles = reserved, list[int]()
            locations: list[Location] = []
            for group, bundle in zip(groups, in_order_of_hosts(groups, hosts), strict=True):
                host = hosts[bundle]
                locations += [Location(rack=rack_of[order[host]], host=host, device=rank) for rank in group]
                self._bundles += [bundle] * len(group)
            self.placement = Placement(locations=tuple(locations), threads=self._threads)
            self._names: list[str] = [nodes[node]["NodeManagerHostname"] if node in nodes else node for node in order]
            _log.info("hosts of the ranks, by Ray: %s", ", ".join(self._names))
            self._acquired = acquired.pop_all()

    def launch(self, config: WorkerConfig) -> RayLauncher:
        """Start the actors of all ranks of a cluster. Raise WorkerLostError if the host of a rank was lost."""
        self.check(config.cluster)
        return RayLauncher(self, msgspec.structs.replace(config, is_placed=True))

    def check(self, cluster: Cluster) -> None:
        """Raise WorkerLostError if a host of the cluster has left Ray, or Ray has moved its reservation."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        by_bundle = placement_group_table(self._reserved)["bundles_to_node_id"]
        for rank, location in enumerate(cluster.locations):
            node = self._nodes[location.host]
            if node not in alive or by_bundle[self._bundles[location.device]] != node:
                raise WorkerLostError(rank, f"Ray lost or moved its place on host {self.name(location)}")

    def name(self, location: Location) -> str:
        """Return the name of the host of a rank."""
        return self._names[location.host]

    def actor(self, location: Location) -> ActorHandle:
        """Create the actor of a rank, at the location of the placement that the rank has."""
        place = PlacementGroupSchedulingStrategy(
            self._reserved, placement_group_bundle_index=self._bundles[location.device]
        )
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=self._threads,
                num_gpus=int(self._uses_gpus),
                max_concurrency=_CONCURRENCY,
                max_restarts=0,
                scheduling_strategy=place,
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
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        model = config.files.name
        if model != ALIAS and (path := Path(model).expanduser()).exists():  # actors have another working folder
            config = msgspec.structs.replace(config, files=replace(config.files, name=str(path.absolute())))
        with ExitStack() as acquired:
            self._actors = [hosts.actor(location) for location in self.cluster.locations]
            acquired.callback(self.clean_up)
            self.channel: Channel = SecureChannel(
                address_of(interface) if interface else ray.util.get_node_ip_address()
            )
            acquired.callback(self.channel.close)
            folder = f"/tmp/longspan-{secrets.token_hex(8)}"  # noqa: S108 - private
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
            reason = str(error).strip().partition("\n")[0]
            raise WorkerLostError(rank, f"its actor does not start: {reason}") from error
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

    def wait(self, timeout_s: float | None = None) -> int:
        if not ray.is_initialized():
            return _LOST
        try:
            code: int = ray.get(self._code, timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(f"worker process {self.pid} still runs after {timeout_s} s") from error
        except RayError:
            return _LOST
        return code

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)

    def destroy(self) -> None:
        self.kill()
        with suppress(TimeoutError):
            self.wait(_END_TIMEOUT_S)


def _connect(address: str | None) -> None:
    """Connect to Ray, unless this process is connected. Keeps the signal handlers, which Ray replaces."""
    global _num_users, _is_ours  # noqa: PLW0603 - Ray has one connection per process
    with _connecting:
        if not ray.is_initialized():
            is_main = threading.current_thread() is threading.main_thread()
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                ray.init(address, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError, RayError) as error:
                reason = str(error).strip().partition("\n")[0]
                problem = f"has no Ray cluster ({reason}): run `ray start` on its hosts, or check the address and token"
                raise ParameterError("ray_address", problem, address) from error
            finally:
                for number, handler in handlers.items() if is_main else ():
                    signal.signal(number, handler)
            _is_ours = True
        _num_users += 1


def _disconnect() -> None:
    global _num_users, _is_ours  # noqa: PLW0603 - see above
    with _connecting:
        _num_users -= 1
        if _is_ours and not _num_users:
            _is_ours = False
            ray.shutdown()


def _too_small(groups: Sequence[range], per_rank: dict[str, float], nodes: Iterable[dict[str, Any]]) -> ParameterError:
    num_ranks, resources = groups[-1].stop, ", ".join(f"{number:g} {name}" for name, number in per_rank.items())
    largest = max(map(len, groups))
    names = sorted(per_rank)
    hosts = "; ".join(", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in names) for node in nodes)
    problem = (
        f"is ray, but its cluster has no free place for {num_ranks} ranks with {resources} each, of which up to "
        f"{largest} share a host. Its hosts have: {hosts}. Use fewer ranks or `threads_per_rank`, or add hosts"
    )
    return ParameterError("executor", problem, "ray")


def _placed(node: dict[str, Any]) -> PlacedHost:
    return PlacedHost(address=node["NodeManagerAddress"], label=node["Labels"].get(RACK_LABEL))
