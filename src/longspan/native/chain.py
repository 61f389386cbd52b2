"""Several kernels in one call, and the arguments of each, as `native/chain.cpp` defines them.

Arguments contain only addresses, so callers keep the memory alive until the call returns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longspan import native

MAX_MATRICES = 3


class MatrixArgs(ctypes.Structure):
    """`Matrix` of linear.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "levels", "grid", "head_norm", "out")),
        *((name, ctypes.c_long) for name in ("outputs", "row", "out_row", "rotated", "bits")),
    )


class LinearArgs(ctypes.Structure):
    """`Linear` of linear.cpp, field by field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("tokens", "inputs", "x_row")),
        ("norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("number", ctypes.c_long),
        ("matrices", MatrixArgs * MAX_MATRICES),
        ("gated", ctypes.c_long),
        ("residual", ctypes.c_void_p),
        ("residual_row", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_long) for name in ("head_dim", "rotary_dim")),
    )


class StoreArgs(ctypes.Structure):
    """`Store` of paged.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "keys", "values", "blocks", "offsets")),
        *((name, ctypes.c_long) for name in ("tokens", "kv_heads", "dim", "block_size")),
        *((name, ctypes.c_long) for name in ("k_head", "k_row", "v_head", "v_row")),
    )


class PagedArgs(ctypes.Structure):
    """`Paged` of paged.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("first_item", "blocks", "low", "high")),
        *((name, ctypes.c_long) for name in ("queries", "heads", "kv_heads", "dim", "block_size")),
        *((name, ctypes.c_long) for name in ("q_head", "q_row", "out_head", "out_row")),
        ("scale", ctypes.c_float),
    )


class _Link(ctypes.Structure):
    """`Link` of chain.cpp, field by field."""

    _fields_ = (("kind", ctypes.c_long), ("problem", ctypes.c_void_p))


Args = LinearArgs | StoreArgs | PagedArgs
_KINDS = {LinearArgs: 0, StoreArgs: 1, PagedArgs: 2}


def fields(args: ctypes.Array[Any]) -> npt.NDArray[np.void]:
    """View structures as an array, so that one assignment sets a field in all of them."""
    return np.frombuffer(memoryview(args).cast("B"), np.dtype(args._type_))


class Chain:
    """Kernels that run one after the other. Each may read the results of earlier ones.

    Args:
        links: the arguments of the kernels, which may be changed between calls of `run`.
    """

    def __init__(self, *links: Args) -> None:
        self._arguments = links  # kept alive
        self._links: ctypes.Array[_Link] = (_Link * len(links))(
            *(_Link(_KINDS[type(link)], ctypes.addressof(link)) for link in links)
        )

    def run(self, num_threads: int | None = None) -> None:
        """Run the kernels. The default is the number of threads of PyTorch.

        Raises:
            MemoryError: if there is no memory for intermediate results.
        """
        threads = torch.get_num_threads() if num_threads is None else num_threads
        if native.loaded().longspan_run(self._links, ctypes.c_long(len(self._links)), threads):
            raise MemoryError("no memory for intermediate results of a kernel")
