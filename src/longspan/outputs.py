"""What `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longspan.core.request import FinishReason, RequestMetrics


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        finish_reason: `stop` (end-of-sequence token or stop string), `length`, `abort`; None while it runs.
        logits: float32 `[vocab]` per output token, if asked for with `output_logits`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logits: list[npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The state of a request; cumulative when streamed. `prompt` is None when token ids were given."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
