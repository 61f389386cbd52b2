"""Finds copies to a device, and reads of a device, for which the host would wait. The device has no memory (`meta`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WaitError(Exception):
    """On a CUDA device the host would wait until the device has done all earlier work."""


@contextmanager
def without_waits() -> Iterator[None]:
    """Refuse copies to the device that are not asynchronous. Tensors without memory cannot be read at all."""
    with _WithoutNumbers(), _WithoutCopies():
        yield


class _WithoutNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        on_device = any(isinstance(one, Tensor) and one.is_meta for one in (*args, found))
        if on_device and func in {torch.tensor, torch.as_tensor, Tensor.new_tensor}:
            raise WaitError("a tensor on the device is made of numbers of the host")
        if on_device and func in {Tensor.__getitem__, Tensor.__setitem__} and isinstance(args[1], list):
            raise WaitError("a list is an index")
        return found


class _WithoutCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        inputs, outputs = (
            {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.ndim}
            for values in ((args, kwargs), found)
        )
        is_copy = func.overloadpacket in {torch.ops.aten._to_copy, torch.ops.aten.copy_}
        is_async = is_copy and (kwargs.get("non_blocking") or args[2:3] == (True,))
        if "meta" in outputs and "cpu" in inputs and not is_async:
            raise WaitError(f"{func} copies numbers of the host")
        return found
