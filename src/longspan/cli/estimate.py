"""The verb `estimate`: predicts the time of a prompt or a decode step on devices that need not be available."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from longspan.cli.options import NameArgument, verb
from longspan.cli.outputs import note
from longspan.core.exchange import ALLTOALL, RING_KV, RING_Q, exchange_of
from longspan.core.options import Option
from longspan.core.parallel_args import parse_parallel
from longspan.core.quantities import number, seconds
from longspan.errors import ParameterError
from longspan.sim.spec import HardwareSpec

if TYPE_CHECKING:
    from rich.table import Table

    from longspan.core.exchange import Exchange
    from longspan.cost.estimate import Drops, Estimate
    from longspan.cost.step_cost import RooflineCost
    from longspan.sim.resolved import Fleet, ResolvedCluster

Fractions = tuple[float, ...] | Literal["search"] | None
_cluster = partial(Option, group="Cluster")
_work = partial(Option, group="Work")
_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])?")
_MAX_TOKENS = 2**40
_NEGLIGIBLE = 1e-6
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def length(text: str) -> int:
    """Parse `8192`, `8K` (8 * 1,024), `8k` (8 * 1,000), `1M` and `25.6k`, as vLLM does."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a number of tokens such as 8192, 8K (8192) or 8k (8000), but {text!r} given")
    number, unit = match[1], match[2] or ""
    factor = (1024 if unit.isupper() else 1000) ** _POWERS[unit.lower()] if unit else 1
    tokens = Fraction(number) * factor
    if ("." in number and not unit.islower()) or tokens.denominator != 1:
        raise ValueError(f"must be a whole number of tokens, but {text!r} given: 25.6k works, 25.6K does not")
    if tokens > _MAX_TOKENS:
        raise ValueError(f"can be at most {_MAX_TOKENS} tokens (1T), but {text!r} given")
    return int(tokens)


def _fractions(text: str) -> Fractions:
    from longspan.cost.partition_table import parse_fractions  # noqa: PLC0415 - loads numpy

    return "search" if text == "search" else parse_fractions(text)


