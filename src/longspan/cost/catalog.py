"""Devices, links, models and efficiency constants, as the data files beside this one have them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Kernels = Literal["flash", "eager"]
"""Kernels compute attention fused, or as separate operators over a matrix of scores."""


@dataclass(frozen=True, kw_only=True)
class LinearCurve:
    """Seconds of a matrix product, (c^smooth + m^smooth)^(1/smooth) + start, for c of computing and m of memory.

    Attributes:
        compute: the part of the peak that large products reach.
        half_wave: how many times the tiles of a product must fill the device to reach half of that.
        half_depth: how many terms its sums must have to reach half of it.
        memory: the part of the memory's speed that weights are read with.
        smooth: how sharp the edge of the roof is.
        start_us: of the smallest product.
    """

    compute: float
    half_wave: float
    half_depth: float
    memory: float
    smooth: float
    start_us: float


@dataclass(frozen=True, kw_only=True)
class StreamCurve:
    """Constants of element-wise operators: how fast they read and write.

    Attributes:
        norm, rotary, activation: bytes per clock and unit, which limit these beside the memory.
        add: the part of the memory's speed that is reached.
        start_us: of the smallest.
    """

    norm: float
    rotary: float
    activation: float
    add: float
    start_us: float


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One way to compute attention, and what comes with the code that does.

    Attributes:
        attention: the part of the peak that fused attention reaches.
        merge_bytes: memory traffic per output element when a partial output is merged.
        hop_us: what a hop of a ring costs beside computing and sending: launches, and waiting for each other.
        layer_us: the host's time to start all operators of a layer.
        launch_us: the host's time for each further operator: messages, and repeating KV heads. 0 with fused code,
            where `hop_us` includes it.
        memory_passes: how often received keys and values are read and written once more.
        score_bytes: memory traffic per score element, without fusion.
        score_part: the part of the memory's speed that this traffic reaches.
        score_buffer_bytes: what is held per score element at once.
        kv_copies: how many copies of gathered keys and values are held, on average over layers.
        rendezvous: whether a message leaves only when its receiver asks for it.
        unfused: whether all else consists of single operators, too, and hidden scores are computed.
    """

    attention: float
    merge_bytes: float
    hop_us: float
    layer_us: float
    launch_us: float
    memory_passes: int
    score_bytes: float
    score_part: float
    score_buffer_bytes: float
    kv_copies: float
    rendezvous: bool
    unfused: bool


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The efficiency constants of the roofline.

    Attributes:
        host_smooth: how sharply the time of the host, which starts operators, and that of the device meet.
        attention: by the kernels that compute it.
    """

    linear: LinearCurve
    stream: StreamCurve
    host_smooth: float
    attention: dict[Kernels, Attention]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device by its data sheet.

    Attributes:
        flops_per_s, fp8_flops_per_s, fp32_flops_per_s: of dense matrix products in 16, 8 and 32 bits (without TF32); 0
            for what it cannot do.
        bytes_per_s: of its memory.
        units: how many tiles of a matrix product it computes at a time.
        clock_hz: of these.
        link, bus, network: names of what connects those of one host, them through its memory, and hosts.
    """

    name: str
    flops_per_s: float
    fp8_flops_per_s: float
    fp32_flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    units: int
    clock_hz: float
    link: str
    bus: str
    network: str

    @property
    def is_host(self) -> bool:
        """Whether its memory is that of its host."""
        return self.bus == "shared-memory"

    def peak(self, bytes_per_weight: float) -> float:
        """Returns operations per second with weights of `bytes_per_weight`: those of 16 bits where narrower ones cannot
        be used.
        """
        if bytes_per_weight >= 4:
            return self.fp32_flops_per_s
        return self.fp8_flops_per_s if self.multiplies_narrow(bytes_per_weight) else self.flops_per_s

    def multiplies_narrow(self, bytes_per_weight: float) -> bool:
        """Tells whether weights of `bytes_per_weight` are multiplied in 8 bits, so that their inputs are rounded."""
        return bytes_per_weight <= 1 and self.fp8_flops_per_s > 0


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link as messages find it: inside a host, or between hosts.

    Attributes:
        nominal_bytes_per_s: one way, of a device, or of a host if it is `shared` by the devices of that.
        bytes_per_s: that large messages between two devices reach of that.
        ring_bytes_per_s: the same of rings of messages, as collectives send them.
        latency_s: of the smallest message.
        collective_s: of the smallest collective; between hosts, what each doubling of their number adds.
    """

    where: Literal["inside", "between"]
    nominal_bytes_per_s: float
    bytes_per_s: float
    ring_bytes_per_s: float
    shared: bool
    latency_s: float
    collective_s: float

    def send_s(self, num_bytes: float, flows: int = 1) -> float:
        """Times a message, one of `flows` that leave a host at once."""
        return self.latency_s + num_bytes / self.flow(flows)

    def flow(self, flows: int) -> float:
        """Returns bytes per second of each of `flows` messages that leave a host at once."""
        return self.bytes_per_s / flows if self.shared else self.bytes_per_s


def device(name: str) -> Device:
    """Finds a device by its name, such as `a100-sxm-80g`. Raises ValueError for an unknown one, with all known."""
    entry = _entry("hardware", "hardware", name)
    return Device(
        name=name,
        flops_per_s=entry["tflops"] * 1e12,
        fp8_flops_per_s=entry["tflops_fp8"] * 1e12,
        fp32_flops_per_s=entry["tflops_fp32"] * 1e12,
        bytes_per_s=entry["memory_gbytes_per_s"] * 1e9,
        memory_bytes=entry["memory_gib"] * 2**30,
        units=entry["units"],
        clock_hz=entry["clock_ghz"] * 1e9,
        link=entry["link"],
        bus=entry["bus"],
        network=entry["network"],
    )


def link(name: str, bytes_per_s: float | None = None) -> Link:
    """Finds a link by its name, such as `nvlink3`; of another nominal speed if one is given."""
    entry = _entry("links", "link", name)
    nominal = entry["gbytes_per_s"] * 1e9 if bytes_per_s is None else bytes_per_s
    return Link(
        where=entry["where"],
        nominal_bytes_per_s=nominal,
        bytes_per_s=nominal * entry["achieved"],
        ring_bytes_per_s=nominal * entry["collective"],
        shared=entry.get("per") == "host",
        latency_s=entry["latency_us"] * 1e-6,
        collective_s=entry["collective_us"] * 1e-6,
    )


def model_config(name: str) -> dict[str, Any]:
    """Returns the fields of a known model's config.json. Raises ValueError for an unknown one, with all known."""
    return dict(_entry("models", "model", name))


