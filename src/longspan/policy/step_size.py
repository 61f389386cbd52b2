"""The number of tokens of a step, by one rule for engines and simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from longspan.core.config import EngineConfig
from longspan.core.options import SchedulingArgs
from longspan.core.policy import Policy

_CUDA_STEP_TOKENS = 8192
"""Tokens of a step on a CUDA device, which needs more than a CPU to be busy. More tokens delay decodes longer."""
ArgsT = TypeVar("ArgsT", bound=SchedulingArgs)


def with_step_tokens(options: ArgsT, policy: Policy, device: str, whole_tokens: Callable[[int], int]) -> ArgsT:
    """Return options with a size of steps. A given size stays.

    Args:
        whole_tokens: returns the tokens that memory can hold, at least the given number. It is used for a policy whose
            steps should hold whole prompts.
    """
    if options.max_num_batched_tokens is not None:
        return options
    least = _CUDA_STEP_TOKENS if device == "cuda" else EngineConfig.max_num_batched_tokens
    return replace(options, max_num_batched_tokens=whole_tokens(least) if policy.whole_prompts else least)
