"""Exchanges that other packages add as entry points of the group `longspan.exchanges`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from longspan.core.exchange import BUILT_IN, Exchange, Traits, exchanges
from longspan.core.extensions import EXCHANGES, extensions
from longspan.errors import PluginError

if TYPE_CHECKING:
    from longspan.core.extensions import Extension


@dataclass(frozen=True, kw_only=True)
class ExchangePlugin:
    """An exchange of another package, named by an entry point of the group `longspan.exchanges`.

    All processes import its module, so that must not import torch.

    Attributes:
        traits: layouts and other traits.
        attention: `module:name` of an attention function or `attn.exchanges.AttentionExchange`. Only workers import it.
        cost: `module:name` of a `cost.channels.ExchangeCost`, which policies and simulations import.
    """

    traits: Traits
    attention: str
    cost: str


_LOADED: dict[str, tuple[ExchangePlugin, Extension]] = {}


def load_traits(kind: str) -> Traits:
    """Import the plug-in with this name, and return its traits. Raise KeyError if there is none."""
    added = extensions(EXCHANGES, BUILT_IN)
    if kind not in added:
        raise KeyError(kind)
    plugin = added[kind].load()
    if not isinstance(plugin, ExchangePlugin):
        raise PluginError(f"{added[kind].origin} is no longspan.core.exchange_plugins.ExchangePlugin: name one")
    if plugin.traits.level == "layer":
        raise PluginError(f"{added[kind].origin} computes whole layers: only built-in exchanges can")
    if plugin.traits.sparse_form_of is not None:
        raise PluginError(f"{added[kind].origin} is a sparse form of an exchange: only built-in exchanges have one")
    added[kind].check(plugin.attention)  # only workers import it
    _LOADED[kind] = plugin, added[kind]
    return plugin.traits


def exchange_names() -> tuple[str, ...]:
    """Return the kinds between several members, including plug-ins that are not imported yet."""
    return tuple(dict.fromkeys((*(one.kind for one in exchanges()), *extensions(EXCHANGES, BUILT_IN))))


def plugin_part(kind: str, part: Literal["attention", "cost"]) -> object | None:
    """Import the attention or the cost of the plug-in with this name. Return None for any other kind."""
    if kind in BUILT_IN:
        return None
    _ = Exchange(kind).traits  # loads a plug-in
    if kind not in _LOADED:  # registered by `register_traits`
        return None
    plugin, extension = _LOADED[kind]
    return extension.resolve(getattr(plugin, part))
