"""Settings of the API server, and the limits of a single request."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from longspan.core.checks import check_numbers
from longspan.core.options import Option
from longspan.errors import ParameterError
from longspan.limits import read_bytes

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
else:
    Tracer = object  # part of an extra, while flags are made from evaluated type hints

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
"""A request's field, the keyword of JSON Schema that bounds it, and the limit with the bound's value.

`maxPrompts` is `maxItems` for lists of prompts, but not for a list of token ids, which is one prompt.
"""


_limit = partial(Option, group="Limits of a request", configures=True)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of a single request.

    Raises:
        ParameterError: a limit is not a positive whole number.
    """

    max_body_bytes: Annotated[int, _limit("Maximum bytes of a request's body.")] = 16 * 2**20
    max_elements: Annotated[
        int, _limit("Maximum number of strings (with field names), lists and objects in a request's body.")
    ] = 100_000
    max_nesting: Annotated[int, _limit("Maximum nesting of lists and objects.")] = 64
    max_tokenize_length: Annotated[
        int, _limit("Maximum number of characters to tokenize, or of token ids to detokenize.")
    ] = 5_000_000
    max_prompts: Annotated[int, _limit("Maximum number of prompts of a completion request.")] = 256
    max_messages: Annotated[int, _limit("Maximum number of messages of a conversation.")] = 4096
    max_n: Annotated[int, _limit("Maximum number of choices per prompt.")] = 128
    max_choices: Annotated[int, _limit("Maximum number of choices of all prompts of a request together.")] = 1024
    max_logprobs: Annotated[int, _limit("Maximum number of most likely tokens reported for a token.")] = 20
    max_stop_strings: Annotated[int, _limit("Maximum number of stop strings.")] = 16
    max_stop_length: Annotated[int, _limit("Maximum number of characters of a stop string.")] = 256
    max_stop_token_ids: Annotated[int, _limit("Maximum number of stop tokens.")] = 128
    max_logit_bias: Annotated[int, _limit("Maximum number of tokens with a bias.")] = 1024

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problem = f"must be a whole number of at least 1, but {value!r} given"
                raise ParameterError(limit.name, problem, value)

    def check(self, limit: str, size: int, problem: str, remedy: str) -> None:
        """Raise a ValueError if a size is above the limit of this name."""
        maximum = getattr(self, limit)
        if size > maximum:
            flag = f"--{limit.replace('_', '-')}"
            raise ValueError(f"{problem}, but at most {maximum} are allowed here ({flag}): {remedy}")

    def check_field(self, field: str, value: object) -> None:
        """Raise a ValueError if the value of a request's field is above a limit."""
        for bounded, keyword, limit in _BOUNDS:
            if bounded == field:
                relation = {"maximum": "is", "maxLength": "has a string of length"}.get(keyword, "has length")
                size = _size(value, keyword)
                self.check(limit, size, f"{field} {relation} {size}", "reduce it")

    def narrowed(self, schemas: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of an OpenAPI document, or a JSON schema, with these limits as bounds."""
        narrow = copy.deepcopy(schemas)
        defined = narrow.get("components", {}).get("schemas", {}) or narrow.get("$defs", {})
        for schema in (narrow, *defined.values()):
            if schema.get("title", "").endswith("Request"):
                for name, keyword, limit in _BOUNDS:
                    if name in schema["properties"]:
                        _narrow(schema["properties"][name], keyword, getattr(self, limit), defined)
        return narrow


def _size(value: object, keyword: str) -> int:
    """Return the size that `keyword` bounds, or 0 if it does not bound such a value."""
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


def _narrow(schema: dict[str, Any], keyword: str, bound: int, defined: dict[str, Any]) -> None:
    """Write a bound into all alternatives of a schema that it applies to."""
    if "$ref" in schema:
        _narrow(defined[schema["$ref"].rpartition("/")[2]], keyword, bound, defined)
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        _narrow(option, keyword, bound, defined)
    if keyword == "maxLength" and schema.get("type") == "array":
        _narrow(schema["items"], keyword, bound, defined)
    if keyword == "maxPrompts" and schema.get("type") == "array" and schema["items"].get("type") != "integer":
        keyword = "maxItems"
    if "type" in schema and schema["type"] == _TYPES.get(keyword):
        schema[keyword] = min(bound, schema.get(keyword, bound))


_server = partial(Option, group="Server", configures=True)
_names = partial(_server, repeatable=True, read=tuple)
_timeout = partial(_server, minimum=0.001)


def _template(path: str) -> str:
    """Return the text of a file. Raise ValueError if it cannot be read."""
    try:
        return read_bytes(Path(path)).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"must be a file with a Jinja template, but {path!r:.100} cannot be read: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the API server, without the engine's options. Times are seconds.

    Attributes:
        model_names: names of the model in requests. Responses have the first name.
        api_keys: a client needs any of these keys. Without keys, requests need none.
        keep_alive_s: time without output before a comment in a stream. A failure before the first comment has its own
            status.
        tracer: gets one span per request for text. None for no tracing.

    Raises:
        ParameterError: a value is invalid. The message does not repeat keys.
    """

    host: Annotated[str, _server("Address to listen on. 0.0.0.0 is every interface.")] = "127.0.0.1"
    port: Annotated[int, _server("Port to listen on. 0 chooses a free port.")] = 8000
    api_keys: Annotated[
        tuple[str, ...], _names("Key that clients need. Repeatable, any key suffices.", name="api-key", default="")
    ] = field(default=(), repr=False)
    model_names: Annotated[
        tuple[str, ...],
        _names("Name of the model for clients. Repeatable. By default the model's own.", name="served-model-name"),
    ] = ()
    root_path: Annotated[str, _server("Path prefix that a proxy removes.")] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        _names(
            "Origin whose web pages may call the API (CORS), as https://example.org, or * for all. Repeatable.",
            default="",
        ),
    ] = ()
    max_num_queued_reqs: Annotated[
        int, _server("Maximum number of waiting requests. More are answered 503.", minimum=1)
    ] = 1024
    max_num_queued_tokens: Annotated[
        int, _server("Maximum sum of tokens of waiting requests. A single request may be longer.", minimum=1)
    ] = 8_000_000
    engine_timeout_s: Annotated[
        float, _server("Seconds of silence after which the engine core counts as lost.", minimum=10)
    ] = 60.0
    max_worker_restarts: Annotated[
        int | None,
        _server(
            "Number of times lost workers are replaced. Then only the other instances serve.",
            minimum=0,
            default="no limit",
        ),
    ] = None
    tune_idle: Annotated[
        bool,
        _server("Measure missing partitions of chains for policy runahead while no request runs. A request stops it."),
    ] = False
    timeout_keep_alive_s: Annotated[int, _server("Seconds a connection may be idle between requests.", minimum=1)] = 75
    request_timeout_s: Annotated[
        float | None, _timeout("Seconds a request may take. The header x-request-timeout can only shorten it.")
    ] = None
    body_timeout_s: Annotated[float, _timeout("Seconds a request's body may take to arrive.")] = 60.0
    max_total_body_bytes: Annotated[
        int, _server("Maximum bytes of the bodies of all open requests. More are answered 503.", minimum=1)
    ] = 2**28
    max_header_bytes: Annotated[
        int,
        _server("Maximum bytes of request line and headers.", name="h11-max-incomplete-event-size", minimum=1024),
    ] = 64 * 1024
    keep_alive_s: Annotated[
        float, _timeout("Seconds without output after which a stream sends a comment.", name="stream-keep-alive")
    ] = 10.0
    reader_timeout_s: Annotated[float, _timeout("Seconds after which a client that reads nothing is disconnected.")] = (
        60.0
    )
    shutdown_timeout_s: Annotated[
        float, _server("Seconds for open requests after SIGTERM. A second signal ends the server at once.", minimum=0)
    ] = 30.0
    access_log: Annotated[
        bool, _server("Log a line per request, except successful probes (/health, /live, /version, /metrics).")
    ] = True
    metrics_prefix: Annotated[str, _server("Prefix of metric names, such as vllm: for dashboards made for vLLM.")] = (
        "longspan:"
    )
    enable_auto_tool_choice: Annotated[
        bool, _server("Let the model choose whether it calls tools if a request does not say.")
    ] = True
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "granite", "functionary", "qwen3_coder", "glm45", "openai"],
        _server("Format of the model's tool calls. auto detects it in the chat template."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "qwen3", "deepseek_r1", "glm45", "mistral", "seed_oss", "openai_gptoss", "none"],
        _server("Format of reasoning, or none. By default it is detected in the chat template."),
    ] = "auto"
    chat_template: Annotated[
        str | None, _server("A Jinja template instead of the model's own.", metavar="FILE", read=_template)
    ] = None
    record: Annotated[
        str | None,
        _server("Append lengths, times and prefix hashes of requests, without text.", metavar="FILE.jsonl.gz"),
    ] = None
    tracer: Tracer | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not all(self.model_names):
            raise ParameterError("model_names", f"must not be empty, but {list(self.model_names)} given")
        if not all(_KEY.fullmatch(key) for key in self.api_keys):
            raise ParameterError("api_keys", ": a key is empty or has spaces: give a key that a header can carry")
        if not _ROOT_PATH.fullmatch(self.root_path):
            problem = f"must be empty or like /some/prefix, but {self.root_path!r} given"
            raise ParameterError("root_path", problem, self.root_path)
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            problem = f"must be letters, digits, _ and :, such as vllm:, but {self.metrics_prefix!r} given"
            raise ParameterError("metrics_prefix", problem, self.metrics_prefix)

    def check_queue(self, num_prompts: int, num_tokens: int) -> None:
        """Raise a ValueError if the prompts of one request exceed an empty queue, so that a retry would not help."""
        if num_prompts > self.max_num_queued_reqs:
            raise ValueError(
                f"{num_prompts} prompts never fit into the queue, whose maximum is {self.max_num_queued_reqs} "
                "(--max-num-queued-reqs): send several requests"
            )
        if num_prompts > 1 and num_tokens > self.max_num_queued_tokens:
            raise ValueError(
                f"prompts of {num_tokens} tokens never fit into the queue together, whose maximum is "
                f"{self.max_num_queued_tokens} (--max-num-queued-tokens): send several requests"
            )
