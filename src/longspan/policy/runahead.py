"""KV-Runahead (arXiv 2405.05329): long prompts in chains of consecutive pieces, cut by a look-up table.

Each instance hands the keys and values of a layer to the next one. The last one has all of them in the end and decodes
alone, if it has room. All else is as in `context`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from longspan.core.exchange import CHAIN
from longspan.policy.choosing import Facts
from longspan.policy.context import Context, ContextOptions, LengthOptions
from longspan.policy.options import check_exchange, parse_options, settings_of
from longspan.policy.sharding import Partitions


@dataclass(frozen=True, kw_only=True)
class RunaheadOptions(LengthOptions):
    """Options of `runahead`.

    Attributes:
        partition: `even` pieces (KVR-E), those `searched` for prompts of exactly this length (KVR-S), or `predicted`
            from the two nearest lengths (KVR-P); `auto` is predicted if anything was searched, else even.
        exchange, layout: there is one of each.
        home, rotate: as of `context`.
    """

    exchange: str = "auto"
    layout: Literal["auto", "contiguous"] = "auto"
    partition: Literal["auto", "even", "searched", "predicted"] = "auto"
    home: Literal["auto", "last", "computed"] = "auto"
    rotate: Literal["block", "token"] = "block"

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, [CHAIN])


def create(num_instances: int, options: Mapping[str, str], facts: Facts) -> Context:
    """The policy.

    Raises:
        ValueError: for an unknown option, a bad value, or a partition that was not searched.
    """
    parsed = parse_options("runahead", RunaheadOptions, options)
    if parsed.partition == "auto" or facts.partitions is None:
        partitions = Partitions.best(facts.partitions, facts.model, num_instances)
    else:
        partitions = Partitions(kind=parsed.partition, table=facts.partitions, model=facts.model, members=num_instances)
    return Context(
        num_instances,
        ContextOptions(
            exchange=CHAIN.kind,
            home=parsed.home,
            rotate=parsed.rotate,
            threshold=parsed.threshold,
            long_share=parsed.long_share,
        ),
        facts,
        partitions,
        settings_of("runahead", parsed),
    )
