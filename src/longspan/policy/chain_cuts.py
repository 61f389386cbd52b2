"""Pieces of chains, by the look-up table of KV-Runahead (arXiv 2405.05329)."""

from __future__ import annotations

from typing import Literal

from longspan.cost.partition_table import Entry, PartitionTable
from longspan.policy.facts import Facts

_REMEDY = "measure it with longspan profile --partitions, or choose partition=even"


class ChainCuts:
    """The paper's KVR-E (`even`), KVR-S (`searched`) and KVR-P (`predicted` from the two nearest lengths).

    `auto` is predicted if the table has such chains, else even. All kinds are even until a table is looked up.

    Attributes:
        model, members: the model, and the number of members of the longest chain.
        is_tunable: partitions that are added to the table are used.
        whole: a prompt should be one chain: searched cuts are for whole prompts, and KVR-E is one chain. False for one
            instance, and if pieces are even without a table, because several chains balance members better then.

    Args:
        members: of the longest chain.

    Raises:
        ValueError: for searched or predicted pieces, if the table has none for this model and group.
    """

    def __init__(self, kind: Literal["auto", "even", "searched", "predicted"], facts: Facts, members: int) -> None:
        self._kind, self._table, self.model = kind, facts.partitions or PartitionTable(), facts.model
        self.members, self.is_tunable = members, kind == "auto" and members > 1
        self._trial: Entry | None = None
        lengths = self._table.lengths(self.model, members)
        if kind == "auto" or facts.partitions is None:
            self._kind = "predicted" if lengths else "even"
        elif kind != "even" and members > 1 and not lengths:
            raise ValueError(
                f"partition={kind} needs a table of partitions, but there is none for {members} instances with this "
                f"model, precision and number of threads: {_REMEDY}"
            )
        self.whole = members > 1 and (kind == "even" or self._kind != "even")

    def add(self, entry: Entry) -> None:
        """Add a partition to the table, which `auto` uses from now on."""
        assert self.is_tunable and isinstance(self._table, PartitionTable), "there is a table to tune"
        self._table, self._kind = self._table.with_entry(entry), "predicted"

    def try_out(self, entry: Entry | None) -> None:
        """Use a partition for whole prompts of its length until the next call. The table stays."""
        self._trial = entry

    def check(self, length: int, members: int) -> None:
        """Raise ValueError if pieces are `searched`, and the table lacks a prompt of this length."""
        if self._kind == "searched" and members > 1 and self._table.exact(self.model, members, length) is None:
            searched = self._table.lengths(self.model, members)
            lengths = ", ".join(f"{length:,}" for length in searched) or "none"
            raise ValueError(
                f"partition=searched has none for {length:,} tokens on {members} instances, only for {lengths}: "
                f"{_REMEDY} or predicted"
            )

    def fractions(self, new_tokens: int, cached_tokens: int, members: int) -> tuple[float, ...]:
        """Return the fractions of one chain, which computes `new_tokens` in a step. Empty for even pieces.

        The table has whole prompts. Parts of prompts and recomputed requests are predicted. All members attend to
        cached tokens alike, so the distance from even pieces is multiplied by the share of new tokens.
        """
        if self._trial is not None and (self._trial.length, self._trial.members) == (new_tokens, members):
            return self._trial.fractions
        if self._kind == "even":
            return ()
        is_whole = self._kind == "searched" and not cached_tokens
        fractions = self._table.exact(self.model, members, new_tokens) if is_whole else None
        fractions = fractions or self._table.predict(self.model, members, new_tokens) or ()
        new = new_tokens / (new_tokens + cached_tokens)
        return tuple([new * fraction + (1 - new) / members for fraction in fractions])
