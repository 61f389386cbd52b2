"""KV-Runahead (arXiv 2405.05329): long prompts in chains of consecutive pieces, cut by a look-up table.

Each instance hands the keys and values of a layer to the next one. The last one has all of them in the end and decodes
alone, if it has room. All else is as in `context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.core.exchange import CHAIN
from longspan.policy.context import Context, ContextOptions, LengthOptions
from longspan.policy.facts import Facts
from longspan.policy.group_parts import Partitions, check_exchange


@dataclass(frozen=True, kw_only=True)
class RunaheadOptions(LengthOptions):
    """Options of `runahead`: how a chain cuts its prompts.

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
        super().__post_init__()
        check_exchange("exchange", self.exchange, lambda: (CHAIN,))


class Runahead(Context, name="runahead"):
    """Shares long prompts in chains, whose pieces a table cuts."""

    Options = RunaheadOptions
    reads_hosts = False

    def __init__(self, instances: tuple[int, ...], options: RunaheadOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self.whole_prompts = self._partitions is not None and self._partitions.whole

    def _sharing_of(self, options: RunaheadOptions) -> ContextOptions:
        return ContextOptions(
            exchange=CHAIN.kind,
            home=options.home,
            rotate=options.rotate,
            threshold=options.threshold,
            long_share=options.long_share,
        )

    def _partitions_of(self, options: RunaheadOptions, facts: Facts) -> Partitions:
        return Partitions(options.partition, facts, len(self.instances))
