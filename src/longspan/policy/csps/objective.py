"""The objective by which settings of sparse attention are chosen (CSPS §3.2.6)."""

from __future__ import annotations

from dataclasses import dataclass

NO_LOSS = 1.0
"""Loss in points that counts as none. Smaller losses are below the noise of the measured prompts."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The least time with at most `max_loss` points lost, or the least loss within `target_s`.

    Attributes:
        target_s: seconds to the first token. None limits the loss instead.
    """

    max_loss: float = 0.0
    target_s: float | None = None

    @property
    def loss_bound(self) -> float:
        """Upper bound for predicted points."""
        return max(self.max_loss, NO_LOSS)
