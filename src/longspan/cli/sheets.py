"""The options of every verb that computes times from data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import typer

_cluster = partial(typer.Option, rich_help_panel="Cluster")


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """What connects devices, and in which form a model is computed on them."""

    link: Annotated[
        str | None,
        _cluster(
            metavar="NAME",
            help="What connects hosts, or the devices of a single host.",
            show_default="what such devices come with",
        ),
    ] = None
    link_gbytes_per_s: Annotated[
        float | None,
        _cluster(
            metavar="X",
            help="Instead: its nominal speed, one way, in 10^9 bytes per second.",
            show_default="the link's",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], _cluster(help="Of weights, keys and values; auto: 16 bits.")
    ] = "auto"
    ffn_dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "fp8"] | None,
        _cluster(help="Of the feed-forward weights.", show_default="as --dtype"),
    ] = None
    attention: Annotated[
        Literal["flash", "eager"] | None,
        _cluster(help="Fused, or as Hugging Face's single operators compute it.", show_default="flash"),
    ] = None
