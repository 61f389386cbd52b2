"""Rows to sample, and the expected result in plain numpy: one dense row at a time, written from the docs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from longspan.core.steps import Sampling
from longspan.runtime.logit_changes import TokenCounts
from longspan.runtime.random_tokens import uniforms
from longspan.runtime.sampling import Draw

VOCAB = 16

CHI_SQUARE_999 = dict(enumerate((10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26), start=1))
"""Exceeded once in 1,000 times, by degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row: its request's wishes and the tokens that went before."""

    sampling: Sampling
    position: int = 5
    below_minimum: bool = True
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = field(default=())

    def draw(self, vocab: int = VOCAB) -> Draw:
        history = TokenCounts(vocab, self.prompt, "cpu") if self.sampling.penalised else None
        if history:
            history.add(self.output[:2])
            history.add(self.output[2:])
        banned = self.sampling.banned if self.below_minimum else ()
        return Draw(sampling=self.sampling, position=self.position, banned=banned, history=history)


def case(*, position: int = 5, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **wishes: Any) -> Case:
    sampling = Sampling(**{"seed": 0, "temperature": 1.0, **wishes})
    return Case(sampling=sampling, position=position, prompt=prompt, output=output)


def logits_of(seed: int, rows: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def changed(logits: Tensor, case: Case) -> np.ndarray:
    """The row after bias, ban and penalties, float32."""
    row, wish = logits.numpy().copy(), case.sampling
    for token, bias in wish.logit_bias:
        row[token] += np.float32(bias)
    if case.below_minimum:
        row[list(wish.banned)] = -np.inf
    counts = np.bincount(case.output, minlength=len(row)).astype(np.float32)
    if wish.penalised:
        for token in {*case.prompt, *case.output}:
            penalty = np.float32(wish.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row -= np.float32(wish.frequency_penalty) * counts
        row -= np.float32(wish.presence_penalty) * (counts > 0)
    return row


def probabilities(logits: Tensor, case: Case) -> np.ndarray:
    """Return the probabilities of a row that is not greedy, float64. Excluded tokens have 0."""
    wish = case.sampling
    row = changed(logits, case).astype(np.float64)
    weights = np.exp((row - row.max()) / wish.temperature)
    weights[weights < wish.min_p * weights.max()] = 0
    if 0 < wish.top_k < len(row):
        weights[row < np.sort(row)[-wish.top_k]] = 0
    weights /= weights.sum()
    if wish.top_p < 1:
        ranked = np.sort(weights)[::-1]
        needed = np.flatnonzero(np.cumsum(ranked) >= wish.top_p)
        last = ranked[needed[0]] if len(needed) else 0.0
        weights[weights < last] = 0
    return weights / weights.sum()


def expected_token(logits: Tensor, case: Case) -> int:
    """The best token, or the one at the drawn quantile in vocabulary order."""
    wish = case.sampling
    if not wish.temperature:
        return int(changed(logits, case).argmax())
    reached = np.cumsum(probabilities(logits, case))
    [quantile] = uniforms([(wish.seed, wish.choice, case.position)])
    return int(np.searchsorted(reached, quantile * reached[-1], side="right"))


tokens = st.integers(0, VOCAB - 1)
wishes = st.builds(
    Sampling,
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, VOCAB, 100]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 1.1]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=3).map(lambda x: tuple(x.items())),
    banned=st.sets(tokens, max_size=4).map(tuple),
)
cases = st.builds(
    Case,
    sampling=wishes,
    position=st.integers(1, 2**40),
    below_minimum=st.booleans(),
    prompt=st.lists(tokens, max_size=6).map(tuple),
    output=st.lists(tokens, max_size=6).map(tuple),
)
