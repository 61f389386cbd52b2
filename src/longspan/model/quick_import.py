"""Imports transformers' models in half the time: without a compiler and without parallel training.

transformers marks some functions for `torch.compile`, which loads `torch._dynamo`, and defines classes for its own
tensor parallelism and FSDP, which loads `torch.distributed.tensor`. Workers use neither: models run eagerly, and their
weights are split by `model.sharding`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TypeVar

import torch
import transformers.utils
from transformers.utils import import_utils

_DYNAMO = "torch._dynamo"
_MASKING = f"{_DYNAMO}._trace_wrapped_higher_order_op"
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
        sys.meta_path.insert(0, _DynamoModules())
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
    """Stands for `torch._dynamo` as long as nobody wants more of it than what eager models and gloo do."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        self.__spec__ = ModuleSpec(_DYNAMO, None, is_package=True)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        self.allow_in_graph = self.assume_constant_result = _unmarked
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # torch.distributed clears it; there is none

    @staticmethod
    def disable(function: FunctionT | None = None, *_: object, **__: object) -> object:
        """Leaves a function as it is, or returns what does so."""
        return _unmarked if function is None else function

    def __getattr__(self, name: str) -> object:
        """Gives way to the real module."""
        if name.startswith("__"):  # asked of all modules, by `inspect`
            raise AttributeError(name)
        return getattr(self.give_way(), name)

    def give_way(self) -> ModuleType:
        """Imports the real module in place of this one."""
        if sys.modules.get(_DYNAMO) is self:
            del sys.modules[_DYNAMO], vars(torch)["_dynamo"]
        return import_module(_DYNAMO)


class _DynamoModules(MetaPathFinder, Loader):
    """Finds what lies in `torch._dynamo`, which gives way before, except for the module that all models import."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        del path, target
        package = sys.modules.get(_DYNAMO)
        if not fullname.startswith(f"{_DYNAMO}.") or fullname == _MASKING or not isinstance(package, _Dynamo):
            return None
        package.give_way()
        import_module(fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, since the module was imported when it was found."""


def _unmarked(function: FunctionT) -> FunctionT:
    return function
