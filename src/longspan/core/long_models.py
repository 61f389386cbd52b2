"""Models with long contexts, for errors about prompts that are too long."""

from __future__ import annotations

_LONG_MODELS = {
    "HuggingFaceTB/SmolLM3-3B": 65_536,
    "meta-llama/Llama-3.2-1B-Instruct": 131_072,
    "Qwen/Qwen3-4B-Instruct-2507": 262_144,
}
"""Models of supported types (docs/models.md) with the `max_position_embeddings` of their config.json, in order."""


def long_model(min_context: int | None) -> str:
    """Return the words for a model with a context of at least `min_context` tokens. None for an unknown number."""
    for name, length in _LONG_MODELS.items():
        if min_context is not None and length >= min_context:
            return f"a model with a longer context, such as {name} ({length} tokens)"
    return "a model whose config.json has a larger max_position_embeddings"
