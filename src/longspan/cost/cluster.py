"""A model on a cluster, by the names of both: what `estimate` and simulated steps are computed from."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.core.fleet import Fleet
from longspan.core.parallel import ParallelSpec
from longspan.cost import catalog
from longspan.cost.architecture import Architecture
from longspan.cost.efficiency import Efficiency, Kernels
from longspan.cost.forward import Roofline
from longspan.cost.layer import Layer
from longspan.cost.operators import Chip
from longspan.cost.topology import Topology, Wire, wire


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, and what connects them.

    Attributes:
        link: the name of the slowest link between devices that work together: between hosts if there are several.
        link_bytes_per_s: the nominal speed of that link, in place of its own. Inside a host, without a `link`, one that
            is not quicker than the bus is taken to go there, and reaches the part of it that messages on the bus do.

    Raises:
        ValueError: for numbers below 1, unknown names, one host with a link that its devices share, or several with
            one inside a host.
    """

    hardware: str
    gpus_per_host: int
    hosts: int = 1
    link: str | None = None
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("gpus_per_host", "hosts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but {getattr(self, name)} given")
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            raise ValueError(f"a link carries more than 0 bytes per second, but {self.link_bytes_per_s:g} given")
        if self.hosts > 1 and self.link is not None and catalog.link(self.link).where == "inside":
            networks = [name for name in catalog.names("links") if catalog.link(name).where == "between"]
            raise ValueError(
                f"the link {self.link} is inside a host, but {self.hosts} hosts given: choose one between hosts "
                f"({', '.join(networks)}), or give --hosts 1 with all devices"
            )
        if self.hosts == 1 and self.link is not None and catalog.link(self.link).per_host:
            raise ValueError(
                f"the link {self.link} is between hosts, and shared by the devices of each: give --hosts 2 or more"
            )

    @property
    def num_gpus(self) -> int:
        """Of all hosts."""
        return self.gpus_per_host * self.hosts


def roofline(
    model: Architecture,
    cluster: Cluster,
    spec: ParallelSpec,
    kernels: Kernels = "flash",
    constants: Efficiency | None = None,
) -> Roofline:
    """The cost model of so many instances of a model on a cluster; `constants` replace those of efficiency.toml.

    Raises:
        ValueError: for unknown names, more ranks than devices, or heads that so many ranks cannot share.
    """
    [found] = rooflines(model, cluster, Fleet(spec=spec), kernels, constants)
    return found


def rooflines(
    model: Architecture, cluster: Cluster, fleet: Fleet, kernels: Kernels = "flash", constants: Efficiency | None = None
) -> tuple[Roofline, ...]:
    """The same of every role of a fleet: of all instances, or of those that prefill and those that decode.

    Raises:
        ValueError: see `roofline`.
    """
    specs = [fleet.spec] if fleet.decode_spec is None else [fleet.spec, fleet.decode_spec]
    if fleet.num_ranks > cluster.num_gpus:
        ranks = " + ".join(f"{spec.instances} * {spec.tp}" for spec in specs)
        raise ValueError(
            f"{fleet} needs {ranks} = {fleet.num_ranks} GPUs, but there are {cluster.hosts} hosts * "
            f"{cluster.gpus_per_host} = {cluster.num_gpus}: use more hosts or fewer ranks"
        )
    for spec in specs:
        if model.attention.num_heads < spec.tp:
            raise ValueError(
                f"tp({spec.tp}) ranks cannot share {model.attention.num_heads} query heads: use a smaller tp"
            )
    constants, device = constants or catalog.efficiency(), catalog.device(cluster.hardware)
    inside, between = _wires(cluster)
    chip = Chip(
        device=device,
        efficiency=constants,
        attention=constants.attention[kernels],
        bytes_per_element=model.attention.bytes_per_element,
    )
    found, num_instances, num_devices = [], 0, 0
    for spec in specs:
        topology = Topology(
            tp=spec.tp,
            gpus_per_host=cluster.gpus_per_host,
            inside=inside,
            between=between,
            first_instance=num_instances,
            first_device=num_devices,
        )
        found.append(Roofline(layer=Layer(model=model, chip=chip, tp=spec.tp), topology=topology))
        num_instances, num_devices = num_instances + spec.instances, num_devices + spec.num_ranks
    return tuple(found)


def _wires(cluster: Cluster) -> tuple[Wire, Wire]:
    """Of one host, and between hosts; the slowest that there is can be given."""
    device, speed = catalog.device(cluster.hardware), cluster.link_bytes_per_s
    inside, between = catalog.link(device.link), catalog.link(device.network)
    slowest = wire(catalog.link(slowest_link(cluster)), speed)
    if cluster.hosts > 1:
        return wire(inside), slowest
    bus = catalog.link(device.bus)
    if cluster.link is None and speed is not None and speed > bus.bytes_per_s:
        slowest = slowest.at_least(wire(bus))
    return slowest, wire(between)


def slowest_link(cluster: Cluster) -> str:
    """The name of the slowest link that there is."""
    device, speed = catalog.device(cluster.hardware), cluster.link_bytes_per_s
    if cluster.link is not None:
        return cluster.link
    if cluster.hosts > 1:
        return device.network
    return device.bus if speed is not None and speed <= catalog.link(device.bus).bytes_per_s else device.link
