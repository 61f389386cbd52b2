"""Devices, links, models and efficiency constants, read from the data files of this package."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal

import msgspec

from longspan.cost.links import Link, link_of
from longspan.cost.precision import BYTES, Format, Precision, Products, products_of
from longspan.errors import ParameterError

Kernels = Literal["flash", "eager"]
"""Attention is fused, or made of separate operators over a matrix of scores."""
Launch = Literal["eager", "graph", "compiled"]
"""The modelled engine launches operators one by one, decode steps as recorded graphs, or prompts compiled, too."""
_MEASURED_AS: dict[Format, Format] = {"float32": "bfloat16", "float16": "bfloat16", "mxfp4": "int4"}
"""Formats without measured products, and the format with the same kind of kernels."""


@dataclass(frozen=True, kw_only=True)
class LinearCurve:
    """Seconds of a matrix product: (c^smooth + m^smooth)^(1/smooth) + start, for c of compute and m of memory.

    Attributes:
        compute: the fraction of the peak that large products reach.
        half_wave: number of waves of tiles on the device at which a product reaches half of that.
        half_depth: number of terms per sum at which a product reaches half of that.
        memory: the fraction of the memory's speed at which weights are read.
        smooth: sharpness of the edge of the roof.
        start_us: microseconds of the smallest product.
        rounding: the fraction of the memory's speed at which an operator rounds inputs to the format of the weights.
            If it is 0, inputs stay in 16 bits.
    """

    compute: float
    half_wave: float
    half_depth: float
    memory: float
    smooth: float
    start_us: float
    rounding: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StreamCurve:
    """Constants of the read and write speed of element-wise operators.

    Attributes:
        norm, rotary, activation: bytes per clock and unit, a limit in addition to the memory.
        add: the fraction of the memory's speed that is reached.
        start_us: microseconds of the smallest operator.
    """

    norm: float
    rotary: float
    activation: float
    add: float
    start_us: float


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One way to compute attention, with the overheads of its code.

    Attributes:
        attention: factor of the speed of fused products, 1 for the kernels of attention.toml.
        merge_bytes: memory traffic per output element when a partial output is merged.
        hop_us: microseconds of a ring hop without computation and transfer: launches, and waits of members.
        layer_us: the host's time to launch all operators of a layer.
        launch_us: the host's time for each further operator: messages, and repeating KV heads. 0 with fused code,
            where `hop_us` includes it.
        memory_passes: number of further reads and writes of received keys and values.
        score_bytes: memory traffic per score element, without fusion.
        score_part: the fraction of the memory's speed that this traffic reaches.
        score_buffer_bytes: memory in use per score element.
        kv_copies: number of copies of gathered keys and values in memory, on average over layers.
        rendezvous: whether a message is sent only when its receiver is ready.
        unfused: whether all other code consists of single operators, too, and masked scores are computed.
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
class FlashConstants:
    """Constants of fused attention of one generation and precision, see `flash.py`.

    Attributes:
        start_us: microseconds of the smallest call.
        head_dims: the head sizes of `compute` and `memory`.
        compute: the part of the peak that long prompts reach up to 16,384 tokens.
        far: factor of that for pairs further apart.
        ragged: waves of tiles that are idle in a new prompt.
        row_keys: further keys that a query row costs.
        stores: passes over new keys and values, in 16 bits, that their way into the cache costs.
        memory: the part of the memory's speed at which keys and values are read.
        few: clocks of a unit per byte that are added if one sequence and KV head is read alone.
        sequence_us: microseconds of a unit per sequence and KV head.
        split_us: microseconds to split one long sequence over the device, and to merge.
    """

    start_us: float
    head_dims: tuple[float, ...]
    compute: tuple[float, ...]
    far: float
    ragged: float
    row_keys: float
    stores: float
    memory: tuple[float, ...]
    few: float
    sequence_us: float
    split_us: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The efficiency constants of the roofline.

    Attributes:
        linear: products of 2023 in 16 bits, on all devices: for unfused code, and without `products`.
        host_smooth: sharpness of the transition between the host's launch time and the device's time.
        compiled_us: a compiled engine's time to launch a layer of a prompt.
        attention: constants of attention by kernels.
        products: today's products by measured generation and format, from products.toml.
    """

    linear: LinearCurve
    stream: StreamCurve
    host_smooth: float
    compiled_us: float
    attention: dict[Kernels, Attention]
    products: dict[str, dict[Format, LinearCurve]] = field(default_factory=dict)

    def curve(self, device: Device, weights: Format) -> LinearCurve:
        """Return the curve of products with weights in a format, which the device may only store."""
        if not self.products:
            return self.linear
        return self.products[device.measured_generation][device.computed_as(weights)]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device, from its data sheet.

    Attributes:
        generation: an entry of generations.toml, such as `hopper`.
        flops_per_s, fp8_flops_per_s, fp4_flops_per_s, int8_flops_per_s, fp32_flops_per_s: speed of dense matrix
            products in each precision, 16 bits first. TF32 is not used. 0 if the device does not support it.
        bytes_per_s: speed of its memory.
        units: number of tiles of a matrix product that it computes at once.
        clock_hz: clock of the units.
        link, bus, network: the links between devices of a host, to the host's memory, and between hosts.
        attention: the device's own entry of attention.toml, which only devices of the catalog have.
        links: the links of the user's file.
    """

    name: str
    generation: str
    flops_per_s: float
    fp8_flops_per_s: float
    fp4_flops_per_s: float
    int8_flops_per_s: float
    fp32_flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    units: int
    clock_hz: float
    link: Link
    bus: Link
    network: Link
    attention: str = ""
    links: tuple[Link, ...] = ()

    def link_by(self, name: str) -> Link:
        """Return a link of the user's file or of the catalog. Raise ValueError with all names for an unknown name."""
        own = {link.name: link for link in self.links}
        return own[name] if name in own else link_of(name, _entry("links", "link", name, own), link_table())

    @property
    def measured_generation(self) -> str:
        """The generation whose measured constants the device uses: see generations.toml."""
        constants: str = _entry("generations", "generation", self.generation)["constants"]
        return constants

    @property
    def is_host(self) -> bool:
        """Whether the device uses its host's memory."""
        return self.bus.name == "shared-memory"

    def peak(self, weights: Format) -> float:
        """Return the operations per second of products with weights in a format.

        Products in a format that the device does not support are computed in 16 bits.
        """
        return self._speeds[products_of(weights)] or self.flops_per_s

    def multiplies_narrow(self, weights: Format) -> bool:
        """Return whether products with such weights have fewer than 16 bits, so that inputs are rounded."""
        products = products_of(weights)
        return products in ("fp8", "int8", "fp4") and self._speeds[products] > 0

    def attention_peak(self, precision: Precision) -> float:
        """Return the operations per second of fused attention. Keys in 8 bits are widened if there is no fp8."""
        narrow = BYTES[precision.attention] <= 1 and not self.multiplies_narrow(precision.attention)
        return self.peak(precision.activations if narrow else precision.attention)

    def computed_as(self, weights: Format) -> Format:
        """Return the format whose products were measured for weights in a format.

        Weights in a format that the device cannot multiply are widened to 16 bits, as those in int8 or int4.
        """
        if products_of(weights) in ("fp8", "int8", "fp4") and not self.multiplies_narrow(weights):
            return "int8" if BYTES[weights] >= 1 else "int4"
        return _MEASURED_AS.get(weights, weights)

    @cached_property
    def _speeds(self) -> dict[Products, float]:
        return {
            "fp32": self.fp32_flops_per_s,
            "fp16": self.flops_per_s,
            "fp8": self.fp8_flops_per_s,
            "int8": self.int8_flops_per_s,
            "fp4": self.fp4_flops_per_s,
        }


