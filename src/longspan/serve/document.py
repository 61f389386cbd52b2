"""The OpenAPI document, narrowed to what a server has: whoever follows it asks for nothing that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longspan.core.protocols import PolicySettings

Schema = dict[str, Any]

EVENTS: Schema = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk, or an error, as JSON; at last [DONE]."}},
}
"""An event of a stream."""


def name_what_is_there(document: Schema, model_names: Sequence[str], vocab_size: int, max_model_len: int) -> None:
    """Writes the names of the model and the bounds of token ids and outputs into a document's schemas."""
    schemas: Schema = document["components"]["schemas"]
    for name in ("TokenIds", "StopTokens"):
        schemas[name]["items"]["maximum"] = vocab_size - 1
    for schema in schemas.values():
        for name in ("max_tokens", "max_completion_tokens"):
            for option in schema.get("properties", {}).get(name, {}).get("anyOf", ()):
                if option.get("type") == "integer":
                    option["maximum"] = max_model_len - 1  # behind a prompt of one token
        model = schema.get("properties", {}).get("model", {})
        for option in model.get("anyOf", ()):  # in requests it may be null; in answers it is a text
            if option.get("type") == "string":
                option["enum"] = list(model_names)


def name_options(document: Schema, settings: PolicySettings) -> None:
    """Writes the options of a policy that may change into a document's schemas."""
    schema = document["components"]["schemas"]["PolicyUpdate"]
    schema["properties"] = dict.fromkeys(settings.changeable, schema["additionalProperties"])
    schema["additionalProperties"] = False
