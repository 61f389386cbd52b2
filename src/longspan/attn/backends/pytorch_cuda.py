"""PyTorch's kernels on CUDA devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import pad

from longspan.attn.backends import CudaKernel, Partial, cudnn_plans
from longspan.attn.backends.cudnn_plans import Plan
from longspan.attn.backends.pytorch import AttentionBackend, eager
from longspan.attn.paged import PagedKv
from longspan.attn.paged_splits import copied_once
from longspan.attn.spec import AttnSpec

_log = logging.getLogger("longspan")
_AMPERE, _HOPPER = (8, 0), (9, 0)
_MAX_FLASH_DIM, _MAX_CUDNN_DIM = 256, 128
_MAX_GROUPED = 1024
"""Queries of a prompt that shares a call. Longer prompts keep all multiprocessors busy and are for cuDNN."""
_FLASH_PACKAGES = {"FA3": ("flash_attn_interface", {9}), "FA4": ("flash_attn.cute.interface", {9, 10})}
"""Versions of FlashAttention that PyTorch can use instead of its own, their modules, and the major compute capability.
The first that is installed is used."""


def cuda_kernel(
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    *,
    masked: bool = False,
    windowed: bool = False,
    flash: str | None = None,
) -> CudaKernel:
    """Choose the fastest of PyTorch's CUDA kernels that supports such attention.

    cuDNN is the fastest from Hopper (9.0) on, for head dimensions up to 128. Only FlashAttention supports both edges of
    sliding windows. `capability` is that of the device.

    Args:
        flash: the version of FlashAttention that replaces PyTorch's own. It is as fast as cuDNN, and has no plans.
    """
    is_half = dtype in {torch.bfloat16, torch.float16}
    if masked:
        return "eager"
    max_dim = _MAX_CUDNN_DIM if flash == "FA4" else _MAX_FLASH_DIM
    if is_half and head_dim % 8 == 0 and head_dim <= max_dim and capability >= _AMPERE:
        has_cudnn = capability >= _HOPPER and head_dim <= _MAX_CUDNN_DIM and flash is None
        return "cudnn" if has_cudnn and not windowed else "flash"
    return "efficient" if head_dim % (8 if is_half else 4) == 0 and not windowed else "eager"


def use_installed_flash(capability: tuple[int, int]) -> str | None:
    """Let PyTorch call a newer FlashAttention in this process, if one is installed that supports the device.

    Return its version, "FA3" or "FA4". None if PyTorch keeps its own.
    """
    known = attention.list_flash_attention_impls() if hasattr(attention, "list_flash_attention_impls") else []
    for version, (module, majors) in _FLASH_PACKAGES.items():
        if version in known and capability[0] in majors and _is_installed(module):
            try:
                attention.activate_flash_attention_impl(version)
            except (ImportError, RuntimeError) as error:
                _log.warning("%s is installed, but PyTorch cannot use it: %s", module, error)
            else:
                _log.info("attention is computed by %s (%s)", version, module)
                return version
    return None


def _is_installed(module: str) -> bool:
    """Return True if a module of any depth can be found."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


