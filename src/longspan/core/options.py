"""Options: fields of a configuration that a command line, a file or the environment may set, and scheduling options.

A field of a dataclass is an option if an `Option` annotates it. It has the field's name, type and default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from longspan.core.checks import check_numbers
from longspan.errors import ParameterError


@dataclass(frozen=True)
class Option:
    """An option on a command line. The flag of a boolean sets it. If it is true by default, a second flag negates it.

    Attributes:
        help: a sentence.
        group: the heading under which options are listed.
        name: the name of its flag. Default: the field's name, without the unit `_s` of a time.
        short: a second flag, of one letter.
        metavar: placeholder of the value in help. Default: its type.
        default: the default in words. Empty to show none, for a secret value.
        minimum: the smallest number that is allowed.
        may_be_infinite: infinity is allowed.
        repeatable: the option may be given several times.
        configures: the option configures an engine or a server, not a single call, and has an environment variable.
        read: parses the text, or the texts of a repeatable option. Its ValueErrors continue the option's name.
    """

    help: str
    group: str = "Options"
    name: str | None = None
    short: str | None = None
    metavar: str | None = None
    default: str | None = None
    minimum: float | None = None
    may_be_infinite: bool = False
    repeatable: bool = False
    configures: bool = False
    read: Callable[[Any], object] | None = None

    def flag(self, field: str) -> str:
        return (self.name or (field if field.endswith("_per_s") else field.removesuffix("_s"))).replace("_", "-")


def options_of(owner: type[Any] | Callable[..., object]) -> dict[str, tuple[Option, Any]]:
    """Return the fields of a dataclass, or the parameters of a function, that are options, with their types."""
    hints = get_type_hints(owner, include_extras=True)
    notes = ((name, get_args(hint)) for name, hint in hints.items() if get_origin(hint) is Annotated)
    return {name: (note, kind) for name, (kind, *rest) in notes for note in rest if isinstance(note, Option)}


def id_list(text: str) -> tuple[int, ...]:
    """Parse token ids, or other whole numbers, separated by commas. Raise ValueError for anything else."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError(f"must be whole numbers with commas between, but {text!r} given") from None


def length_list(text: str) -> tuple[int, ...]:
    """Parse numbers of tokens, separated by commas. Raise ValueError for anything else, and for an empty list."""
    lengths = id_list(text)
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"must be numbers of at least 1 with commas between, such as 1024,4096, but {text!r:.60} given"
        )
    return lengths


