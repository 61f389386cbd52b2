"""What part of their peaks devices and links reach: the constants of the model, one set for everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["flash", "eager"]
"""How attention is computed: fused, or as separate operators over a matrix of scores."""


@dataclass(frozen=True, kw_only=True)
class LinearCurve:
    """Seconds of a matrix product, (c^smooth + m^smooth)^(1/smooth) + start, for c of computing and m of memory.

    Attributes:
        compute: the part of the peak that large products reach.
        half_wave: products whose tiles fill the device so many times reach half of that.
        half_depth: and those whose sums have so many terms.
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
    """How fast element-wise operators read and write.

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
        launch_us: the host's time per operator.
        memory_passes: how often received keys and values are read and written once more.
        score_bytes: memory traffic per score element, without fusion.
        score_part: the part of the memory's speed that this traffic reaches.
        score_buffer_bytes: what is held per score element at once.
        kv_copies: how many copies of gathered keys and values are held.
        rendezvous: whether a message leaves only when its receiver asks for it.
        unfused: whether all else consists of single operators, too, and hidden scores are computed.
    """

    attention: float
    merge_bytes: float
    hop_us: float
    launch_us: float
    memory_passes: int
    score_bytes: float
    score_part: float
    score_buffer_bytes: float
    kv_copies: int
    rendezvous: bool
    unfused: bool


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """All constants.

    Attributes:
        host_smooth: how sharply the time of the host, which starts operators, and that of the device meet.
        attention: by the kernels that compute it.
    """

    linear: LinearCurve
    stream: StreamCurve
    host_smooth: float
    attention: dict[Kernels, Attention]
