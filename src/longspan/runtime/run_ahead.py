"""Decode steps whose results the host reads later, so that a device never waits for the host between two steps.

The tokens of a step stay on the device, where the next step reads them. The next step is launched before the host reads
the tokens of the step before, if its command is there. CPUs compute one step after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.core.steps import Sampled
from longspan.runtime.batch import Packed, RankRequests
from longspan.runtime.messages import Done


class HostCopy:
    """A copy of a small tensor of int64 on its way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> list[list[int]]:
        """Wait for the copy, and return its rows."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._numbers.tolist()
        return rows


@dataclass(frozen=True, kw_only=True)
class UnreadStep:
    """A launched step, of which each request has sampled one token.

    Attributes:
        tokens: `[n]` int64 on the device.
        done: the report of the step, without its tokens.
        is_reported: whether this rank reports tokens. All ranks of a stage sample them.
    """

    request_ids: tuple[int, ...]
    tokens: Tensor
    copy: HostCopy
    done: Done
    is_reported: bool

    @classmethod
    def of(cls, packed: Packed, logits: Tensor, tokens: Tensor, done: Done, *, is_reported: bool) -> UnreadStep:
        """Start to copy tokens, and whether their logits `[n, vocab]` are finite, to the host."""
        finite = logits.gather(1, tokens[:, None])[:, 0].isfinite()
        copy = HostCopy(torch.stack((tokens, finite.long())))
        return cls(request_ids=packed.request_ids, tokens=tokens, copy=copy, done=done, is_reported=is_reported)

    def read(self, requests: RankRequests) -> Done:
        """Wait for the tokens, and return the report of the step."""
        tokens, finite = self.copy.read()
        for request_id, token in zip(self.request_ids, tokens, strict=True):
            requests[request_id].read_token(token, self.tokens)
        if not self.is_reported:
            return self.done
        each = [*zip(self.request_ids, tokens, finite, strict=True)]
        return Done(
            rank=self.done.rank,
            number=self.done.number,
            sampled=tuple(Sampled(request_id=request_id, token=token) for request_id, token, _ in each),
            scored=self.done.scored,
            bytes_sent=self.done.bytes_sent,
            non_finite=tuple(request_id for request_id, _, is_finite in each if not is_finite),
            times=self.done.times,
        )
