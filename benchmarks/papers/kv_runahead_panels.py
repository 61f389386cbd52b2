"""KV-Runahead: our numbers of its figures. All GPUs are of one host, and 1k is 1,024 tokens."""

from __future__ import annotations

from kv_runahead import estimate, fig_11, predicted_s, searched, setting
from panels import Panel, Series

_METHODS = ("TSP", "KVR-E", "KVR-S")
_THOUSANDS = (1, 2, 4, 8, 12, 16)
_FIRST = tuple(range(7168, 12_289, 512))


def panels() -> list[Panel]:
    """Return the panels of Figs. 6 to 11."""
    return [_first_piece(), *_llama(), *_falcon(), *_pieces(), _noise()]


def seconds(
    method: str, gpus: int, thousands: int, model: str = "llama-7b", link_gbytes_per_s: float | None = None
) -> float:
    """Return the predicted TTFT."""
    return estimate(method, gpus, thousands, model, link_gbytes_per_s).seconds


def _first_piece() -> Panel:
    length = 16_384
    times = [
        (first, setting("llama-7b").prefill("2", "chain", length, fractions=(first / length, 1 - first / length)))
        for first in _FIRST
    ]
    return Panel(
        name="Fig. 6a",
        title="16k on 2 GPUs, by the first piece",
        x="tokens of the first GPU",
        y="seconds",
        ours={"TTFT": [(first, estimated.seconds) for first, estimated in times]},
    )


def _llama() -> list[Panel]:
    by_gpus = [
        Panel(
            name=f"Fig. 8{part}",
            title=f"Llama 7B on {gpus} GPUs, 300 GB/s",
            x="thousand tokens",
            y="seconds",
            ours=_times(gpus),
        )
        for part, gpus in (("a", 2), ("b", 4), ("c", 8))
    ]
    free = {gpus: seconds("KVR-S", gpus, 12, "llama-7b", 1e6) for gpus in (2, 4, 8)}
    least = {gpus: setting("llama-7b").prefill(str(gpus), "chain", 12_288).lower_bound_s for gpus in free}
    bounds = Panel(
        name="Fig. 8d",
        title="12k: over the time without communication",
        x="GPUs",
        y="ratio of seconds",
        ours={
            **{method: [(gpus, seconds(method, gpus, 12) / free[gpus]) for gpus in free] for method in _METHODS},
            "TTFT*(p)": [(gpus, least[gpus] / free[gpus]) for gpus in free],
        },
    )
    slow = [
        Panel(
            name="Figs. 8e and 8f, seconds",
            title="Llama 7B, KVR-S at 10 GB/s",
            x="thousand tokens",
            y="seconds",
            ours={
                name: [(n, seconds("KVR-S", gpus, n, "llama-7b", 10)) for n in (1, 2, 4, 8, 12)]
                for name, gpus in (("1 GPU", 1), ("2 GPUs", 2), ("4 GPUs", 4))
            },
        ),
        Panel(
            name="Figs. 8e and 8f",
            title="Llama 7B, KVR-S over TSP at 10 GB/s",
            x="thousand tokens",
            y="times as quick",
            ours={
                f"{gpus} GPUs": [
                    (n, seconds("TSP", gpus, n, "llama-7b", 10) / seconds("KVR-S", gpus, n, "llama-7b", 10))
                    for n in (4, 8, 12, 16)
                ]
                for gpus in (2, 4)
            },
        ),
    ]
    return [*by_gpus, bounds, *slow]


def _times(gpus: int) -> Series:
    """Return TTFT by method, of lengths that fit into memory."""
    return {
        method: [(n, seconds(method, gpus, n)) for n in _THOUSANDS if estimate(method, gpus, n).memory.fits]
        for method in _METHODS
    }


def _falcon() -> list[Panel]:
    return [
        Panel(
            name=f"Fig. 9{part}",
            title=f"Falcon 7B on {gpus} GPUs, over TSP",
            x="thousand tokens",
            y="times as quick",
            ours={
                method: [
                    (n, seconds("TSP", gpus, n, "falcon-7b") / seconds(method, gpus, n, "falcon-7b")) for n in (2, 4, 8)
                ]
                for method in ("KVR-E", "KVR-S")
            },
        )
        for part, gpus in (("a", 2), ("b", 4), ("c", 8))
    ]


def _pieces() -> list[Panel]:
    shares = Panel(
        name="Fig. 10a",
        title="searched pieces on 4 GPUs",
        x="GPU",
        y="share of the prompt",
        ours={f"{n}k": [(at, piece) for at, piece in enumerate(searched(4, n), start=1)] for n in (8, 10, 12, 16)},
    )
    slower = [
        Panel(
            name=f"Fig. 10{part}",
            title=f"predicted pieces on {gpus} GPUs",
            x="thousand tokens",
            y="% slower than searched",
            ours={"KVR-P": [(n, 100 * (predicted_s(gpus, n) / seconds("KVR-S", gpus, n) - 1)) for n in (10, 14)]},
        )
        for part, gpus in (("b", 4), ("c", 8))
    ]
    return [shares, *slower]


def _noise() -> Panel:
    return Panel(
        name="Fig. 11",
        title="largest loss by noisy links, 8k to 16k",
        x="method",
        y="% of TTFT",
        ours={"ours": list(fig_11().items())},
        bars=True,
    )
