"""The exchange of queries, keys, values and partial outputs in attention: a value, and the traits of every kind.

To add an exchange, register its kind and traits here. Its tensors are in `attn/exchanges/<kind>.py`, its seconds and
bytes in `cost/channels.py`. A package of its own adds one by an `ExchangePlugin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from longspan.core.extensions import EXCHANGES, extensions
from longspan.core.runs import Layout
from longspan.core.sparse import SparseSetting
from longspan.errors import PluginError

if TYPE_CHECKING:
    from longspan.core.extensions import Extension

WeightSource = Literal["host", "peers"]
"""Unsharded weights come from the memory of the host, or from the other ranks of the instance."""

Parameter = Literal["dense", "weights", "sparse"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a kind of exchange, as the rest of the code must know them.

    Attributes:
        layouts: the layouts that it can compute with, the preferred one first.
        level: an `attention` exchange moves queries, keys and values; a `layer` exchange computes whole attention
            layers with other weights than the model's, and its tokens come last in the packed row.
        stores: new keys and values are in the pool `before` the exchange, or it hands over what is stored `after` it.
        decodes: whether policies may decode single tokens with it.
        keeps: the KV of a token stays with the member that `computed` it, or with that one or any `later` member.
        skewed: whether its members may be in different layers at the same time, so that nobody waits for a later one.
        reads_hosts: whether some keys of a member may lie in the pool of its host.
        parameters: the fields of `Exchange` that it takes.
    """

    layouts: tuple[Layout, ...] = ("zigzag", "striped", "contiguous")
    level: Literal["attention", "layer"] = "attention"
    stores: Literal["before", "after"] = "before"
    decodes: bool = True
    keeps: Literal["computed", "later"] = "computed"
    skewed: bool = False
    reads_hosts: bool = False
    parameters: tuple[Parameter, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether each member's tokens must follow those of the member before it."""
        return self.layouts == ("contiguous",)


class Exchange(NamedTuple):
    """One way to exchange tensors in attention. It is a tuple because simulations hash millions of them, and messages
    stay short.

    Attributes:
        kind: a name of the registry.
        dense: scores that causality hides are computed and masked instead of skipped.
        weights: every rank computes whole layers with unsharded weights from there; None keeps the ranks' own shares.
        sparse: how unimportant tokens far away are dropped; None for exact attention.
    """

    kind: str
    dense: bool = False
    weights: WeightSource | None = None
    sparse: SparseSetting | None = None

    def __str__(self) -> str:
        return f"{self.shown}_{self.weights}" if self.weights else self.shown

    @property
    def shown(self) -> str:
        """The name in metrics and reports, which does not tell where weights are from."""
        variant = "_dense" if self.dense else "_sparse" if self.sparse is not None else ""
        return self.kind + variant

    @property
    def traits(self) -> Traits:
        return _TRAITS[self.kind]

    @property
    def is_layerwise(self) -> bool:
        """Whether it computes whole attention layers instead of exchanging inside the model's own."""
        return self.weights is not None or self.traits.level == "layer"

    @property
    def stores_after(self) -> bool:
        return self.is_layerwise or self.traits.stores == "after"


@dataclass(frozen=True, kw_only=True)
class ExchangePlugin:
    """An exchange of another package: its entry point of the group `longspan.exchanges` names one.

    The module of this object needs no torch, because all processes import it.

    Attributes:
        traits: its layouts and so on.
        attention: `module:name` of the function that computes attention, or of an `attn.exchanges.AttentionExchange`.
            Workers alone import it.
        cost: `module:name` of a `cost.channels.ExchangeCost`, which policies and simulations import.
    """

    traits: Traits
    attention: str
    cost: str


class _Known(dict[str, Traits]):
    """The traits of each kind. Those of a plug-in are loaded when they are first read."""

    def __missing__(self, kind: str) -> Traits:
        added = extensions(EXCHANGES, _BUILT_IN)
        if kind not in added:
            raise KeyError(kind)
        plugin = added[kind].load()
        if not isinstance(plugin, ExchangePlugin):
            raise PluginError(f"{added[kind].origin} is no longspan.core.exchange.ExchangePlugin: name one")
        if plugin.traits.level == "layer":
            raise PluginError(f"{added[kind].origin} computes whole layers: only built-in exchanges can")
        added[kind].check(plugin.attention)  # only workers import it
        self[kind], _PLUGINS[kind] = plugin.traits, (plugin, added[kind])
        return plugin.traits


_TRAITS = _Known()
_PLUGINS: dict[str, tuple[ExchangePlugin, Extension]] = {}


def register_traits(kind: str, traits: Traits) -> Exchange:
    """Makes a kind of exchange known; returns it without parameters."""
    assert kind not in _TRAITS, f"there is an exchange {kind} already"
    _TRAITS[kind] = traits
    return Exchange(kind)


LOCAL = register_traits("local", Traits(layouts=("single",), reads_hosts=True))
"""One member holds all keys, and nothing travels."""
RING_KV = register_traits("ring_kv", Traits())
"""Keys and values travel around the ring (pass-KV)."""
RING_Q = register_traits("ring_q", Traits())
"""Queries travel to the keys, and partial outputs back (pass-Q)."""
ALLTOALL = register_traits("alltoall", Traits(parameters=("weights", "sparse")))
"""Each member gets some heads of all tokens (SP-NTP, Ulysses)."""
GATHER_KV = register_traits("gather_kv", Traits(parameters=("dense",)))
"""Every member gathers all keys and values (the papers' TSP baseline)."""
GATHER_HIDDEN = register_traits(
    "gather_hidden", Traits(level="layer", stores="after", decodes=False, parameters=("sparse",))
)
"""Hidden states are gathered, and outputs are summed and scattered (SP-TP, Megatron-SP)."""
CHAIN = register_traits(
    "chain", Traits(layouts=("contiguous",), stores="after", decodes=False, keeps="later", skewed=True)
)
"""Keys and values run from each member to the next (KV-Runahead)."""


_BUILT_IN = frozenset(_TRAITS)


def exchange_names() -> tuple[str, ...]:
    """Returns the kinds between several members, those of packages that are not imported yet included."""
    return tuple(dict.fromkeys((*(one.kind for one in exchanges()), *extensions(EXCHANGES, _BUILT_IN))))


def plugin_attention(kind: str) -> object | None:
    """Imports what computes attention by an exchange of another package; None for a kind that is none."""
    return _part(kind, "attention")


def plugin_cost(kind: str) -> object | None:
    """Imports the cost of an exchange of another package; None for a kind that is none."""
    return _part(kind, "cost")


def _part(kind: str, part: Literal["attention", "cost"]) -> object | None:
    if kind in _BUILT_IN:
        return None
    _ = _TRAITS[kind]  # a plug-in is loaded here
    if kind not in _PLUGINS:  # it was registered by `register_traits`
        return None
    plugin, extension = _PLUGINS[kind]
    return extension.resolve(getattr(plugin, part))


def exchanges() -> Iterator[Exchange]:
    """Yields every loaded kind between several members, without parameters. A plug-in is loaded when it is named."""
    return (Exchange(kind) for kind in _TRAITS if kind != LOCAL.kind)


def of_any_layout() -> tuple[Exchange, ...]:
    """Returns the attention exchanges that compute with any layout."""
    layouts = {*get_args(Layout)} - {"single"}
    return tuple(one for one in exchanges() if not one.is_layerwise and layouts <= {*one.traits.layouts})


def decoding() -> tuple[Exchange, ...]:
    """Returns the exchanges that single tokens may be decoded with, the usual one first."""
    return (RING_Q, *(one for one in exchanges() if one.traits.decodes and one != RING_Q))


def takers(parameter: Parameter) -> str:
    """Lists the kinds that take a parameter, for messages."""
    return ", ".join(one.kind for one in exchanges() if parameter in one.traits.parameters)


def shown_names() -> tuple[str, ...]:
    names = [variant.shown for one in exchanges() for variant in _variants(one)]
    names += [f"{one.kind}_sparse" for one in exchanges() if "sparse" in one.traits.parameters]
    return tuple(dict.fromkeys(names))


def exchange_of(kind: str) -> Exchange:
    """Returns a kind of exchange, without parameters. Raises ValueError for one that nobody registered."""
    if kind != LOCAL.kind and kind not in exchange_names():
        raise ValueError(f"unknown exchange {kind!r}: choose one of {', '.join((LOCAL.kind, *exchange_names()))}")
    _ = _TRAITS[kind]  # a plug-in is loaded here
    return Exchange(kind)


def exchange_named(text: str) -> Exchange:
    """Returns the exchange that prints as `text`. Raises ValueError when none does."""
    if text in _TRAITS:
        return Exchange(text)
    return next((one for base in exchanges() for one in _variants(base) if str(one) == text), None) or exchange_of(text)


def _variants(one: Exchange) -> Iterator[Exchange]:
    yield one
    if "dense" in one.traits.parameters:
        yield one._replace(dense=True)
    if "weights" in one.traits.parameters:
        yield from (one._replace(weights=source) for source in get_args(WeightSource))
