"""What a request asks of the sampler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next tokens of a request are chosen and when it ends. Names and defaults are vLLM's.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: only the k most likely tokens stay; 0 or -1 keeps all.
        top_p: only the smallest set of most likely tokens whose probability reaches p stays.
        seed: of this request's random numbers; None draws one from the engine's seed.
        stop: strings that end the output; they are not part of it.
        min_tokens: until so many tokens are out, end-of-sequence tokens and stop strings do not end the request;
            end-of-sequence tokens are not sampled at all.
        max_tokens: at most so many output tokens; None means up to the model's context.
        ignore_eos: generate on past end-of-sequence tokens.
        output_logits: return the float32 logits that each output token was chosen from (before temperature).

    Raises:
        ValueError: for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    output_logits: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        checks = (
            (0.0 <= self.temperature < float("inf"), f"temperature must be 0 or more, but {self.temperature} given"),
            (self.top_k >= -1, f"top_k must be -1 or 0 (all) or positive, but {self.top_k} given"),
            (0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, but {self.top_p} given"),
            (
                self.seed is None or 0 <= self.seed < 2**63,
                f"seed must be at least 0 and below 2**63, but {self.seed} given",
            ),
            (all(stop), "a stop string must not be empty"),
            (
                self.max_tokens is None or self.max_tokens >= 1,
                f"max_tokens must be at least 1, but {self.max_tokens} given",
            ),
            (self.min_tokens >= 0, f"min_tokens must be at least 0, but {self.min_tokens} given"),
            (
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"min_tokens({self.min_tokens}) must not exceed max_tokens({self.max_tokens})",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        assert isinstance(self.stop, tuple), "normalised in the constructor"
        return self.stop
