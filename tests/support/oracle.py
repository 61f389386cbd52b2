"""The one oracle: the unmodified Hugging Face model in one process, float32, greedy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tiny_models import auto_class, without_timm
from transformers import AutoConfig

from longspan.outputs import RequestOutput

TOLERANCE = 2e-3
"""Largest allowed difference of a logit. Where the oracle's two best are closer, either token is right."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Greedy continuation: `token_ids`, and the float32 logits `[vocab]` that each was chosen from."""

    token_ids: list[int]
    logits: list[np.ndarray]


class Oracle:
    """A model that ignores end-of-sequence tokens.

    With `use_cache=False` every token is computed afresh. Llamas with longrope need that: when a request
    grows past the switch length, `generate` keeps cached keys with the short factors.
    """

    def __init__(self, folder: Path, *, use_cache: bool = True, dtype: torch.dtype = torch.float32) -> None:
        self._use_cache = use_cache
        config = AutoConfig.from_pretrained(folder)
        with without_timm():
            self._model = auto_class(config).from_pretrained(folder, dtype=dtype).eval()
        if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            self._model.set_attn_implementation("eager")  # transformers 5.17 takes sdpa, which has no softcap
        self._model.generation_config.eos_token_id = None
        self._known: dict[tuple[tuple[int, ...], int], Expected] = {}

    @torch.no_grad()
    def complete(self, prompt: Sequence[int], max_tokens: int) -> Expected:
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            self._known[key] = self._generate(key[0], max_tokens)
        return self._known[key]

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities `[len(tokens), vocab]` of the token after each."""
        logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float().log_softmax(dim=-1).numpy()

    def _generate(self, prompt: tuple[int, ...], max_tokens: int) -> Expected:
        ids = torch.tensor([prompt])
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=self._use_cache,
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        logits = [step[0].float().numpy() for step in found.logits]
        return Expected(token_ids=found.sequences[0, len(prompt) :].tolist(), logits=logits)


def assert_exact(output: RequestOutput, expected: Expected, *, tolerance: float = TOLERANCE) -> None:
    """Same tokens, and logits within `tolerance`, up to the first token where the oracle itself is undecided."""
    [got] = output.outputs
    assert got.logits is not None
    assert len(got.token_ids) == len(expected.token_ids)
    for step, (logits, reference) in enumerate(zip(got.logits, expected.logits, strict=True)):
        difference = float(np.abs(logits - reference).max())
        assert difference <= tolerance, f"logits of token {step} differ by {difference}"
        if got.token_ids[step] != expected.token_ids[step]:
            second, first = np.sort(reference)[-2:]
            assert first - second <= tolerance, f"token {step}: {got.token_ids[step]} != {expected.token_ids[step]}"
            warnings.warn(f"token {step} is a tie within {tolerance}; later tokens are not compared", stacklevel=2)
            return
