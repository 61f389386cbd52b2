"""Exchange `broadcast` sends all keys and values of each instance to every other instance.

All processes import this module, so it imports no torch. Workers alone import `tensors`.
"""

from __future__ import annotations

from longspan.core.exchange import Traits
from longspan.core.exchange_plugins import ExchangePlugin

BROADCAST = ExchangePlugin(
    traits=Traits(layouts=("zigzag", "striped")),
    attention="longspan_example.tensors:broadcast",
    cost="longspan_example.cost:COST",
)
