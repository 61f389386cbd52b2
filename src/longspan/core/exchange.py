"""The exchange of queries, keys, values and partial outputs in attention: a value, and the traits of every kind.

To add an exchange, register its kind and traits here. Its tensors are in `attn/exchanges/<kind>.py`, its seconds and
bytes in `cost/channels.py`. A sparse form of an exchange is a separate kind. Users choose the exact exchange, and the
policy schedules the sparse form for requests with a sparse setting. Plug-ins are `exchange_plugins.ExchangePlugin`s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from longspan.core.runs import Layout
from longspan.core.sparse import SparseSetting

WeightSource = Literal["host", "peers"]
"""Unsharded weights come from the memory of the host, or from the other ranks of the instance."""

Parameter = Literal["dense", "weights", "sparse", "micro_partitions"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a kind of exchange that other packages use.

    Attributes:
        layouts: the layouts that it can compute with, the preferred one first.
        level: an `attention` exchange moves queries, keys and values. A `layer` exchange computes whole attention
            layers with other weights than the model's, and its tokens are last in the packed row.
        stores: new keys and values are in the pool `before` the exchange, or it returns them to be stored `after` it.
        decodes: whether policies may decode single tokens with it.
        keeps: the KV of a token stays with the member that `computed` it, or with that one or any `later` member.
        skewed: whether its members may be in different layers at the same time, without waiting for later members.
        reads_hosts: whether some keys of a member may lie in the pool of its host.
        parameters: the fields of `Exchange` that it takes.
        sparse_form_of: the exact kind of a sparse form. None for an exact kind.
    """

    layouts: tuple[Layout, ...] = ("zigzag", "striped", "contiguous")
    level: Literal["attention", "layer"] = "attention"
    stores: Literal["before", "after"] = "before"
    decodes: bool = True
    keeps: Literal["computed", "later"] = "computed"
    skewed: bool = False
    reads_hosts: bool = False
    parameters: tuple[Parameter, ...] = ()
    sparse_form_of: str | None = None

    @property
    def in_order(self) -> bool:
        """Whether each member's tokens must follow the tokens of the previous member."""
        return self.layouts == ("contiguous",)


class Exchange(NamedTuple):
    """One way to exchange tensors in attention.

    It is a tuple because simulations hash millions of exchanges, and messages stay short.

    Attributes:
        kind: a name of the registry.
        dense: scores that causality hides are computed and masked instead of skipped.
        weights: every rank computes whole layers with unsharded weights from this source. None: its own shard.
        sparse: the setting of a sparse form, which drops unimportant distant tokens. None for exact kinds.
        micro_partitions: pieces in which tokens are gathered, computed and scattered concurrently.
    """

    kind: str
    dense: bool = False
    weights: WeightSource | None = None
    sparse: SparseSetting | None = None
    micro_partitions: int = 1

    def __str__(self) -> str:
        return f"{self.shown}_{self.weights}" if self.weights else self.shown

    @property
    def shown(self) -> str:
        """The name in metrics and reports, without the source of weights."""
        return f"{self.kind}_dense" if self.dense else self.kind

    @property
    def traits(self) -> Traits:
        return _TRAITS[self.kind]

    @property
    def is_layerwise(self) -> bool:
        """Whether it computes whole attention layers in place of the model's layers."""
        return self.weights is not None or self.traits.level == "layer"

    @property
    def stores_after(self) -> bool:
        return self.is_layerwise or self.traits.stores == "after"

    @property
    def has_sparse_form(self) -> bool:
        return self.kind in _SPARSE_FORMS and not _TRAITS[_SPARSE_FORMS[self.kind]].decodes

    def sparse_form(self, setting: SparseSetting) -> Exchange:
        """Return the sparse form of this exchange with a setting."""
        assert self == Exchange(self.kind), f"{self} has parameters that its sparse form does not take"
        return Exchange(_SPARSE_FORMS[self.kind], sparse=setting)

    @property
    def exact_form(self) -> Exchange:
        """The exact exchange of a sparse form or without micro-partitions, or the exchange itself."""
        exact = self.traits.sparse_form_of
        if exact is not None:
            return Exchange(exact)
        return self if self.micro_partitions == 1 else self._replace(micro_partitions=1)

    @property
    def is_sparse_form(self) -> bool:
        return self.traits.sparse_form_of is not None

    @property
    def is_priced_by_share(self) -> bool:
        """Whether the seconds of prompts are predicted as a share of those of its exact form."""
        return self.micro_partitions > 1 or (self.sparse is not None and not self.traits.decodes)


_SPARSE_FORMS: dict[str, str] = {}
"""Maps an exact kind to the kind that is its sparse form."""


class _Known(dict[str, Traits]):
    """The traits of each kind. The traits of a plug-in are loaded when they are first read."""

    def __missing__(self, kind: str) -> Traits:
        from longspan.core.exchange_plugins import load_traits  # noqa: PLC0415 - built-in kinds need no plug-ins

        self[kind] = load_traits(kind)
        return self[kind]


_TRAITS = _Known()


