"""Counts the launches of decoder layers: operators of PyTorch that compute, and kernels of Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Launches(TorchDispatchMode):
    """Counts launches inside the block, by the layer that is computed. Views and allocations are none.

    Attributes:
        names: the operators and kernels of each layer, in order.
        num_bytes: of each layer, the bytes of the tensors that Triton's kernels read and write, without KV pools.
    """

    def __init__(self, layers: dict[int, nn.Module], *, run_kernels: bool = True) -> None:
        super().__init__()
        self.names: dict[int, list[str]] = {number: [] for number in layers}
        self.num_bytes = dict.fromkeys(layers, 0)
        self._current: int | None = None
        self._run_kernels = run_kernels
        for number, layer in layers.items():
            layer.register_forward_pre_hook(self._entering(number))
            layer.register_forward_hook(self._leaving)

    def _entering(self, number: int) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._current = number

        return enter

    def _leaving(self, *_: object) -> None:
        self._current = None

    def __enter__(self) -> Any:
        from triton.runtime.interpreter import GridExecutor

        self._launch = launch = GridExecutor.__call__

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._count(kernel.fn.__name__)
            if self._current is not None:
                self.num_bytes[self._current] += sum(one.nbytes for one in args if isinstance(one, Tensor))
            if self._run_kernels:
                with _disable_current_modes():
                    launch(kernel, *args, **kwargs)

        GridExecutor.__call__ = counted
        return super().__enter__()

    def __exit__(self, *reason: object) -> None:
        from triton.runtime.interpreter import GridExecutor

        super().__exit__(*reason)
        GridExecutor.__call__ = self._launch

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        storages = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        outputs = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        is_view = not func._schema.is_mutable and any(one.untyped_storage()._cdata in storages for one in outputs)
        if not is_view and "empty" not in func.__name__:
            self._count(func.__name__)
        return found

    def _count(self, name: str) -> None:
        if self._current is not None:
            self.names[self._current].append(name)
