"""Settings of the API server, and the limits of a single request."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from longspan.core.options import Option

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_METRICS_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ROOT_PATH = re.compile(r"(/[^/?#\s]+)*")
_KEY = re.compile(r"[^\s\x00-\x1f\x7f]+")


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


_limit = partial(Option, group="Limits of what one request may ask for.")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of what one request may ask for.

    Raises:
        ValueError: for a limit that is not a positive whole number.
    """

    max_body_bytes: Annotated[int, _limit("Most bytes of a request's body.")] = 16 * 2**20
    max_elements: Annotated[
        int, _limit("Most strings (names of fields too), lists and objects of a request's body; numbers do not count.")
    ] = 100_000
    max_nesting: Annotated[int, _limit("How deep lists and objects may lie in one another.")] = 64
    max_tokenize_length: Annotated[
        int, _limit("Most characters of a text to tokenize, and most token ids to make a text of.")
    ] = 5_000_000
    max_prompts: Annotated[int, _limit("Most prompts of one completion request.")] = 256
    max_messages: Annotated[int, _limit("Most messages of one conversation.")] = 4096
    max_n: Annotated[int, _limit("Most choices per prompt.")] = 128
    max_choices: Annotated[int, _limit("Most choices of one request, of all its prompts together.")] = 1024
    max_logprobs: Annotated[int, _limit("How many of the most likely tokens may be reported beside a token.")] = 20
    max_stop_strings: Annotated[int, _limit("Most strings that end an output.")] = 16
    max_stop_length: Annotated[int, _limit("Most characters of each of them.")] = 256
    max_stop_token_ids: Annotated[int, _limit("Most tokens that end an output.")] = 128
    max_logit_bias: Annotated[int, _limit("Most tokens with a bias.")] = 1024

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{_flag(limit.name)} must be a whole number of at least 1, but {value!r} given")

    def check(self, limit: str, size: int, problem: str, remedy: str) -> None:
        """Raise a ValueError when a size is above the limit of this name."""
        most = getattr(self, limit)
        if size > most:
            raise ValueError(f"{problem}, but at most {most} are allowed here ({_flag(limit)}): {remedy}")

    def check_field(self, field: str, value: object) -> None:
        """Raise a ValueError when the value of a request's field is above a limit."""
        for bounded, keyword, limit in _BOUNDS:
            if bounded == field:
                what = {"maximum": "is", "maxLength": "has a string of length"}.get(keyword, "has length")
                size = _size(value, keyword)
                self.check(limit, size, f"{field} {what} {size}", "ask for less")

    def narrowed(self, schemas: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of an OpenAPI document, or a JSON schema, that promises no more than these limits allow."""
        narrow = copy.deepcopy(schemas)
        defined = narrow.get("components", {}).get("schemas", {}) or narrow.get("$defs", {})
        for schema in (narrow, *defined.values()):
            if schema.get("title", "").endswith("Request"):
                for name, keyword, limit in _BOUNDS:
                    if name in schema["properties"]:
                        _narrow(schema["properties"][name], keyword, getattr(self, limit), defined)
        return narrow


def _flag(limit: str) -> str:
    return "--" + limit.replace("_", "-")


def _size(value: object, keyword: str) -> int:
    """Return the size that `keyword` bounds; 0 where it bounds nothing of a value."""
    match keyword, value:
        case "maximum", int() if not isinstance(value, bool):
            return value
        case ("maxItems", list() as sized) | ("maxProperties", dict() as sized) | ("maxLength", str() as sized):
            return len(sized)
        case "maxPrompts", list() if value and not isinstance(value[0], int):
            return len(value)
        case "maxLength", list():
            return max(map(len, value), default=0)
    return 0


_TYPES = {"maximum": "integer", "maxItems": "array", "maxProperties": "object", "maxLength": "string"}


def _narrow(schema: dict[str, Any], keyword: str, most: int, defined: dict[str, Any]) -> None:
    """Write a bound into all alternatives of a schema that it is a bound of."""
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


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the API server, apart from the engine.

    Attributes:
        model_names: by which clients may ask; the first is told to them.
        api_keys: any of them will do; none: everybody may ask.
        root_path: the prefix that a proxy in front takes off.
        request_timeout_s: the longest that a request may take; None for no limit.
        body_timeout_s: the longest that a request's body may take to come.
        max_total_body_bytes: of the bodies of all open requests together.
        max_header_bytes: of a request's line and headers together.
        shutdown_timeout_s: how long requests under way may go on after SIGTERM.
        keep_alive_s: how long a stream may be silent before a comment is sent. For so long its status is open, too: a
            failure before it has one of its own.
        reader_timeout_s: a client that reads nothing of its stream for so long is taken for gone.
        max_num_queued_reqs, max_num_queued_tokens: of `EngineSetup`; what could never wait is refused.
        metrics_prefix: of the metrics' names, with its colon.
        tracer: gets one span per request for text; None for no tracing.

    Raises:
        ValueError: for a value that cannot work; keys are not repeated in it.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    root_path: str = ""
    request_timeout_s: float | None = None
    body_timeout_s: float = 60.0
    max_total_body_bytes: int = 2**28
    max_header_bytes: int = 64 * 1024
    shutdown_timeout_s: float = 30.0
    keep_alive_s: float = 10.0
    reader_timeout_s: float = 60.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    metrics_prefix: str = "longspan:"
    tracer: Tracer | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"--served-model-name must not be empty, but {list(self.model_names)} given")
        if not all(_KEY.fullmatch(key) for key in self.api_keys):
            raise ValueError("an --api-key is empty or has spaces in it: give one that a header can carry")
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(f"--root-path must be empty or like /some/prefix, but {self.root_path!r} given")
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ValueError(
                f"--metrics-prefix must be letters, digits, _ and :, such as vllm:, but {self.metrics_prefix!r} given"
            )

    def check_queue(self, num_prompts: int, num_tokens: int) -> None:
        """Check that the prompts of one request, which have so many tokens together, find room in an empty queue.

        Raises:
            ValueError: if they do not: to come again later would not help.
        """
        most_prompts, most_tokens = self.max_num_queued_reqs, self.max_num_queued_tokens
        if most_prompts is not None and num_prompts > most_prompts:
            raise ValueError(
                f"{num_prompts} prompts never fit into the queue, which has room for {most_prompts} "
                "(--max-num-queued-reqs): send several requests"
            )
        if most_tokens is not None and num_prompts > 1 and num_tokens > most_tokens:
            raise ValueError(
                f"prompts of {num_tokens} tokens never fit into the queue together, which has room for {most_tokens} "
                "(--max-num-queued-tokens): send several requests"
            )