def key_values(pairs: Sequence[str]) -> dict[str, str]:
    """Parse texts of the form key=value. Raise ValueError for a text without key or `=`, or a repeated key."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"must be of the form key=value, but {pair!r:.60} given")
        if key in options:
            raise ValueError(f"{key} is given twice, as {options[key]!r} and {value!r}: leave one of them out")
        options[key] = value
    return options


def option_text(value: str | float | bool) -> str:
    """Format the value of an option as `key_values` parses it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def at_least_one(**values: int | None) -> None:
    """Raise a ParameterError for the first value below 1. None means not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ParameterError(name, f"must be at least 1, but {value} given", value)


OptionValue = str | int | float | bool | None
"""The value of an option of a policy. None means that it was not given and has no default."""


class SettledError(ValueError):
    """The option cannot change while the policy serves."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The name and options of a policy, as the API reports them.

    Attributes:
        options: the present values of all options.
        changeable: the options that may change while it serves.
        given: the options that users gave, as texts. All other values are derived for each cluster.
    """

    name: str
    options: Mapping[str, OptionValue]
    changeable: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)

    def check_changes(self, names: Iterable[str]) -> None:
        """Raise ValueError unless these options exist and may change, SettledError if one may not."""
        changeable = f"that may change while it serves: {', '.join(self.changeable) or 'none'}"
        for name in names:
            if name not in self.options:
                raise ValueError(f"policy {self.name} has no option {name[:60]!r}; its options {changeable}")
            if name not in self.changeable:
                raise SettledError(
                    f"option {name} of policy {self.name} cannot change while it serves: restart, and give "
                    f"policy option {name}=VALUE; options {changeable}"
                )


PromptLayout = Literal["auto", "zigzag", "striped", "contiguous"]

_SHARING = ("exchange", "layout", "fractions", "csa", "max_accuracy_loss", "target_ttft", "target_tbt")
_scheduling = partial(Option, group="Scheduling and memory", configures=True)


@dataclass(frozen=True, kw_only=True)
class SchedulingArgs:
    """The options of scheduling and KV memory, for engines and simulations."""

    policy: Annotated[str, _scheduling("The policy that plans the steps.")] = "auto"
    exchange: Annotated[
        str, _scheduling("How queries, keys and values of a shared prompt are sent. auto chooses per step.")
    ] = "auto"
    layout: Annotated[PromptLayout, _scheduling("How a shared prompt is sharded.")] = "auto"
    fractions: Annotated[
        str | None,
        _scheduling(
            "Part of a contiguous layout for each instance.",
            metavar="F,F,...",
            default="set by the policy",
        ),
    ] = None
    csa: Annotated[
        str,
        _scheduling(
            "Sparse attention, by policy csps: off, auto to choose for each prompt, a YAML file of settings, or a "
            "tuned file of longspan tune csa.",
            metavar="off|auto|FILE",
        ),
    ] = "off"
    max_accuracy_loss: Annotated[
        float | None,
        _scheduling(
            "Loss of quality that --csa auto may accept: points of needle score, or per cent of perplexity.",
            minimum=0,
            default="0, and less than 1 counts as none",
        ),
    ] = None
    target_ttft: Annotated[
        float | None,
        _scheduling("Seconds to the first token, within which --csa auto loses as little as it can.", minimum=0.001),
    ] = None
    target_tbt: Annotated[
        float | None,
        _scheduling(
            "Wanted bound for the seconds of steps that prefill and decode, for policies auto and csps.",
            default="a step that is 90 % prefill",
            minimum=0.001,
        ),
    ] = None
    policy_options: Annotated[
        Mapping[str, str] | None,
        _scheduling(
            "An option of the policy. Repeatable.",
            name="policy-option",
            short="o",
            metavar="KEY=VALUE",
            repeatable=True,
            read=key_values,
        ),
    ] = None
    max_model_len: Annotated[
        int | None, _scheduling("Longest prompt plus output, in tokens.", default="limit of model and KV pools")
    ] = None
    block_size: Annotated[int, _scheduling("Tokens per KV block.")] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        _scheduling(
            "Maximum tokens of one step on one instance.",
            default="2048, or the limit by memory where chains have been searched",
        ),
    ] = None
    max_num_seqs: Annotated[int, _scheduling("Maximum running requests of one instance.")] = 128
    num_gpu_blocks_override: Annotated[
        int | None, _scheduling("KV blocks of each instance, for any size of memory.", default="limit by memory")
    ] = None
    host_kv_gib: Annotated[float, _scheduling("GiB of memory on each host for KV in addition to devices.")] = 0.0
    disk_kv_gib: Annotated[
        float, _scheduling("GiB on the disk of each host for KV that later runs can load. Needs --host-kv-gib.")
    ] = 0.0
    enable_prefix_caching: Annotated[bool, _scheduling("Reuse the KV of prompts that begin alike.")] = True
    async_scheduling: Annotated[bool, _scheduling("Plan and send a step while the last one runs.")] = True

    def __post_init__(self) -> None:
        check_numbers(self)
        at_least_one(
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
        )
        if self.target_ttft is not None and self.max_accuracy_loss is not None:
            problem = f"and `max_accuracy_loss` {self.max_accuracy_loss:g} exclude each other: give one of them"
            raise ParameterError("target_ttft", problem, self.target_ttft)

    def all_policy_options(self) -> dict[str, str]:
        """Return all options of the policy, including `sharing`. Raise ParameterError for a repeated option."""
        options = dict(self.policy_options or {})
        for name, value in self.sharing.items():
            if name in options:
                problem = f"{value} and policy option {name}={options[name]} are given: give one of them"
                raise ParameterError(name, problem, value)
            options[name] = option_text(value)
        return options

    @property
    def sharing(self) -> dict[str, str | float]:
        """The policy options that are also scheduling options, if they differ from their defaults."""
        defaults = {field.name: field.default for field in fields(SchedulingArgs)}
        return {name: value for name in _SHARING if (value := getattr(self, name)) != defaults[name]}
