"""Collectives: measured NCCL and engines' kernels, the fit of `cost/data/links.toml`, and the errors.

The files are kernels/nccl.csv.gz and custom_allreduce.csv.gz, from the AIConfigurator repository (Apache-2.0).
They have times on 2, 4 and 8 GPUs. Their `message_size` counts elements, not bytes: an all-reduce of 2^28 bfloat16 on 8
A100 takes 4.2 ms. That is 222 GB/s, as NCCL is known to reach, and 111 GB/s if it were bytes.
The constants are fitted without SGLang and without a tenth of the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longspan.cost import catalog
from longspan.cost.links import collective_s
from measured_kernels.frame import Array, KernelErrors, read_rows

_DEVICES = {"a100_sxm": "a100-sxm-80g", "h100_sxm": "h100-sxm-80g", "b200_sxm": "b200-sxm", "l40s": "l40s"}
_SHOWN = {"all_reduce": "all-reduce", "gather": "all-gather, reduce-scatter", "alltoall": "all-to-all"}
_LINKS = {"a100_sxm": "nvlink3", "h100_sxm": "nvlink4", "b200_sxm": "nvlink5", "l40s": "pcie4-x16-l40s"}
_KINDS = {"all_reduce": "all_reduce", "all_gather": "gather", "reduce_scatter": "gather", "alltoall": "alltoall"}
_HELD_OUT_FRAMEWORK = "sglang"
_HELD_OUT_SIZES = (2**14, 2**22)
"""Elements. Two of 22 sizes."""
_WITHOUT_KERNELS = "l40s"
"""vLLM uses its kernels on PCIe for two GPUs only, where they gain little."""
_KERNEL_BYTES = 2**23
"""Engines leave larger all-reduces to NCCL. vLLM's limit is 8 MiB."""
_MEMBERS = (2, 4, 8)
_CLASSES = ((2**17, "up to 64 KiB"), (2**23, "up to 4 MiB"), (2**40, "larger"))
_BEFORE = {
    "a100_sxm": (300e9, 0.565, 32.5e-6, 0.80, 13.5e-6),
    "h100_sxm": (450e9, 0.80, 35.5e-6, 0.80, 7.5e-6),
    "b200_sxm": (900e9, 0.80, 35.5e-6, 0.80, 7.5e-6),
    "l40s": (31.5e9, 0.75, 59e-6, 0.75, 25e-6),
}
"""Nominal speed, part and start of collectives, part and start of messages, at commit 90e53d91."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured time of a collective, and its size.

    Attributes:
        source: `nccl`, or the framework of the kernel.
        num_elements: message_size.
        sent: bytes that each member sends.
        best_s: seconds of the better of NCCL and the framework's kernel.
    """

    device: str
    kind: str
    source: str
    is_eager: bool
    members: int
    num_elements: int
    num_bytes: int
    sent: float
    seconds: float
    best_s: float

    @property
    def is_held_out(self) -> bool:
        return self.source == _HELD_OUT_FRAMEWORK or self.num_elements in _HELD_OUT_SIZES


def errors(data: Path) -> Iterator[KernelErrors]:
    """Yield the errors of each collective by device, GPUs and size.

    The errors before are of the formulas of commit 90e53d91. An all-reduce is the better of NCCL and the kernels of one
    framework. Kernels launched one by one show the time of the host, and are left out.
    """
    parts: dict[tuple[str, str, int, str], list[Measured]] = {}
    for row in read_measured(data):
        if not row.is_eager and (row.source != "nccl" or row.kind != "all_reduce"):
            size = next(name for limit, name in _CLASSES if row.num_bytes < limit)
            parts.setdefault((row.kind, row.device, row.members, size), []).append(row)
    for (kind, device, members, size), rows in parts.items():
        fitted = [row for row in rows if not row.is_held_out]
        yield KernelErrors(
            kind=_SHOWN[kind],
            device=_DEVICES[device],
            dtype="16 and 8 bits",
            size=f"{members} GPUs, {size}",
            before=_errors(_before_s, rows),
            after=_errors(_after_s, fitted),
            left_rows=_errors(_after_s, [r for r in rows if r.is_held_out and r.source != _HELD_OUT_FRAMEWORK]),
            left_framework=_errors(_after_s, [row for row in rows if row.source == _HELD_OUT_FRAMEWORK]),
        )


def _errors(predicted_s: Callable[[Measured], float], rows: list[Measured]) -> Array:
    return np.array([predicted_s(row) / row.best_s - 1 for row in rows])


