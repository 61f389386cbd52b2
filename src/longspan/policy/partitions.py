"""Which part of a prompt each member of a chain computes: even pieces, or those of a look-up table (KV-Runahead)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.cost.partition_table import PartitionTable

_REMEDY = "measure it with longspan profile --partitions, or choose partition=even"


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """The paper's KVR-E (`even`), KVR-S (`searched`) and KVR-P (`predicted` from the two nearest lengths).

    Attributes:
        model: whose entries of the table count.
        members: of the longest chain.

    Raises:
        ValueError: when pieces are to be searched or predicted ones, and the table has none for this model and group.
    """

    kind: Literal["even", "searched", "predicted"]
    table: PartitionTable
    model: str
    members: int

    def __post_init__(self) -> None:
        if self.kind != "even" and self.members > 1 and not self.table.lengths(self.model, self.members):
            raise ValueError(
                f"partition={self.kind} needs a table of partitions, but there is none for {self.members} instances "
                f"with this model, precision and number of threads: {_REMEDY}"
            )

    @classmethod
    def best(cls, table: PartitionTable | None, model: str, members: int) -> Partitions:
        """Predicted pieces if anything was searched for such chains, else even ones."""
        table = table or PartitionTable()
        kind: Literal["even", "predicted"] = "predicted" if table.lengths(model, members) else "even"
        return cls(kind=kind, table=table, model=model, members=members)

    def check(self, length: int, members: int) -> None:
        """Raises ValueError when a prompt of this length was to be searched for so many members, and was not."""
        known = self.table.lengths(self.model, members)
        if self.kind == "searched" and members > 1 and length not in known:
            lengths = ", ".join(f"{length:,}" for length in known) or "none"
            raise ValueError(
                f"partition=searched has none for {length:,} tokens on {members} instances, only for {lengths}: "
                f"{_REMEDY} or predicted"
            )

    def fractions(self, length: int, members: int) -> tuple[float, ...]:
        """Of a prompt of this length for so many members; empty for even pieces.

        A request that gave its KV up and comes back longer than its prompt was has no entry of its own: a searched
        partition is then a predicted one.
        """
        if self.kind == "even":
            return ()
        return self.table.predict(self.model, members, length) or ()