def device(name: str) -> Device:
    """Return a device by its name, such as `a100-sxm-80g`. Raise ValueError with all names for an unknown name."""
    known = device_of(name, _entry("hardware", "hardware", name), {})
    return replace(known, attention=name) if name in _table("attention") else known


def device_of(name: str, entry: Mapping[str, Any], links: Mapping[str, Link]) -> Device:
    """Make a device from the fields of its data sheet, and its own links by name, besides those of the catalog."""
    return Device(
        name=name,
        generation=entry["generation"],
        flops_per_s=entry["tflops"] * 1e12,
        fp8_flops_per_s=entry.get("tflops_fp8", 0) * 1e12,
        fp4_flops_per_s=entry.get("tflops_fp4", 0) * 1e12,
        int8_flops_per_s=entry.get("tflops_int8", 0) * 1e12,
        fp32_flops_per_s=entry["tflops_fp32"] * 1e12,
        bytes_per_s=entry["memory_gbytes_per_s"] * 1e9,
        memory_bytes=entry["memory_gib"] * 2**30,
        units=entry["units"],
        clock_hz=entry["clock_ghz"] * 1e9,
        link=links.get(entry["link"]) or link(entry["link"]),
        bus=links.get(entry["bus"]) or link(entry["bus"]),
        network=links.get(entry["network"]) or link(entry["network"]),
        links=tuple(links.values()),
    )


