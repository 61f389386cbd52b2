"""Serves long prompts with open-weight decoder-only language models on several devices.

The names below load on first use, so that ``import longspan`` is quick and needs no torch.
"""

from typing import TYPE_CHECKING

from longspan.core.exports import lazy_exports

if TYPE_CHECKING:
    from longspan.core.sampling import SamplingParams, StructuredOutputsParams
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LLM": "longspan.llm",
        "RequestOutput": "longspan.outputs",
        "SamplingParams": "longspan.core.sampling",
        "StructuredOutputsParams": "longspan.core.sampling",
    },
)
