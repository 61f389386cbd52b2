"""KV-Runahead (arXiv 2405.05329): long prompts in chains of consecutive pieces, cut by a look-up table.

Each instance hands the keys and values of a layer to the next one. The last one has all of them in the end and decodes
alone, if it has room. All else is as in `context`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from longspan.cost.partition_table import PartitionTable
from longspan.policy.choosing import Facts
from longspan.policy.context import Context, ContextOptions, LengthOptions
from longspan.policy.options import parse_options
from longspan.policy.partitions import Partitions


@dataclass(frozen=True, kw_only=True)
class RunaheadOptions(LengthOptions):
    """Options of `runahead`.

    Attributes:
        partition: `even` pieces (KVR-E), those `searched` for prompts of exactly this length (KVR-S), or `predicted`
            from the two nearest lengths (KVR-P); `auto` is predicted if anything was searched, else even.
        home, rotate: as of `context`.
    """

    partition: Literal["auto", "even", "searched", "predicted"] = "auto"
    home: Literal["last", "computed"] = "last"
    rotate: Literal["block", "token"] = "block"


def create(num_instances: int, options: Mapping[str, str], facts: Facts) -> Context:
    """The policy.

    Raises:
        ValueError: for an unknown option, a bad value, or a partition that was not searched.
    """
    parsed = parse_options("runahead", RunaheadOptions, options)
    table, kind = facts.partitions, parsed.partition
    if table is None:
        table, kind = PartitionTable(), "even"
    if kind == "auto":
        kind = "predicted" if table.lengths(facts.model, num_instances) else "even"
    return Context(
        num_instances,
        ContextOptions(
            exchange="chain",
            home=parsed.home,
            rotate=parsed.rotate,
            threshold=parsed.threshold,
            long_share=parsed.long_share,
        ),
        facts,
        Partitions(kind=kind, table=table, model=facts.model, members=num_instances),
    )
