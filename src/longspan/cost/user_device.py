"""A device that a user describes with the fields of hardware.toml, and its links with the fields of links.toml."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from longspan.cost import catalog
from longspan.cost.catalog import Device
from longspan.cost.links import link_of
from longspan.errors import ParameterError

Check = Callable[[Any], str | None]
"""Returns the remedy for a wrong value of a field, or None."""


def user_device(name: str, fields: Mapping[str, Any], file: str) -> Device:
    """Make a device from the contents of the user's file. Its `links` are links by name, besides the known ones.

    Raises:
        ParameterError: for a missing, unknown or invalid field, with the file, the field, its value and the remedy.
    """
    links = fields.get("links", {})
    if not isinstance(links, Mapping) or not all(isinstance(entry, Mapping) for entry in links.values()):
        raise ParameterError("hardware", f"{file!r} has links = {links!r}: give a table for each link", file)
    for link, entry in links.items():
        _check(entry, _LINK, _LINK_OPTIONAL, file, f"links.{link}.")
        other, field = ("between", "per") if entry["where"] == "inside" else ("inside", "collectives")
        if field in entry:
            stated = f"links.{link}.{field} = {entry[field]!r}"
            problem = f"{file!r} has {stated}, which only links {other} have: leave it out"
            raise ParameterError("hardware", problem, file)
    inside = _choice([*_links("inside"), *(link for link, entry in links.items() if entry["where"] == "inside")])
    between = _choice([*_links("between"), *(link for link, entry in links.items() if entry["where"] == "between")])
    own = {key: value for key, value in fields.items() if key != "links"}
    _check(own, _DEVICE | {"link": inside, "bus": inside, "network": between}, _DEVICE_OPTIONAL, file)
    table = catalog.link_table()
    return catalog.device_of(name, own, {link: link_of(link, entry, table) for link, entry in links.items()})


def _check(
    fields: Mapping[str, Any], required: Mapping[str, Check], optional: Mapping[str, Check], file: str, prefix: str = ""
) -> None:
    every = {**required, **optional}
    for key, value in fields.items():
        if key not in every:
            from longspan.names import choices  # noqa: PLC0415 - an error

            problem = f"{file!r} has {prefix}{key} = {value!r}, which is no field: {choices(key, every)}"
            raise ParameterError("hardware", problem, file)
        if (advice := every[key](value)) is not None:
            raise ParameterError("hardware", f"{file!r} has {prefix}{key} = {value!r}: {advice}", file)
    for key, check in required.items():
        if key not in fields:
            raise ParameterError("hardware", f"{file!r} has no {prefix}{key}: add it, and {check(None)}", file)


def _links(where: str) -> Iterable[str]:
    return [name for name in catalog.names("links") if catalog.link(name).where == where]


def _choice(known: Iterable[str]) -> Check:
    names = list(known)

    def check(value: object) -> str | None:
        from longspan.names import choices  # noqa: PLC0415 - an error

        return None if value in names else choices(value, names)

    return check


def _number(low: float, high: float, unit: str, *, or_0: bool = False) -> Check:
    """Return the check of a number in a range, which real devices do not leave, and which other units do."""
    zero = ", or 0 if the device does not support it" if or_0 else ""
    advice = f"give a number from {low:,} to {high:,}{unit}{zero}"

    def check(value: object) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and (low <= value <= high or (or_0 and value == 0)) else advice  # type: ignore[operator]

    return check


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else "give a text"


_TFLOPS = 0.01, 100_000, " TFLOP/s"
_PART = _number(0.001, 1, ", a part")
_MICROSECONDS = _number(0.01, 1_000_000, " microseconds")
_DEVICE: dict[str, Check] = {
    "generation": _choice(catalog.names("generations")),
    "tflops": _number(*_TFLOPS),
    "tflops_fp32": _number(*_TFLOPS),
    "memory_gbytes_per_s": _number(0.1, 1_000_000, " GB/s"),
    "memory_gib": _number(0.01, 100_000, " GiB"),
    "units": _number(1, 100_000, ""),
    "clock_ghz": _number(0.01, 100, " GHz"),
}
_DEVICE_OPTIONAL: dict[str, Check] = {
    "source": _text,
    "tflops_fp8": _number(*_TFLOPS, or_0=True),
    "tflops_fp4": _number(*_TFLOPS, or_0=True),
    "tflops_int8": _number(*_TFLOPS, or_0=True),
}
_LINK: dict[str, Check] = {
    "where": _choice(["inside", "between"]),
    "gbytes_per_s": _number(0.01, 100_000, " GB/s"),
    "achieved": _PART,
    "collective": _PART,
    "latency_us": _MICROSECONDS,
    "collective_us": _MICROSECONDS,
}
_LINK_OPTIONAL: dict[str, Check] = {
    "source": _text,
    "per": _choice(["device", "host"]),
    "collectives": _choice([name for name, entry in catalog.link_table().items() if "all_reduce" in entry]),
}
