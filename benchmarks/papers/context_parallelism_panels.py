"""Context Parallelism: our numbers of its figures."""

from __future__ import annotations

from context_parallelism import KV_RING, Q_RING, context_parallel, hosts, partial_prefill, tensor_parallel
from panels import Panel

_THOUSANDS = (2, 4, 8, 16, 32, 64, 128)
_LONG = (128, 256, 512, 1000)
_MISS_RATES = (0.01, 0.02, 0.025, 0.0325, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_TOTALS = (16_000, 32_000, 64_000, 128_000, 256_000)


def panels() -> list[Panel]:
    """Return the panels of Figs. 6 to 10."""
    alone = context_parallel(1, 128_000)
    scaling = {
        f"CP, {link}": [(1, 1.0), *((n, alone / context_parallel(n, 128_000, of)) for n in (2, 4, 8, 16))]
        for link, of in (("RDMA", None), ("TCP", "tcp-100g"))
    }
    return [
        Panel(
            name="Fig. 6a",
            title="TTFT of pass-KV, RDMA",
            x="thousand tokens",
            y="seconds",
            ours={
                f"CP{n}": [(length, context_parallel(n, 1000 * length)) for length in _THOUSANDS]
                for n in (1, 2, 4, 8, 16)
            },
            log="xy",
        ),
        Panel(
            name="Fig. 6b",
            title="128K tokens: time of one host over that of n",
            x="hosts",
            y="times as quick",
            ours=scaling,
        ),
        Panel(
            name="Fig. 7",
            title="128K tokens: tensor over context parallelism",
            x="hosts",
            y="ratio of seconds",
            ours={"TP over CP": [(n, tensor_parallel(n, 128_000) / context_parallel(n, 128_000)) for n in (2, 4, 8)]},
        ),
        Panel(
            name="Fig. 8",
            title="TTFT of long contexts",
            x="thousand tokens",
            y="seconds",
            ours={f"CP{n}": [(length, context_parallel(n, 1000 * length)) for length in _LONG] for n in (8, 16)},
        ),
        Panel(
            name="Fig. 9",
            title="128K tokens, 4 hosts: pass-KV over pass-Q",
            x="KV cache miss rate",
            y="ratio of seconds",
            ours={
                "pass-KV over pass-Q": [
                    (rate, partial_prefill(KV_RING, rate) / partial_prefill(Q_RING, rate)) for rate in _MISS_RATES
                ]
            },
            log="x",
        ),
        Panel(
            name="Fig. 10",
            title="miss rate below which pass-Q is quicker",
            x="new tokens",
            y="miss rate",
            ours={
                "threshold": [(total * rate, rate) for total in _TOTALS if (rate := _crossing(total))],
            },
            log="xy",
        ),
    ]


def _crossing(total: int) -> float:
    """Return the highest miss rate at which pass-Q is quicker on 4 hosts, or 0 if there is none."""
    setting, rates = hosts(4), [0.0025 * step for step in range(1, 81)]

    def seconds(exchange: str, rate: float) -> float:
        return setting.prefill("4xtp8", exchange, total, total - round(rate * total)).seconds

    return max((rate for rate in rates if seconds(Q_RING, rate) < seconds(KV_RING, rate)), default=0.0)
