"""The traffic of a server: its latest requests and the rates for them. Policies start from it after a restart."""

from __future__ import annotations

from typing import ClassVar

from longspan.cost.profile_key import Count, Stored

NUM_LENGTHS = 256
"""Prompts whose lengths are kept. More give a steadier distribution, which follows a change later."""


class Traffic(Stored, frozen=True, kw_only=True):
    """The latest requests of a server.

    Attributes:
        lengths: tokens to compute of the latest prompts, oldest first.
        answer_tokens: expected tokens of an answer. None if it is unknown.
        improvement_rates: the rates of `tetris` that were found for these prompts, as its option. Empty if none was.

    Raises:
        ValueError: the rates have another form.
    """

    called: ClassVar[str] = "record of traffic"

    lengths: tuple[Count, ...] = ()
    answer_tokens: float | None = None
    improvement_rates: str = ""

    def __post_init__(self) -> None:
        if self.improvement_rates:
            from longspan.policy.tetris.rates import RateTable  # noqa: PLC0415 - most policies have no such rates

            table = RateTable.parse(self.improvement_rates)
            if min(requests_per_s for requests_per_s, _ in table.entries) <= 0:
                raise ValueError(f"improvement rates {self.improvement_rates} are for 0 requests per second")
