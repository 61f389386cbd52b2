"""CUDA graphs on a CPU: a replay repeats the operators and kernels of a function, without the function."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from longspan.attn.comm import Sums
from longspan.model.recording import Action, Replay, ReplayedStep


class Tape:
    """Records in place of `CudaRecorder`, and counts. Kernels of Triton are recorded if they are interpreted."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = self.num_actions = 0
        self._calls: list[Callable[[ReplayedStep], object]] | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        self.num_recorded += 1
        calls: list[Callable[[ReplayedStep], object]] = []
        self._calls = calls
        try:
            with _recorded_kernels(calls), _Operators(calls):
                found = compute()
        finally:
            self._calls = None

        def replay(step: ReplayedStep) -> Tensor:
            self.num_replayed += 1
            for call in calls:
                call(step)
            return found

        return replay

    def between(self, action: Action) -> None:
        """Call an action of the host between two recorded operators, see `recording.Between`."""
        if self._calls is not None:
            self.num_actions += 1
            self._calls.append(action)


_sums: list[Sums] = []


def recordable_sums(sums: Sums) -> Sums:
    """Return the same sums as an operator, which a tape records and replays like the sums of a device."""
    number = len(_sums)
    _sums.append(sums)
    return lambda members, tensor: _sum(tensor, number, [*members])


@torch.library.custom_op("longspan_tests::sum", mutates_args=())
def _sum(tensor: Tensor, number: int, members: list[int]) -> Tensor:
    return _sums[number](members, tensor.clone())


class _Operators(TorchDispatchMode):
    def __init__(self, calls: list[Callable[[ReplayedStep], object]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        outputs = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        inputs = {id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        storages = {one.untyped_storage().data_ptr() for one in inputs.values()}
        if func._schema.is_mutable:
            self._calls.append(lambda _: func(*args, **kwargs))
        elif not any(one.untyped_storage().data_ptr() in storages for one in outputs):  # no views

            def again(_: ReplayedStep) -> None:
                new = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
                for one, other in zip(outputs, new, strict=True):
                    one.copy_(other)

            self._calls.append(again)
        return found


class _recorded_kernels:  # noqa: N801 - a context
    """Records launches of Triton's kernels, of which the mode above sees only the work of the interpreter."""

    def __init__(self, calls: list[Callable[[ReplayedStep], object]]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        if not _is_interpreting():
            return
        from triton.runtime.interpreter import GridExecutor

        self._launch = launch = GridExecutor.__call__

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._calls.append(lambda _: launch(kernel, *args, **kwargs))
            with _disable_current_modes():
                launch(kernel, *args, **kwargs)

        GridExecutor.__call__ = recorded

    def __exit__(self, *_: object) -> None:
        if not _is_interpreting():
            return
        from triton.runtime.interpreter import GridExecutor

        GridExecutor.__call__ = self._launch


def _is_interpreting() -> bool:
    """Return whether this process interprets. The launcher of kernels, which is replaced, is global to all threads."""
    return os.environ.get("TRITON_INTERPRET") == "1"
