"""What became of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A request whose whole answer came.

    Attributes:
        ttft_s: from when it was due to the first chunk with a token.
        e2el_s: from when it was due to the last chunk with a choice.
        tbt_s: times between tokens, `[num_output_tokens - 1]`; see `answer.times_between`.
        num_prompt_tokens: as the server counts them; so is `num_output_tokens`.
    """

    ttft_s: float
    e2el_s: float
    tbt_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None if there was only one."""
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def mean_tbt_s(self) -> float | None:
        """Mean of the times between tokens; None if there are none."""
        return sum(self.tbt_s) / len(self.tbt_s) if self.tbt_s else None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no answer. `kind` is what failures are counted by: an HTTP status, or a word."""

    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """One request, in seconds after the start of the run.

    Attributes:
        input_len: prompt tokens that were meant.
        output_len: most output tokens.
        due_s: when it was to be sent.
        sent_s: when it was sent: later if the load generator was busy or all slots were taken.
    """

    index: int
    input_len: int
    output_len: int
    due_s: float
    sent_s: float
    outcome: Answered | Failure

    @property
    def late_s(self) -> float:
        """How much too late it was sent."""
        return self.sent_s - self.due_s


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run, or what there was of it when it was interrupted.

    Attributes:
        results: of requests that ended, by index.
        num_asked: requests that were planned.
        duration_s: from the start to the last end.
        max_concurrent: most requests that were under way at once.
    """

    results: tuple[Result, ...]
    num_asked: int
    duration_s: float
    max_concurrent: int
    interrupted: bool = False
