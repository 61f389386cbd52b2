"""Flags: each field of a dataclass that an `Option` annotates is a flag of the verbs that take the dataclass.

Their values may also come from environment variables and a file.
"""

from __future__ import annotations

import errno
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
import yaml

import longspan
from longspan.core.options import Option, option_of, options_of
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.errors import ParameterError, named
from longspan.runtime.executor.forkserver import start_server

if TYPE_CHECKING:
    from longspan.args import EngineArgs
    from longspan.llm import LLM

ReturnT = TypeVar("ReturnT")
STDIN = "-"
ModelArgument = Annotated[str, Option("An alias (smollm2-135m), a local folder, or a Hugging Face hub id.")]
NameArgument = Annotated[str, Option("A name such as llama-3-8b, a folder with a config.json, or a hub id.")]
_form = partial(Option, group="Structured outputs: give one")


def start(model: str, engine: EngineArgs, *, seed: int | None) -> LLM:
    """Starts the workers of a model. They import beside us.

    Raises:
        ValueError: for options that are wrong whatever the model is, before anything is imported for it.
    """
    engine.resolve()
    start_server()
    return longspan.LLM(**{**vars(engine), "model": model, "seed": seed or 0})


# ---------------------------------------------------------------- flags from dataclasses


def verb(*, environment: bool = False) -> Callable[[Callable[..., ReturnT]], Callable[..., ReturnT]]:
    """Makes a function for Typer: each parameter that is a dataclass is replaced by those of its fields with an Option.

    The parameter's default, an instance, has the defaults, so that two verbs can share options and differ in what they
    take for granted. A short flag belongs to the first option that has it.

    With `environment`, `max_model_len` can also be given as the environment variable `LONGSPAN_MAX_MODEL_LEN`.
    """
    return partial(_flat, environment=environment)


@dataclass(frozen=True, kw_only=True)
class _Flag:
    """Turns an option into a parameter for Typer."""

    field: str
    option: Option
    kind: Any
    default: object
    positional: bool = False

    @property
    def name(self) -> str:
        return self.option.flag(self.field)

    @property
    def shown(self) -> str:
        return self.name.upper() if self.positional else f"--{self.name}"

    def parameter(self, *, environment: bool) -> inspect.Parameter:
        option, kind, default = self.option, self.kind, self.default
        if option.read is not None:
            kind = list[str] if option.repeatable else str
            if default is not inspect.Parameter.empty:
                kind, default = kind | None, str(default) if isinstance(default, int) else None
        words: dict[str, Any] = {
            "help": option.help.replace("[", "\\["),
            "metavar": option.metavar,
            "show_default": True if option.default is None else option.default or False,
            "min": option.minimum,
            "envvar": f"LONGSPAN_{self._python_name.upper()}" if environment else None,
        }
        note: Any
        if self.positional:
            note = typer.Argument(**words)
        else:
            flag = f"{self.shown}/--no-{self.name}" if kind is bool and default else self.shown
            short = () if option.short is None else (f"-{option.short}",)
            note = typer.Option(flag, *short, rich_help_panel=option.group or None, **words)
        side = inspect.Parameter.POSITIONAL_OR_KEYWORD if self.positional else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self._python_name, side, default=default, annotation=Annotated[kind, note])

    @property
    def _python_name(self) -> str:
        return self.name.replace("-", "_")

    def taken_from(self, values: Mapping[str, Any]) -> object:
        """Returns the option's value among those that Typer has read."""
        value = values[self._python_name]
        if self.option.read is None:
            return value
        if value is None or value == []:
            return self.default
        try:
            return self.option.read(value)
        except ParameterError:
            raise
        except ValueError as error:
            raise ParameterError(self.field, str(error), value) from error


def _flat(function: Callable[..., ReturnT], *, environment: bool) -> Callable[..., ReturnT]:
    parameters, hints = inspect.signature(function).parameters, get_type_hints(function, include_extras=True)
    bundles = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    flags: dict[str, _Flag] = {}
    others: list[inspect.Parameter] = []  # annotated for Typer already
    for name, parameter in parameters.items():
        if name in bundles:
            found = [
                _Flag(field=field, option=option, kind=kind, default=getattr(parameter.default, field))
                for field, option, kind in options_of(bundles[name])
            ]
        elif (option := option_of(hints[name])) is not None:
            positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            kind, default = get_args(hints[name])[0], parameter.default
            found = [_Flag(field=name, option=option, kind=kind, default=default, positional=positional)]
        else:
            found = []
            others.append(parameter.replace(annotation=hints[name]))
        for flag in found:
            if flag.field in flags:
                raise ValueError(f"two options are called {flag.field}")
            taken = flag.option.short in {other.option.short for other in flags.values()}
            flags[flag.field] = replace(flag, option=replace(flag.option, short=None)) if taken else flag

    @wraps(function)
    def flat(**values: Any) -> ReturnT:  # noqa: ANN401  # whatever the options hold
        try:
            taken = {name: flag.taken_from(values) for name, flag in flags.items()}
            given = {name: taken[name] if name in taken else values[name] for name in parameters if name not in bundles}
            for name, kind in bundles.items():
                given[name] = kind(**{field.name: taken[field.name] for field in fields(kind) if field.name in taken})
            return function(**given)
        except ParameterError as error:
            if error.parameter not in flags:
                raise
            raise ValueError(named(flags[error.parameter].shown, error.problem)) from error

    shown = [flag.parameter(environment=environment) for flag in flags.values()]
    in_order = sorted([*others, *shown], key=lambda one: one.kind)
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in in_order}
    flat.__signature__ = inspect.Signature(in_order)  # type: ignore[attr-defined]  # read by inspect, so by Typer
    return flat


