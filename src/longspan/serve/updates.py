"""What the engine tells about a request while it runs: what is new since the last time."""

from __future__ import annotations

import msgspec

from longspan.core.request import FinishReason
from longspan.outputs import LogprobsOfToken


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one choice; see `outputs.CompletionOutput`.

    Attributes:
        logprobs: of the new tokens; None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobsOfToken] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a request.

    Attributes:
        choices: those of which anything is new.
        prompt_logprobs: with the first update, if asked for.
        num_cached_tokens: prompt tokens whose KV was there already.
        finished: whether this is the last update.
    """

    choices: list[ChoiceDelta]
    prompt_logprobs: list[LogprobsOfToken | None] | None
    num_cached_tokens: int
    finished: bool
