"""Random numbers keyed by (seed, choice, position): a batch or a layout cannot change them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one position of one of a request's outputs."""
    return uniforms([(seed, choice, position)])[0]


def uniforms(keys: Iterable[tuple[int, int, int]]) -> list[float]:
    """`uniform` of each (seed, choice, position).

    These are `Generator(Philox(key=(seed, choice), counter=position)).random()`. A new generator for each would gather
    entropy that nobody needs, so that one is wound to each key in turn.
    """
    philox = np.random.Philox(key=0)
    state = philox.state
    inner = state["state"]
    numbers = []
    for seed, choice, position in keys:
        inner["key"][:] = seed, choice
        inner["counter"][:] = position, 0, 0, 0
        philox.state = state
        numbers.append((int(philox.random_raw()) >> 11) * 2.0**-53)
    return numbers
