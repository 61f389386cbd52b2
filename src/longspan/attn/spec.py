"""The parameters of one attention layer. `spec_reader` reads them from the arguments of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from longspan.core.runs import Run

if TYPE_CHECKING:
    from longspan.core.splits import HeadShare


@dataclass(frozen=True, slots=True)
class Visibility:
    """The limit of causal attention in a layer: how far back a query sees keys. At most one field is set.

    Attributes:
        window: sliding window W. A query at position p sees keys from p - W + 1 on.
        chunk: chunk size C. A query sees keys of its own chunk, from the last multiple of C at or before p on.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"a layer has a window or chunks, not both: window {self.window}, chunk {self.chunk}")

    def first(self, query: int) -> int:
        """Return the position of the first key that a query sees."""
        if self.chunk is not None:
            return query // self.chunk * self.chunk
        return 0 if self.window is None else max(0, query - self.window + 1)

    @property
    def max_keys(self) -> int | None:
        """The maximum number of keys that a query sees, or None without a limit."""
        return self.window if self.chunk is None else self.chunk

    def pieces(self, queries: Run) -> Iterator[Run]:
        """Cut a run of queries at the borders of chunks. All queries of a piece have the same first key."""
        if self.chunk is None:
            yield queries
            return
        start = queries.start
        while start < queries.stop:
            piece = Run(start, min(queries.stop, self.first(start) + self.chunk), queries.step)
            yield piece
            start += len(piece) * queries.step


@dataclass(frozen=True, kw_only=True)
class AttnSpec:
    """The attention of one layer.

    `scale` multiplies the scores. `softcap` c turns a scaled score s into `c * tanh(s / c)`. `window` is the sliding
    window W of Hugging Face: a key is visible iff `0 <= query_position - key_position < W` (None: no limit). `chunk` is
    the chunk size C of Llama 4: a key before the query is visible iff `position // C` of both is equal.
    With `has_sinks` the softmax of each query head has one more score, a learned sink without a key and a value.
    Values narrower than keys are padded to `head_dim`, see `padded`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None = None
    has_sinks: bool = False

    @cached_property
    def visibility(self) -> Visibility:
        return Visibility(window=self.window, chunk=self.chunk)

    def of_heads(self, share: HeadShare) -> AttnSpec:
        return replace(self, num_heads=len(share.heads), num_kv_heads=len(share.kv_heads))


def padded(values: Tensor, head_dim: int) -> Tensor:
    """Return values `[..., dim]` with zeros appended up to the head size of the keys.

    Pools and exchanges have one head size for keys and values. Outputs are cut to the size of the values again.
    """
    return values if values.shape[-1] == head_dim else functional.pad(values, (0, head_dim - values.shape[-1]))


def reads_cached_length(module: nn.Module) -> bool:
    """Return True if the code of a module's class reads the length of its cache."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_seq_length" in code.co_names


def as_output(out: Tensor) -> tuple[Tensor, None]:
    """Return `out [heads, tokens, head_dim]` as transformers expects it: `[1, tokens, heads, head_dim]`, no weights.

    It must be contiguous, since some models call `view` on it. Other models would copy it themselves.
    """
    return out.transpose(0, 1).contiguous().unsqueeze(0), None
