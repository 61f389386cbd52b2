"""Prompts of real text that ships with Python."""

from __future__ import annotations

import functools
import pydoc_data.topics

from transformers import AutoTokenizer

from longspan.model.source import smollm2_folder


@functools.cache
def topic_tokens() -> tuple[int, ...]:
    """The manual's topics in SmolLM2's tokens."""
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return tuple(AutoTokenizer.from_pretrained(smollm2_folder())(text[:80_000])["input_ids"])
