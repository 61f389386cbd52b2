"""JSON schemas of requests, reduced to the part that a grammar can express."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

Schema = Mapping[str, Any]
_log = logging.getLogger("longspan")

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")  # llguidance's
)
"""Formats that a grammar enforces. Other formats are annotations."""

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$id", "$anchor", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
_INEXPRESSIBLE = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"uniqueItems": (False,), "minContains": (0,), "then": (), "else": ()}
"""Values of these keywords that constrain nothing."""

_PLACES: Mapping[str, Literal["schema", "list", "map"]] = {
    **dict.fromkeys(("additionalItems", "additionalProperties", "items"), "schema"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "list"),
    **dict.fromkeys(("$defs", "definitions", "patternProperties", "properties"), "map"),
}
"""Keywords whose values hold schemas."""
_VALUES: Mapping[str, type | tuple[type, ...]] = {
    **{key: Mapping if place == "map" else list for key, place in _PLACES.items()},
    "additionalProperties": (bool, Mapping),
    "additionalItems": (bool, Mapping),
    "items": (bool, Mapping, list),
    **dict.fromkeys(("$ref", "format", "pattern", "$schema"), str),
    **dict.fromkeys(("enum", "required"), list),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), (int, float)),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (int, float, bool)),
    "const": object,
    "type": (str, list),
}
"""Keywords that a grammar can express, and the types of their values."""
_MAY_BE_FLAGS = frozenset(("additionalItems", "additionalProperties", "items", "exclusiveMinimum", "exclusiveMaximum"))
_SHAPE = frozenset((*_PLACES, "$ref", "const", "enum", "required", "type")) - {"allOf", "patternProperties"}

_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
"""Values of `$schema` that llguidance knows. The draft decides whether `items` may be a list."""
_INDEX = re.compile(r"[0-9]{1,9}")
"""An index of a list in a JSON pointer."""
_LOOKS = re.compile(r"\(\?(?:<?[=!]|P?[=>])|\\[1-9bBkAzZG]")
"""Parts of a pattern that no automaton has: look-around, back references, boundaries of words."""


class Reduced(NamedTuple):
    """A schema without annotations, and the keywords that no grammar can express, each with its path in the schema."""

    schema: dict[str, Any]
    left_out: tuple[tuple[str, str], ...]

    def log(self) -> Reduced:
        """Log each kind of inexpressible keyword once per process. Return the same value."""
        for keyword, _ in self.left_out:
            log_left_out(keyword)
        return self


@lru_cache(maxsize=256)
def log_left_out(keyword: str) -> None:
    """Log that a keyword constrains no output, once for each keyword in the cache."""
    _log.warning("schemas have %s, which no grammar can express: outputs may violate it", keyword)


def reduced(schema: Schema) -> Reduced:
    """Return the part of a schema that a grammar can express. A weaker schema allows every value of the stronger."""
    left_out = list[tuple[str, str]]()
    small = _reduced(schema, "", left_out)
    for path, holder in _references(small):
        if not _resolves(holder["$ref"], small):
            left_out.append(("$ref", f"{path}.$ref"))
            del holder["$ref"]
    return Reduced(small, tuple(left_out))


def without_annotations(schema: Schema) -> dict[str, Any]:
    """Return a schema without annotations, to which unknown formats belong. Inexpressible keywords stay."""

    def kept(value: Schema, _: str) -> dict[str, Any]:
        plain = _mapped({key: item for key, item in value.items() if key not in _ANNOTATIONS}, kept, "")
        if "format" in plain and not _is_expressible("format", plain["format"]):
            del plain["format"]
        return plain

    return kept(schema, "")


def shape_only(schema: Schema) -> dict[str, Any]:
    """Return the types, properties and choices of a schema, without bounds and patterns of its values."""

    def kept(value: Schema, _: str) -> dict[str, Any]:
        return _mapped({key: item for key, item in value.items() if key in _SHAPE}, kept, "")

    return kept(schema, "")


def closed(parameters: Schema) -> dict[str, Any]:
    """Return the schema of a call's arguments, an object. It allows no undescribed properties.

    The exception are schemas that describe properties elsewhere than in `properties`.
    """
    elsewhere = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    names = parameters.get("properties")
    is_plain = names is not None and not elsewhere & parameters.keys()
    is_plain = is_plain and set(parameters.get("required", ())) <= set(names or ())
    return {**({"additionalProperties": False} if is_plain else {}), **parameters, "type": "object"}


def _reduced(schema: Schema, path: str, left_out: list[tuple[str, str]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _INEXPRESSIBLE:
            if value not in _NEUTRAL.get(key, ()) and not (key in ("then", "else") and "if" not in schema):
                left_out.append((key, f"{path}.{key}"))
        elif key in _VALUES:
            if _is_expressible(key, value):
                kept[key] = value
            elif key not in ("format", "$schema"):
                left_out.append((key, f"{path}.{key}"))
    if "type" in kept:
        kept["type"] = [name for name in _listed(kept["type"]) if isinstance(name, str) and name in _TYPES]
        kept["type"] = kept["type"][0] if len(kept["type"]) == 1 else kept["type"]
    if "required" in kept:
        kept["required"] = [name for name in kept["required"] if isinstance(name, str)]
    if "pattern" in kept:
        kept.pop("format", None)  # the pattern says it, and both together take long
    if isinstance(kept.get("patternProperties"), Mapping):
        for pattern in [pattern for pattern in kept["patternProperties"] if not _is_regular(pattern)]:
            left_out.append(("patternProperties", f"{path}.patternProperties"))
            kept["patternProperties"] = {k: v for k, v in kept["patternProperties"].items() if k != pattern}
            kept.pop("additionalProperties", None)  # it would exclude the properties of the pattern
    return _mapped(kept, lambda value, place: _reduced(value, path + place, left_out), "")


def _is_expressible(key: str, value: object) -> bool:
    if not isinstance(value, _VALUES[key]) or (key not in _MAY_BE_FLAGS and isinstance(value, bool)):
        return key == "const"
    check = _CHECKS.get(key)
    return check is None or check(value)


def _is_regular(pattern: str) -> bool:
    return not _LOOKS.search(pattern.replace("\\\\", ""))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf"), bool),
    "$schema": lambda url: _DRAFTS.fullmatch(url) is not None,
    "format": lambda name: name in FORMATS,
    "multipleOf": lambda number: number > 0,
    "pattern": _is_regular,
    "type": lambda names: any(name in _TYPES for name in _listed(names) if isinstance(name, str)),
}
"""Further conditions on the values of keywords."""


def _mapped(schema: dict[str, Any], change: Callable[[Schema, str], dict[str, Any]], path: str) -> dict[str, Any]:
    """Return a schema whose direct subschemas are replaced by their `change`. It gets the path of each."""

    def one(value: object, place: str) -> object:
        if isinstance(value, Mapping):
            return change(value, place)
        return value if isinstance(value, bool) else {}

    for key in schema.keys() & _PLACES.keys():
        value = schema[key]
        if _PLACES[key] == "map" and isinstance(value, Mapping):
            schema[key] = {name: one(item, f"{path}.{key}.{name}") for name, item in value.items()}
        elif isinstance(value, list):
            schema[key] = [one(item, f"{path}.{key}[{index}]") for index, item in enumerate(value)]
        else:
            schema[key] = one(value, f"{path}.{key}")
    return schema


def _references(schema: object, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas with a reference, and their paths. Constants and choices have no references."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield path, schema
        for key, value in schema.items():
            if _PLACES.get(key) == "map":
                for name, item in value.items():
                    yield from _references(item, f"{path}.{key}.{name}")
            elif key in _PLACES:
                yield from _references(value, f"{path}.{key}")
    elif isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _references(item, f"{path}[{index}]")


def _resolves(reference: str, root: object) -> bool:
    """Return True if a reference is a JSON pointer into `root`."""
    if not (reference == "#" or reference.startswith("#/")):
        return False
    at: object = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and name in at:
            at = at[name]
        elif isinstance(at, list) and _INDEX.fullmatch(name) and int(name) < len(at):
            at = at[int(name)]
        else:
            return False
    return isinstance(at, dict | bool)
