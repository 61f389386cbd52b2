"""Attention exchanges, one file each: all members of a group call one at once, layer by layer.

The module `<kind>.py` registers its exchange and is imported on first use. So is that of a plug-in.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from longspan.attn.comm import Group
from longspan.attn.member import MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import BUILT_IN, Exchange

if TYPE_CHECKING:
    from longspan.attn.hosted import HostSource

KeysAndValues = tuple[Tensor, Tensor]
"""Two tensors `[kv_heads, tokens, head_dim]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of one member for one layer.

    Attributes:
        parts: alike on every member; members without queries call, too.
        q: this member's queries `[heads, tokens, head_dim]`; `rows` of a part are its own.
        k, v: the new keys and values `[kv_heads, tokens, head_dim]`, packed like `q`.
        kv: this layer of the pool. It has the new keys and values, too, unless the exchange stores them after.
        out: has q's shape; the rows of the parts are written.
        started: the result of `start` for this layer; None when that was not called.
        layer, num_layers: which one of the model it is, and of how many.
        layers: those that this member computes one after the other.
        first_kv_head: the number in the whole layer of the first KV head that this member's rank has.
        host: keys and values of the parts that members have on their hosts; None when no member has any.
    """

    exchange: Exchange
    group: Group
    parts: MemberParts
    q: Tensor
    k: Tensor
    v: Tensor
    kv: PagedKv
    spec: AttnSpec
    out: Tensor
    started: object = None
    layer: int = 0
    num_layers: int = 1
    layers: Sequence[int] = range(1)
    first_kv_head: int = 0
    host: HostSource | None = None


Attend = Callable[[Call], Sequence[KeysAndValues] | None]
"""Computes attention. Returns for each part the keys and values to be stored; None when they were stored before."""
Start = Callable[[Group, MemberParts, PagedKv, AttnSpec], object]
"""Starts the transfers of a layer that need nothing of it to be computed, while its projections run."""


@dataclass(frozen=True, kw_only=True)
class AttentionExchange:
    """The tensor operations of one kind of exchange."""

    attend: Attend
    start: Start | None = None


_REGISTERED: dict[str, AttentionExchange] = {}


def register_attention(exchange: Exchange, attend: Attend, *, start: Start | None = None) -> None:
    """Registers how a kind of exchange computes attention, with any parameters."""
    _REGISTERED[exchange.kind] = AttentionExchange(attend=attend, start=start)


def attention_exchange(exchange: Exchange) -> AttentionExchange:
    """Returns the registered operations of a kind."""
    if exchange.kind not in _REGISTERED:
        added = None
        if exchange.kind not in BUILT_IN:
            from longspan.core.exchange_plugins import plugin_part  # noqa: PLC0415 - plug-ins alone

            added = plugin_part(exchange.kind, "attention")
        if added is None:
            importlib.import_module(f"{__name__}.{exchange.kind}")
        elif isinstance(added, AttentionExchange):
            _REGISTERED[exchange.kind] = added
        else:
            register_attention(exchange, cast("Attend", added))
    return _REGISTERED[exchange.kind]
