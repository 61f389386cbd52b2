"""The OpenAPI document, narrowed to what a server has: whoever follows it asks for nothing that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

EVENTS: Schema = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk, or an error, as JSON; at last [DONE]."}},
}
"""An event of a stream."""


def name_what_is_there(document: Schema, model_names: Sequence[str], vocab_size: int) -> None:
    """Writes the names of the model and the bound of token ids into a document's schemas."""
    schemas: Schema = document["components"]["schemas"]
    for name in ("TokenIds", "StopTokens"):
        schemas[name]["items"]["maximum"] = vocab_size - 1
    for schema in schemas.values():
        model = schema.get("properties", {}).get("model", {})
        for option in model.get("anyOf", ()):  # in requests it may be null; in answers it is a text
            if option.get("type") == "string":
                option["enum"] = list(model_names)
