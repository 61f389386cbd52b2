"""Bodies of requests: bytes to pydantic models, within limits."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from longspan.serve.errors import WireError, blaming, cut, wire_error
from longspan.serve.settings import RequestLimits

RequestT = TypeVar("RequestT", bound=BaseModel)


def check_content_type(header: str | None) -> None:
    """Check that a body says that it is JSON.

    This also keeps web pages from using a server on their reader's machine: to send JSON, browsers ask for leave first.

    Raises:
        WireError: if it says another thing, or nothing.
    """
    given = (header or "").partition(";")[0].strip().lower()
    if given != "application/json":
        said = f"is {cut(given)!r}" if given else "is missing"
        raise WireError(f"the content-type {said}: send the body with content-type: application/json", status=415)


def read_request(model: type[RequestT], body: bytes, limits: RequestLimits) -> RequestT:
    """Read the request that a body holds.

    Raises:
        WireError: when it is too large, has too many elements, is no JSON, nested too deeply, or not what `model`
            describes.
    """
    if len(body) > limits.max_body_bytes:
        raise WireError(f"the body has more than {limits.max_body_bytes} bytes (--max-body-bytes)", status=413)
    with blaming(None):
        limits.check_elements(num_elements(body, limits.max_elements))
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise WireError(f"the body is not JSON: {cut(str(error), 100)}") from error
    if not isinstance(value, dict):
        raise WireError("the body must be a JSON object")
    with blaming(None):
        limits.check_nesting(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise wire_error(error.errors(include_url=False), value) from error


def num_elements(body: bytes, enough: int) -> int:
    """Count strings, lists and objects in a body of JSON, names of fields included, at least to more than `enough`.

    They are counted without being made. Of what is no JSON, those before its first mistake are counted at least.
    """
    most = body.count(b'"') // 2 + _num_opened(body)
    if most <= enough:
        return most
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    num_strings = (plain.count(b'"') + 1) // 2
    if num_strings > enough:
        return num_strings
    return num_strings + _num_opened(b"".join(plain.split(b'"')[::2]))


def _num_opened(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")
