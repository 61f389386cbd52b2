"""Fit constants of `cost/data/*.toml` to measured kernels and profiles of layers, and print their tables.

    python benchmarks/fit_efficiency.py DATA

DATA is a folder with kernels/*.csv.gz: milliseconds of single kernels, from the repository of AIConfigurator
(Apache-2.0). Its profiles/*.csv.gz are median milliseconds of operators and collectives, from the repository of the
Vidur simulator (MIT). The script prints products.toml, the tables [linear] and [stream] of efficiency.toml, and the
entries of links.toml for NVLink. It also prints the error of that file for all measured messages and collectives.
`kernel_errors.py` prints the errors of the constants, fitted and held out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measured_kernels import collectives, products
from measured_kernels.frame import read_rows

from longspan.cost import catalog
from longspan.cost.topology import Topology

_DEVICES = {"a100": "a100-sxm-80g", "h100": "h100-sxm-80g", "a40": "a40"}
_LINKS = {"a100_dgx": "nvlink3", "h100_dgx": "nvlink4"}
_MEASURED = {
    ("a100_dgx", "send_recv", 2, 2): "nvlink3",
    ("a100_dgx", "all_reduce", 2, 2): "nvlink3",
    ("a100_dgx", "all_reduce", 4, 4): "nvlink3",
    ("a100_dgx", "all_reduce", 8, 8): "nvlink3",
    ("h100_dgx", "send_recv", 2, 2): "nvlink4",
    ("h100_dgx", "all_reduce", 2, 2): "nvlink4",
    ("h100_dgx", "all_reduce", 4, 4): "nvlink4",
    ("h100_dgx", "all_reduce", 8, 8): "nvlink4",
    ("a100_pairwise_nvlink", "all_reduce", 4, 4): "pcie4-x16",
    ("h100_pairwise_nvlink", "all_reduce", 4, 4): "pcie5-x16",
    ("a100_dgx", "send_recv", 2, 1): "infiniband-8x200g",
    ("a100_dgx", "all_reduce", 2, 1): "infiniband-8x200g",
    ("a100_dgx", "all_reduce", 16, 8): "infiniband-8x200g",
    ("h100_dgx", "send_recv", 2, 1): "rdma-400g",
}
_MIDDLE = 2**20
_HALF = 2
_BEYOND_CACHES = 2**26
_KIND = ("network", "collective", "num_workers", "devices_per_node")
_SMALL, _LARGE = 2**16, 2**25
_STREAMS = {
    "norm": ("input_layernorm_ms", "post_attention_layernorm_ms"),
    "rotary": ("attn_rope_ms",),
    "activation": ("mlp_act_ms",),
    "add": ("add_ms",),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of linear_layers.csv: the sizes of a layer's rank, and its times."""

    device: str
    model: str
    tokens: int
    hidden: int
    heads: float
    kv_heads: float
    head_dim: int
    wide: float
    milliseconds: dict[str, float]

    def stream_bytes(self, name: str) -> float:
        """Return the bytes that an element-wise operator reads and writes."""
        elements = {
            "norm": 2 * self.hidden,
            "rotary": 2 * (self.heads + self.kv_heads) * self.head_dim,
            "activation": 3 * self.wide,
            "add": 3 * self.hidden,
        }
        return _HALF * self.tokens * elements[name]


def main(data: Path) -> None:
    """Fit all constants, and print them."""
    products.print_constants(data)
    rows = [_row(fields) for fields in read_rows(data / "profiles" / "linear_layers.csv.gz")]
    print("\n[stream]")
    starts = [seconds for name in _STREAMS for num_bytes, seconds, _ in _streams(rows, name) if num_bytes < _SMALL]
    added = [(n, seconds, device) for n, seconds, device in _streams(rows, "add") if n > _BEYOND_CACHES]
    add = float(np.median([n / seconds / device.bytes_per_s for n, seconds, device in added]))
    for name in list(_STREAMS)[:-1]:
        rates = []
        for num_bytes, seconds, device in _streams(rows, name):
            rest = (seconds / num_bytes) ** 2 - (1 / (add * device.bytes_per_s)) ** 2
            if num_bytes > _BEYOND_CACHES and rest > 0:
                rates.append((device.name, rest**-0.5 / device.units / device.clock_hz))
        by_device = {kind: float(np.median([r for k, r in rates if k == kind])) for kind, _ in rates}
        shown = ", ".join(f"{kind}: {rate:.2f}" for kind, rate in sorted(by_device.items()))
        print(f"{name} = {np.mean(list(by_device.values())):.2f}  # {shown}")
    print(f"add = {add:.3f}")
    print(f"start_us = {1e6 * float(np.median(starts)):.1f}")
    measured = read_rows(data / "profiles" / "collectives.csv.gz")
    _print_links(measured)
    _print_link_errors(measured)
    collectives.print_constants(data)


