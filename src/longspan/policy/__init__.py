"""Policies and their baselines, chosen by name. A policy decides the next steps from a read-only view of the cluster.

To add one, write its file with a `PolicySpec`, and give that to `register_policy` or name it in the registry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from longspan.core.exchange import Exchange, exchange_of, of_any_layout
from longspan.core.sparse import SparseSetting
from longspan.core.view import Admitted, ClusterView, Plan, Policy
from longspan.errors import ParameterError

if TYPE_CHECKING:
    from longspan.core.cluster import Cluster
    from longspan.policy.choosing import Facts

OptionsT = TypeVar("OptionsT")
PolicyT = TypeVar("PolicyT", bound=Policy)
OptionValue = str | int | float | bool
"""An option of a policy, as the policy reads it."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec(Generic[OptionsT, PolicyT]):
    """A policy as people choose it: its name, options and rules.

    Attributes:
        options: the dataclass of its options, which checks them.
        make: makes the policy for the instances that prefill, in order of proximity, with its options and the `Facts`
            of model and hardware.
        capacity: counts the instances whose pools one request can fill; by default, the policy's attribute says so.
        check_prompt: raises ValueError for a prompt of a length that the policy cannot place.
        whole_prompts: tells whether steps should hold whole prompts where memory allows.
        changeable: the options that may change while it serves.
        change: changes such options, and returns all options that are then in force.
        reads_hosts: tells whether requests that outgrow an instance run there, with what it lacks room for on its host.
        knows_roles: tells whether some instances may only prefill, or only decode.
        shards_decodes: tells whether the KV of a request may lie on several of those that only decode.
        takes_turns: tells whether instances of both roles take turns on the same devices; `admits`, who gets on which.
        hint: tells users what they might have forgotten to say, if anything.
        sparse: how the prefill of a prompt of so many tokens drops some, in blocks of so many, of which an instance has
            so many; exact if not given.
    """

    name: str
    options: type[OptionsT]
    make: Callable[[tuple[int, ...], OptionsT, Any], PolicyT]
    capacity: Callable[[PolicyT], int] = attrgetter("capacity")
    check_prompt: Callable[[PolicyT, int], None] | None = None
    whole_prompts: Callable[[PolicyT], bool] = lambda _: False
    changeable: tuple[str, ...] = ()
    change: Callable[[PolicyT, OptionsT, Mapping[str, str]], OptionsT] | None = None
    reads_hosts: bool = False
    knows_roles: bool = False
    shards_decodes: bool = False
    takes_turns: bool = False
    admits: Callable[[PolicyT, Cluster], Admitted] | None = None
    hint: Callable[[OptionsT, Any], str | None] | None = None
    sparse: Callable[[PolicyT, int, int, int], SparseSetting | None] | None = None

    def chosen(self, instances: tuple[int, ...], options: OptionsT, facts: object) -> ChosenPolicy:
        policy = self.make(instances, options, facts)
        hint = None if self.hint is None else self.hint(options, facts)
        return ChosenPolicy(spec=self, options=options, policy=policy, plan=policy.plan, hint=hint)


@dataclass(kw_only=True)
class ChosenPolicy:
    """A policy that serves, beside its spec and the options in force.

    Attributes:
        plan: the policy's own; whoever wants to see its plans puts a function of theirs around it.
        hint: what users might have forgotten to say.
    """

    spec: PolicySpec[Any, Any]
    options: Any
    policy: Policy
    plan: Callable[[ClusterView], Plan]
    hint: str | None = None

    @property
    def exchange(self) -> Exchange | None:
        """Returns the exchange of prompts that an option names; None when the policy chooses, or has no such option."""
        kind = getattr(self.options, "exchange", "auto")
        return None if kind == "auto" else exchange_of(kind)

    @property
    def settings(self) -> PolicySettings:
        return PolicySettings(name=self.spec.name, options=asdict(self.options), changeable=self.spec.changeable)

    def admits(self, cluster: Cluster) -> Admitted:
        """Asks the policy; most admit all."""
        return "all" if self.spec.admits is None else self.spec.admits(self.policy, cluster)

    @property
    def reads_hosts(self) -> bool:
        return self.spec.reads_hosts

    @property
    def shards_decodes(self) -> bool:
        return self.spec.shards_decodes

    def update(self, options: Mapping[str, str]) -> None:
        """Changes options between two plans; requests that run stay as they are."""
        self.settings.check_changes(options)
        if self.spec.change is not None:
            self.options = self.spec.change(self.policy, self.options, options)

    def sparse(self, num_prompt_tokens: int, block_size: int, num_blocks: int) -> SparseSetting | None:
        if self.spec.sparse is None:
            return None
        return self.spec.sparse(self.policy, num_prompt_tokens, block_size, num_blocks)

    def check(self, num_prompt_tokens: int) -> None:
        if self.spec.check_prompt is not None:
            self.spec.check_prompt(self.policy, num_prompt_tokens)

    def capacity_tokens(self, *, num_blocks: int, block_size: int) -> int:
        return self.spec.capacity(self.policy) * num_blocks * block_size


