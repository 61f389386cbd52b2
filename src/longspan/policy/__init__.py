"""The policies, one file each, chosen by name. A policy decides the next steps from a read-only view of the cluster.

To add one, write its file and `register` its spec, or name it in the registry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.policy.spec import ChosenPolicy, PolicySpec, parse_options

if TYPE_CHECKING:
    from longspan.policy.choosing import Facts

_REGISTRY: dict[str, str | PolicySpec[Any, Any]] = {
    "chunked": "chunked:CHUNKED",
    "context": "context:CONTEXT",
    "runahead": "runahead:RUNAHEAD",
    "tetris": "tetris.policy:TETRIS",
    "fixed-sp": "tetris.policy:FIXED_SP",
    "loongserve": "loongserve:LOONGSERVE",
    "loongserve-disagg": "loongserve:LOONGSERVE_DISAGG",
}
"""A spec, or the module and name of one that loads on first use."""


def register(spec: PolicySpec[Any, Any]) -> None:
    """Lets people choose a policy by the name in its spec."""
    _REGISTRY[spec.name] = spec


def make_policy(
    name: str, *, num_instances: int, options: Mapping[str, str], facts: Facts | None = None
) -> ChosenPolicy:
    """Makes the policy of that name, which chooses by the `facts` known of model and hardware.

    `auto` is `chunked` on one instance and `context` on several, or `tetris` where instances have roles.

    Raises:
        ValueError: for an unknown name or option, a bad value, or a policy that cannot run on so many instances.
    """
    from longspan.policy.choosing import Facts  # noqa: PLC0415 - a policy that prices nothing loads no cost model

    facts = facts or Facts()
    if name == "auto" and facts.has_roles:
        name = "tetris"
    if name == "auto":
        name = "chunked" if num_instances == 1 else "context"
        if num_instances == 1 and options:
            raise ValueError(
                f"option {next(iter(options))!r} is of prompts that instances share, but there is 1 instance: give "
                "--parallel 2 or more, or a --policy that has this option"
            )
    if name not in _REGISTRY:
        raise ValueError(f"unknown policy {name!r}: choose from auto, {', '.join(_REGISTRY)}")
    spec = _spec(name)
    if facts.has_roles and not spec.knows_roles:
        able = [other for other in _REGISTRY if _spec(other).knows_roles]
        raise ValueError(
            f"policy {name} prefills and decodes on the same instances, but they have roles here: choose "
            f"{' or '.join(able)}, or give --parallel instead of --prefill-parallel and --decode-parallel"
        )
    instances = tuple(sorted(facts.prefill(num_instances), key=facts.location))
    return spec.chosen(instances, parse_options(name, spec.options, options), facts)


def _spec(name: str) -> PolicySpec[Any, Any]:
    """Returns the spec of a name in the registry."""
    found = _REGISTRY[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _REGISTRY[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found
