"""Options for sharding a request over a group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, Self

from longspan.core.exchange import BUILT_IN, RING_Q, Exchange, decoding, exchange_of, exchanges, takers
from longspan.core.exchange_plugins import exchange_names
from longspan.core.sparse import MAX_PIECES
from longspan.cost.partition_table import parse_fractions
from longspan.errors import ParameterError
from longspan.policy.shards import Shape


def check_exchange(key: str, given: str, choices: Callable[[], Iterable[Exchange]], *, automatic: bool = True) -> None:
    """Raise ParameterError unless an option names one of these exchanges, or `auto` if that is allowed."""
    if given not in BUILT_IN and given in exchange_names():
        from longspan.cost.channels import cost_of  # noqa: PLC0415 - plug-ins alone

        cost_of(exchange_of(given))  # an exchange of a plug-in is a choice once it is loaded
    kinds = ["auto"] * automatic + [exchange.kind for exchange in choices()]
    if given not in kinds:
        raise ParameterError(key, f"is one of {', '.join(kinds)}, but {given!r} given", given)


@dataclass(frozen=True, kw_only=True)
class SharingOptions:
    """Options for sharding a request over a group.

    Attributes:
        exchange: of prefill. `auto` chooses the exchange that is expected to be quickest for each step.
        decode: the exchange of single tokens. All but `ring_q` move the KV of the whole request for each of them.
        layout: of prefill. `auto` is zigzag, or contiguous for a chain or with fractions.
        fractions: of a contiguous layout, one per instance (`0.6,0.4`). Empty is even pieces.
        dense: with `gather_kv`, compute the scores that causality masks, too, as KV-Runahead's baseline does.
        weights: with `alltoall` and tensor parallelism, every rank prefills with the unsharded weights of a layer. It
            copies them from the `host`, which CPUs map, or from the `peers` of its instance. `auto` does so if it sends
            fewer bytes than summing outputs, and takes the quicker source.
        micro_partitions: with `gather_hidden`, the pieces in which hidden states are gathered, while earlier ones are
            computed. A file of `csa` has its own.
        home: the members that keep the KV of a chain. `last` keeps all KV on the last instance while it has free
            blocks, and decodes there alone. `computed` keeps each token where it was computed. `auto` is last.
        rotate: the owner of new tokens of a decode. `block` gives the next block to the member with the fewest blocks.
            `token` gives the next token to the member with the fewest tokens. Members then differ by at most one token
            once they have evened out, but the next turn of a conversation recomputes the answer: only blocks with
            neighbouring tokens are cached.
    """

    exchange: str = "auto"
    decode: str = RING_Q.kind
    layout: Literal["auto", "zigzag", "striped", "contiguous"] = "auto"
    fractions: str = ""
    dense: bool = False
    weights: Literal["auto", "host", "peers"] = "auto"
    micro_partitions: int = 1
    home: Literal["auto", "last", "computed"] = "auto"
    rotate: Literal["block", "token"] = "block"

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, exchanges)
        check_exchange("decode", self.decode, decoding, automatic=False)
        traits = None if self.exchange == "auto" else exchange_of(self.exchange).traits
        if traits is not None and self.layout not in {"auto", *traits.layouts}:
            able, use = " or ".join(traits.layouts), traits.layouts[0]
            problem = f"{self.exchange} computes with layout {able}, but layout {self.layout} given: use {use}"
            raise ParameterError("exchange", problem, self.exchange)
        if self.fractions and self.layout not in {"auto", "contiguous"}:
            problem = f"are for layout contiguous, but {self.layout} given: leave one of them out"
            raise ParameterError("fractions", problem, self.fractions)
        parameters = () if traits is None else traits.parameters
        but_given = f"but {self.exchange} given: leave one of them out"
        if self.dense and "dense" not in parameters:
            raise ParameterError("dense", f"is for exchange {takers('dense')}, {but_given}", self.dense)
        if self.weights != "auto" and "weights" not in parameters:
            raise ParameterError("weights", f"are for exchange {takers('weights')}, {but_given}", self.weights)
        self._check_micro_partitions(parameters, but_given)
        if self.home != "auto" and traits is not None and traits.keeps != "later":
            able = ", ".join(exchange.kind for exchange in exchanges() if exchange.traits.keeps == "later")
            raise ParameterError("home", f"is for exchange {able}, {but_given}", self.home)
        if self.fractions:
            parse_fractions(self.fractions)

    def _check_micro_partitions(self, parameters: Collection[str], but_given: str) -> None:
        number = self.micro_partitions
        if not 1 <= number <= MAX_PIECES:
            raise ParameterError("micro_partitions", f"must be from 1 to {MAX_PIECES}, but {number} given", number)
        if number > 1 and "micro_partitions" not in parameters:
            problem = f"are for exchange {takers('micro_partitions')}, {but_given}"
            raise ParameterError("micro_partitions", problem, number)

    @classmethod
    def of(cls, options: object, **changes: Any) -> Self:  # noqa: ANN401 - a value for any field
        """Return the options that a policy has under the same names, with changes."""
        names = {field.name for field in fields(cls)}
        return cls(**({name: value for name, value in vars(options).items() if name in names} | changes))

    def check_instances(self, number: int, tp: int | None) -> None:
        """Raise ParameterError unless the options fit the instances. None for an unknown `tp`."""
        if self.fractions and (given := len(self.fractions_by_member)) != number:
            problem = f"{self.fractions} are {given}, but there are {number} instances: give one for each"
            raise ParameterError("fractions", problem, self.fractions)
        if self.weights != "auto" and tp == 1:
            problem = (
                f"({self.weights}) are for instances split by tensor parallelism, but tp is 1: leave them out, or "
                "split instances with `parallel`, such as 2xtp2"
            )
            raise ParameterError("weights", problem, self.weights)

    @cached_property
    def fractions_by_member(self) -> tuple[float, ...]:
        """The fractions in order of the members. Empty for even pieces."""
        return parse_fractions(self.fractions) if self.fractions else ()

    @cached_property
    def shape(self) -> Shape:
        """The layout of prompts for all exchanges but chains."""
        layout = self.layout
        if layout == "auto":
            layout = "contiguous" if self.fractions else "zigzag"
        return Shape(layout=layout, fractions=self.fractions_by_member)

    @property
    def may_chain(self) -> bool:
        """True if prompts may be cut into consecutive pieces, as a chain needs."""
        return self.layout in {"auto", "contiguous"}

    def leaves_kv_with_last(self, exchange: Exchange) -> bool:
        """Return True if a chain leaves its KV with the last member, which then decodes alone."""
        return exchange.traits.keeps == "later" and self.home != "computed"

    @cached_property
    def wanted(self) -> Exchange | None:
        """The exchange of prefill. None if it is chosen for each step."""
        if self.exchange == "auto":
            return None
        return exchange_of(self.exchange)._replace(dense=self.dense, micro_partitions=self.micro_partitions)
