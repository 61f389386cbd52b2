"""A policy beside its `plan(view)`: one `PolicySpec` for each, and options given as text (`-o key=value`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from longspan.core.view import ClusterView, Plan, Policy

OptionsT = TypeVar("OptionsT")
PolicyT = TypeVar("PolicyT", bound=Policy)


@dataclass(frozen=True, kw_only=True)
class PolicySpec(Generic[OptionsT, PolicyT]):
    """A policy as people choose it: its name, options and rules.

    Attributes:
        name: users choose the policy by this name.
        options: the dataclass of its options, which checks them.
        make: makes the policy for the instances that prefill, in order of proximity, with its options and the `Facts`
            of model and hardware; `choosing.Facts` is not named here, so that a policy which prices nothing loads no
            cost model.
        capacity: counts the instances whose pools one request can fill.
        check_prompt: raises ValueError for a prompt of a length that the policy cannot place.
        changeable: the options that may change while it serves.
        change: changes such options, and returns all options that are then in force.
        knows_roles: tells whether some instances may only prefill, or only decode.
    """

    name: str
    options: type[OptionsT]
    make: Callable[[tuple[int, ...], OptionsT, Any], PolicyT]
    capacity: Callable[[PolicyT], int]
    check_prompt: Callable[[PolicyT, int], None] | None = None
    changeable: tuple[str, ...] = ()
    change: Callable[[PolicyT, OptionsT, Mapping[str, str]], OptionsT] | None = None
    knows_roles: bool = False

    def chosen(self, instances: tuple[int, ...], options: OptionsT, facts: object) -> ChosenPolicy:
        """Makes the policy."""
        policy = self.make(instances, options, facts)
        return ChosenPolicy(spec=self, options=options, policy=policy, plan=policy.plan)


@dataclass(kw_only=True)
class ChosenPolicy:
    """A policy that serves, beside its spec and the options in force.

    Attributes:
        plan: the policy's own; whoever wants to see its plans puts a function of theirs around it.
    """

    spec: PolicySpec[Any, Any]
    options: Any
    policy: Policy
    plan: Callable[[ClusterView], Plan]

    @property
    def settings(self) -> PolicySettings:
        """Returns the name and the options in force."""
        return PolicySettings(name=self.spec.name, options=asdict(self.options), changeable=self.spec.changeable)

    def update(self, options: Mapping[str, str]) -> None:
        """Changes options between two plans; requests that run stay as they are.

        Raises:
            ValueError: for an option that it lacks or that may not change, see `PolicySettings.check_changes`, or a bad
                value. Nothing has changed then.
        """
        self.settings.check_changes(options)
        if self.spec.change is not None:
            self.options = self.spec.change(self.policy, self.options, options)

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that the policy cannot place as its options say."""
        if self.spec.check_prompt is not None:
            self.spec.check_prompt(self.policy, num_prompt_tokens)

    def capacity_tokens(self, *, num_blocks: int, block_size: int) -> int:
        """Returns the longest request, in tokens, that is sure to fit when it is alone and pools have `num_blocks`."""
        return self.spec.capacity(self.policy) * num_blocks * block_size


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The name of a policy and its options, for people and over the wire.

    Attributes:
        options: all options, as they are in force.
        changeable: the options that may change while it serves.
    """

    name: str
    options: Mapping[str, OptionValue]
    changeable: tuple[str, ...] = ()

    def check_changes(self, names: Iterable[str]) -> None:
        """Checks that options of these names may change while the policy serves.

        Raises:
            SettledError: when it has one of them, but it may not.
            ValueError: when it has no such option.
        """
        others = f"that may change while it serves: {', '.join(self.changeable) or 'none'}"
        for name in names:
            if name not in self.options:
                raise ValueError(f"policy {self.name} has no option {name[:60]!r}; its options {others}")
            if name not in self.changeable:
                raise SettledError(
                    f"option {name} of policy {self.name} cannot change while it serves: start anew with "
                    f"-o {name}=VALUE; options {others}"
                )


OptionValue = str | int | float | bool
"""An option of a policy, as the policy reads it."""


def option_text(value: OptionValue) -> str:
    """Writes an option's value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class SettledError(ValueError):
    """An option that only a new start can change."""


def parse_options(policy: str, kind: type[OptionsT], options: Mapping[str, str]) -> OptionsT:
    """Reads `options` into the dataclass `kind`.

    Raises:
        ValueError: for a key that `kind` lacks or a value of the wrong type; the message lists the valid keys.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every options class is a dataclass
    for key in options:
        if key not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has none, but context and others do"
            raise ValueError(f"policy {policy} has no option {key!r}: {valid}")
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"policy {policy}: {_explained(error, kind, options)}") from error


def _explained(error: msgspec.ValidationError, kind: type, options: Mapping[str, str]) -> str:
    """Says what is wrong with a value, and what would be right where that can be listed."""
    key = str(error).rpartition("$.")[2].rstrip("`")
    if key not in options:
        return str(error)
    wanted = list(_wanted(get_type_hints(kind)[key]))
    one_of = "one of " if len(wanted) > 1 else ""
    return f"option {key} is {one_of}{', '.join(wanted)}, but {options[key]!r} given"


def _wanted(hint: Any) -> Iterator[str]:  # noqa: ANN401 - a type, a union, a literal or what it lists
    """Lists in words what may be given for a type."""
    if isinstance(hint, str):
        yield hint
    elif choices := get_args(hint):
        for choice in choices:
            yield from _wanted(choice)
    else:
        yield from {bool: ("true", "false"), int: ("a whole number",), float: ("a number",)}[hint]
