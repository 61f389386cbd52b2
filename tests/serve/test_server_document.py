"""The OpenAPI document describes exactly the routes of the server."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from longspan.serve.app import body_schemas, write_bounds

GOOD: dict[str, Any] = {"prompt": [1, 9], "stop_token_ids": [9], "max_tokens": 7}


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    document = {"components": {"schemas": body_schemas()}}
    write_bounds(document, ("one", "two"), vocab_size=10, max_model_len=8)
    return Draft202012Validator({"$ref": "#/components/schemas/CompletionRequest", **document})


@pytest.mark.parametrize("given", [{}, {"model": "one"}, {"model": "two"}, {"model": None}])
def test_every_route_of_the_document_exists(validator: Draft202012Validator, given: dict[str, Any]) -> None:
    assert validator.is_valid({**GOOD, **given})


@pytest.mark.parametrize(
    "given",
    [{"model": "three"}, {"prompt": [10]}, {"prompt": [[1], [10]]}, {"stop_token_ids": [10]}, {"max_tokens": 8}],
)
def test_answers_outside_the_document_are_found(validator: Draft202012Validator, given: dict[str, Any]) -> None:
    assert not validator.is_valid({**GOOD, **given})
