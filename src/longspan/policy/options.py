"""Options of policies: given as text (`-o key=value`), validated against the policy's own dataclass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from longspan.core.exchange import RING_Q, Exchange, decoding, exchange_of, exchanges, takers
from longspan.core.protocols import PolicySettings
from longspan.cost.partitions import parse_fractions
from longspan.policy.sharding import Shape

OptionsT = TypeVar("OptionsT")


class FixedSettings:
    """A policy that is set as it is for as long as it serves."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    @property
    def settings(self) -> PolicySettings:
        """Its name and its options."""
        return self._settings

    def update(self, options: Mapping[str, str]) -> None:
        """Raises ValueError unless there is nothing to change."""
        self._settings.check_changes(options)


def settings_of(policy: str, options: object, changeable: tuple[str, ...] = ()) -> PolicySettings:
    """How the policy of that name is set, by the instance of its dataclass."""
    values = asdict(options)  # type: ignore[call-overload]  # every options class is a dataclass
    return PolicySettings(name=policy, options=values, changeable=changeable)


def parse_options(policy: str, kind: type[OptionsT], options: Mapping[str, str]) -> OptionsT:
    """`options` as an instance of the dataclass `kind`.

    Raises:
        ValueError: for a key that `kind` lacks or a value of the wrong type; the message lists the valid keys.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every options class is a dataclass
    for key in options:
        if key not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has none, but context and others do"
            raise ValueError(f"policy {policy} has no option {key!r}: {valid}")
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"policy {policy}: {_explained(error, kind, options)}") from error


def _explained(error: msgspec.ValidationError, kind: type, options: Mapping[str, str]) -> str:
    """The message of a value of the wrong type, with what would be right where that can be listed."""
    key = str(error).rpartition("$.")[2].rstrip("`")
    if key not in options:
        return str(error)
    wanted = list(_wanted(get_type_hints(kind)[key]))
    one_of = "one of " if len(wanted) > 1 else ""
    return f"option {key} is {one_of}{', '.join(wanted)}, but {options[key]!r} given"


def _wanted(hint: Any) -> Iterator[str]:  # noqa: ANN401 - a type, a union, a literal or what it lists
    """What may be given for a type, in words."""
    if isinstance(hint, str):
        yield hint
    elif choices := get_args(hint):
        for choice in choices:
            yield from _wanted(choice)
    else:
        yield from {bool: ("true", "false"), int: ("a whole number",), float: ("a number",)}[hint]


def check_exchange(key: str, given: str, choices: Sequence[Exchange], *, automatic: bool = True) -> None:
    """Raises ValueError unless an option names one of these kinds of exchange, or `auto` where that is possible."""
    kinds = ["auto"] * automatic + [one.kind for one in choices]
    if given not in kinds:
        raise ValueError(f"option {key} is one of {', '.join(kinds)}, but {given!r} given")


@dataclass(frozen=True, kw_only=True)
class SharingOptions:
    """How requests are shared.

    Attributes:
        exchange: of prefill; `auto` chooses for each step what is expected to be quickest.
        decode: the exchange of single tokens. All but `ring_q` move the KV of the whole request for each of them.
        layout: of prefill; `auto` is zigzag, or contiguous for a chain or when fractions are given.
        fractions: of a contiguous layout, one per instance (`0.6,0.4`); empty for even pieces.
        dense: with `gather_kv`, compute the scores that causality hides, too, as KV-Runahead's baseline does.
        weights: with `alltoall` and tensor parallelism, every rank computes prefills with the whole weights of a layer,
            and gets them from the `host`, whose copy CPUs map, or from the `peers` in its instance; `auto` does so
            where it sends fewer bytes than summing outputs, and takes what is quicker.
        home: where a chain leaves the KV: all of it with the `last` instance while that has room, which then decodes
            alone, or each token's where it was `computed`; `auto` is last.
        rotate: who holds new tokens of a decode: by `block`, the member with the fewest blocks takes the next block; by
            `token`, the one with the fewest tokens takes the next token. What members hold then differs by one token at
            most once it has evened out, but the next turn of a conversation computes the answer again: only blocks with
            neighbouring tokens are found again.

    Raises:
        ValueError: for options that contradict each other.
    """

    exchange: str = "auto"
    decode: str = RING_Q.kind
    layout: Literal["auto", "zigzag", "striped", "contiguous"] = "auto"
    fractions: str = ""
    dense: bool = False
    weights: Literal["auto", "host", "peers"] = "auto"
    home: Literal["auto", "last", "computed"] = "auto"
    rotate: Literal["block", "token"] = "block"

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, tuple(exchanges()))
        check_exchange("decode", self.decode, decoding(), automatic=False)
        traits = None if self.exchange == "auto" else exchange_of(self.exchange).traits
        if traits is not None and self.layout not in {"auto", *traits.layouts}:
            raise ValueError(
                f"exchange {self.exchange} computes with layout {' or '.join(traits.layouts)}, but "
                f"layout {self.layout} given: use {traits.layouts[0]}"
            )
        if self.fractions and self.layout not in {"auto", "contiguous"}:
            raise ValueError(f"fractions are for layout contiguous, but {self.layout} given: leave one of them out")
        if self.dense and (traits is None or "dense" not in traits.parameters):
            raise ValueError(
                f"dense is for exchange {takers('dense')}, but {self.exchange} given: leave one of them out"
            )
        if self.weights != "auto" and (traits is None or "weights" not in traits.parameters):
            raise ValueError(
                f"weights are for exchange {takers('weights')}, but {self.exchange} given: leave one of them out"
            )
        if self.home != "auto" and traits is not None and traits.keeps != "later":
            raise ValueError(f"home is for exchange chain, but {self.exchange} given: leave one of them out")
        if self.fractions:
            parse_fractions(self.fractions)

    def check_group(self, size: int) -> None:
        """Raises ValueError when there are not as many fractions as instances."""
        given = len(parse_fractions(self.fractions)) if self.fractions else size
        if given != size:
            raise ValueError(
                f"fractions {self.fractions} are {given}, but there are {size} instances: give one for each"
            )

    def shape(self, exchange: Exchange) -> Shape:
        """How prompts are dealt for an exchange."""
        return self._shapes[exchange.traits.in_order]

    def check_tp(self, tp: int | None) -> None:
        """Raises ValueError when weights are to be made whole that are, on instances of one rank; None is unknown."""
        if self.weights != "auto" and tp == 1:
            raise ValueError(
                f"weights={self.weights} is for instances split by tensor parallelism, but tp is 1: leave it out, or "
                "split them with --parallel, such as 2xtp2"
            )

    @cached_property
    def _shapes(self) -> tuple[Shape, Shape]:
        """For all exchanges but chains, and for chains."""
        layout = self.layout
        if layout == "auto":
            layout = "contiguous" if self.fractions else "zigzag"
        fractions = parse_fractions(self.fractions) if self.fractions else ()
        return Shape(layout=layout, fractions=fractions), Shape(layout="contiguous", fractions=fractions, chained=True)

    @property
    def chains(self) -> bool:
        """Whether the layout can be that of a chain."""
        return self.layout in {"auto", "contiguous"}

    @cached_property
    def decoding(self) -> Exchange:
        """The exchange of single tokens."""
        return exchange_of(self.decode)

    @cached_property
    def wanted(self) -> Exchange | None:
        """The exchange of prefill; None when it is to be chosen."""
        if self.exchange == "auto":
            return None
        return exchange_of(self.exchange)._replace(dense=self.dense)