# ---------------------------------------------------------------- values from a file


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Takes defaults from a YAML file that maps flags (with - or _) to values; for the callback of an eager option.

    Raises:
        BadParameter: when the file cannot be read, is no mapping, or has a key that is no flag. Values are not
            repeated in it, since some are secret.
    """
    if path is None:
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        where = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        raise typer.BadParameter(f"{path}{where} is not YAML: {getattr(error, 'problem', None)}") from None
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} must map flags to values, such as max-model-len: 4096")
    options = {name.lstrip("-"): option for option in context.command.params for name in option.opts}
    options |= {name.replace("-", "_"): option for name, option in options.items()}
    defaults: dict[str, object] = {}
    for key, value in values.items():
        option = options.get(key)
        if option is None or option.name == "config":
            raise typer.BadParameter(f"{path} has {key!r}, which is no flag of longspan {context.command.name}")
        if value is not None:
            defaults[option.name] = _texts(f"{path}: {key}", value, repeatable=option.multiple)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _texts(where: str, value: object, *, repeatable: bool) -> str | list[str]:
    """Writes a value of a YAML file as the command line would; a mapping stands for texts of the form key=value."""
    if repeatable and isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    items = value if repeatable and isinstance(value, list) else [value]
    if any(isinstance(item, list | dict) for item in items):
        raise typer.BadParameter(f"{where} must be {'texts or numbers' if repeatable else 'one text or number'}")
    texts = [str(item) for item in items]
    return texts if repeatable else texts[0]


# ---------------------------------------------------------------- how tokens are chosen

SAMPLING = SamplingParams(temperature=0.0, max_tokens=128, seed=0)
"""The command line takes these values for granted, unlike Python and the server."""


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """Describes the form of an output: the fields of `StructuredOutputsParams`, which may be in files."""

    json_schema: Annotated[
        str | None, _form("The output is JSON that this schema describes.", metavar="FILE_OR_TEXT")
    ] = None
    regex: Annotated[str | None, _form("The whole output matches this regular expression.")] = None
    choice: Annotated[list[str] | None, _form("A text that the output may be; repeatable.")] = None
    grammar: Annotated[
        str | None, _form("The output follows this grammar, in Lark's notation.", metavar="FILE_OR_TEXT")
    ] = None

    def params(self) -> StructuredOutputsParams | None:
        """Returns the parameter of a request.

        Raises:
            ValueError: for a file that cannot be read, or several forms.
        """
        schema, regex, choice, grammar = self.json_schema, self.regex, self.choice, self.grammar
        if schema is None and regex is None and not choice and grammar is None:
            return None
        return StructuredOutputsParams(
            json=None if schema is None else _schema(schema),
            regex=regex,
            choice=choice or None,
            grammar=None if grammar is None else _file_or_text("grammar", grammar),
        )


def _schema(value: str) -> str:
    text = _file_or_text("json_schema", value)
    if not text.lstrip().startswith("{"):
        problem = f"{value!r:.60} is neither a schema (an object such as {{...}}) nor a file with one"
        raise ParameterError("json_schema", problem, value)
    return text


def _file_or_text(name: str, value: str) -> str:
    """Returns the text of the file of this name, if there is one, or else the value itself."""
    try:
        return Path(value).read_text(encoding="utf-8") if Path(value).is_file() else value
    except UnicodeDecodeError as error:
        raise ParameterError(name, f": file {value!r} is not UTF-8: {error}", value) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # so it is a text
            return value
        raise ParameterError(name, f": file {value!r} cannot be read: {error.strerror}", value) from None


def read_text(path: Path, what: str) -> str:
    """Returns the text of a file or, for the path `-`, of stdin without the line end that closes it.

    Raises:
        ValueError: when it cannot be read or is not UTF-8; the message calls it `what`.
    """
    try:
        if str(path) == STDIN:
            return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(path)!r} is not UTF-8: {error}") from None
