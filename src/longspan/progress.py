"""The progress bar of `LLM.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from tqdm import tqdm

from longspan.tracking import Tracked


class Progress:
    """Prompts done, with their input and output tokens per second, on stderr if it is a terminal.

    A single prompt gets no bar.
    """

    def __init__(self, tracked: Sequence[Tracked], *, wanted: bool) -> None:
        self._tracked = tracked
        self._bar = tqdm(
            total=len(tracked),
            desc="prompts",
            unit="prompt",
            dynamic_ncols=True,
            disable=None if wanted and len(tracked) > 1 else True,  # None: unless stderr is no terminal
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self) -> None:
        """Shows how far the prompts are."""
        if self._bar.disable:
            return
        num_done = sum(one.finished for one in self._tracked)
        elapsed_s = max(self._bar.format_dict["elapsed"], 1e-9)
        speeds = (count / elapsed_s for count in num_tokens(self._tracked))
        self._bar.set_postfix_str("input {:.1f} tok/s, output {:.1f} tok/s".format(*speeds), refresh=False)
        self._bar.update(num_done - self._bar.n)


def num_tokens(tracked: Sequence[Tracked]) -> tuple[int, int]:
    """Prompt tokens of those that have put a token out, and output tokens, so far."""
    outputs = [one.num_taken for one in tracked]
    prompts = [len(one.job.token_ids) for one, taken in zip(tracked, outputs, strict=True) if taken]
    return sum(prompts), sum(outputs)
