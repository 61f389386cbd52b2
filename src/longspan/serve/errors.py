"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

Below `/v1/messages`, they have the form of Anthropic's API: `{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from longspan.core.request import ContextLengthError
from longspan.errors import ParameterError, named
from longspan.names import closest, renamed

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of a response with this HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}


_MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


UNSUPPORTED_THREAD = "thread_unsupported_request"
"""The error code with which Anthropic's API refuses threads. Its clients then send the whole conversation."""


def messages_error_body(status: int, message: str, request_id: str | None, code: str | None = None) -> dict[str, Any]:
    """Return the body of a response with this HTTP status in the form of Anthropic's API."""
    error: dict[str, Any] = {"type": _MESSAGES_TYPES.get(status, "invalid_request_error"), "message": message}
    if code == UNSUPPORTED_THREAD:
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


class ErrorResponse(JSONResponse):
    """An error in the form of the API that the request's path belongs to. By default, OpenAI's."""

    def __init__(self, body: dict[str, Any], status: int, headers: Mapping[str, str]) -> None:
        super().__init__(body, status_code=status, headers=headers)
        self._message: str = body["error"]["message"]
        self._code: str = body["error"]["code"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/"):
            request_id = scope.get("state", {}).get("request_id")
            self.body = self.render(messages_error_body(self.status_code, self._message, request_id, self._code))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(
    status: int, message: str, *, retry_after_s: int | None = None, **fields: str | None
) -> ErrorResponse:
    """Return a response with the body of `error_body`. `retry_after_s` is its header `retry-after`, in seconds."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return ErrorResponse(error_body(status, message, **fields), status, headers)


_MAX_ECHO = 60
_MAX_PARAM = 100
_MAX_FIELDS = 100
"""Fields of a body that are compared with a missing one."""
_MAX_INT = 10**15


class ServeError(Exception):
    """A request that is not served.

    Attributes:
        status: status of the HTTP response.
        param: the field of the request that is the cause, such as `messages[0].content`. None if no field is.
        code: the error's code for clients. By default its status.
    """

    status = 500
    param: str | None = None
    code: str | None = None


class WireError(ServeError, ValueError):
    """A request that is not served because of a mistake in it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class QueueFullError(ServeError):
    """The queue has no capacity for a request. The client can send it again later."""

    status = 503


class EngineLostError(ServeError):
    """The engine cannot answer a request that has no mistake."""


class NotServingError(EngineLostError):
    """The engine computes nothing now, or the server accepts no new requests."""

    status = 503


class RequestFailedError(ServeError):
    """The engine goes on, but this request fails, and would fail again.

    A field of the request is the cause only if there is a `param`.
    """

    def __init__(self, reason: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(reason)
        self.param, self.code, self.status = param, code, 500 if param is None else 400


class ClientGoneError(ServeError):
    """The client has disconnected and waits for no response."""

    status = 499


class DeadlineError(ServeError):
    """The request took longer than its timeout."""

    status = 504


@contextmanager
def as_wire_errors(param: str | None, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn a ValueError of the block into a WireError. Its field is `param`, or the parameter of the error.

    `names` maps parameters to fields of other names.
    """
    names = names or {}
    try:
        yield
    except WireError:
        raise
    except ParameterError as error:
        field = names.get(error.parameter, error.parameter)
        raise WireError(renamed(named(field, error.problem), names), field) from error
    except ContextLengthError as error:
        raise WireError(renamed(str(error), names), param, code=error.code) from error
    except ValueError as error:
        raise WireError(renamed(str(error), names), param) from error


def wire_error(invalid: ValidationError, body: object) -> WireError:
    """Turn pydantic's errors about a body into one error, which repeats at most a few characters of the body.

    If a field has alternatives, the alternative that the value matches best is reported.
    """
    errors = invalid.errors(include_url=False)
    params = [_param(error, body) for error in errors]
    for error, path in zip(errors, params, strict=True):
        if isinstance(cause := error.get("ctx", {}).get("error"), WireError):
            return _at(path, cause)
    worst = max(params, key=len)
    alternatives = [error for error, path in zip(errors, params, strict=True) if path == worst]
    first = alternatives[0]
    messages = dict.fromkeys(_message(error) for error in alternatives)
    remedy = _similar_field(first, body) if first["type"] == "missing" else _given(first)
    return _at(worst, WireError(" or ".join(messages).replace(" or must be ", " or ") + remedy))


def shortened(text: str, max_chars: int = _MAX_ECHO) -> str:
    """Return the beginning of a text, with dots if it is cut."""
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _at(path: Sequence[str | int], error: WireError) -> WireError:
    """Return an error about the value at `path`, which the message writes as in `messages[0].content`."""
    steps = path if error.param is None else [*path, error.param]
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    param = shortened(text.removeprefix("."), _MAX_PARAM) or None
    return WireError(str(error) if param is None else f"{param}: {error}", param, error.status, error.code)


_OBJECT = "must be an object"
_PROBLEMS: Mapping[str, str] = {
    "missing": "must be given",
    "string_type": "must be a text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "union_tag_not_found": "must be an object with the field {discriminator}",
    "union_tag_invalid": "must have one of {expected_tags} as the field {discriminator}, but has {tag}",
}
"""Texts of pydantic's types of errors, with the keys of their contexts. Other types have pydantic's own text."""


def _message(error: ErrorDetails) -> str:
    text = _PROBLEMS.get(error["type"])
    if error["type"] in {"too_short", "string_too_short"} and 1 in error.get("ctx", {}).values():
        return "must not be empty"
    context = {key: _bound(value) for key, value in error.get("ctx", {}).items()}
    return str(error["msg"]) if text is None else text.format_map(context)


def _bound(value: object) -> str:
    """Return a value of an error's context: a bound, choices, or a tag of the request."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return shortened(str(value), _MAX_PARAM)


_OTHER_PATHS = {("prompt", "messages"): "/v1/chat/completions", ("messages", "prompt"): "/v1/completions"}
"""The path that takes the second field, by the missing and the given field."""


def _similar_field(error: ErrorDetails, body: object) -> str:
    """Return the remedy for a missing field: the unknown field that is similar, or the path for a field of the body."""
    given, [*_, name] = error.get("input"), error["loc"]
    if not isinstance(given, dict):
        return ""
    for (missing, other), path in _OTHER_PATHS.items():
        if missing == name and other in given and given is body:
            return f": send {other} to {path}"
    similar = closest(str(name), [key for key in islice(given, _MAX_FIELDS) if len(key) <= _MAX_ECHO])
    return "" if similar is None else f", but {shortened(repr(similar))} given: change its name"


_MEDIA = re.compile(r"(input_)?(image|audio|video|file|document)(_url)?")
"""Types of parts of messages that are no text, in the APIs of OpenAI, Anthropic and vLLM."""
_ONLY_TEXT = (
    ". Only text is served, also by models that know images or sound: remove this part, or send the text of images, "
    "recordings and files"
)


def _given(error: ErrorDetails) -> str:
    """Return `, but VALUE given`, or an empty text if the value is long or part of the message."""
    value = error.get("input")
    small = isinstance(value, str | float) or (isinstance(value, int) and abs(value) <= _MAX_INT)
    if error["type"] == "union_tag_invalid":
        return _ONLY_TEXT if _MEDIA.fullmatch(error["ctx"]["tag"]) else ""
    if not (small or value is None):
        return ""
    if isinstance(value, str):
        is_media = error["loc"][-1] == "type" and _MEDIA.fullmatch(value)
        return f", but {shortened(repr(value[:_MAX_ECHO]))} given{_ONLY_TEXT if is_media else ''}"
    return f", but {json.dumps(value)} given"


def _param(error: ErrorDetails, body: object) -> list[str | int]:
    """Return the path of the error in the body, without pydantic's names for alternatives of a field."""
    path: list[str | int] = []
    at, location = body, error["loc"]
    for index, step in enumerate(location):
        is_there = step in at if isinstance(at, dict) else isinstance(at, list) and isinstance(step, int)
        if is_there:
            at = at[step]  # type: ignore[index]  # a list or a dict with this index, by pydantic
        if is_there or (index == len(location) - 1 and error["type"] == "missing"):
            path.append(step)
    return path
