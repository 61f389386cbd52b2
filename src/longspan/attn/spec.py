"""The computation of one attention layer, apart from its tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttnSpec:
    """The attention of one layer.

    `scale` multiplies the scores; `softcap` c turns a scaled score s into `c * tanh(s / c)`; `window` is the
    Hugging Face sliding window W: a key is visible iff `0 <= query_position - key_position < W` (None: no limit).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
