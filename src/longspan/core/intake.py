"""Makes requests of prompts, within the limits of the engine and its policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import TypedDict, Unpack

from longspan.core.config import EngineConfig, capacity_tokens
from longspan.core.policy import Policy
from longspan.core.request import Request, RequestMetrics, check_length
from longspan.core.sampling import SamplingParams


class RequestOptions(TypedDict, total=False):
    """Options of one request beside its sampling parameters.

    Attributes:
        choice, leader: for `params.n` outputs, add the first request, and then the others with it as their leader.
        grammar: the compiled `params.structured_outputs`, see `Sampling`.
        cache_salt: KV is shared with requests of the same salt only.
    """

    choice: int
    leader: Request | None
    grammar: str
    cache_salt: str


class Intake:
    """Numbers requests, and resolves the sampling parameters that were not given.

    Attributes:
        config: of the present cluster.
        max_len: the largest number of tokens of a request, prompt and output together.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._ids, self._seeds = count(), random.Random(config.seed)

    def adopt(self, policy: Policy) -> None:
        """Use the limits of another policy from the next request on."""
        self._policy, config = policy, self.config
        self.max_len = min(config.max_model_len, capacity_tokens(policy, config.fleet, config.block_size))

    def check(self, num_prompt_tokens: int) -> None:
        """Raise ValueError for a prompt that is empty, too long for any output, or refused by the policy."""
        check_length(num_prompt_tokens, self.max_len)
        self._policy.check_prompt(num_prompt_tokens)

    def make(
        self, prompt: Sequence[int], params: SamplingParams, now_s: float, **options: Unpack[RequestOptions]
    ) -> Request:
        """Return a new request.

        Raises:
            ValueError: see `check`.
        """
        self.check(len(prompt))
        choice, leader = options.get("choice", 0), options.get("leader")
        assert (leader is None) == (choice == 0), "the first choice leads the others"
        config, max_tokens = self.config, self.max_len - len(prompt)
        request = Request(
            id=next(self._ids),
            prompt=prompt,
            params=params,
            seed=leader.seed if leader else self._seeds.getrandbits(63) if params.seed is None else params.seed,
            choice=choice,
            leader=leader,
            grammar=options.get("grammar", ""),
            sparse=leader.sparse
            if leader
            else self._policy.sparse(len(prompt), config.block_size, config.cluster.num_blocks[0]),
            cache_salt=leader.cache_salt if leader else options.get("cache_salt", ""),
            block_size=config.block_size,
            max_tokens=max_tokens if params.max_tokens is None else min(max_tokens, params.max_tokens),
            metrics=RequestMetrics(arrival_s=now_s),
        )
        request.pin_rope_length(config.rope_length(len(prompt)))
        return request
