"""Settings of the API server, and the limits of a single request."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from longspan.core.checks import check_numbers
from longspan.core.options import Option
from longspan.errors import ParameterError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
else:
    Tracer = object  # it belongs to an extra, and flags are made by evaluating the hints

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


_limit = partial(Option, group="Limits of what one request may ask for.", configures=True)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of what one request may ask for.

    Raises:
        ParameterError: for a limit that is not a positive whole number.
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
                problem = f"must be a whole number of at least 1, but {value!r} given"
                raise ParameterError(limit.name, problem, value)

    def check(self, limit: str, size: int, problem: str, remedy: str) -> None:
        """Raises a ValueError when a size is above the limit of this name."""
        most = getattr(self, limit)
        if size > most:
            raise ValueError(f"{problem}, but at most {most} are allowed here ({_flag(limit)}): {remedy}")

    def check_field(self, field: str, value: object) -> None:
        """Raises a ValueError when the value of a request's field is above a limit."""
        for bounded, keyword, limit in _BOUNDS:
            if bounded == field:
                what = {"maximum": "is", "maxLength": "has a string of length"}.get(keyword, "has length")
                size = _size(value, keyword)
                self.check(limit, size, f"{field} {what} {size}", "ask for less")

    def narrowed(self, schemas: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of an OpenAPI document, or a JSON schema, that promises no more than these limits allow."""
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
    """Returns the size that `keyword` bounds; 0 where it bounds nothing of a value."""
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


_server = partial(Option, group="Server", configures=True)
_names = partial(_server, repeatable=True, read=tuple)
_timeout = partial(_server, minimum=0.001)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the API server, apart from the engine; times are seconds.

    Attributes:
        model_names: by which clients may ask; the first is told to them.
        api_keys: any of them will do; none: everybody may ask.
        keep_alive_s: for so long the status of a stream is open, too: a failure before it has one of its own.
        tracer: gets one span per request for text; None for no tracing.

    Raises:
        ParameterError: for a value that cannot work; keys are not repeated in it.
    """

    host: Annotated[str, _server("Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1"
    port: Annotated[int, _server("0 takes a free one.")] = 8000
    api_keys: Annotated[
        tuple[str, ...], _names("Clients need this key; repeatable, any of them will do.", name="api-key", default="")
    ] = field(default=(), repr=False)
    model_names: Annotated[
        tuple[str, ...],
        _names("The name clients ask for; repeatable. The model's own if not given.", name="served-model-name"),
    ] = ()
    root_path: Annotated[str, _server("The prefix that a proxy in front takes off.")] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        _names(
            "Origins whose web pages may call the API (CORS), as https://example.org; repeatable, * for all.",
            default="",
        ),
    ] = ()
    max_num_queued_reqs: Annotated[
        int, _server("Requests that may wait for room; more are answered 503.", minimum=1)
    ] = 1024
    max_num_queued_tokens: Annotated[
        int, _server("Tokens of all requests that wait; one request may wait whatever its length.", minimum=1)
    ] = 8_000_000
    engine_timeout_s: Annotated[
        float,
        _server("Seconds of silence after which the engine core is taken for lost.", name="engine-timeout", minimum=10),
    ] = 60.0
    max_worker_restarts: Annotated[
        int | None,
        _server(
            "How often lost workers are replaced; then the other instances serve without.",
            minimum=0,
            default="as often as need be",
        ),
    ] = None
    timeout_keep_alive_s: Annotated[
        int,
        _server("Seconds that a connection may be idle between requests.", name="timeout-keep-alive", minimum=1),
    ] = 75
    request_timeout_s: Annotated[
        float | None,
        _timeout("Seconds that a request may take; x-request-timeout can only shorten it.", name="request-timeout"),
    ] = None
    body_timeout_s: Annotated[
        float, _timeout("Seconds that a request's body may take to come.", name="body-timeout")
    ] = 60.0
    max_total_body_bytes: Annotated[
        int, _server("Most bytes of the bodies of all open requests; more are answered 503.", minimum=1)
    ] = 2**28
    max_header_bytes: Annotated[
        int, _server("Most bytes of a request's line and headers.", name="h11-max-incomplete-event-size", minimum=1024)
    ] = 64 * 1024
    keep_alive_s: Annotated[
        float, _timeout("Seconds that a stream may be silent before a comment is sent.", name="stream-keep-alive")
    ] = 10.0
    reader_timeout_s: Annotated[
        float,
        _timeout("Seconds after which a client that takes nothing of its answer is let go.", name="reader-timeout"),
    ] = 60.0
    shutdown_timeout_s: Annotated[
        float,
        _server(
            "Seconds that requests under way have after SIGTERM; a second signal ends at once.",
            name="shutdown-timeout",
            minimum=0,
        ),
    ] = 30.0
    metrics_prefix: Annotated[str, _server("Prefix of metric names; vllm: for dashboards made for vLLM.")] = "longspan:"
    enable_auto_tool_choice: Annotated[
        bool, _server("Let the model choose whether it calls tools, when a request does not say.")
    ] = True
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral"],
        _server("How the model writes calls of tools; auto finds that in its chat template."),
    ] = "auto"
    tracer: Tracer | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not all(self.model_names):
            raise ParameterError("model_names", f"must not be empty, but {list(self.model_names)} given")
        if not all(_KEY.fullmatch(key) for key in self.api_keys):
            raise ParameterError("api_keys", ": one is empty or has spaces in it: give one that a header can carry")
        if not _ROOT_PATH.fullmatch(self.root_path):
            problem = f"must be empty or like /some/prefix, but {self.root_path!r} given"
            raise ParameterError("root_path", problem, self.root_path)
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            problem = f"must be letters, digits, _ and :, such as vllm:, but {self.metrics_prefix!r} given"
            raise ParameterError("metrics_prefix", problem, self.metrics_prefix)

    def check_queue(self, num_prompts: int, num_tokens: int) -> None:
        """Raises a ValueError if the prompts of one request would not fit into an empty queue.

        To come again later would not help.
        """
        if num_prompts > self.max_num_queued_reqs:
            raise ValueError(
                f"{num_prompts} prompts never fit into the queue, which has room for {self.max_num_queued_reqs} "
                "(--max-num-queued-reqs): send several requests"
            )
        if num_prompts > 1 and num_tokens > self.max_num_queued_tokens:
            raise ValueError(
                f"prompts of {num_tokens} tokens never fit into the queue together, which has room for "
                f"{self.max_num_queued_tokens} (--max-num-queued-tokens): send several requests"
            )
