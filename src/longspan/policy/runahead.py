"""KV-Runahead (arXiv 2405.05329): long prompts in chains of consecutive pieces, cut by a look-up table.

Each instance sends the keys and values of a layer to the next one. The last instance then has all of them, and decodes
alone if it has free blocks. Otherwise the policy is `context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.core.exchange import CHAIN
from longspan.policy.chain_cuts import ChainCuts
from longspan.policy.context import Context, ContextOptions, LengthOptions
from longspan.policy.facts import Facts
from longspan.policy.sharing import check_exchange


@dataclass(frozen=True, kw_only=True)
class RunaheadOptions(LengthOptions):
    """Options of `runahead`: how chains are cut.

    Attributes:
        partition: `even` pieces (KVR-E), pieces `searched` for prompts of exactly this length (KVR-S), or pieces
            `predicted` from the two nearest lengths (KVR-P). `auto` is predicted if the table has any, else even.
        exchange, layout: each has one value.
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

    @property
    def sharing(self) -> ContextOptions:
        return ContextOptions.of(self, exchange=CHAIN.kind, layout="auto")


class Runahead(Context, name="runahead"):
    """Shares long prompts in chains, whose pieces a table cuts.

    Attributes:
        cuts: the pieces of chains.
    """

    Options = RunaheadOptions
    reads_hosts = False

    def __init__(self, instances: tuple[int, ...], options: RunaheadOptions, facts: Facts) -> None:
        self.cuts = cuts = ChainCuts(options.partition, facts, len(instances))
        super().__init__(instances, options, facts, sharing=options.sharing, chain_cuts=cuts)
        self.whole_prompts = cuts.whole

    def shares(self, num_tokens: int) -> bool:
        """Return True if all instances share a prompt of this length."""
        return self._by_length.num_members(num_tokens) == len(self.instances) > 1
