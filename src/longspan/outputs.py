"""The values that `LLM` returns, with vLLM's names and shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longspan.core.request import ErrorKind, FinishReason, RequestMetrics


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """The likelihood of a token by the model's own logits.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token.
        decoded_token: its text. None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOfToken = dict[int, Logprob]
"""Log-probabilities by token id: first the chosen token (or the prompt's), then the most likely ones, best first."""


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        text: the text without the stop string or stop token that ended it. `token_ids` has the stop token.
        cumulative_logprob: sum of the log-probabilities of its tokens, if logprobs are requested.
        logprobs: log-probabilities per output token, if requested.
        finish_reason: `stop` (end-of-sequence or stop token, or stop string), `length`, `abort`,
            `error` (`stop_reason` explains it). None while it runs.
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended it. None for end-of-sequence tokens.
        error: with `error`, its kind: `structured_outputs` (no token fits the grammar), `non_finite` (the model
            computed NaN or infinity), or `capacity` (a worker was lost, and the remaining devices are too small).
        logits: float32 `[vocab]` per output token, if requested with `output_logits`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOfToken] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorKind | None = None
    logits: list[npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The state of a request. It is cumulative in a stream.

    Attributes:
        request_id: a number of the engine, or the id that was given to `AsyncLLM.generate`.
        prompt: None if token ids were given.
        prompt_logprobs: log-probabilities per prompt token, None for the first, if requested.
        prompt_attention: if requested by `attention_from`: float32 `[prompt tokens]`, the share of each token in the
            attention of these queries, over all layers and heads. The shares sum to 1.
        outputs: `SamplingParams.n` outputs.
        metrics: metrics of the first output, which computed the prompt.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobsOfToken | None] | None = None
    prompt_attention: npt.NDArray[np.float32] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens whose KV was cached."""
        return self.metrics.num_cached_tokens
