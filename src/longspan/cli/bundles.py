"""Options that several verbs share: dataclasses whose fields become options of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

ReturnT = TypeVar("ReturnT")


def bundled(verb: Callable[..., ReturnT]) -> Callable[..., ReturnT]:
    """A function for Typer: each parameter of `verb` that is a dataclass is replaced by the fields of that dataclass.

    The fields are annotated as parameters of a Typer function are. Their defaults come from the parameter's default,
    an instance, so that two verbs can share options and differ in what they take for granted.
    """
    hints = get_type_hints(verb, include_extras=True)
    bundles: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if is_dataclass(hints[name]):
            bundles[name] = hints[name]
            parameters += _options(hints[name], parameter.default)
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

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
            annotation=hints[field.name],
            default=getattr(defaults, field.name),
        )
