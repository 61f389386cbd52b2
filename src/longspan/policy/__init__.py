"""Policies: one file each, chosen by name. A policy decides the next steps from a read-only view of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from longspan.core.protocols import EnginePolicy
from longspan.policy import loongserve, runahead
from longspan.policy.choosing import Facts
from longspan.policy.chunked import Chunked
from longspan.policy.context import Context
from longspan.policy.tetris import policy as tetris

_POLICIES: dict[str, Callable[[int, Mapping[str, str], Facts], EnginePolicy]] = {
    "chunked": Chunked.create,
    "context": Context.create,
    "runahead": runahead.create,
    "tetris": tetris.create_tetris,
    "fixed-sp": tetris.create_fixed,
    "loongserve": loongserve.create_unified,
    "loongserve-disagg": loongserve.create_disaggregated,
}

_WITH_ROLES = ("tetris", "fixed-sp", "loongserve-disagg")
"""Those that know of instances which only prefill, or only decode."""


def make_policy(
    name: str, *, num_instances: int, options: Mapping[str, str], facts: Facts | None = None
) -> EnginePolicy:
    """The policy of that name; `auto` is `chunked` on one instance and `context` on several, or `tetris` with roles.

    It chooses by the `facts` known of model and hardware.

    Raises:
        ValueError: for an unknown name or option, a bad value, or a policy that cannot run on so many instances.
    """
    if name == "auto" and facts is not None and facts.has_roles:
        name = "tetris"
    if name == "auto":
        name = "chunked" if num_instances == 1 else "context"
        if num_instances == 1 and options:
            raise ValueError(
                f"option {next(iter(options))!r} is of prompts that instances share, but there is 1 instance: give "
                "--parallel 2 or more, or a --policy that has this option"
            )
    if name not in _POLICIES:
        raise ValueError(f"unknown policy {name!r}: choose from auto, {', '.join(_POLICIES)}")
    if facts is not None and facts.has_roles and name not in _WITH_ROLES:
        raise ValueError(
            f"policy {name} prefills and decodes on the same instances, but they have roles here: choose "
            f"{' or '.join(_WITH_ROLES)}, or give --parallel instead of --prefill-parallel and --decode-parallel"
        )
    return _POLICIES[name](num_instances, options, facts or Facts())
