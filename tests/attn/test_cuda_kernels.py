"""Which of PyTorch's kernels CUDA devices use, and that these take and give what we think; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.args import EngineArgs
from longspan.attn.backends import CudaKernel, backend_of
from longspan.attn.backends.pytorch import TorchCuda, cuda_kernel
from longspan.attn.spec import AttnSpec

AMPERE, HOPPER, TURING = (8, 6), (9, 0), (7, 5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "readers", "capability", "masked", "wanted"),
    [
        (torch.bfloat16, 128, 1, HOPPER, False, "cudnn"),
        (torch.bfloat16, 128, 4, HOPPER, False, "flash"),
        (torch.bfloat16, 256, 1, HOPPER, False, "flash"),
        (torch.bfloat16, 128, 1, AMPERE, False, "flash"),
        (torch.float16, 64, 1, TURING, False, "efficient"),
        (torch.bfloat16, 320, 4, HOPPER, False, "efficient"),
        (torch.bfloat16, 100, 1, HOPPER, False, "eager"),
        (torch.float32, 100, 4, HOPPER, False, "efficient"),
        (torch.float32, 50, 1, AMPERE, False, "eager"),
        (torch.bfloat16, 128, 1, HOPPER, True, "eager"),
    ],
)
def test_the_quickest_kernel_that_computes_it(
    dtype: torch.dtype, head_dim: int, readers: int, *, capability: tuple[int, int], masked: bool, wanted: CudaKernel
) -> None:
    assert cuda_kernel(dtype, head_dim, readers, capability, masked=masked) == wanted


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("capability", "dtype"), [(HOPPER, torch.bfloat16), (AMPERE, torch.bfloat16), (AMPERE, torch.float32)]
)
def test_kernels_take_and_give_what_we_think(
    capability: tuple[int, int], dtype: torch.dtype, causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's own rules for tensors without numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    spec = AttnSpec(num_heads=8, num_kv_heads=kv_heads, head_dim=64, scale=0.125, window=None, softcap=None)
    q = torch.empty(3, 8, 70, 64, dtype=dtype, device="meta")
    k, v = torch.empty(2, 3, kv_heads, 70 if causal else 90, 64, dtype=dtype, device="meta")
    out, lse = TorchCuda()._kernel(q, k, v, spec, causal=causal, mask=None)
    assert out.shape == q.shape and out.dtype == dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32


class Called(TorchDispatchMode):
    """Remembers the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
def test_a_backend_may_keep_to_one_kernel_but_under_a_mask(
    kernel: CudaKernel, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On whatever device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    spec = AttnSpec(num_heads=8, num_kv_heads=kv_heads, head_dim=64, scale=0.125, window=None, softcap=None)
    q, k, v = (torch.empty(1, heads, 70, 64, dtype=torch.bfloat16, device="meta") for heads in (8, kv_heads, kv_heads))
    backend: Any = backend_of(torch.device("cuda"), kernel=kernel)
    with Called() as called:
        out, lse = backend._kernel(q, k, v, spec, causal=True, mask=None)
    assert f"aten::_scaled_dot_product_{kernel}_attention" in called.names
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    with Called() as called:
        backend._kernel(q, k, v, spec, causal=False, mask=torch.empty(1, 1, 70, 70, device="meta"))
    assert called.names and not any("scaled_dot_product" in name for name in called.names)


def test_precision_follows_the_device() -> None:
    assert [EngineArgs("m", device=device).precision for device in ("cpu", "cuda")] == ["float32", "bfloat16"]
    assert EngineArgs("m", device="cuda", dtype="float32").precision == "float32"
