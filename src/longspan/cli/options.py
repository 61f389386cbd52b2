"""Flags: each field of a dataclass that an `Option` annotates is a flag of the verbs that take the dataclass.

Verbs that start an engine also read flags from a file. Options that configure the engine or the server are also read
from environment variables.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, cast, get_args

from cyclopts import App, ArgumentCollection, Group, Parameter, Token
from cyclopts.validators import Number

import longspan
from longspan import logs
from longspan.args import EngineArgs
from longspan.cli.signals import finishing, unwinding
from longspan.core.checks import check_number
from longspan.core.exchange_plugins import exchange_names
from longspan.core.options import Option, options_of
from longspan.errors import ParameterError, named
from longspan.file_errors import unread
from longspan.limits import read_bytes
from longspan.names import renamed
from longspan.policy.registry import policy_names
from longspan.runtime.executor.forkserver import start_server

if TYPE_CHECKING:
    from longspan.llm import LLM

_log = logging.getLogger("longspan")
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
ReturnT = TypeVar("ReturnT")
ModelArgument = Annotated[
    str, Option("An alias (smollm2-135m), a local folder, a .gguf file, or a Hugging Face hub id.", configures=True)
]
NameArgument = Annotated[str, Option("A name such as llama-3-8b, a folder with a config.json, or a hub id.")]


@contextmanager
def start(model: str, engine: EngineArgs, *, seed: int | None) -> Iterator[LLM]:
    """Start the workers of a model, and stop them at the end or at a signal. Workers import concurrently with this."""
    engine.resolve()
    start_server()
    kind = longspan.LLM  # loads its module
    gc.freeze()  # imported objects stay: collecting them at the end of the process takes 0.5 s
    with finishing(), ExitStack() as stack, unwinding():
        llm = stack.enter_context(kind(**vars(replace(engine, model=model, seed=seed or 0))))
        yield llm


# ---------------------------------------------------------------- flags from dataclasses


_CHOICES: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "exchange": lambda: ("auto", *exchange_names()),
    "policy": policy_names,
}
"""Values of options that are names of a registry, by the option's field."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """The log of a verb that starts an engine."""

    log_level: Annotated[
        logs.Level,
        Option("Lowest level of the log on stderr. At info it shows the facts of the engine.", configures=True),
    ] = "info"
    log_format: Annotated[logs.Format, Option("Lines of the log: text, or one JSON object each.", configures=True)] = (
        "text"
    )

    def apply(self) -> None:
        logs.configure(self.log_level, self.log_format)


_LOG = LogSettings()


@dataclass(frozen=True, kw_only=True)
class _Flag:
    """Turns an option into a parameter for Cyclopts."""

    field: str
    option: Option
    kind: Any
    default: object
    positional: bool = False

    @property
    def name(self) -> str:
        return self.option.flag(self.field) if self.positional else f"--{self.option.flag(self.field)}"

    def parameter(self, group: Group, choices: Sequence[str], *, configurable: bool) -> inspect.Parameter:
        option, kind, default = self.option, cast(Any, Literal)[*choices] if choices else self.kind, self.default
        is_shown = bool(default) or (default == 0 and default is not False)
        shown = option.default or False if option.default is not None else is_shown and str(default)
        if option.read is not None:
            kind = list[str] if option.repeatable else str
            if default is not inspect.Parameter.empty:
                kind, default = kind | None, None
        kinds = (kind, *get_args(kind))
        variable = f"LONGSPAN_{option.flag(self.field).replace('-', '_').upper()}"
        note = Parameter(
            name=(self.name,) if option.short is None else (self.name, f"-{option.short}"),
            negative=None if default is True else (),
            help=option.help,
            group=group,
            metavar=option.metavar or self._metavar(choices),
            show_default=shown,
            converter=_whole_number if int in kinds else None,
            validator=() if option.minimum is None else Number(gte=option.minimum),
            env_var=variable if configurable and option.configures else None,
            env_var_split=partial(_texts_in if list[str] in kinds else _one_text, variable),
            allow_leading_hyphen=not self.positional,
        )
        side = inspect.Parameter.POSITIONAL_ONLY if self.positional else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.field, side, default=default, annotation=Annotated[kind, note])

    def _metavar(self, choices: Sequence[str]) -> str | None:
        if choices and self.option.read is not None:  # the option takes several of the choices
            return "|".join(choices)
        return None if self.option.minimum is None else f"X>={self.option.minimum:g}"

    def read(self, value: object) -> object:
        """Return the value of a text or texts, by the option's own parser if it has one."""
        check_number(self.field, value, may_be_infinite=self.option.may_be_infinite)
        if self.option.read is None:
            return value
        try:
            return self.option.read(value)
        except ParameterError:
            raise
        except ValueError as error:
            raise ParameterError(self.field, str(error), value) from error


