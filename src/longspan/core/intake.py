"""Creates requests from prompts, within the limits of the engine and its policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import TypedDict, Unpack

from longspan.core.config import EngineConfig
from longspan.core.policy import Policy
from longspan.core.request import Request, RequestMetrics, check_length
from longspan.core.sampling import SamplingParams


class RequestOptions(TypedDict, total=False):
    """Options of one request in addition to its sampling parameters.

    Attributes:
        choice, leader: for `params.n` outputs, add the first request, then the further choices with it as leader.
        grammar: the compiled `params.structured_outputs`, see `Sampling`.
        cache_salt: only requests with equal salts share KV.
        enable_prefix_caching: whether it shares KV at all. True by default.
    """

    choice: int
    leader: Request | None
    grammar: str
    cache_salt: str
    enable_prefix_caching: bool


class Intake:
    """Numbers requests, and resolves sampling parameters that were not given."""

    def __init__(self, seed: int) -> None:
        self._ids, self._seeds = count(), random.Random(seed)

    def check(self, num_prompt_tokens: int, policy: Policy, config: EngineConfig) -> None:
        """Raise ValueError for a prompt that is empty, too long for any output, or refused by the policy."""
        check_length(num_prompt_tokens, config.longest(policy))
        policy.check_prompt(num_prompt_tokens)

    def make(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        now_s: float,
        policy: Policy,
        config: EngineConfig,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Return a new request for the policy and the cluster of a configuration.

        Raises:
            ValueError: see `check`.
        """
        self.check(len(prompt), policy, config)
        choice, leader = options.get("choice", 0), options.get("leader")
        assert (leader is None) == (choice == 0), "the first choice leads all further choices"
        max_tokens = config.longest(policy) - len(prompt)
        request = Request(
            id=next(self._ids),
            prompt=prompt,
            params=params,
            seed=leader.seed if leader else self._seeds.getrandbits(63) if params.seed is None else params.seed,
            choice=choice,
            leader=leader,
            grammar=options.get("grammar", ""),
            sparse=leader.sparse if leader else config.sparse(policy, len(prompt)),
            cache_salt=leader.cache_salt if leader else options.get("cache_salt", ""),
            enable_prefix_caching=options.get("enable_prefix_caching", True),
            block_size=config.block_size,
            max_tokens=max_tokens if params.max_tokens is None else min(max_tokens, params.max_tokens),
            metrics=RequestMetrics(arrival_s=now_s),
        )
        request.pin_rope_length(config.rope_length(len(prompt)))
        return request