def _row(fields: dict[str, str]) -> Row:
    ranks, heads, hidden = (int(fields[name]) for name in ("num_tensor_parallel_workers", "n_head", "n_embd"))
    return Row(
        device=fields["gpu"],
        model=fields["model"],
        tokens=int(fields["num_tokens"]),
        hidden=hidden,
        heads=heads / ranks,
        kv_heads=max(1.0, int(fields["n_kv_head"]) / ranks),
        head_dim=hidden // heads,
        wide=int(fields["n_expanded_embd"]) / ranks,
        milliseconds={name: float(value) for name, value in fields.items() if name.endswith("_ms") and value},
    )


def _streams(rows: list[Row], name: str) -> list[tuple[float, float, catalog.Device]]:
    """Return bytes, seconds and device of each measurement of one kind of operator."""
    return [
        (row.stream_bytes(name), 1e-3 * row.milliseconds[column], catalog.device(_DEVICES[row.device]))
        for row in rows
        for column in _STREAMS[name]
        if row.milliseconds.get(column)
    ]


def _print_links(lines: list[dict[str, str]]) -> None:
    for network, name in _LINKS.items():
        speed = catalog.link(name).nominal_bytes_per_s
        print(f"\n[{name}]  # {network}")
        for collective, field in (("send_recv", "achieved"), ("all_reduce", "collective")):
            large, starts = [], []
            for line in lines:
                ranks, inside = int(line["num_workers"]), line["num_workers"] == line["devices_per_node"]
                if line["network"] != network or line["collective"] != collective or not inside:
                    continue
                num_bytes, seconds = int(line["size"]), 1e-3 * float(line["median_ms"])
                passed = num_bytes * (2 * (ranks - 1) / ranks if collective == "all_reduce" else 1)
                if num_bytes >= _LARGE:
                    large.append((passed, seconds))
                elif num_bytes <= _SMALL:
                    starts.append(seconds)
            start_s = float(np.median(starts))
            part = np.median([passed / (seconds - start_s) / speed for passed, seconds in large])
            print(f"{field} = {part:.3f}, latency {1e6 * start_s:.1f} us")
    for network in _LINKS:
        for collective, on_2 in (("send_recv", "2"), ("all_reduce", "2"), ("all_reduce", "16")):
            wanted = (network, collective, on_2, "8" if on_2 == "16" else "1")
            times = [
                1e3 * float(line["median_ms"])
                for line in lines
                if tuple(line[field] for field in _KIND) == wanted and int(line["size"]) <= _SMALL
            ]
            if times:
                print(f"# {network}, {collective} of {on_2} ranks on 2 hosts: latency {np.median(times):.1f} us")


def _print_link_errors(lines: list[dict[str, str]]) -> None:
    """Print the errors of links.toml for all rows of the kinds in `_MEASURED`, by size."""
    print("\n# collective and ranks, link: mean and worst error of messages below 1 MiB, and of larger messages")
    for (network, collective, ranks, per_host), name in _MEASURED.items():
        wanted = (network, collective, str(ranks), str(per_host))
        of_one, of_two = _topology(name, ranks, per_host), _topology(name, 1, per_host)
        errors: dict[bool, list[float]] = {False: [], True: []}
        for line in lines:
            if tuple(line[field] for field in _KIND) == wanted:
                num_bytes = int(line["size"])
                single = collective == "send_recv"
                predicted_s = of_two.send_s(num_bytes, 0, 1) if single else of_one.all_reduce_s(num_bytes)
                errors[num_bytes >= _MIDDLE].append(1e3 * predicted_s / float(line["median_ms"]) - 1)
        shown = ", ".join(
            f"{np.abs(size).mean():.0%} and {max(size, key=abs):+.0%} of {len(size)}" for size in errors.values()
        )
        print(f"# {network}, {collective} of {ranks} on {-(-ranks // per_host)} hosts, {name}: {shown}")


def _topology(name: str, ranks: int, per_host: int) -> Topology:
    """Return the topology of instances with `ranks` ranks, on hosts with this link inside or between them."""
    kind = catalog.link(name)
    inside = catalog.link("nvlink3") if kind.where == "between" else kind
    hosts = [instance * ranks // per_host for instance in range(2)]
    return Topology(tp=ranks, gpus_per_host=per_host, inside=inside, between=kind, hosts=hosts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder with kernels/*.csv.gz and profiles/*.csv.gz")
    main(Path(sys.argv[1]))