@verb
def estimate(
    model: NameArgument,
    *,
    hardware: Annotated[
        str,
        _cluster(
            "A device such as h100-sxm-80g, or a .toml or .json file of one. An unknown name lists all.",
            metavar="NAME|FILE",
        ),
    ],
    gpus_per_host: Annotated[int, _cluster("Devices of each host.")] = 8,
    hosts: Annotated[int, _cluster("Number of hosts.")] = 1,
    parallel: Annotated[str, _work("N or [Nx][tpT][ppP]: N instances of T * P devices each.", metavar="SPEC")] = "1",
    exchange: Annotated[
        str, _work("Exchange. auto is ring_kv, or ring_q for decode. After a chain, its last instance decodes alone.")
    ] = "auto",
    fractions: Annotated[
        Fractions,
        _work(
            "Share of a contiguous prompt for each instance.",
            metavar="F,F,...|search",
            default="equal for a chain, else zigzag",
            read=_fractions,
        ),
    ] = None,
    context: Annotated[
        int, _work("Tokens of the context with its cached tokens. 8K is 8192, 8k 8000.", metavar="L", read=length)
    ],
    cached: Annotated[int, _work("Number of these tokens that are cached.", metavar="P", read=length)] = 0,
    phase: Annotated[Literal["prefill", "decode"], _work("The whole prompt, or one decode step after it.")] = "prefill",
    batch: Annotated[int, _work("Requests per step.")] = 1,
    csa: Annotated[
        str,
        _work(
            "Sparse attention of a prompt, as of policy csps: off, auto, a YAML file of settings, or a tuned file.",
            metavar="off|auto|FILE",
        ),
    ] = "off",
    host_kv_gib: Annotated[
        float, _work("GiB of memory for KV on each host, to show its capacity and the time to load the context.")
    ] = 0.0,
    hardware_spec: HardwareSpec = HardwareSpec(),
    as_json: Annotated[bool, Option("Print one JSON object and no table.", name="json")] = False,
) -> None:
    """Predict time to first token, or between tokens, from data sheets, with memory and communication.

    No model is run. docs/cost.md describes the formulas and compares their results with measurements of papers.
    """
    from longspan.cost.estimate import attention_flops, estimate_decode, estimate_prefill, host_kv  # noqa: PLC0415
    from longspan.cost.forward import rooflines  # noqa: PLC0415
    from longspan.cost.step_cost import RooflineCost  # noqa: PLC0415
    from longspan.cost.topology import Devices  # noqa: PLC0415
    from longspan.csa_file import csa_settings  # noqa: PLC0415
    from longspan.sim.resolved import Fleet, ResolvedCluster  # noqa: PLC0415
    from longspan.simulation import read_architecture, read_device  # noqa: PLC0415

    spec = parse_parallel(parallel)
    link, rate = hardware_spec.link, hardware_spec.link_gbytes_per_s
    device = read_device(hardware)
    devices = Devices(hardware=device, gpus_per_host=gpus_per_host, hosts=hosts, link=link, link_gbytes_per_s=rate)
    sizes = read_architecture(model, hardware_spec)
    kernels, launch = hardware_spec.attention or "flash", hardware_spec.launch
    [cost] = rooflines(sizes, devices, spec, kernels, launch=launch)
    size, auto = spec.num_instances, RING_KV if phase == "prefill" else RING_Q
    chosen = auto if exchange == "auto" else exchange_of(exchange)
    if csa != "off":
        chosen = ALLTOALL if exchange == "auto" else chosen
        if phase == "decode" or fractions is not None:
            raise ParameterError("csa", "is for prefills without --fractions: leave one of them out", csa)
    if phase == "prefill":
        result = estimate_prefill(cost, size, chosen, context, cached, fractions=fractions, batch=batch)
        if csa != "off":
            placed = spec.on_hosts(gpus_per_host)
            steps = RooflineCost(sizes, devices, placed, block_size=1, kernels=kernels, launch=launch)
            drops = _drops(csa_settings(csa, model), chosen, steps, cached, context)
            pairs = batch * (context - cached) * (context + cached + 1) / 2
            flops = attention_flops(sizes.attention, pairs)
            result = result.with_drops(drops, flops / (size * cost.layer.tp * len(cost.stages)))
    elif fractions is not None or cached:
        raise ValueError("--fractions and --cached describe prompts: leave them out with --phase decode")
    else:
        result = estimate_decode(cost, size, chosen, context, batch)
    if host_kv_gib:
        result = replace(result, host=host_kv(cost, size, hosts, host_kv_gib, context, batch))
    num_tokens = max(0, int(result.memory.kv_room // (cost.layer.kv_bytes * max(map(len, cost.stages)))))
    cluster = spec.on_hosts(gpus_per_host).with_blocks([num_tokens] * size)
    fleet = Fleet.of(devices, sizes.precision)
    _print(result, ResolvedCluster(fleet=fleet, clusters=(cluster,), block_size=1), as_json=as_json)


def _drops(csa: str, exchange: Exchange, cost: RooflineCost, cached: int, context: int) -> Drops:
    """Return the drops that policy `csps` chooses for a prompt, and their effect."""
    from longspan.core.layouts import shard_span  # noqa: PLC0415 - sparse attention alone
    from longspan.cost.csa_pipeline import Members, whole_prompt  # noqa: PLC0415
    from longspan.cost.csa_price import behind, mean_ratios, time_share, work_shares  # noqa: PLC0415
    from longspan.cost.estimate import Drops  # noqa: PLC0415
    from longspan.cost.pricing import whole_prompt_s  # noqa: PLC0415
    from longspan.policy.facts import Facts  # noqa: PLC0415
    from longspan.policy.registry import make_policy  # noqa: PLC0415

    cluster, shape = cost.cluster, cost.shape
    size = cluster.num_instances
    facts = Facts(shape=shape, cluster=cluster, rates=cost.rates, exact_s=partial(whole_prompt_s, cost))
    options = {"csa": csa, "exchange": exchange.kind, "threshold": "0"}
    setting = make_policy("csps", num_instances=size, options=options, facts=facts).sparse(context, 1, context)
    if setting is None:
        return Drops(levels=1)
    q_runs = shard_span("contiguous", cached, context, size, head=0)
    if not cached:
        q_runs = whole_prompt(context, setting.partition, size)
    hosts = facts.hosts(range(size))
    members = Members(hosts, shape, cost.rates(hosts))
    bytes_share, products_share = work_shares(setting, q_runs, behind(cached, q_runs), members)
    return Drops(
        levels=setting.num_levels,
        drop=mean_ratios(setting, shape.num_layers),
        time_share=time_share(exchange.sparse_form(setting), cached, q_runs, members),
        bytes_share=bytes_share if exchange == ALLTOALL else 1.0,
        products_share=products_share,
    )


def _print(result: Estimate, resolved: ResolvedCluster, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**result.as_json(), "cluster": resolved.as_json()}))
    else:
        from rich.console import Console  # noqa: PLC0415

        print(f"cluster: {resolved.fleet}\ninstances: {resolved}")
        Console().print(_table(result, resolved.fleet))
    unused = resolved.unused if resolved.fleet.hosts > 1 else None  # one host is the default
    for warning in (unused, resolved.across):
        if warning is not None:
            note(warning)
    if not result.memory.fits:
        note(f"does not fit: {result.memory.arithmetic}")


def _table(result: Estimate, fleet: Fleet) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("", "", title=f"{result.phase} on {fleet.hosts} × {fleet.gpus_per_host} {fleet.hardware}")
    name = "time to first token" if result.phase == "prefill" else "time between tokens"
    table.add_row(name, seconds(result.seconds))
    table.add_row("lower bound", seconds(result.lower_bound_s))
    for part, part_s in result.breakdown.as_dict().items():
        if part_s > _NEGLIGIBLE * result.seconds:
            table.add_row(f"  {part.removesuffix('_s').replace('_', ' ')}", seconds(part_s))
    table.add_row("exchanged", f"{number(result.bytes_exchanged / 1e9)} GB")
    table.add_row("memory", result.memory.arithmetic)
    if (drops := result.drops) is not None:
        ratios = ", ".join(f"{ratio:.0%}" for ratio in drops.drop) or "nothing"
        saved = f"{1 - drops.bytes_share:.1%} of bytes, {1 - drops.products_share:.1%} of products"
        table.add_row("sparse attention", f"{drops.levels} levels drop {ratios}; saves {saved}")
    if result.host is not None:
        table.add_row("from the host", f"{seconds(result.host.fetch_s)}; holds KV of {result.host.tokens:,} tokens")
    table.add_row(
        "utilisation", f"{result.mfu:.1%} of the 16-bit peak, {result.flops_per_gpu_s / 1e12:.0f} TFLOP/s per GPU"
    )
    if len(set(result.partition)) > 1:
        table.add_row("tokens", ", ".join(map(str, result.partition)))
    return table
