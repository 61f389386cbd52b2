"""The verb `estimate`: prices a prompt or a step of decoding on devices that need not be here."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from longspan.cli.options import NameArgument, verb
from longspan.core.exchange import RING_KV, RING_Q, exchange_of
from longspan.core.options import Option
from longspan.core.parallel_args import parse_parallel
from longspan.core.quantities import number, seconds
from longspan.sim.spec import HardwareSpec

if TYPE_CHECKING:
    from rich.table import Table

    from longspan.cost.estimate import Estimate
    from longspan.sim.resolved import Fleet, ResolvedCluster

Fractions = tuple[float, ...] | Literal["search"] | None
_cluster = partial(Option, group="Cluster")
_work = partial(Option, group="What is computed")
_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])?")
_MOST = 2**40
_NEGLIGIBLE = 1e-6
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_HARDWARE = HardwareSpec()


def length(text: str) -> int:
    """Reads `8192`, `8K` (8 * 1,024), `8k` (8 * 1,000), `1M` and `25.6k`, as vLLM does."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a number of tokens such as 8192, 8K (8192) or 8k (8000), but {text!r} given")
    number, unit = match[1], match[2] or ""
    factor = (1024 if unit.isupper() else 1000) ** _POWERS[unit.lower()] if unit else 1
    tokens = Fraction(number) * factor
    if ("." in number and not unit.islower()) or tokens.denominator != 1:
        raise ValueError(f"must be a whole number of tokens, but {text!r} given: 25.6k works, 25.6K does not")
    if tokens > _MOST:
        raise ValueError(f"can be at most {_MOST} tokens (1T), but {text!r} given")
    return int(tokens)


def _fractions(text: str) -> Fractions:
    from longspan.cost.partition_table import parse_fractions  # noqa: PLC0415 - loads numpy

    return "search" if text == "search" else parse_fractions(text)


@verb
def estimate(
    model: NameArgument,
    *,
    hardware: Annotated[str, _cluster("A device such as h100-sxm-80g; an unknown name lists all.")],
    gpus_per_host: Annotated[int, _cluster("Devices of each host.")] = 8,
    hosts: Annotated[int, _cluster("How many hosts there are.")] = 1,
    parallel: Annotated[str, _work("N or [Nx][tpT][ppP]: N instances of T * P devices each.", metavar="SPEC")] = "1",
    exchange: Annotated[
        str,
        _work(
            "How instances share prompts, if there are several; auto: ring_kv, and ring_q to decode. "
            "Behind a chain its last instance decodes alone.",
        ),
    ] = "auto",
    fractions: Annotated[
        Fractions,
        _work(
            "How much of a contiguous prompt each instance gets.",
            metavar="F,F,...|search",
            default="even for a chain, else zigzag",
            read=_fractions,
        ),
    ] = None,
    context: Annotated[
        int, _work("Tokens of the context, cached ones included; 8K is 8192, 8k 8000.", metavar="L", read=length)
    ],
    cached: Annotated[int, _work("How many of them have been computed before.", metavar="P", read=length)] = 0,
    phase: Annotated[Literal["prefill", "decode"], _work("The whole prompt, or one token behind it.")] = "prefill",
    batch: Annotated[int, _work("Requests at a time.")] = 1,
    host_kv_gib: Annotated[
        float, _work("GiB of memory on each host for KV: how much that is, and how soon the context's is back.")
    ] = 0.0,
    hardware_spec: HardwareSpec = _HARDWARE,
    as_json: Annotated[bool, Option("Print one JSON object and no table.", name="json")] = False,
) -> None:
    """Predicts time to first token, or between tokens, from data sheets, with memory and communication.

    Nothing is run. docs/cost.md says how it is computed, and how far it is from what papers measured.
    """
    from longspan.cost.estimate import estimate_decode, estimate_prefill, host_kv  # noqa: PLC0415 - no other verb does
    from longspan.cost.forward import rooflines  # noqa: PLC0415
    from longspan.cost.topology import Devices  # noqa: PLC0415
    from longspan.sim.resolved import Fleet, ResolvedCluster  # noqa: PLC0415
    from longspan.simulation import read_architecture, resolved_dtype  # noqa: PLC0415

    spec = parse_parallel(parallel)
    devices = Devices(
        hardware=hardware,
        gpus_per_host=gpus_per_host,
        hosts=hosts,
        link=hardware_spec.link,
        link_gbytes_per_s=hardware_spec.link_gbytes_per_s,
    )
    sizes = read_architecture(model, dtype=hardware_spec.dtype, ffn_dtype=hardware_spec.ffn_dtype)
    [cost] = rooflines(sizes, devices, spec, hardware_spec.attention or "flash")
    if phase == "prefill":
        chosen = RING_KV if exchange == "auto" else exchange_of(exchange)
        found = estimate_prefill(cost, spec.num_instances, chosen, context, cached, fractions=fractions, batch=batch)
    else:
        if fractions is not None or cached:
            raise ValueError("--fractions and --cached are of prompts: leave them out with --phase decode")
        chosen = RING_Q if exchange == "auto" else exchange_of(exchange)
        found = estimate_decode(cost, spec.num_instances, chosen, context, batch)
    if host_kv_gib:
        found = replace(found, host=host_kv(cost, spec.num_instances, hosts, host_kv_gib, context, batch))
    token_bytes = cost.layer.kv_bytes * max(map(len, cost.stages))
    num_tokens = max(0, int(found.memory.kv_room // token_bytes))
    cluster = spec.on_hosts(gpus_per_host).with_blocks([num_tokens] * spec.num_instances)
    fleet = Fleet.of(devices, dtype=resolved_dtype(model, hardware_spec.dtype), ffn_dtype=hardware_spec.ffn_dtype)
    _print(found, ResolvedCluster(fleet=fleet, clusters=(cluster,), block_size=1), as_json=as_json)


def _print(found: Estimate, resolved: ResolvedCluster, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**found.as_json(), "cluster": resolved.as_json()}))
    else:
        from rich.console import Console  # noqa: PLC0415

        print(f"cluster: {resolved.fleet}\ninstances: {resolved}")
        Console().print(_table(found, resolved.fleet))
    unused = resolved.unused if resolved.fleet.hosts > 1 else None  # one host is what a device comes with
    for warning in (unused, resolved.across):
        if warning is not None:
            print(f"longspan: {warning}", file=sys.stderr)
    if not found.memory.fits:
        print(f"longspan: does not fit: {found.memory.arithmetic}", file=sys.stderr)


def _table(found: Estimate, fleet: Fleet) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("", "", title=f"{found.phase} on {fleet.hosts} × {fleet.gpus_per_host} {fleet.hardware}")
    name = "time to first token" if found.phase == "prefill" else "time between tokens"
    table.add_row(name, seconds(found.seconds))
    table.add_row("lower bound", seconds(found.lower_bound_s))
    for part, part_s in found.breakdown.as_dict().items():
        if part_s > _NEGLIGIBLE * found.seconds:
            table.add_row(f"  {part.removesuffix('_s').replace('_', ' ')}", seconds(part_s))
    table.add_row("exchanged", f"{number(found.bytes_exchanged / 1e9)} GB")
    table.add_row("memory", found.memory.arithmetic)
    if found.host is not None:
        table.add_row("from the host", f"{seconds(found.host.fetch_s)}; room for KV of {found.host.tokens:,} tokens")
    table.add_row("utilisation", f"{found.mfu:.1%}, {found.flops_per_gpu_s / 1e12:.0f} TFLOP/s per GPU")
    if len(set(found.partition)) > 1:
        table.add_row("tokens", ", ".join(map(str, found.partition)))
    return table