def register_traits(kind: str, traits: Traits) -> Exchange:
    """Register a kind of exchange. Return the exchange without parameters."""
    assert kind not in _TRAITS, f"there is an exchange {kind} already"
    _TRAITS[kind] = traits
    if traits.sparse_form_of is not None:
        _SPARSE_FORMS[traits.sparse_form_of] = kind
    return Exchange(kind)


LOCAL = register_traits("local", Traits(layouts=("single",), reads_hosts=True))
"""One member holds all keys, and nothing travels."""
RING_KV = register_traits("ring_kv", Traits())
"""Keys and values travel around the ring (pass-KV)."""
RING_Q = register_traits("ring_q", Traits(reads_hosts=True))
"""Queries travel to the keys, and partial outputs back (pass-Q)."""
ALLTOALL = register_traits("alltoall", Traits(parameters=("weights",)))
"""Each member gets some heads of all tokens (SP-NTP, Ulysses)."""
GATHER_KV = register_traits("gather_kv", Traits(parameters=("dense",)))
"""Every member gathers all keys and values (the papers' TSP baseline)."""
GATHER_HIDDEN = register_traits(
    "gather_hidden", Traits(level="layer", stores="after", decodes=False, parameters=("micro_partitions",))
)
"""Hidden states are gathered, and outputs are summed and scattered (SP-TP, Megatron-SP)."""
CHAIN = register_traits(
    "chain", Traits(layouts=("contiguous",), stores="after", decodes=False, keeps="later", skewed=True)
)
"""Keys and values run from each member to the next (KV-Runahead)."""
ALLTOALL_SPARSE = register_traits(
    "alltoall_sparse", Traits(decodes=False, parameters=("sparse",), sparse_form_of=ALLTOALL.kind)
)
"""`alltoall` that drops unimportant distant tokens before it sends them (CSPS §3.2.4)."""
GATHER_HIDDEN_SPARSE = register_traits(
    "gather_hidden_sparse",
    Traits(level="layer", stores="after", decodes=False, parameters=("sparse",), sparse_form_of=GATHER_HIDDEN.kind),
)
"""`gather_hidden` without attention to unimportant distant tokens."""
RING_Q_SPARSE = register_traits("ring_q_sparse", Traits(parameters=("sparse",), sparse_form_of=RING_Q.kind))
"""`ring_q` for single tokens, without the keys that were dropped in the prompt."""


BUILT_IN = frozenset(_TRAITS)


def exchanges() -> Iterator[Exchange]:
    """Yield every loaded exact exchange between several members, without parameters. Plug-ins load when named."""
    return (Exchange(kind) for kind in _exact_kinds() if kind != LOCAL.kind)


def _exact_kinds() -> Iterator[str]:
    return (kind for kind, traits in _TRAITS.items() if traits.sparse_form_of is None)


def of_any_layout() -> tuple[Exchange, ...]:
    """Return the attention exchanges that support all layouts."""
    layouts = {*get_args(Layout)} - {"single"}
    return tuple(one for one in exchanges() if not one.is_layerwise and layouts <= {*one.traits.layouts})


def decoding() -> tuple[Exchange, ...]:
    """Return the exchanges that can decode single tokens, the default first."""
    return (RING_Q, *(one for one in exchanges() if one.traits.decodes and one != RING_Q))


def takers(parameter: Parameter) -> str:
    """Return the names of the kinds that take a parameter, for messages."""
    return ", ".join(one.kind for one in exchanges() if parameter in one.traits.parameters)


def with_sparse_form() -> tuple[Exchange, ...]:
    """Return the exchanges that have a sparse form for prompts."""
    return tuple(one for one in exchanges() if one.has_sparse_form)


def shown_names() -> tuple[str, ...]:
    """Return the names of all exchanges between several members, sparse forms last."""
    names = [variant.shown for one in exchanges() for variant in _variants(one)]
    return tuple(dict.fromkeys((*names, *_SPARSE_FORMS.values())))


def exchange_of(kind: str) -> Exchange:
    """Return an exact exchange without parameters. Raise ValueError for any other name."""
    try:
        is_exact = _TRAITS[kind].sparse_form_of is None
    except KeyError:
        is_exact = False
    if not is_exact:
        from longspan.core.exchange_plugins import exchange_names  # noqa: PLC0415 - an error
        from longspan.errors import ParameterError  # noqa: PLC0415 - an error
        from longspan.names import choices  # noqa: PLC0415 - an error

        raise ParameterError("exchange", f"{kind!r} is unknown: {choices(kind, (LOCAL.kind, *exchange_names()))}", kind)
    return Exchange(kind)


def exchange_named(text: str) -> Exchange:
    """Return the exchange that prints as `text`. Raise ValueError if there is none. A sparse form has no setting."""
    if text in _TRAITS:
        return exchange_of(text) if _TRAITS[text].sparse_form_of is None else Exchange(text)
    return next((one for base in exchanges() for one in _variants(base) if str(one) == text), None) or exchange_of(text)


def _variants(one: Exchange) -> Iterator[Exchange]:
    yield one
    if "dense" in one.traits.parameters:
        yield one._replace(dense=True)
    if "weights" in one.traits.parameters:
        yield from (one._replace(weights=source) for source in get_args(WeightSource))
