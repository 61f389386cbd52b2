"""A device that a user describes with the fields of hardware.toml, and its links with the fields of links.toml."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from longspan.cost import catalog
from longspan.cost.catalog import Device
from longspan.cost.links import Link, link_of
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
    inside = _choice([*_links("inside"), *(link for link, entry in links.items() if entry["where"] == "inside")])
    between = _choice([*_links("between"), *(link for link, entry in links.items() if entry["where"] == "between")])
    own = {key: value for key, value in fields.items() if key != "links"}
    _check(own, _DEVICE | {"link": inside, "bus": inside, "network": between}, _DEVICE_OPTIONAL, file)

    def link_by(name: str) -> Link:
        return link_of(name, links[name], catalog.link_table()) if name in links else catalog.link(name)

    return catalog.device_of(name, own, link_by)


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


def _number(low: float, high: float, advice: str) -> Check:
    def check(value: object) -> str | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return advice
        return None if low <= value <= high and math.isfinite(value) else advice

    return check


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else "give a text"


_LEAST = math.ulp(0.0)
_ABOVE_0 = _number(_LEAST, math.inf, "give a finite number above 0")
_FROM_0 = _number(0, math.inf, "give a finite number, 0 if the device does not support it")
_PART = _number(_LEAST, 1, "give a part above 0 and up to 1")
_DEVICE: dict[str, Check] = {
    "generation": _choice(catalog.names("generations")),
    "tflops": _ABOVE_0,
    "tflops_fp32": _ABOVE_0,
    "memory_gbytes_per_s": _ABOVE_0,
    "memory_gib": _ABOVE_0,
    "units": _ABOVE_0,
    "clock_ghz": _ABOVE_0,
}
_DEVICE_OPTIONAL: dict[str, Check] = {
    "source": _text,
    "tflops_fp8": _FROM_0,
    "tflops_fp4": _FROM_0,
    "tflops_int8": _FROM_0,
}
_LINK: dict[str, Check] = {
    "where": _choice(["inside", "between"]),
    "gbytes_per_s": _ABOVE_0,
    "achieved": _PART,
    "collective": _PART,
    "latency_us": _ABOVE_0,
    "collective_us": _ABOVE_0,
}
_LINK_OPTIONAL: dict[str, Check] = {
    "source": _text,
    "per": _choice(["device", "host"]),
    "collectives": _choice([name for name, entry in catalog.link_table().items() if "all_reduce" in entry]),
}