_CONFIG = _Flag(
    field="config",
    option=Option(
        "A YAML file with flags as keys (max-model-len: 4096). Flags and variables override it.", configures=True
    ),
    kind=Path | None,
    default=None,
)
_COMMON, _MAX_COMMON = "Common options", 10
_COMMON_FIELDS = (
    *("prompt", "prompt_file", "system", "host", "port", "api_keys", "model_names", "task", "lengths", "quick", "keep"),
    *("workload", "rate", "context", "hosts", "gpus_per_host", "parallel", "dtype", "max_model_len", "temperature"),
    *("max_tokens", "as_json", "repeats", "partitions", "num_samples", "data", "log_level", "policy", "host_kv_gib"),
)
"""Fields by rank. The first group in help has arguments, required flags and these fields, `_MAX_COMMON` in total."""


_FORM = "structured_outputs"
"""The parameter whose fields are flags of their own. The message has the flag of its field."""
_JSON = "json_schema"
"""The field that is `json` in `StructuredOutputsParams`."""


class _Verb(Generic[ReturnT]):
    """A verb with one parameter per flag for Cyclopts. A longer registry of choices updates the signature."""

    def __init__(self, function: Callable[..., ReturnT]) -> None:
        self._function, self._flags = function, _flags_of(function)
        update_wrapper(self, function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        self._choices: dict[str, Sequence[str]] | None = None
        self.__annotations__: dict[str, object] = {}  # Cyclopts reads annotations of the signature

    @property
    def __signature__(self) -> inspect.Signature:
        choices: dict[str, Sequence[str]] = {field: _CHOICES[field]() for field in self._flags if field in _CHOICES}
        if choices != self._choices:
            self._choices, self._signature = choices, _signature(self._flags, choices)
        return self._signature

    def __call__(self, *args: object, **texts: object) -> ReturnT:
        given, flags = self.__signature__.bind(*args, **texts).arguments, self._flags
        try:
            values: dict[str, Any] = {field: flags[field].read(value) for field, value in given.items()}
            if "log_level" in flags:
                chosen = {field: values[field] for field in ("log_level", "log_format") if field in values}
                replace(_LOG, **chosen).apply()
            return self._function(**_arguments(self._function, values))
        except ValueError as error:
            raise ValueError(self._with_flags(error, given)) from error

    def _with_flags(self, error: ValueError, given: Mapping[str, object]) -> str:
        """Return the message of an error with flags as the names of parameters.

        A parameter may also be an option of the policy, given by `-o`, or a field of `StructuredOutputsParams`.
        """
        names = {field: flag.name for field, flag in self._flags.items()}
        names |= {"json": names[_JSON]} if _JSON in names else {}
        options = given.get("policy_options")
        texts = options if isinstance(options, list) else []
        names |= {key: f"-o {key}" for key, equals, _ in (text.partition("=") for text in texts) if equals}
        if isinstance(error, ParameterError):
            parameter = error.parameter
            if parameter == _FORM:
                return renamed(error.problem.removeprefix(": "), names)
            return renamed(named(names.get(parameter, parameter), error.problem), names)
        return renamed(str(error), names)


def verb(function: Callable[..., ReturnT]) -> Callable[..., ReturnT]:
    """Make a verb of a function. A parameter whose default is a dataclass becomes one flag per field with an `Option`.

    The default object has the defaults of the flags, so that verbs can share options and differ in their defaults.
    (Cyclopts itself uses the defaults of the class.) A short flag belongs to the first option that has it.

    A verb with `EngineArgs` also reads its flags from the file of `--config`, and its log goes to stderr. It reads
    options that `configures` marks from environment variables: `max_model_len` from `LONGSPAN_MAX_MODEL_LEN`.
    """
    return _Verb(function)


def _flags_of(verb: Callable[..., object]) -> dict[str, _Flag]:
    """Return the flags of a verb's parameters, by field."""
    parameters, own = inspect.signature(verb).parameters, options_of(verb)
    starts_engine = any(isinstance(parameter.default, EngineArgs) for parameter in parameters.values())
    listed = [_CONFIG, *_flags_in(_LOG)] if starts_engine else []
    for name, parameter in parameters.items():
        default = parameter.default
        if is_dataclass(default):
            listed += [] if isinstance(default, LogSettings) else _flags_in(default)
        else:
            option, kind = own[name]
            positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            listed.append(_Flag(field=name, option=option, kind=kind, default=default, positional=positional))
    flags: dict[str, _Flag] = {}
    for flag in listed:
        assert flag.field not in flags, f"two options are called {flag.field}"
        is_taken = flag.option.short in {other.option.short for other in flags.values()}
        flags[flag.field] = replace(flag, option=replace(flag.option, short=None)) if is_taken else flag
    return flags


def _flags_in(default: Any) -> list[_Flag]:  # noqa: ANN401 - any dataclass with options
    """Return the flags of a dataclass, with the defaults of this object."""
    options = options_of(type(default)).items()
    return [
        _Flag(field=field, option=option, kind=kind, default=getattr(default, field))
        for field, (option, kind) in options
    ]


def _signature(flags: Mapping[str, _Flag], choices: Mapping[str, Sequence[str]]) -> inspect.Signature:
    first = [field for field, flag in flags.items() if flag.positional or flag.default is inspect.Parameter.empty]
    common = list(dict.fromkeys([*first, *(field for field in _COMMON_FIELDS if field in flags)]))[:_MAX_COMMON]
    ordered = {field: flags[field] for field in dict.fromkeys([*common, *flags])}
    titles = {field: _COMMON if field in common else flag.option.group for field, flag in ordered.items()}
    groups = {title: Group(title, sort_key=number) for number, title in enumerate(dict.fromkeys(titles.values()))}
    parameters = [
        flag.parameter(groups[titles[field]], choices.get(field, ()), configurable="config" in flags)
        for field, flag in ordered.items()
    ]
    return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _arguments(verb: Callable[..., object], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a verb's function: dataclasses with the values of flags, and single values."""
    arguments = {}
    for name, parameter in inspect.signature(verb).parameters.items():
        if is_dataclass(parameter.default):
            given = {field.name: values[field.name] for field in fields(parameter.default) if field.name in values}
            arguments[name] = replace(cast(Any, parameter.default), **given)
        elif name in values:
            arguments[name] = values[name]
    return arguments


def _whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Parse an int without rounding 1.5, as Cyclopts would."""
    try:
        return int(tokens[-1].value)
    except ValueError:
        raise ValueError(f"must be a whole number, but {tokens[-1].value!r} given") from None


def _texts_in(variable: str, _: object, text: str, **__: object) -> list[str]:
    """Return the texts of a variable for a repeatable option: the whole text, or the items of a JSON list.

    The error does not repeat the text, which may be secret.
    """
    if not text.startswith("["):
        return _one_text(variable, _, text)
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError):
        texts = [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{variable} begins with [, but is not a JSON list of texts")
    return cast(list[str], texts)


def _one_text(variable: str, _: object, text: str, **__: object) -> list[str]:
    """Return the text of a variable in a list, or an empty list for an empty text.

    LONGSPAN_PORT=tcp://10.0.0.1:8000 is ignored. Kubernetes sets it in containers if a Service is named longspan.
    """
    if variable.endswith("_PORT") and _SERVICE_LINK.match(text):
        _log.warning("%s is ignored: Kubernetes has set it to the address of a Service (enableServiceLinks)", variable)
        return []
    return [text] if text else []


# ---------------------------------------------------------------- files


def read_config(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Read missing flags from the YAML file of `--config`, which maps flags (with - or _) to values.

    Raises:
        ValueError: the file cannot be read, is no mapping, or has a key that is no flag. The message does not repeat
            values, which may be secret.
    """
    del app
    flags = {name.lstrip("-"): argument for argument in arguments for name in argument.parameter.name or ()}
    config = flags.pop("config", None)
    if config is None or not config.tokens:
        return
    path = config.tokens[-1].value
    for key, value in _mapping_in(path).items():
        argument = flags.get(str(key).replace("_", "-"))
        if argument is None:
            raise ValueError(f"--config: {path} has {key!r}, which is no flag of longspan {' '.join(commands)}")
        if value is None:
            continue
        _, repeatable = argument.token_count()
        texts = _texts(f"--config: {path}: {key}", value, repeatable=repeatable)
        if not argument.tokens:
            for index, text in enumerate(texts):
                argument.append(Token(keyword=argument.name, value=text, source=path, index=index))


def _mapping_in(path: str) -> dict[Any, object]:
    import yaml  # noqa: PLC0415 - needed with such a file only

    try:
        values = yaml.safe_load(read_bytes(Path(path)).decode("utf-8")) or {}
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--config {unread(path, error)}") from None
    except yaml.YAMLError as error:
        where = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        raise ValueError(f"--config: {path}{where} is not YAML: {getattr(error, 'problem', None)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config: {path} must map flags to values, such as max-model-len: 4096")
    return values


def _texts(where: str, value: object, *, repeatable: bool) -> list[str]:
    """Return a YAML value as texts of the command line. A mapping becomes texts of the form key=value."""
    items = list(value.values()) if repeatable and isinstance(value, dict) else value
    items = items if repeatable and isinstance(items, list) else [items]
    if not all(isinstance(item, str | int | float) for item in items):
        raise ValueError(f"{where} must be {'texts or numbers' if repeatable else 'one text or number'}")
    return (
        [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else [str(item) for item in items]
    )
