"""The verb `models`: shows if a model is served, its layouts and its memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console

from longspan.args import EngineArgs
from longspan.cli.options import verb
from longspan.cli.outputs import note, number_table
from longspan.core.options import Option, options_of

if TYPE_CHECKING:
    from rich.table import Table

    from longspan.served_models import Machine, MachineLayout, Support

_GIB = 2**30


def _option(field: str) -> Option:
    return options_of(EngineArgs)[field][0]


@verb
def models(
    model: Annotated[
        str | None,
        Option("An alias, a folder, a config.json, or a hub id. Without it, the types that longspan serves."),
    ] = None,
    *,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _option("dtype")] = "auto",
    quantization: Annotated[Literal["int8", "int4"] | None, _option("quantization")] = None,
    max_model_len: Annotated[int | None, _option("max_model_len")] = None,
    trust_remote_code: Annotated[bool, _option("trust_remote_code")] = False,
    as_json: Annotated[bool, Option("Print one JSON object and no table.", name="json")] = False,
) -> int:
    """Show if a model is served, in which layouts, and the memory for weights and KV.

    Only the configuration is read. The first time, layouts are tried on a small copy of the model, in seconds. The exit
    code is 1 if the model is not served.
    """
    if model is None:
        _print_types(as_json=as_json)
        return 0
    from longspan.served_models import inspect  # noqa: PLC0415 - loads torch

    given = EngineArgs(
        model=model,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
    )
    with Console(stderr=True).status("reading the configuration") as status:
        support = inspect(model, given, status.update)
    if as_json:
        print(json.dumps(_as_json(support)))
    elif support.reason is not None:
        print(f"{model}: {support.reason}")
    else:
        _print(support)
    return 0 if support.reason is None else 1


def _as_json(support: Support) -> dict[str, object]:
    """Return the object that `--json` prints: the fields of `Support`, and verdicts as booleans, too."""
    found = asdict(support)
    for layout in found["layouts"]:
        layout["supported"] = layout["reason"] is None
    for machine in found["machines"]:
        for layout in machine["layouts"]:
            layout["fits"] = layout["reason"] is None
    return {"supported": support.reason is None, **found}


def _print(support: Support) -> None:
    """Print tables of weights, KV, layouts, and layouts of this machine."""
    console = Console()
    assert support.weight_bytes is not None and support.num_parameters is not None, "the model is served"
    facts = f"{support.model_type}, {support.dtype}, context of {support.context_length:,} tokens"
    print(f"{support.model} is served ({facts})")
    table = number_table("Weights", *support.weight_bytes)
    table.add_row(*(_gib(num_bytes) for num_bytes in support.weight_bytes.values()))
    table.caption = f"{support.num_parameters:,} parameters"
    console.print(table)
    console.print(_kv_table(support))
    layouts = number_table("Layouts")
    for header in ("parallel", "exchanges", "verdict"):
        layouts.add_column(header, overflow="fold")
    for layout in support.layouts:
        layouts.add_row(layout.parallel, ", ".join(layout.exchanges), layout.reason or "works")
    console.print(layouts)
    for machine in support.machines:
        console.print(_machine_table(machine, support.request_tokens or 0))


def _kv_table(support: Support) -> Table:
    has_windows = any(kind.window for kind in support.layers)
    table = number_table("KV of a request", "tokens", "memory", *(["attended"] if has_windows else []), "")
    for size in support.kv:
        attended = [_gib(size.visible_bytes)] if has_windows else []
        beyond = "" if size.is_within_context else "longer than the context"
        table.add_row(f"{size.tokens:,}", _gib(size.stored_bytes), *attended, beyond)
    kinds = (
        f"{kind.num_layers} layers of {kind.num_kv_heads} KV heads x {kind.head_dim}, {kind.kv_bytes:,} bytes per token"
        + (f", window of {kind.window:,} tokens" if kind.window else "")
        for kind in support.layers
    )
    table.caption = "\n".join(kinds)
    return table


def _machine_table(machine: Machine, num_tokens: int) -> Table:
    """Return the table of layouts for a request of `num_tokens` tokens on the devices of one kind."""
    each = "" if machine.device == "cpu" else " each"
    name = f"{machine.num_devices} cores" if machine.device == "cpu" else f"{machine.num_devices} GPUs"
    title = f"A request of {num_tokens:,} tokens on {name}, {_gib(machine.memory_bytes)} available{each}"
    table = number_table(title)
    for header in ("parallel", "KV tokens", "longest request", "verdict"):
        table.add_column(header, justify="right" if " " in header else "left", overflow="fold")
    for layout in machine.layouts:
        numbers = (layout.kv_tokens, layout.longest_request)
        shown = ("" if number is None else f"{number:,}" for number in numbers)
        table.add_row(layout.parallel, *shown, _verdict(layout))
    return table


def _verdict(layout: MachineLayout) -> str:
    if layout.reason is not None:
        return layout.reason
    flag = layout.kv_cache_memory_bytes
    return "fits" if flag is None else f"fits with --kv-cache-memory-bytes {flag}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.2f} GiB"


def _print_types(*, as_json: bool) -> None:
    """Print the model types that are served by the installed transformers, with their layouts."""
    from transformers import CONFIG_MAPPING, __version__  # noqa: PLC0415 - seconds

    from longspan.served_models import served_types  # noqa: PLC0415 - loads torch

    version, types = served_types()
    types = {kind: layouts for kind, layouts in types.items() if kind in CONFIG_MAPPING}
    if version != __version__:
        note(f"transformers {__version__} is installed, but the types were tried with {version}")
    if as_json:
        print(json.dumps({"transformers": version, "types": types}))
        return
    table = number_table(f"Types of transformers {version} that are served, and layouts that were tried")
    table.add_column("type")
    table.add_column("layouts")
    for kind, layouts in types.items():
        table.add_row(kind, ", ".join(layouts))
    Console().print(table)
    print("Give a model for its own layouts and memory. docs/models.md has the reasons for all other types.")
