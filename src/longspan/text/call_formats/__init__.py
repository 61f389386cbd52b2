"""The formats in which families of models write calls, one entry per format. A module is loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.text.call_formats.base import CallFormat

_MODULES = {
    "hermes": "objects",
    "llama3_json": "objects",
    "mistral": "objects",
    "granite": "objects",
    "functionary": "named recipients",
    "qwen3_coder": "tagged",
    "glm45": "tagged",
    "openai": "harmony",
}
NAMES = tuple(_MODULES)
"""Names of vLLM's parsers, in the order in which a template is compared with the formats. `functionary` is ours."""


def variants(name: str) -> tuple[CallFormat, ...]:
    """Return the variants of a format. The first is the default if no template decides."""
    modules = [import_module(f"longspan.text.call_formats.{module}") for module in _MODULES[name].split()]
    return tuple(form for module in modules for form in module.VARIANTS[name])
