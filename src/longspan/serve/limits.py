"""How much a single request may ask for, so that none can take the server's memory or time from the others."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

_BOUNDS = (
    ("n", "maximum", "max_n"),
    ("logprobs", "maximum", "max_logprobs"),
    ("top_logprobs", "maximum", "max_logprobs"),
    ("prompt_logprobs", "maximum", "max_logprobs"),
    ("prompt", "maxPrompts", "max_prompts"),
    ("messages", "maxItems", "max_messages"),
    ("stop", "maxItems", "max_stop_strings"),
    ("stop", "maxLength", "max_stop_length"),
    ("stop_token_ids", "maxItems", "max_stop_token_ids"),
    ("logit_bias", "maxProperties", "max_logit_bias"),
)
"""A request's field, the keyword of JSON Schema that bounds it, and the limit that says by how much.

`maxPrompts` is `maxItems` for lists of prompts, but not for a list of token ids, which is one prompt.
"""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request may ask for.

    Attributes:
        max_body_bytes: most bytes of a request's body.
        max_elements: most strings (names of fields too), lists and objects of a request's body; numbers do not count.
        max_nesting: how deep lists and objects may lie in one another.
        max_tokenize_length: most characters of a text to tokenize, and most token ids to make a text of.
        max_prompts: most prompts of one completion request.
        max_messages: most messages of one conversation.
        max_n: most choices per prompt.
        max_choices: most choices of one request, of all its prompts together.
        max_logprobs: how many of the most likely tokens may be reported beside a token.
        max_stop_strings: most strings that end an output.
        max_stop_length: most characters of each of them.
        max_stop_token_ids: most tokens that end an output.
        max_logit_bias: most tokens with a bias.

    Raises:
        ValueError: for a limit that is not a positive whole number.
    """

    max_body_bytes: int = 16 * 2**20
    max_elements: int = 100_000
    max_nesting: int = 64
    max_tokenize_length: int = 5_000_000
    max_prompts: int = 256
    max_messages: int = 4096
    max_n: int = 128
    max_choices: int = 1024
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_length: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{_flag(field.name)} must be a whole number of at least 1, but {value!r} given")

    def check(self, field: str, value: object) -> None:
        """Whether the value of a request's field is within the limits.

        Raises:
            ValueError: if it is not; it names the limit.
        """
        for bounded, keyword, limit in _BOUNDS:
            if bounded == field and (size := _size(value, keyword)) > getattr(self, limit):
                what = {"maximum": "is", "maxLength": "has a string of length"}.get(keyword, "has length")
                raise ValueError(f"{field} {what} {size}, but {self._allowed(limit)}: ask for less")

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Whether a request's choices, `n` for each prompt, are not too many together.

        Raises:
            ValueError: if they are.
        """
        if num_prompts * n > self.max_choices:
            asked = f"{n} for each of {num_prompts} prompts are {num_prompts * n} choices"
            raise ValueError(f"{asked}, but {self._allowed('max_choices')}: send several requests")

    def check_tokenize(self, length: int) -> None:
        """Whether so many characters may be tokenized, or so many token ids made a text.

        Raises:
            ValueError: if they are too many.
        """
        if length > self.max_tokenize_length:
            raise ValueError(f"it has length {length}, but {self._allowed('max_tokenize_length')}: send it in parts")

    def check_elements(self, number: int) -> None:
        """Whether a body may have so many strings, lists and objects.

        Raises:
            ValueError: if they are too many.
        """
        if number > self.max_elements:
            raise ValueError(f"the body has too many strings, lists and objects: {self._allowed('max_elements')}")

    def check_nesting(self, value: object) -> None:
        """Whether a value of JSON is not nested too deeply.

        Raises:
            ValueError: if it is.
        """
        level, depth = _children([value]), 0
        while level:
            depth += 1
            if depth > self.max_nesting:
                raise ValueError(f"lists and objects lie too deep in one another: {self._allowed('max_nesting')}")
            level = [child for node in level for child in _children(node)]

    def narrowed(self, schemas: dict[str, Any]) -> dict[str, Any]:
        """A copy of an OpenAPI document, or of a model's JSON schema, that promises no more than these limits allow."""
        narrow = copy.deepcopy(schemas)
        defined = narrow.get("components", {}).get("schemas", {}) or narrow.get("$defs", {})
        for schema in (narrow, *defined.values()):
            if schema.get("title", "").endswith("Request"):
                self._narrow_request(schema["properties"], defined)
        return narrow

    def _narrow_request(self, properties: dict[str, Any], defined: dict[str, Any]) -> None:
        for field, keyword, limit in _BOUNDS:
            if field in properties:
                _narrow(properties[field], keyword, getattr(self, limit), defined)

    def _allowed(self, limit: str) -> str:
        return f"at most {getattr(self, limit)} are allowed here ({_flag(limit)})"


def _flag(limit: str) -> str:
    return "--" + limit.replace("_", "-")


def _size(value: object, keyword: str) -> int:
    """What `keyword` bounds of a value; 0 where it bounds nothing of it."""
    size = 0
    match keyword, value:
        case "maximum", int() if not isinstance(value, bool):
            size = value
        case "maxItems", list():
            size = len(value)
        case "maxProperties", dict():
            size = len(value)
        case "maxPrompts", list() if value and not isinstance(value[0], int):
            size = len(value)
        case "maxLength", str():
            size = len(value)
        case "maxLength", list():
            size = max((_size(item, keyword) for item in value), default=0)
    return size


def _children(node: object) -> list[object]:
    """The lists and objects in a list or an object."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in children if isinstance(child, dict | list)]


_TYPES = {"maximum": "integer", "maxItems": "array", "maxProperties": "object", "maxLength": "string"}


def _narrow(schema: dict[str, Any], keyword: str, most: int, defined: dict[str, Any]) -> None:
    """Writes a bound into all alternatives of a schema that it is a bound of."""
    if "$ref" in schema:
        _narrow(defined[schema["$ref"].rpartition("/")[2]], keyword, most, defined)
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        _narrow(option, keyword, most, defined)
    if keyword == "maxLength" and schema.get("type") == "array":
        _narrow(schema["items"], keyword, most, defined)
    if keyword == "maxPrompts" and schema.get("type") == "array" and schema["items"].get("type") != "integer":
        keyword = "maxItems"
    if "type" in schema and schema["type"] == _TYPES.get(keyword):
        schema[keyword] = min(most, schema.get(keyword, most))