@cache
def link(name: str) -> Link:
    """Return a link by its name, such as `nvlink3`. Raise ValueError with all names for an unknown name."""
    return link_of(name, _entry("links", "link", name), link_table())


def link_table() -> dict[str, dict[str, Any]]:
    """Return the fields of all links by name."""
    return _table("links")


def model_config(name: str) -> dict[str, Any]:
    """Return the fields of a model's config.json. Raise ValueError with all names for an unknown name."""
    return dict(_entry("models", "model", name))


def names(file: Literal["generations", "hardware", "links", "models"]) -> tuple[str, ...]:
    return tuple(_table(file))


@dataclass(frozen=True, kw_only=True)
class ComputedError:
    """The relative error of predicted times against a paper's measurements, in percent.

    Attributes:
        what: table or figure, and the number of values.
        hardware: the kind of device, such as `a100`.
        policies: the policies that compute like the paper's system.
        wanted: the bound, in words.
        mean: mean of the absolute errors.
        worst: the largest error, with its sign and its place.
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
    """The relative errors of simulated latencies against a real machine with equal requests, in percent."""

    policy: str
    ttft_p50: float
    ttft_p90: float
    tbt_p50: float
    tbt_p90: float


@cache
def errors() -> tuple[tuple[ComputedError, ...], tuple[ServedError, ...]]:
    """Return the recorded errors of predictions: of computed steps, and of simulated serving."""
    table = _table("errors")
    rows = table["computed"], table["served"]
    return msgspec.convert(rows, tuple[tuple[ComputedError, ...], tuple[ServedError, ...]])


@cache
def efficiency() -> Efficiency:
    table = _table("efficiency")
    return Efficiency(
        linear=LinearCurve(**table["linear"]),
        stream=StreamCurve(**table["stream"]),
        host_smooth=table["host"]["smooth"],
        compiled_us=table["host"]["compiled_us"],
        attention={"flash": Attention(**table["flash"]), "eager": Attention(**table["eager"])},
        products=_products(),
    )


@cache
def flash_constants(device: Device, precision: Precision) -> FlashConstants:
    """Return the constants of fused attention. Keys in 8 bits have their own where such kernels were measured."""
    table = _table("attention")
    formats = table.get(device.attention) or table.get(device.generation) or table[device.measured_generation]
    narrow = precision.kv_bytes <= 1 and "fp8" in formats
    return msgspec.convert(formats["fp8" if narrow else "bfloat16"], FlashConstants)


def _products() -> dict[str, dict[Format, LinearCurve]]:
    table = _table("products")
    return {name: {weights: _curve(table, name, weights) for weights in curves} for name, curves in table.items()}


def _curve(table: dict[str, Any], generation: str, weights: str) -> LinearCurve:
    """Return a curve of a table. An entry may name another one, such as `ampere.int8`."""
    entry = table[generation][weights]
    return _curve(table, *entry.split(".")) if isinstance(entry, str) else LinearCurve(**entry)


def _entry(file: str, parameter: str, name: str, own: Collection[str] = ()) -> dict[str, Any]:
    table = _table(file)
    if name not in table:
        from longspan.names import choices  # noqa: PLC0415 - an error

        raise ParameterError(parameter, f"{name!r} is unknown: {choices(name, [*own, *table])}", name)
    entry: dict[str, Any] = table[name]
    return entry


@cache
def _table(file: str) -> dict[str, Any]:
    return tomllib.loads((files("longspan.cost") / "data" / f"{file}.toml").read_text(encoding="utf-8"))