class TorchCuda(AttentionBackend):
    """Attention by the kernel that `cuda_kernel` chooses. `kernel` fixes one for calls without a mask, to compare."""

    def __init__(self, kernel: CudaKernel | None = None) -> None:
        self._forced = kernel

    def _band(
        self, q: Tensor, k: Tensor, v: Tensor, lower: int, upper: int, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Compute a sliding window in one call if FlashAttention supports it. Every query sees some key."""
        if dense or not self._flash_supports(q, spec):
            return super()._band(q, k, v, lower, upper, spec, dense=dense)
        keys = slice(max(0, lower), min(k.shape[1], q.shape[1] + upper))
        k, v = k[:, keys], v[:, keys]
        # A window counts from the diagonal through the last query and the last key. Some query sees each end of the
        # keys, so neither side is negative. Negative sides would be unbounded.
        diagonal = keys.start + k.shape[1] - q.shape[1]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - public ones have no windows
            *(tensor.transpose(0, 1)[None] for tensor in (q, k, v)),
            *(None, None, q.shape[1], k.shape[1], 0.0, False, False),
            scale=spec.scale,
            window_size_left=diagonal - lower,
            window_size_right=upper - diagonal,
        )
        return out[0].transpose(0, 1), lse[0]

    def max_grouped(self, q: Tensor, spec: AttnSpec) -> int:
        is_supported = self._forced is None and spec.chunk is None and self._flash_supports(q, spec)
        return _MAX_GROUPED if is_supported else 0

    def attend_prompts(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[tuple[int, int], ...], spec: AttnSpec
    ) -> Partial:
        """Call FlashAttention, whose diagonal ends with the last query and the last key of each prompt."""
        queries, keys = zip(*lengths, strict=True)
        ends = (copied_once((0, *accumulate(own)), torch.int32, q.device) for own in (queries, keys))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - public ones hide the lse
            *(tensor.transpose(0, 1) for tensor in (q, k, v)),
            *(*ends, max(queries), max(keys), 0.0, False, False),
            scale=spec.scale,
            window_size_left=-1 if spec.window is None else spec.window - 1,
            window_size_right=0,
        )
        return out.transpose(0, 1), lse

    def _flash_supports(self, q: Tensor, spec: AttnSpec) -> bool:
        """Return True if FlashAttention supports windows of such queries."""
        return spec.softcap is None and chosen_kernel(q, windowed=True) == "flash"

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
        kernel = chosen_kernel(q, masked=mask is not None)
        if self._forced is not None and mask is None:
            kernel = self._forced
        elif kernel == "cudnn":  # only `_by_cudnn` knows the shapes that have plans
            kernel = "flash"
        return _call(kernel, q, k, v, spec, causal=causal, mask=mask)

    def _by_cudnn(self, q: Tensor, spec: AttnSpec) -> bool:
        return self._forced is None and spec.softcap is None and chosen_kernel(q) == "cudnn"

    def _full(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Partial:
        if not self._by_cudnn(q, spec):
            return super()._full(q, k, v, spec)
        out, lse = self._rectangle(q.reshape(spec.num_kv_heads, -1, q.shape[2]), k, v, spec)
        return out.reshape(q.shape), lse.reshape(q.shape[:2])

    def _diagonal(self, q: Tensor, k: Tensor, v: Tensor, upper: int, spec: AttnSpec) -> Partial:
        """Compute causal runs by squares of bounded size, each with the keys before it. Later rows see all keys."""
        if not self._by_cudnn(q, spec):
            return super()._diagonal(q, k, v, upper, spec)
        num_causal = min(q.shape[1], k.shape[1] - upper)
        results = []
        for start, stop in pairwise(cudnn_plans.cuts(num_causal, upper)):
            seen = slice(0, upper + stop)
            results.append(self._square(q[:, start:stop], k[:, seen], v[:, seen], spec))
        if num_causal < q.shape[1]:
            results.append(self._full(q[:, num_causal:], k, v, spec))
        return _concatenated(results)

    def _square(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Partial:
        """Compute queries that end with the last key: a causal square, and keys before it that all queries see.

        The square may contain keys before the queries, so that the number of remaining keys has plans. The queries then
        have as many rows before them. No query sees the padding behind the keys.
        """
        num_queries, before = q.shape[1], k.shape[1] - q.shape[1]
        chosen = cudnn_plans.square(num_queries, before % cudnn_plans.TOKENS)
        if chosen is None:
            partials = [self._fused(q[None], k[None, :, before:], v[None, :, before:], spec, causal=True)]
        else:
            added, length = chosen
            before, behind = before - added, length - added - num_queries
            rows = pad(q, (0, 0, added, behind))[None]
            keys, values = (pad(x[:, before:], (0, 0, 0, behind))[None] for x in (k, v))
            out, lse = _call("cudnn", rows, keys, values, spec, causal=True)
            own = slice(added, added + num_queries)
            partials = [(out[:, :, own], lse[:, :, own])]
        partials = [(out[0], lse[0]) for out, lse in partials]
        if before:
            partials.append(self._full(q, k[:, :before], v[:, :before], spec))
        return self._merged(partials)

    def _rectangle(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Partial:
        """Compute rows `[K, rows, D]` that see all keys, by cuDNN except for the last rows and keys."""
        keys = cudnn_plans.key_pieces(k.shape[1])
        rows = cudnn_plans.row_pieces(q.shape[1], len(q)) if keys else []
        last_row, last_key = (rows[-1].stop, keys[-1].stop) if rows else (0, 0)
        cut = [slice(each.start, each.stop) for each in keys if rows]
        pairs = [(k[None, :, own].contiguous(), v[None, :, own].contiguous()) for own in cut]
        results = []
        for start, stop, length in rows:
            some = q[None, :, start:stop]
            padded = pad(some, (0, 0, 0, length - (stop - start)))
            calls = [_call("cudnn", padded, some_k, some_v, spec, causal=False) for some_k, some_v in pairs]
            partials = [(out[0, :, : stop - start], lse[0, :, : stop - start]) for out, lse in calls]
            if last_key < k.shape[1]:
                out, lse = self._fused(some, k[None, :, last_key:], v[None, :, last_key:], spec)
                partials.append((out[0], lse[0]))
            results.append(self._merged(partials))
        if last_row < q.shape[1]:
            out, lse = self._fused(q[None, :, last_row:], k[None], v[None], spec)
            results.append((out[0], lse[0]))
        return _concatenated(results)

    def _merged(self, partials: Sequence[Partial]) -> Partial:
        if len(partials) == 1:
            return partials[0]
        out = torch.empty_like(partials[0][0], memory_format=torch.contiguous_format)
        return out, self.merge_into(out, partials)

    def prepare(self, kv: PagedKv, specs: Collection[AttnSpec], max_queries: int, max_keys: int) -> None:
        """Make the plans of all shapes. cuDNN keeps them for this thread. The calls read the pool in place of keys."""
        begun_s, made = time.monotonic(), set[tuple[int, int, int, Plan]]()
        max_keys = min(max_keys, len(kv.keys) * kv.block_size)
        for spec in specs:
            num_kv_heads, dim, readers = spec.num_kv_heads, spec.head_dim, spec.num_heads // spec.num_kv_heads
            if self._by_cudnn(kv.keys.new_empty(0, dim), spec):
                longest = min(max_keys, spec.visibility.max_keys or max_keys)
                plans = {*cudnn_plans.all_plans(num_kv_heads, readers, max_queries, longest)}
                new = {(num_kv_heads, readers, dim, plan) for plan in plans} - made
                made |= new
                for *_, plan in new:
                    _make(plan, spec, kv.keys.flatten())
        if made:
            _log.info("%d plans of cuDNN made in %.1f s", len(made), time.monotonic() - begun_s)


def _make(plan: Plan, spec: AttnSpec, memory: Tensor) -> None:
    """Make a call of this shape, whose keys and values are any contents of `memory`."""
    num_heads = spec.num_heads if plan.causal else spec.num_kv_heads
    size = spec.num_kv_heads * plan.num_keys * spec.head_dim
    keys = memory[:size] if size <= len(memory) else memory.new_zeros(size)
    keys = keys.view(1, spec.num_kv_heads, plan.num_keys, spec.head_dim)
    q = memory.new_zeros(1, num_heads, plan.num_queries, spec.head_dim)
    _call("cudnn", q, keys, keys, spec, causal=plan.causal)


def chosen_kernel(q: Tensor, *, masked: bool = False, windowed: bool = False) -> CudaKernel:
    """Choose the kernel for queries `[..., D]` on their device."""
    current = getattr(attention, "current_flash_attention_impl", lambda: None)
    capability = torch.cuda.get_device_capability(q.device)
    return cuda_kernel(q.dtype, q.shape[-1], capability, masked=masked, windowed=windowed, flash=current())


def _concatenated(partials: Sequence[Partial]) -> Partial:
    """Join the results of rows in order."""
    if len(partials) == 1:
        return partials[0]
    return torch.cat([out for out, _ in partials], dim=1), torch.cat([lse for _, lse in partials], dim=1)


def _call(
    kernel: CudaKernel, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None = None
) -> Partial:
    """Call a kernel. Only `eager` takes a mask."""
    operators = torch.ops.aten
    match kernel:
        case "cudnn":
            options = (None, True, 0.0, causal, False)
            # Plans depend on the strides of dimensions of size 1, too, so all get the strides of a new tensor.
            packed = (x.contiguous().view(-1).view(x.shape) for x in (q, k, v))
            out, lse, *_ = operators._scaled_dot_product_cudnn_attention(*packed, *options, scale=spec.scale)  # noqa: SLF001 - public ones hide the lse
            return out, lse.reshape(q.shape[:3])
        case "flash":
            out, lse, *_ = operators._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=spec.scale)  # noqa: SLF001
            return out, lse
        case "efficient":
            of_all = (q, *_for_each_reader(q, k, v), None, True, 0.0, causal)
            out, lse, *_ = operators._scaled_dot_product_efficient_attention(*of_all, scale=spec.scale)  # noqa: SLF001
            return out, lse[:, :, : q.shape[2]]  # padded to a multiple of 32
        case "eager":
            return eager(q, k, v, spec, causal=causal, mask=mask)


def _for_each_reader(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat KV heads, for kernels that need one per query head."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))
