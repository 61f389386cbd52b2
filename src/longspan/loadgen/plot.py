"""A run as a picture, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longspan.loadgen.results import Answered, Result, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_plot(path: Path) -> None:
    """Whether a picture can be made, before a run.

    Raises:
        ValueError: when matplotlib is missing, there is no such folder, or pictures of this kind are unknown.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'longspan[plot]'")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {str(path)!r}: the folder {str(path.parent)!r} is not there")
    from matplotlib.figure import Figure  # noqa: PLC0415  # an optional extra

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--plot {str(path)!r}: this kind of picture is not supported; one of {', '.join(known)} is")


def save_plot(path: Path, run: Run) -> None:
    """Writes four plots: distributions of TTFT and TBT, requests under way, and output tokens per second, over time.

    Raises:
        ValueError: when it cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  # an optional extra

    answered = [(result, result.outcome) for result in run.results if isinstance(result.outcome, Answered)]
    figure = Figure(figsize=(11, 7), layout="constrained")
    (ttft, tbt), (running, tokens) = figure.subplots(2, 2)
    _distribution(ttft, "TTFT (ms)", [one.ttft_s for _, one in answered])
    _distribution(tbt, "TBT (ms)", [time for _, one in answered for time in one.tbt_s])
    times, counts = running_over_time(answered)
    running.step(times, counts, where="post")
    running.set(xlabel="s", ylabel="requests under way", ylim=(0, None))
    rates = tokens_over_time(answered, run.duration_s)
    tokens.stairs(rates, np.arange(len(rates) + 1))
    tokens.set(xlabel="s", ylabel="output tokens per second", ylim=(0, None))
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"--plot {str(path)!r} cannot be written: {error.strerror}") from None


def running_over_time(answered: Sequence[tuple[Result, Answered]]) -> tuple[list[float], list[int]]:
    """Times at which a request starts or ends, and how many are under way from then on."""
    changes = [(result.sent_s, 1) for result, _ in answered]
    changes += [(result.due_s + one.e2el_s, -1) for result, one in answered]
    changes.sort()
    counts = np.cumsum([change for _, change in changes], dtype=np.int64)
    return [time for time, _ in changes], [int(count) for count in counts]


def tokens_over_time(answered: Sequence[tuple[Result, Answered]], duration_s: float) -> list[int]:
    """Output tokens in each second."""
    times = [
        time
        for result, one in answered
        for time in result.due_s + one.ttft_s + np.concatenate([[0.0], np.cumsum(one.tbt_s)])
    ]
    edges = np.arange(int(duration_s) + 2)
    return [int(count) for count in np.histogram(times, bins=edges)[0]]


def _distribution(axes: Axes, label: str, times_s: Sequence[float]) -> None:
    times_ms = np.sort(np.asarray(times_s, dtype=np.float64)) * 1e3
    if len(times_ms):
        axes.step(times_ms, np.arange(1, len(times_ms) + 1) / len(times_ms), where="post")
    axes.set(xlabel=label, ylabel="share of them", ylim=(0, 1.02))
    axes.grid(visible=True, alpha=0.3)
