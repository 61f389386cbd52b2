"""A model on a cluster, by the names of both: what `estimate` and simulated steps are computed from."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.core.cluster import Cluster, ParallelSpec
from longspan.cost import catalog
from longspan.cost.architecture import Architecture
from longspan.cost.catalog import Efficiency, Kernels
from longspan.cost.channels import Channel, cost_of
from longspan.cost.forward import Roofline
from longspan.cost.roofline import Chip, Layer
from longspan.cost.topology import Topology, Wire, wire
from longspan.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class Devices:
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
                f"({', '.join(networks)}), or put all devices into one host"
            )
        if self.hosts == 1 and self.link is not None and catalog.link(self.link).per_host:
            raise ValueError(
                f"the link {self.link} is between hosts, and shared by the devices of each: give 2 hosts or more"
            )

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_host * self.hosts


def link_speed(link: str | None, gbytes_per_s: float | None) -> float | None:
    """Returns bytes per second of a link whose speed is given in place of its name. Raises ValueError for both."""
    if link is not None and gbytes_per_s is not None:
        problem = f"{gbytes_per_s:g} and link {link} both give its speed: give one"
        raise ParameterError("link_gbytes_per_s", problem, gbytes_per_s)
    return None if gbytes_per_s is None else gbytes_per_s * 1e9


def roofline(
    model: Architecture,
    devices: Devices,
    spec: ParallelSpec,
    kernels: Kernels = "flash",
    constants: Efficiency | None = None,
) -> Roofline:
    """Makes the cost model of so many instances of a model on a cluster; `constants` replace those of efficiency.toml.

    Raises:
        ValueError: for unknown names, more ranks than devices, or heads that so many ranks cannot share.
    """
    [found] = rooflines(model, devices, Cluster(spec=spec), kernels, constants)
    return found


def rooflines(
    model: Architecture,
    devices: Devices,
    cluster: Cluster,
    kernels: Kernels = "flash",
    constants: Efficiency | None = None,
) -> tuple[Roofline, ...]:
    """Makes the cost model of each role: of all instances, or of those that prefill and those that decode.

    Raises:
        ValueError: see `roofline`.
    """
    specs = [cluster.spec] if cluster.decode_spec is None else [cluster.spec, cluster.decode_spec]
    if cluster.num_ranks > devices.num_gpus:
        ranks = " + ".join(f"{spec.instances} * {spec.tp}" for spec in specs)
        raise ValueError(
            f"{cluster} needs {ranks} = {cluster.num_ranks} GPUs, but there are {devices.hosts} hosts * "
            f"{devices.gpus_per_host} = {devices.num_gpus}: use more hosts or fewer ranks"
        )
    for spec in specs:
        if model.attention.num_heads < spec.tp:
            raise ValueError(
                f"tp({spec.tp}) ranks cannot share {model.attention.num_heads} query heads: use a smaller tp"
            )
    constants, device = constants or catalog.efficiency(), catalog.device(devices.hardware)
    inside, between = _wires(devices)
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
            gpus_per_host=devices.gpus_per_host,
            inside=inside,
            between=between,
            first_instance=num_instances,
            first_device=num_devices,
        )
        found.append(Roofline(layer=Layer(model=model, chip=chip, tp=spec.tp), topology=topology))
        num_instances, num_devices = num_instances + spec.instances, num_devices + spec.num_ranks
    return tuple(found)


def _wires(devices: Devices) -> tuple[Wire, Wire]:
    """Finds the wires inside a host and between hosts; the slowest that there is can be given."""
    device, speed = catalog.device(devices.hardware), devices.link_bytes_per_s
    inside, between = catalog.link(device.link), catalog.link(device.network)
    slowest = wire(catalog.link(slowest_link(devices)), speed)
    if devices.hosts > 1:
        return wire(inside), slowest
    bus = catalog.link(device.bus)
    if devices.link is None and speed is not None and speed > bus.bytes_per_s:
        slowest = slowest.at_least(wire(bus))
    return slowest, wire(between)


def slowest_link(devices: Devices) -> str:
    """Names the slowest link that there is."""
    device, speed = catalog.device(devices.hardware), devices.link_bytes_per_s
    if devices.link is not None:
        return devices.link
    if devices.hosts > 1:
        return device.network
    return device.bus if speed is not None and speed <= catalog.link(device.bus).bytes_per_s else device.link


_GIB = 2**30
_RESERVED_BYTES = 1.5 * _GIB
"""Of each device, for the driver's context, libraries' workspaces and buffers of links."""
_HIDDEN_COPIES = 6
"""Hidden states held at once: residual, normed, queries, attention's output, projected, sum."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device.

    Attributes:
        scores: of attention without fusion.
        activations: hidden states, and those in the feed-forward layers as far as they exceed the scores.
        capacity: of the device.
    """

    weights: float
    kv: float
    scores: float
    activations: float
    capacity: float

    @property
    def used(self) -> float:
        """All of this is used, with what is reserved."""
        return self.weights + self.kv + self.scores + self.activations + _RESERVED_BYTES

    @property
    def fits(self) -> bool:
        return self.used <= self.capacity

    @property
    def arithmetic(self) -> str:
        """The sum is written out, in GiB."""
        parts = (
            (self.weights, "weights"),
            (self.kv, "KV"),
            (self.scores, "scores"),
            (self.activations, "activations"),
            (_RESERVED_BYTES, "reserved"),
        )
        terms = " + ".join(f"{size / _GIB:.1f} {name}" for size, name in parts if size)
        relation = "<=" if self.fits else ">"
        return f"{terms} = {self.used / _GIB:.1f} GiB per GPU {relation} {self.capacity / _GIB:.1f} GiB"


def memory(layer: Layer, channel: Channel, tokens: float) -> Memory:
    """Counts the memory of the fullest rank, when its group has computed a channel's queries and holds all its keys.

    Args:
        tokens: that the busiest instance computes at once.
    """
    shape, attention = layer.model.attention, layer.chip.attention
    held = max(channel.shares.held)
    copies = 1
    gathered = len(channel.group) > 1 and cost_of(channel.exchange).copies_kv
    if attention.unfused and gathered:
        held, copies = max(held, channel.keys), attention.kv_copies
    scores = max(channel.shares.scores) * layer.heads * attention.score_buffer_bytes
    hidden = _HIDDEN_COPIES * tokens * shape.hidden_size * layer.chip.bytes_per_element
    matrices = 4 if layer.model.gated else 2
    wide = matrices * tokens * layer.model.intermediate_size / layer.tp * layer.chip.bytes_per_element
    return Memory(
        weights=layer.model.weight_bytes / layer.tp,
        kv=copies * held * layer.kv_bytes * shape.num_layers,
        scores=scores,
        activations=hidden + max(0.0, wide - scores),
        capacity=layer.chip.device.memory_bytes,
    )
