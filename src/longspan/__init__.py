"""Serves long prompts with open-weight decoder-only language models on several devices.

The names below load on first use, so that ``import longspan`` is quick and needs no torch. ``attn`` is the attention
library, which needs none of the rest.
"""

from typing import TYPE_CHECKING

from longspan.core.exports import lazy_exports

if TYPE_CHECKING:
    from longspan import attn
    from longspan.async_llm import AsyncLLM
    from longspan.core.sampling import SamplingParams, StructuredOutputsParams
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput
    from longspan.sim.spec import ClusterSpec
    from longspan.simulation import simulate
    from longspan.text.input_processor import TextPrompt, TokensPrompt
    from longspan.workload.spec import WorkloadSpec

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "ClusterSpec",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WorkloadSpec",
    "__version__",
    "attn",
    "simulate",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AsyncLLM": "longspan.async_llm",
        "ClusterSpec": "longspan.sim.spec",
        "LLM": "longspan.llm",
        "RequestOutput": "longspan.outputs",
        "SamplingParams": "longspan.core.sampling",
        "StructuredOutputsParams": "longspan.core.sampling",
        "TextPrompt": "longspan.text.input_processor",
        "TokensPrompt": "longspan.text.input_processor",
        "WorkloadSpec": "longspan.workload.spec",
        "attn": "longspan.attn",
        "simulate": "longspan.simulation",
    },
)
