"""Attention by the kernels of `longspan.native`, which in bfloat16 on CPUs are several times faster than PyTorch's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from longspan import native
from longspan.attn.backends import Partial
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.paged import PagedKv, PagedPlan
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation
from longspan.native.chain import Chain, PagedArgs, StoreArgs

_FAR = 1 << 40
_MAX_DIM, _MULTIPLE = 256, 32
"""The largest head dimension of the kernels, and the number that it must be a multiple of."""
_MAX_SINGLE_THREAD_TOKENS = 64
"""One thread stores up to this number of tokens before further threads have woken up."""
_MIN_QUERIES = 17
"""Minimum queries. With fewer, packing the keys costs more than the faster products save."""


class _Flash(ctypes.Structure):
    """`Problem` of flash.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "queries", "keys", "dim")),
        *((name, ctypes.c_long) for name in ("q_head", "q_row", "k_head", "k_row", "v_head", "v_row")),
        *((name, ctypes.c_long) for name in ("out_head", "out_row")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_long) for name in ("lower", "upper", "dense")),
        ("kept", ctypes.c_void_p),
    )


class _Rating(ctypes.Structure):
    """`Rating` of sparse.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "lse", "seen", "ratings")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "samples", "keys", "dim")),
        *((name, ctypes.c_long) for name in ("q_head", "k_head", "k_row")),
        ("scale", ctypes.c_float),
    )


class _Partial(ctypes.Structure):
    """`Partial` of sparse.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
        *((name, ctypes.c_long) for name in ("rows", "head", "row", "lse_head")),
        ("places", ctypes.c_void_p),
        ("kv_heads", ctypes.c_long),
    )


class _Merge(ctypes.Structure):
    """`Merge` of sparse.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("partials", "out", "lse")),
        *((name, ctypes.c_long) for name in ("number", "heads", "queries", "dim", "head", "row")),
    )


class NativeCpu(TorchCpu):
    """Our own kernels, which must be loaded, and PyTorch's for all other cases."""

    @staticmethod
    def knows(spec: AttnSpec) -> bool:
        """Return True if the kernels support this attention in bfloat16."""
        return spec.softcap is None and spec.head_dim % _MULTIPLE == 0 and spec.head_dim <= _MAX_DIM

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        if q.shape[1] < _MIN_QUERIES or not _applies(q, spec):
            return super().attend(q, k, v, relation, spec, dense=dense)
        is_full = relation.kind == "full"  # its bounds may be those of the last of several runs
        band = (-_FAR, _FAR) if is_full else (relation.lower, relation.upper)
        return _attended(q, k, v, spec, band=band, dense=dense)

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> Partial:
        if q.shape[1] < _MIN_QUERIES or not indices.shape[1] or not _applies(q, spec):
            return super().attend_kept(q, k, v, indices, spec)
        return _attended(q, k, v, spec, kept=indices)

    def store(self, kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        if not (_is_bf16(kv.keys, k, v) and kv.keys.is_contiguous()):
            super().store(kv, blocks, offsets, k, v)
            return
        assert blocks.is_contiguous() and offsets.is_contiguous(), "the kernel reads them as arrays"
        num_heads, num_tokens, dim = k.shape
        problem = StoreArgs(
            *(tensor.data_ptr() for tensor in (k, v, kv.keys, kv.values, blocks, offsets)),
            *(num_tokens, num_heads, dim, kv.block_size, *k.stride()[:2], *v.stride()[:2]),
        )
        Chain(problem).run(num_threads=1 if num_tokens <= _MAX_SINGLE_THREAD_TOKENS else None)

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        if not (_applies(q, spec) and kv.keys.is_contiguous()):
            return super().attend_paged(q, kv, plan, spec)
        assert q.shape[1] == plan.num_queries, "the plan is for these queries"
        q = q if q.stride(-1) == 1 else q.contiguous()
        out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=torch.float32)
        problem = PagedArgs(
            *(tensor.data_ptr() for tensor in (q, kv.keys, kv.values, out, lse)),
            *plan.addresses,
            *(q.shape[1], q.shape[0], kv.keys.shape[1], q.shape[2], kv.block_size),
            *(*q.stride()[:2], *out.stride()[:2]),
            spec.scale,
        )
        Chain(problem).run()
        return out, lse

    def merge_into(self, out: Tensor, partials: Sequence[Partial], order: Tensor | None = None) -> Tensor:
        if not _is_bf16(out, *(partial for partial, _ in partials)):
            return super().merge_into(out, partials, order)
        lse = torch.empty(out.shape[:2], dtype=torch.float32)
        each = (_Partial * len(partials))(
            *(
                _Partial(some.data_ptr(), some_lse.data_ptr(), some.shape[1], *some.stride()[:2], some_lse.stride(0))
                for some, some_lse in partials
            )
        )
        if order is not None:
            numbers = torch.arange(order.shape[1], dtype=torch.int32).expand_as(order)
            places = torch.empty(order.shape, dtype=torch.int32).scatter_(1, order.long(), numbers)
            for partial in each[1:]:
                partial.places, partial.kv_heads = places.data_ptr(), len(places)
        problem = _Merge(
            *(ctypes.addressof(each), out.data_ptr(), lse.data_ptr()), *(len(partials), *out.shape, *out.stride()[:2])
        )
        native.loaded().longspan_merge_bf16(ctypes.byref(problem), torch.get_num_threads())
        return lse

    def rate(self, q: Tensor, lse: Tensor, seen: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
        if not _applies(q, spec):
            return super().rate(q, lse, seen, k, spec)
        q, lse, seen = q.contiguous(), lse.contiguous(), seen.to(torch.int64)
        k = k if k.stride(-1) == 1 else k.contiguous()
        ratings = torch.empty(k.shape[:2], dtype=torch.float32)
        problem = _Rating(
            *(tensor.data_ptr() for tensor in (q, k, lse, seen, ratings)),
            *(q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2], q.stride(0), *k.stride()[:2]),
            spec.scale,
        )
        if native.loaded().longspan_rate_bf16(ctypes.byref(problem), torch.get_num_threads()):
            raise MemoryError("no memory for packed keys")
        return ratings


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    *,
    band: tuple[int, int] = (-_FAR, _FAR),
    dense: bool = False,
    kept: Tensor | None = None,
) -> Partial:
    """Call the kernel for queries that see a band of the keys, or all keys that are kept for their KV head."""
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    kept = None if kept is None else kept.to(torch.int32).contiguous()
    num_heads, num_queries, dim = q.shape
    out = torch.empty(num_queries, num_heads, dim, dtype=q.dtype).transpose(
        0, 1
    )  # the layout that the next layer reads
    lse = torch.empty(num_heads, num_queries, dtype=torch.float32)
    problem = _Flash(
        *(tensor.data_ptr() for tensor in (q, k, v, out, lse)),
        *(num_heads, k.shape[0], num_queries, k.shape[1] if kept is None else kept.shape[1], dim),
        *(stride for tensor in (q, k, v, out) for stride in tensor.stride()[:2]),
        spec.scale,
        *band,
        dense,
        None if kept is None else kept.data_ptr(),
    )
    if native.loaded().longspan_attend_bf16(ctypes.byref(problem), torch.get_num_threads()):
        raise MemoryError("no memory for packed keys and values")
    return out, lse


def _is_bf16(*tensors: Tensor) -> bool:
    """Return True if all tensors are bfloat16 on a CPU, with dense rows."""
    return all(t.device.type == "cpu" and t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in tensors)


def _applies(q: Tensor, spec: AttnSpec) -> bool:
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and NativeCpu.knows(spec)
