"""Checks of the arguments of dataclasses, by their names, types and literals."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from longspan.errors import ParameterError

KindT = TypeVar("KindT")

_KINDS: Mapping[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Mapping: "a dict",
    type(None): "None",
}
_ACCEPTED = {int: Integral, float: Real}


def check_types(options: Any) -> None:  # noqa: ANN401 - any dataclass
    """Raise a ParameterError for a field whose value has none of its types. Literals are for `check_choice`."""
    for name, kinds in _types_of(cast(Any, type(options))).items():
        value = getattr(options, name)
        if kinds <= _KINDS.keys() and not any(_is_of(value, kind) for kind in kinds):
            words = [words for kind, words in _KINDS.items() if kind in kinds]
            raise ParameterError(name, f"must be {' or '.join(words)}, but {value!r:.60} given", value)


def check_choice(name: str, value: object, hint: Any) -> None:  # noqa: ANN401 - a type
    """Raise a ParameterError for a value that is none of the literals of its type, if it has literals."""
    parts = _parts(hint)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices and value not in choices and not (value is None and type(None) in parts):
        one_of = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ParameterError(name, f"must be {one_of}, but {value!r:.60} given", value)


@cache
def _types_of(kind: Any) -> dict[str, frozenset[Any]]:  # noqa: ANN401 - a dataclass
    """Return the types of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {
        field.name: frozenset(get_origin(part) or part for part in _parts(hints[field.name])) for field in fields(kind)
    }


def _parts(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_of(value: object, kind: type) -> bool:
    """Return True for a value of this type. True and False are no numbers."""
    return isinstance(value, _ACCEPTED.get(kind, kind)) and (kind is bool or not isinstance(value, bool))


def suggesting(kind: type[KindT]) -> type[KindT]:
    """Decorate a dataclass so that the error about an unknown argument names a known one."""
    init: Callable[..., None] = kind.__init__
    known = inspect.signature(kind).parameters

    @wraps(init)
    def checked(self: KindT, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the arguments of the dataclass
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            if kwargs.keys() <= known.keys():
                raise
            from longspan.names import remedy  # noqa: PLC0415 - an error

            raise TypeError(str(error).replace(".__init__", "", 1) + remedy(kwargs, known)) from None

    kind.__init__ = checked  # type: ignore[method-assign, assignment]
    return kind
