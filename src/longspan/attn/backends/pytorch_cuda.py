"""PyTorch's kernels on CUDA devices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attn.backends import CudaKernel, Partial, merge_each
from longspan.attn.backends.pytorch import AttentionBackend, eager
from longspan.attn.spec import AttnSpec

_AMPERE, _HOPPER = (8, 0), (9, 0)
_MAX_FLASH_DIM, _MAX_CUDNN_DIM = 256, 128
_CUDNN_TOKENS, _CUDNN_LENGTHS, _MAX_PADDING = 1024, 32, 1 / 8
"""cuDNN makes a plan for every shape and its strides, which often takes longer than a call. So lengths are multiples
of 1024, and for long contexts one of 32 between two powers of two. Padding adds at most 1/8 of the rows."""


def cuda_kernel(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], *, masked: bool = False, windowed: bool = False
) -> CudaKernel:
    """Choose the fastest of PyTorch's CUDA kernels that supports such attention.

    cuDNN is the fastest from Hopper (9.0) on, for head dimensions up to 128. Only FlashAttention supports both edges of
    sliding windows. `capability` is that of the device.
    """
    is_half = dtype in {torch.bfloat16, torch.float16}
    if masked:
        return "eager"
    if is_half and head_dim % 8 == 0 and head_dim <= _MAX_FLASH_DIM and capability >= _AMPERE:
        has_cudnn = capability >= _HOPPER and head_dim <= _MAX_CUDNN_DIM
        return "cudnn" if has_cudnn and not windowed else "flash"
    return "efficient" if head_dim % (8 if is_half else 4) == 0 and not windowed else "eager"


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

    def _flash_supports(self, q: Tensor, spec: AttnSpec) -> bool:
        """Return True if FlashAttention supports windows of such queries."""
        kernel = cuda_kernel(q.dtype, q.shape[2], torch.cuda.get_device_capability(q.device), windowed=True)
        return spec.softcap is None and kernel == "flash"

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
        if self._forced is not None and mask is None:
            return _call(self._forced, q, k, v, spec, causal=causal)
        capability = torch.cuda.get_device_capability(q.device)
        kernel = cuda_kernel(q.dtype, q.shape[3], capability, masked=mask is not None)
        if kernel == "cudnn":
            return _by_cudnn(q, k, v, spec, causal=causal)
        return _call(kernel, q, k, v, spec, causal=causal, mask=mask)


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool) -> Partial:
    """Compute lengths that cuDNN has plans for by cuDNN, and the remaining keys by FlashAttention.

    Rows are padded to such a length. In causal squares keys are padded, too, and no real query sees the padding.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    added = -num_queries % _CUDNN_TOKENS
    cut = num_keys - num_keys % max(_CUDNN_TOKENS, (1 << num_keys.bit_length() - 1) // _CUDNN_LENGTHS)
    if added > _MAX_PADDING * num_queries or not (cut or causal):
        return _call("flash", q, k, v, spec, causal=causal)
    rows, keys, values = (pad(x, (0, 0, 0, added)) if added and (causal or x is q) else x for x in (q, k, v))
    if not causal:
        keys, values = keys[:, :, :cut], values[:, :, :cut]
    out, lse = (x[:, :, :num_queries] for x in _call("cudnn", rows, keys, values, spec, causal=causal))
    if causal or cut == num_keys:
        return out, lse
    merged, lse = merge_each([(out, lse), _call("flash", q, k[:, :, cut:], v[:, :, cut:], spec, causal=False)])
    return merged.to(q.dtype), lse


def _call(
    kernel: CudaKernel, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None = None
) -> Partial:
    """Call a kernel. Only `eager` takes a mask."""
    operators = torch.ops.aten
    match kernel:
        case "cudnn":
            options = (None, True, 0.0, causal, False)
            out, lse, *_ = operators._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - public ones hide the lse
                *(x.contiguous() for x in (q, k, v)), *options, scale=spec.scale
            )
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