def print_constants(data: Path) -> None:
    """Print the tables of links.toml."""
    rows = [row for row in read_measured(data) if not row.is_held_out and not row.is_eager]
    for device, link in _LINKS.items():
        nominal = catalog.link(link).nominal_bytes_per_s
        for kind in dict.fromkeys(_KINDS.values()):
            of_nccl = [row for row in rows if (row.device, row.kind, row.source) == (device, kind, "nccl")]
            _print(f"{link}.{kind}", nominal, of_nccl)
        if device not in _WITHOUT_KERNELS:
            _print(f"{link}.kernels", nominal, [row for row in rows if row.device == device and _is_kernel(row)])


def _is_kernel(row: Measured) -> bool:
    """Return whether an engine uses this kernel instead of NCCL."""
    return row.source != "nccl" and row.num_bytes < _KERNEL_BYTES and row.seconds <= row.best_s


def _print(table: str, nominal: float, rows: list[Measured]) -> None:
    fits = [fit([row for row in rows if row.members == members]) for members in _MEMBERS]
    starts = [[f"{1e6 * lines[protocol][0]:.1f}" for lines in fits] for protocol in range(2)]
    parts = [[f"{1 / lines[protocol][1] / nominal:.3g}" for lines in fits] for protocol in range(2)]
    print(f"\n[{table}]")
    for name, values in (("start_us", starts), ("part", parts)):
        protocols = [f"[{', '.join(row)}]" for row in values]
        print(f"{name} = [{', '.join(protocols)}]")


def fit(rows: list[Measured]) -> list[Array]:
    """Return two lines, start and time per byte, whose lower one has the least mean logarithmic error.

    The first line is fitted to the messages up to a size, the second one to larger messages, for every such size.
    """
    sent, seconds = np.array([row.sent for row in rows]), np.array([row.seconds for row in rows])
    best: list[Array] = []
    least = np.inf
    for edge in np.unique(sent)[2:-2]:
        lines = []
        for chosen in (sent <= edge, sent > edge):
            terms = np.stack([np.ones(chosen.sum()), sent[chosen]], axis=1) / seconds[chosen, None]
            lines.append(np.linalg.lstsq(terms, np.ones(chosen.sum()), rcond=None)[0])
        if min(map(min, lines)) <= 0:
            continue
        lower = np.min([start_s + byte_s * sent for start_s, byte_s in lines], axis=0)
        error = float(np.abs(np.log(lower / seconds)).mean())
        if error < least:
            best, least = lines, error
    return best


def _after_s(row: Measured) -> float:
    link = catalog.link(_LINKS[row.device])
    if row.kind == "all_reduce":
        return link.all_reduce_s(row.num_bytes, row.members, kernels=True)
    return collective_s(link.gather if row.kind == "gather" else link.alltoall, row.sent, row.members)


def _before_s(row: Measured) -> float:
    nominal, part, start_s, achieved, latency_s = _BEFORE[row.device]
    if row.kind == "alltoall":
        return latency_s + row.sent / (nominal * achieved)
    return start_s + row.sent / (nominal * part)


def read_measured(data: Path) -> list[Measured]:
    nccl = [_nccl(fields) for fields in read_rows(data / "kernels" / "nccl.csv.gz")]
    halves = [row for row in nccl if row.kind == "all_reduce" and row.num_bytes == 2 * row.num_elements]
    summed = {(row.device, row.members, row.num_elements): row.seconds for row in halves}
    return nccl + [_kernel(fields, summed) for fields in read_rows(data / "kernels" / "custom_allreduce.csv.gz")]


def _nccl(fields: dict[str, str]) -> Measured:
    members, num_elements = int(fields["num_gpus"]), int(fields["message_size"])
    num_bytes, seconds = num_elements * (2 if fields["nccl_dtype"] == "half" else 1), 1e-3 * float(fields["latency"])
    rounds = 2 if fields["op_name"] == "all_reduce" else 1
    return Measured(
        device=fields["device"],
        kind=_KINDS[fields["op_name"]],
        source="nccl",
        is_eager=False,
        members=members,
        num_elements=num_elements,
        num_bytes=num_bytes,
        sent=rounds * num_bytes * (members - 1) / members,
        seconds=seconds,
        best_s=seconds,
    )


def _kernel(fields: dict[str, str], nccl: dict[tuple[str, int, int], float]) -> Measured:
    members, num_elements = int(fields["num_gpus"]), int(fields["message_size"])
    num_bytes, seconds = 2 * num_elements, 1e-3 * float(fields["latency"])
    return Measured(
        device=fields["device"],
        kind="all_reduce",
        source=fields["framework"],
        is_eager=fields["kernel_source"].endswith("eager"),
        members=members,
        num_elements=num_elements,
        num_bytes=num_bytes,
        sent=2 * num_bytes * (members - 1) / members,
        seconds=seconds,
        best_s=min(seconds, nccl.get((fields["device"], members, num_elements), seconds)),
    )
