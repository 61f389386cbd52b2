"""An attention function that makes an unmodified Hugging Face model context-parallel.

Each member calls the model with its own tokens and with `split=Split(...)`. Models of transformers pass it to their
attention, so there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from longspan.attn.library import Members, checked_runs, ring_kv
from longspan.attn.spec import as_output, padded, reads_cached_length
from longspan.attn.spec_reader import read_spec, rope_dicts
from longspan.core.runs import SpanShards, num_tokens, positions

_NAME = "longspan_split"


def register() -> str:
    """Register the attention with transformers. Return its name, for `from_pretrained(attn_implementation=...)`.

    The model is called with `input_ids [1, tokens]` and `position_ids [1, tokens]` of this member's tokens,
    `use_cache=False`, `split=Split(...)`, and no attention mask, under `torch.no_grad()`. Its logits are those of these
    tokens.

    The model must be causal, with full, sliding-window or chunked attention. All other layers must treat tokens one by
    one, and rotary embeddings must be the same on all members.

    Raises:
        ValueError: when the model is called, if it or an argument is not supported.
    """
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _no_mask)
    return _NAME


@dataclass(frozen=True)
class Split:
    """The split of a model call's tokens between the members of a group.

    Attributes:
        group: the result of `join`.
        runs: for each sequence the positions of the tokens of every member. A model call has the tokens of this member,
            one sequence after the other.
        exchange: `ring_kv` or another exchange, such as `functools.partial(gather_kv, dense=True)`.

    Raises:
        ValueError: if the runs are not whole sequences, or a member has no token, since models need at least one.
    """

    group: Members
    runs: Sequence[SpanShards]
    exchange: Callable[..., Tensor] = ring_kv

    def __post_init__(self) -> None:
        checked_runs(self.runs, self.runs, self.group.size)
        idle = [m for m in range(self.group.size) if not any(num_tokens(sharded[m]) for sharded in self.runs)]
        if idle:
            raise ValueError(
                f"members {idle} have no tokens, but models need at least one: split between fewer members"
            )

    @property
    def positions(self) -> list[int]:
        """The positions of this member's tokens, for `position_ids`."""
        return [position for sharded in self.runs for position in positions(sharded[self.group.rank])]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    split: Split | None = None,
    position_ids: Tensor | None = None,
    s_aux: Tensor | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    if split is None:
        raise ValueError(f"{type(module).__name__} got no split: call the model with split=longspan.attn.Split(...)")
    spec = read_spec(module, query, key, value, attention_mask, s_aux=s_aux, **arguments)  # type: ignore[arg-type]  # checked there
    if reads_cached_length(module):
        raise ValueError(
            f"{type(module).__name__} counts positions by its cache, and members have none: serve the model by longspan"
        )
    if query.shape[0] != 1:
        raise ValueError(f"a batch of {query.shape[0]} rows: pack sequences into one, and give Split the runs of each")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{key.shape[2]} keys for {query.shape[2]} tokens: call the model with use_cache=False")
    if getattr(module, "layer_idx", 0) == 0:
        _check_rope(module, split.runs)
        _check_positions(position_ids, split.positions)
    options = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "chunk": spec.chunk}
    values = padded(value[0], spec.head_dim)
    out = split.exchange(split.group, query[0], key[0], values, split.runs, sinks=s_aux, **options)
    return as_output(out[..., : value.shape[-1]])


def _check_rope(module: nn.Module, runs: Sequence[SpanShards]) -> None:
    """Refuse RoPE that depends on the largest position of a call, which differs between members."""
    for rope in rope_dicts(getattr(module, "config", None)):
        if rope.get("rope_type") == "dynamic":
            raise ValueError("dynamic RoPE differs between members: choose yarn, or none")
        if rope.get("rope_type") == "longrope":
            length = rope["original_max_position_embeddings"]
            tops = [max(run.stop for sharded in runs for run in sharded[member]) for member in range(len(runs[0]))]
            if min(tops) <= length < max(tops):
                raise ValueError(
                    f"longrope changes after {length} tokens, but the members' tokens end at {tops}: all must be on "
                    "one side, for example with shard_span('striped', ..., align=16)"
                )


def _check_positions(position_ids: Tensor | None, expected: Sequence[int]) -> None:
    """Check positions if the model passes them to its attention, as nearly all models do."""
    if position_ids is None:
        return
    if position_ids.shape[-1] != len(expected) or (position_ids != torch.tensor(expected).to(position_ids)).any():
        raise ValueError("position_ids are not those of this member's tokens: give torch.tensor([split.positions])")


def _no_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: object) -> None:
    """Build no mask, since exchanges compute visibility from runs. Refuse masks that callers pass."""
    if use_vmap or (attention_mask is not None and not attention_mask.all()):
        raise ValueError("attention masks are not supported: give tokens without padding, and no attention_mask")
