"""Prompts of given lengths, as token ids or as words, drawn from a seed: the same whenever they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.loadgen.traces import BLOCK_LEN
from longspan.loadgen.workload import Ask

_PREFIX, _OWN, _BLOCK = 3, 4, 5  # streams of random numbers that do not depend on each other

# Short and frequent, so that a word with the space before it is one token of nearly every tokenizer.
_WORDS = (
    "the of and to in is that it was for on are as with they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made "
    "over did down only way find use may water long little very after words called just where most know get through "
    "back much before go good new write our used me man too any day same right look think also around another came "
    "come work three word must because does part even place well such here take why things help put years different "
    "away again off went old number great tell men say small every found still between name should home big give air "
    "line set own under read last never us left end along while might next sound below saw something thought both few "
    "those always looked show large often together asked house world going want school important until form food keep "
    "children feet land side without boy once animals life enough took sometimes four head above kind began almost "
    "live page got earth need far hand high year mother light parts country father let night following picture being "
    "study second eyes soon times story boys since white days ever paper hard near sentence better best across during "
    "today others however sure means knew try told young miles sun ways thing whole hear example heard several change "
    "answer room sea against top turned learn point city play toward five using himself usually"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class PromptMaker:
    """Makes the prompt of each request.

    Attributes:
        vocab_size: token ids are below it. A server refuses ids that its model does not have.
        prefix_len: so many tokens at the start are the same in all prompts.
    """

    seed: int
    vocab_size: int
    prefix_len: int = 0

    def __post_init__(self) -> None:
        """Checks the vocabulary.

        Raises:
            ValueError: when there is nothing to draw from.
        """
        if self.vocab_size < 1:
            raise ValueError(f"--random-vocab-size must be at least 1, but {self.vocab_size} given")
        if self.seed < 0:
            raise ValueError(f"--seed must be at least 0, but {self.seed} given")

    def token_ids(self, index: int, ask: Ask) -> list[int]:
        """The prompt of request `index`, `[input_len]`."""
        ids: list[int] = self._draw(index, ask, self.vocab_size).tolist()
        return ids

    def words(self, index: int, ask: Ask) -> str:
        """As `token_ids`, with a word in the place of each token."""
        return " ".join([WORDS[one] for one in self._draw(index, ask, len(WORDS))])

    def _draw(self, index: int, ask: Ask, bound: int) -> NDArray[np.int64]:
        shared: list[NDArray[np.int64]] = [self._numbers(bound, self.prefix_len, _PREFIX)]
        shared += [self._numbers(bound, BLOCK_LEN, _BLOCK, one) for one in ask.block_ids]
        start = np.concatenate(shared)[: ask.input_len]
        return np.concatenate([start, self._numbers(bound, ask.input_len - len(start), _OWN, index)])

    def _numbers(self, bound: int, num: int, *stream: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, *stream]).integers(bound, size=num)
