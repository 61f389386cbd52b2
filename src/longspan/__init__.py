"""Serves long prompts with open-weight LLMs on several devices. Names load on first use: this needs no torch."""

from longspan.core import extensions as _extensions

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing typing: the command line installs signal handlers before it imports more
    from longspan import attn
    from longspan.async_llm import AsyncLLM
    from longspan.core.options import SchedulingArgs
    from longspan.core.sampling import SamplingParams, StructuredOutputsParams
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput
    from longspan.planning import plan
    from longspan.sim.spec import ClusterSpec, ServiceLevel
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
    "SchedulingArgs",
    "ServiceLevel",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WorkloadSpec",
    "__version__",
    "attn",
    "plan",
    "simulate",
]
_OWNERS = {
    "AsyncLLM": "longspan.async_llm",
    "ClusterSpec": "longspan.sim.spec",
    "LLM": "longspan.llm",
    "RequestOutput": "longspan.outputs",
    "SamplingParams": "longspan.core.sampling",
    "SchedulingArgs": "longspan.core.options",
    "ServiceLevel": "longspan.sim.spec",
    "StructuredOutputsParams": "longspan.core.sampling",
    "TextPrompt": "longspan.text.input_processor",
    "TokensPrompt": "longspan.text.input_processor",
    "WorkloadSpec": "longspan.workload.spec",
    "attn": "longspan.attn",
    "plan": "longspan.planning",
    "simulate": "longspan.simulation",
}


def _find(group: str) -> "dict[str, _extensions.Extension]":
    from longspan.plugins import find  # noqa: PLC0415 - reading metadata is slow

    return dict(find(group))


_extensions.finder = _find


def __getattr__(name: str) -> object:
    from longspan.core.exports import lazy_exports  # noqa: PLC0415 - on first use

    return lazy_exports(__name__, _OWNERS)[0](name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWNERS})
