"""A tokenizer's vocabulary as grammars see it: the bytes of every token, and which tokens end an output."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from longspan.model.files import ModelError, one_line


def grammar_vocabulary(
    tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> LLTokenizer:
    """The vocabulary of a tokenizer for a model with `vocab_size` logits; takes up to a second.

    `eos_token_ids` are the model's; if there are none, the tokenizer's own counts.

    Raises:
        ModelError: when the tokenizer is of a kind whose bytes cannot be told, or nothing can end an output.
    """
    eos = list(eos_token_ids) or [token for token in (tokenizer.eos_token_id,) if token is not None]
    if not eos:
        raise ModelError("structured outputs need an end-of-sequence token, but this model has none: leave them out")
    try:
        return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=eos)
    except ValueError as error:
        raise ModelError(f"structured outputs cannot work with this model's tokenizer ({one_line(error)})") from error