def names(file: Literal["hardware", "links", "models"]) -> tuple[str, ...]:
    return tuple(_table(file))


@dataclass(frozen=True, kw_only=True)
class ComputedError:
    """The error of computed times against what a paper measured, in percent of that.

    Attributes:
        what: table or figure, and how many of its numbers.
        hardware: the kind of device, such as `a100`.
        policies: serve by what the paper measured.
        wanted: the bound, in words.
        mean: of the absolute errors.
        worst: the largest, with its sign and where it is.
    """

    what: str
    hardware: str
    attention: Kernels
    policies: tuple[str, ...]
    wanted: str
    mean: float
    worst: str


@dataclass(frozen=True, kw_only=True)
class ServedError:
    """The errors of simulated latencies against those of the same requests on a real machine, in percent of these."""

    policy: str
    ttft_p50: float
    ttft_p90: float
    tbt_p50: float
    tbt_p90: float


@cache
def errors() -> tuple[tuple[ComputedError, ...], tuple[ServedError, ...]]:
    """Returns the errors of predictions that were found so far: of computed steps, and of simulated serving."""
    table = _table("errors")
    computed = tuple(ComputedError(**{**row, "policies": tuple(row["policies"])}) for row in table["computed"])
    return computed, tuple(ServedError(**row) for row in table["served"])


@cache
def efficiency() -> Efficiency:
    table = _table("efficiency")
    return Efficiency(
        linear=LinearCurve(**table["linear"]),
        stream=StreamCurve(**table["stream"]),
        host_smooth=table["host"]["smooth"],
        attention={"flash": Attention(**table["flash"]), "eager": Attention(**table["eager"])},
    )


def _entry(file: str, what: str, name: str) -> dict[str, Any]:
    table = _table(file)
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: known are {', '.join(table)}")
    entry: dict[str, Any] = table[name]
    return entry


@cache
def _table(file: str) -> dict[str, Any]:
    return tomllib.loads((files("longspan.cost") / "data" / f"{file}.toml").read_text(encoding="utf-8"))
