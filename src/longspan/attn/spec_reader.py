"""The parameters of an attention layer, read from the arguments that transformers passes to an attention function.

This module does not import transformers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from longspan.attn.spec import AttnSpec

CHUNKED = "chunked_attention"
LAYER_TYPES = {"full_attention", "sliding_attention", CHUNKED}
"""The supported `layer_types` of a configuration."""
_PROBE = (0, 1, 5, 17, 400)
_LENGTHS = re.compile("position|context|length|floor|window|chunk")
"""Names of configuration values that are lengths in tokens."""
_SHORTEST = 16
"""The smallest length, in tokens, whose multiples are checked. The first positions cover shorter lengths."""
_MULTIPLES = 16
"""Checked multiples of a length, from either end of the context. More of them slow down every start."""
_HARMLESS = {"position_ids", "use_cache", "cache_position", "position_embeddings", "logits_to_keep", "return_dict"}
"""Arguments that do not change the results of a layer, in addition to all that begin with "output_"."""


class UnsupportedAttentionError(ValueError):
    """A layer computes something that an AttnSpec cannot express. The message begins with the class of the layer."""


def read_spec(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    dropout: float | None = None,
    s_aux: Tensor | None = None,
    **extra: object,
) -> AttnSpec:
    """Read the parameters of a layer from its attention arguments. Tensors are `[batch, heads, tokens, head_dim]`.

    Raises:
        UnsupportedAttentionError: with the first reason.
    """
    unknown = ", ".join(
        name
        for name, value in sorted(extra.items())
        if value is not None and name not in _HARMLESS and not name.startswith("output_")
    )
    layer_types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    chunk = _chunk_size(module)
    odd_types = ", ".join(sorted(set(layer_types) - (LAYER_TYPES if chunk else LAYER_TYPES - {CHUNKED})))
    problems = {
        f"has attention arguments unknown to longspan ({unknown})": bool(unknown),
        "builds its own attention mask": attention_mask is not None,
        "has bidirectional attention": is_causal is False or getattr(module, "is_causal", True) is False,
        f"is mixed with layers of type {odd_types}": bool(odd_types),
        "has queries and keys of different head sizes": query.shape[-1] != key.shape[-1],
        "has values wider than its keys": value.shape[-1] > key.shape[-1],
        "has learned sinks in a form unknown to longspan": not _has_known_sinks(module, s_aux, query.shape[1]),
        f"drops out some of its weights ({dropout}): call eval() on the model": bool(dropout),
    }
    for problem in (text for text, holds in problems.items() if holds):
        raise UnsupportedAttentionError(f"{type(module).__name__} {problem}")
    return AttnSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        chunk=chunk if chunk and layer_types and layer_types[module.layer_idx] == CHUNKED else None,
        has_sinks=s_aux is not None,
    )


def _chunk_size(module: nn.Module) -> int | None:
    """Return the chunk size of a model's chunked layers, or None if it is not known.

    transformers passes it to its mask only, which longspan does not build. So the configuration states it, and it is
    valid if the model's code makes this mask.
    """
    size = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    has_mask = hasattr(sys.modules.get(type(module).__module__), "create_chunked_causal_mask")
    return size if has_mask and hasattr(module, "layer_idx") and isinstance(size, int) and size > 0 else None


def _has_known_sinks(module: nn.Module, s_aux: Tensor | None, num_heads: int) -> bool:
    """Return True if a layer passes one sink per query head, its parameter `sinks`, or has no sinks."""
    own: object = getattr(module, "sinks", None)
    return not isinstance(own, Tensor) if s_aux is None else own is s_aux and s_aux.shape == (num_heads,)


def rope_dicts(config: object) -> Iterator[Mapping[str, Any]]:
    """Yield the RoPE parameters of a configuration: one set, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    yield from nested or [rope]


def probe_positions(config: object, context_length: int) -> list[int]:
    """Return positions at which a model is checked: the first, the last, and both sides of every switch of its scaling.

    RoPE and query scaling change at multiples of a length in the configuration, such as the step of
    `floor(position / step)` or `original_max_position_embeddings`. A short length has many multiples, of which the
    first and the last are checked. Powers of two cover lengths that appear only in code.
    """
    stated = [vars(config), *rope_dicts(config)]
    lengths = {
        value
        for source in stated
        for name, value in source.items()
        if isinstance(value, int) and _LENGTHS.search(name) and _SHORTEST <= value < context_length
    }
    switches = {1 << power for power in range(context_length.bit_length())}
    for length in lengths:
        multiples = range(length, context_length, length)
        switches.update(multiples[:_MULTIPLES], multiples[-_MULTIPLES:])
    sides = {position - offset for position in switches for offset in (0, 1)}
    return sorted(position for position in {*sides, *_PROBE, context_length - 1} if 0 <= position < context_length)
