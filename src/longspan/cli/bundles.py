"""Options that several verbs share: dataclasses whose fields become options of the command line.

And where else than on the command line their values may come from: environment variables and a file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
import yaml
from typer.models import ParameterInfo

ReturnT = TypeVar("ReturnT")


def bundled(*, environment: bool = False) -> Callable[[Callable[..., ReturnT]], Callable[..., ReturnT]]:
    """Makes a function for Typer: each parameter that is a dataclass is replaced by the fields of that dataclass.

    The fields are annotated as parameters of a Typer function are. Their defaults come from the parameter's default,
    an instance, so that two verbs can share options and differ in what they take for granted. With `environment`, an
    option `max_model_len` can also be given as the environment variable `LONGSPAN_MAX_MODEL_LEN`.
    """
    return partial(_flat, environment=environment)


def _flat(verb: Callable[..., ReturnT], *, environment: bool) -> Callable[..., ReturnT]:
    hints = get_type_hints(verb, include_extras=True)
    bundles: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if is_dataclass(hints[name]):
            bundles[name] = hints[name]
            parameters += _options(hints[name], parameter.default)
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    if environment:
        parameters = [parameter.replace(annotation=_with_variable(parameter)) for parameter in parameters]

    @wraps(verb)
    def flat(**values: Any) -> ReturnT:  # noqa: ANN401  # whatever the options hold
        for name, kind in bundles.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return verb(**values)

    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect, so by Typer
    return flat


def _options(kind: type[Any], defaults: object) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=_annotated(kind, field.name, hints[field.name]),
            default=getattr(defaults, field.name),
        )


def _annotated(kind: type[Any], name: str, hint: object) -> object:
    """A field that is not annotated for Typer is described by the docstring of its class, if that names it."""
    if get_origin(hint) is Annotated:
        return hint
    doc = inspect.getdoc(kind) or ""
    found = re.search(rf"^ +(?:\w+, )*{name}(?:, \w+)*: (.+(?:\n      +.+)*)", doc, re.MULTILINE)
    if found is None:
        return hint
    words = " ".join(found[1].split())
    return Annotated[hint, typer.Option(help=words[0].upper() + words[1:], rich_help_panel=doc.partition("\n")[0])]


def _with_variable(parameter: inspect.Parameter) -> object:
    """The parameter's annotation, its option readable from the environment."""
    kind, *notes = get_args(parameter.annotation)
    [info] = [copy(note) for note in notes if isinstance(note, ParameterInfo)]  # other verbs have the original
    info.envvar = f"LONGSPAN_{parameter.name.upper()}"
    return Annotated[kind, info]


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Takes defaults from a YAML file that maps flags (with - or _) to values; for the callback of an eager option.

    Raises:
        BadParameter: when the file cannot be read, is no mapping, or has a key that is no flag.
    """
    if path is None:
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} must map flags to values, such as max-model-len: 4096")
    known = {name.lstrip("-"): option.name for option in context.command.params for name in option.opts}
    known |= {name.replace("-", "_"): name_of for name, name_of in known.items()}
    defaults: dict[str, object] = {}
    for key, value in values.items():
        if key not in known or known[key] == "config":
            raise typer.BadParameter(f"{path} has {key!r}, which is no flag of longspan {context.command.name}")
        defaults[str(known[key])] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path