class SettledError(ValueError):
    """The option cannot change while the policy serves."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The name of a policy and its options in force; `changeable` ones may change while it serves."""

    name: str
    options: Mapping[str, OptionValue]
    changeable: tuple[str, ...] = ()

    def check_changes(self, names: Iterable[str]) -> None:
        """Raises ValueError unless these options exist and may change, SettledError if one may not."""
        others = f"that may change while it serves: {', '.join(self.changeable) or 'none'}"
        for name in names:
            if name not in self.options:
                raise ValueError(f"policy {self.name} has no option {name[:60]!r}; its options {others}")
            if name not in self.changeable:
                raise SettledError(
                    f"option {name} of policy {self.name} cannot change while it serves: start anew with "
                    f"policy option {name}=VALUE; options {others}"
                )


_REGISTRY: dict[str, str | PolicySpec[Any, Any]] = {
    "auto": "auto:AUTO",
    "chunked": "chunked:CHUNKED",
    "context": "context:CONTEXT",
    "runahead": "runahead:RUNAHEAD",
    "tetris": "tetris:TETRIS",
    "fixed-sp": "tetris:FIXED_SP",
    "loongserve": "loongserve:LOONGSERVE",
    "loongserve-disagg": "loongserve:LOONGSERVE_DISAGG",
    "csps": "csps:CSPS",
    "seesaw": "seesaw:SEESAW",
    "prefill-first": "batch_order:PREFILL_FIRST",
    "decode-first": "batch_order:DECODE_FIRST",
}
"""A spec, or the module and name of one that loads on first use."""


def register_policy(spec: PolicySpec[Any, Any]) -> None:
    _REGISTRY[spec.name] = spec


def policy_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def make_policy(
    name: str, *, num_instances: int, options: Mapping[str, str], facts: Facts | None = None
) -> ChosenPolicy:
    """Makes the policy of that name, which chooses by the `facts` known of model and hardware.

    `auto` is `chunked` on one instance; with options that it lacks it is `context`, or `tetris` where instances have
    roles.

    Raises:
        ValueError: for an unknown name or option, a bad value, or a policy that cannot run on so many instances.
    """
    from longspan.policy.choosing import Facts  # noqa: PLC0415 - importing the registry loads no cost model

    facts = facts or Facts()
    if name == "auto":
        name = "chunked" if num_instances == 1 else _of_several(options, "tetris" if facts.has_roles else "context")
        if name == "chunked" and options:
            raise ValueError(
                f"option {next(iter(options))!r} is of prompts that instances share, but there is 1 instance: set "
                "parallel to 2 or more, or policy to one that has this option"
            )
    spec = spec_of(name)
    if facts.has_roles and not spec.knows_roles:
        able = " or ".join(other for other in _REGISTRY if spec_of(other).knows_roles)
        problem = f"{name} prefills and decodes on the same instances, but they have roles here: choose {able}, or give"
        raise ParameterError("policy", f"{problem} parallel instead of prefill_parallel and decode_parallel", name)
    instances = tuple(sorted(facts.prefill(num_instances), key=facts.location))
    return spec.chosen(instances, parse_options(name, spec.options, options), facts)


def _of_several(options: Mapping[str, str], other: str) -> str:
    known = {field.name for field in fields(spec_of("auto").options)}
    able = {"auto", *(one.kind for one in of_any_layout())}
    return "auto" if known.issuperset(options) and options.get("exchange", "auto") in able else other


def turns_of(policy: str, cluster: Cluster) -> tuple[Cluster, ...]:
    """Returns the clusters that take turns on the devices of one with roles, if a policy has them do so."""
    return () if policy == "auto" or not spec_of(policy).takes_turns else cluster.in_turns()


def spec_of(name: str) -> PolicySpec[Any, Any]:
    if name not in _REGISTRY:
        raise ParameterError("policy", f"{name!r} is unknown: choose from {', '.join(policy_names())}", name)
    found = _REGISTRY[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _REGISTRY[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found


def parse_options(policy: str, kind: type[OptionsT], options: Mapping[str, str]) -> OptionsT:
    """Reads texts into the dataclass `kind`.

    Raises:
        ValueError: for an unknown key or a value of the wrong type.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every options class is a dataclass
    for key in options:
        if key not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has none, but context and others do"
            raise ValueError(f"policy {policy} has no option {key!r}: {valid}")
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(cause := error.__cause__, ParameterError):
            raise ParameterError(cause.parameter, f"{cause.problem} (policy {policy})", cause.value) from cause
        raise ValueError(f"policy {policy}: {_explained(error, kind, options)}") from error


def _explained(error: msgspec.ValidationError, kind: type, options: Mapping[str, str]) -> str:
    key = str(error).rpartition("$.")[2].rstrip("`")
    if key not in options:
        return str(error)
    wanted = list(_wanted(get_type_hints(kind)[key]))
    return f"option {key} is {'one of ' if len(wanted) > 1 else ''}{', '.join(wanted)}, but {options[key]!r} given"


def _wanted(hint: Any) -> Iterator[str]:  # noqa: ANN401 - a type, a union, a literal or what it lists
    if isinstance(hint, str):
        yield hint
    elif choices := get_args(hint):
        for choice in choices:
            yield from _wanted(choice)
    else:
        yield from {bool: ("true", "false"), int: ("a whole number",), float: ("a number",)}.get(hint, ())
