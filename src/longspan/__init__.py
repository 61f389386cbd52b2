"""Serves long prompts with open-weight decoder-only language models on several devices.

The names below load on first use, so that ``import longspan`` is quick and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.core.sampling import SamplingParams, StructuredOutputsParams
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "longspan.llm",
    "RequestOutput": "longspan.outputs",
    "SamplingParams": "longspan.core.sampling",
    "StructuredOutputsParams": "longspan.core.sampling",
}


def __getattr__(name: str) -> object:
    """Loads an exported name from its module the first time it is asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the lazy exports too."""
    return sorted({*globals(), *__all__})
