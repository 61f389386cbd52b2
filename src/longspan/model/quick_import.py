"""Imports transformers' models in half the time: without a compiler and without parallel training.

transformers marks some functions for `torch.compile`, which loads `torch._dynamo`, and defines classes for its own
tensor parallelism and FSDP, which loads `torch.distributed.tensor`. Workers use neither: models run eagerly, and their
weights are split by `model.sharding`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
import transformers.utils
from transformers.utils import import_utils

_DYNAMO = "torch._dynamo"
_DISTRIBUTED = "is_torch_distributed_available"
_MODELS = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "sympy")
"""The last is what PyTorch imports when it builds a model on the meta device."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def import_models() -> None:
    """Imports what transformers' models have in common, by way of one of them.

    Functions that they mark for the compiler stay unmarked, and what they define for distributed tensors stays
    undefined. So this is for processes in which nobody else uses transformers. Whoever needs `torch._dynamo` later, or
    on the way, still gets it.
    """
    if _DYNAMO not in sys.modules:
        vars(torch)["_dynamo"] = sys.modules[_DYNAMO] = _Dynamo()
    real, owners = import_utils.is_torch_distributed_available, (import_utils, transformers.utils)
    try:
        for owner in owners:
            setattr(owner, _DISTRIBUTED, lambda: False)
        for name in _MODELS:
            import_module(name)
    finally:
        for owner in owners:
            setattr(owner, _DISTRIBUTED, real)


class _Dynamo(ModuleType):
    """Stands for `torch._dynamo` as long as nobody wants more of it than its marks for functions."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        self.__spec__ = ModuleSpec(_DYNAMO, None, is_package=True)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # modules in it are imported as ever
        self.allow_in_graph = self.assume_constant_result = _unmarked

    @staticmethod
    def disable(function: FunctionT | None = None, *_: object, **__: object) -> object:
        """Leaves a function as it is, or returns what does so."""
        return _unmarked if function is None else function

    def __getattr__(self, name: str) -> object:
        """Gives way to the real module."""
        if name.startswith("__"):  # asked of all modules, by `inspect`
            raise AttributeError(name)
        if sys.modules.get(_DYNAMO) is self:
            del sys.modules[_DYNAMO], vars(torch)["_dynamo"]
        return getattr(import_module(_DYNAMO), name)


def _unmarked(function: FunctionT) -> FunctionT:
    return function
