"""Context Parallelism: what its text gives of Llama 3 405B on H100 hosts, beside the cost model.

    python benchmarks/papers/context_parallelism.py

128K is read as 128,000 tokens (the paper's P + T = 128000) and 1M as 1,000,000 (its FLOP count). Weights of the
feed-forward layers are FP8, all else bfloat16. TTIT is said to grow to 47 and 71 ms with 4 hosts.
"""

from __future__ import annotations

import sys

from cells import Cell, Setting, report
from pass_q import PASS_Q

from longspan.core.exchange import RING_Q

_K128, _M1 = 128_000, 1_000_000
_TOLERANCE = 0.15


def hosts(number: int, link: str | None = None) -> Setting:
    """Builds hosts of eight of the paper's H100s, on which `ring_q` is the paper's pass-Q."""
    return Setting(
        model="llama-3-405b",
        hardware="h100-96g-hbm2e-500w",
        hosts=number,
        ffn_bytes=1,
        link=link,
        costs={RING_Q.kind: PASS_Q},
    )


def context_parallel(number: int, length: int, link: str | None = None) -> float:
    """Predicts the seconds of pass-KV on so many hosts."""
    return hosts(number, link).prefill(f"{number}xtp8", "ring_kv", length).seconds


def tensor_parallel(number: int, length: int) -> float:
    """Predicts the seconds with the model split over all GPUs of so many hosts."""
    return hosts(number).prefill(f"tp{8 * number}", "local", length).seconds


def cells() -> list[Cell]:
    """Lists what the text gives. Attention alone is of one device over its part of 1M: 540 TFLOP/s, says the paper."""
    million = hosts(16).prefill("16xtp8", "ring_kv", _M1)
    rate = million.flops_per_gpu_s
    attention = hosts(1).attention_flops_per_s("tp8", _M1 // 128)
    found = [
        ("TTFT of 1M, 16 hosts", 77, million.seconds, "s"),
        ("TTFT of 128K, 16 hosts", 3.8, context_parallel(16, _K128), "s"),
        ("TFLOP/s per GPU at 1M", 502, rate / 1e12, ""),
        ("that, of attention alone", 0.93, rate / attention, ""),
        ("TTFT of TP16 / CP2", 1.15, tensor_parallel(2, _K128) / context_parallel(2, _K128), "x"),
        ("TTFT of TP64 / CP8", 2.0, tensor_parallel(8, _K128) / context_parallel(8, _K128), "x"),
        ("TTIT of TP32", 47, 1e3 * hosts(4).decode("tp32", _K128).seconds, "ms"),
        ("TTIT of CP4", 71, 1e3 * hosts(4).decode("4xtp8", _K128).seconds, "ms"),
    ]
    alone = context_parallel(1, _K128)
    for number in (2, 4):
        rdma = alone / context_parallel(number, _K128)
        tcp = alone / context_parallel(number, _K128, "tcp-100g")
        found.append((f"scaling to {number} hosts, TCP / RDMA", 1.0, tcp / rdma, "x"))
    return [
        Cell(name=name, paper=paper, ours=ours, tolerance=_TOLERANCE, unit=unit) for name, paper, ours, unit in found
    ]


def main() -> bool:
    """Prints all; returns whether all is near enough."""
    return report("Context Parallelism", cells())


if __name__ == "__main__":
    sys.exit(not main())
