"""This registry finds policies by their names. `make_policy` resolves the choice of a user for a cluster.

To add one, write a subclass of `core.policy.Policy`. Name it in the registry here, or pass it to `register_policy`.
Another package can name it as an entry point of the group `longspan.policies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING

from longspan.core.exchange import BUILT_IN, Exchange, of_any_layout
from longspan.core.extensions import POLICIES, extensions
from longspan.core.option_values import parse_options, unknown_option
from longspan.core.policy import Policy
from longspan.errors import ParameterError, PluginError

if TYPE_CHECKING:
    from longspan.core.cluster import Cluster
    from longspan.core.extensions import Extension
    from longspan.policy.facts import Facts

_REGISTRY: dict[str, str | type[Policy]] = {
    "auto": "auto:Auto",
    "chunked": "chunked:Chunked",
    "context": "context:Context",
    "runahead": "runahead:Runahead",
    "tetris": "tetris:Tetris",
    "fixed-sp": "baselines.fixed_sp:FixedSp",
    "loongserve": "baselines.loongserve:LoongServe",
    "loongserve-disagg": "baselines.loongserve:LoongServeDisagg",
    "csps": "csps.policy:Csps",
    "seesaw": "seesaw:Seesaw",
    "prefill-first": "baselines.phase_order:PrefillFirst",
    "decode-first": "baselines.phase_order:DecodeFirst",
}
"""A policy, or the module and name of a class that is imported on first use."""
_BUILT_IN = frozenset(_REGISTRY)
_SPARSE = frozenset({"csa", "max_accuracy_loss", "target_ttft"})
"""Options of sparse attention, which `csps` alone has."""
_ALONE = _SPARSE | {"target_tbt"}
"""Options of `auto` that count on one instance, too. Other options are for prompts that several instances share."""


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """A policy as the user chose it. It is resolved by `make_policy`, again for every cluster.

    Attributes:
        given: the options that the user gave, as texts.
    """

    name: str = "auto"
    given: Mapping[str, str] = field(default_factory=dict)

    def changed(self, changes: Mapping[str, str | None]) -> PolicyChoice:
        """Return the choice with other options. None removes an option."""
        given = {name: text for name, text in {**self.given, **changes}.items() if text is not None}
        return replace(self, given=given)

    def updated(self, policy: Policy) -> PolicyChoice:
        """Return the choice with the options of the policy, which was made from it and may have changed since."""
        return replace(self, given=policy.given)


def register_policy(policy: type[Policy]) -> None:
    """Make a policy known by its name."""
    _REGISTRY[policy.name] = policy


def policy_names() -> tuple[str, ...]:
    """Return all names. Packages that are not imported yet are included."""
    return tuple(dict.fromkeys((*_REGISTRY, *extensions(POLICIES, _BUILT_IN))))


def make_policy(
    name: str,
    *,
    num_instances: int,
    options: Mapping[str, str],
    facts: Facts | None = None,
    is_resized: bool = False,
) -> Policy:
    """Make the policy of that name, with the known `facts` of model and hardware.

    `auto` is `csps` with options of sparse attention, `context` with further options that `auto` lacks, and `tetris`
    with these if instances have roles. Without options it is `chunked` on one instance.

    Args:
        is_resized: the cluster has changed since the options were given. Options for prompts that several instances
            share are then valid on one instance, too.

    Raises:
        ValueError: for an unknown name or option, a bad value, or a policy that cannot run on this number of instances.
    """
    from longspan.policy.facts import Facts  # noqa: PLC0415 - importing the registry loads no cost model

    facts = facts or Facts()
    if name == "auto":
        name = _resolved(num_instances, options, has_roles=facts.has_roles)
        shared = next((option for option in options if option not in _ALONE), None)
        if num_instances == 1 and shared is not None and not is_resized:
            problem = "is for prompts that instances share, but there is 1 instance: set `parallel` to 2 or more"
            raise ParameterError(shared, problem, str(options[shared])[:60])
    kind = policy_class(name)
    if facts.has_roles and not kind.knows_roles:
        able = " or ".join(other for other in _REGISTRY if policy_class(other).knows_roles)
        problem = f"{name} prefills and decodes on the same instances, but they have roles here: choose {able}, or give"
        raise ParameterError(
            "policy", f"{problem} `parallel` instead of `prefill_parallel` and `decode_parallel`", name
        )
    check_sparse(name, options)
    instances = tuple(sorted(facts.prefill(num_instances), key=facts.location))
    policy = kind(instances, parse_options(name, kind.Options, options), facts)
    policy.given = dict(options)
    return policy


def _resolved(num_instances: int, options: Mapping[str, str], *, has_roles: bool) -> str:
    """Return the name of the policy that `auto` resolves to."""
    if not options:
        return "chunked" if num_instances == 1 else "auto"
    known, wide = _option_names("auto"), "tetris" if has_roles else "context"
    exchange = options.get("exchange", "auto")
    if exchange not in BUILT_IN | {"auto"}:
        with suppress(KeyError):  # an unknown name is refused with the other options
            _ = Exchange(exchange).traits  # loads a plug-in
    able = {"auto", *(exchange.kind for exchange in of_any_layout())}
    if known.keys() >= options.keys() and exchange in able:
        return "auto"
    resolved = wide if _SPARSE.isdisjoint(options) else "csps"
    names = {**known, **_option_names(wide), **(dict.fromkeys(sorted(_SPARSE)) if has_roles else _option_names("csps"))}
    needs = [option for option in options if option not in known] or ["exchange"]
    for key in sorted(options.keys() - _option_names(resolved).keys(), key=lambda option: (option in known, option)):
        if key not in known:
            where = " where instances have roles" if has_roles else ""
            raise unknown_option("auto", key, names, where)
        problem = f"and {needs[0]} exclude each other: {needs[0]} needs policy {resolved}, which has no {key}"
        raise ParameterError(key, f"{problem}; leave one of them out", str(options[key])[:60])
    return resolved


def _option_names(name: str) -> dict[str, None]:
    return dict.fromkeys(option.name for option in fields(policy_class(name).Options))


def check_sparse(name: str, options: Mapping[str, str]) -> None:
    """Raise ParameterError if options of sparse attention are given to a policy that lacks them."""
    if name not in {"auto", "csps"} and (given := sorted(_SPARSE & options.keys() - _option_names(name).keys())):
        problem = f"is for policy csps, but policy {name} given: leave `policy` out, or choose csps"
        raise ParameterError(given[0], problem, str(options[given[0]])[:60])


def phases_of(policy: str, cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the clusters that alternately use the devices of a cluster with roles, for a policy that takes phases.

    Return an empty tuple for other policies.
    """
    if policy == "auto" or not policy_class(policy).takes_phases:
        return ()
    from longspan.core.fleets import in_phases  # noqa: PLC0415 - most policies have one cluster

    return in_phases(cluster)


def policy_class(name: str) -> type[Policy]:
    """Return the policy of that name. Raise ParameterError for an unknown name."""
    if name not in _REGISTRY:
        added = extensions(POLICIES, _BUILT_IN)
        if name not in added:
            from longspan.names import choices  # noqa: PLC0415 - an error

            raise ParameterError("policy", f"{name!r} is unknown: {choices(name, policy_names())}", name)
        _REGISTRY[name] = _added(name, added[name])
    policy = _REGISTRY[name]
    if isinstance(policy, str):
        module, _, attribute = policy.partition(":")
        policy = _REGISTRY[name] = getattr(import_module(f"longspan.policy.{module}"), attribute)
    return policy


def _added(name: str, extension: Extension) -> type[Policy]:
    """Import a policy of another package."""
    policy = extension.load()
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise PluginError(f"{extension.origin} is no subclass of longspan.core.policy.Policy: name one")
    if policy.name != name:
        raise PluginError(f"{extension.origin} is a policy that is named {policy.name!r}: give both the same name")
    return policy
