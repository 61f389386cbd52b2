"""The choice among PyTorch's CUDA kernels, and their arguments and results. No GPU is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.attn.backends import CudaKernel, backend_of, pytorch_cuda
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.backends.pytorch_cuda import TorchCuda, cuda_kernel
from longspan.attn.check import random_qkv, random_sinks, reference
from longspan.attn.comm import ALONE
from longspan.attn.exchanges import Call
from longspan.attn.exchanges.local import local
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import LOCAL
from longspan.core.runs import Run, relate

AMPERE, HOPPER, TURING = (8, 6), (9, 0), (7, 5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "case", "wanted"),
    [
        (torch.bfloat16, 128, HOPPER, {}, "cudnn"),
        (torch.bfloat16, 256, HOPPER, {}, "flash"),
        (torch.bfloat16, 128, AMPERE, {}, "flash"),
        (torch.float16, 64, TURING, {}, "efficient"),
        (torch.bfloat16, 320, HOPPER, {}, "efficient"),
        (torch.bfloat16, 100, HOPPER, {}, "eager"),
        (torch.float32, 100, HOPPER, {}, "efficient"),
        (torch.float32, 50, AMPERE, {}, "eager"),
        (torch.bfloat16, 128, HOPPER, {"masked": True}, "eager"),
    ],
)
def test_the_quickest_kernel_that_computes_it(
    dtype: torch.dtype, head_dim: int, *, capability: tuple[int, int], case: dict[str, bool], wanted: CudaKernel
) -> None:
    assert cuda_kernel(dtype, head_dim, capability, **case) == wanted


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "wanted"),
    [
        (torch.bfloat16, 128, HOPPER, "flash"),
        (torch.float16, 256, AMPERE, "flash"),
        (torch.float16, 64, TURING, "eager"),
        (torch.bfloat16, 100, HOPPER, "eager"),
        (torch.bfloat16, 320, HOPPER, "eager"),
        (torch.float32, 64, HOPPER, "eager"),
    ],
)
def test_the_only_kernel_for_windows(
    dtype: torch.dtype, head_dim: int, *, capability: tuple[int, int], wanted: CudaKernel
) -> None:
    assert cuda_kernel(dtype, head_dim, capability, windowed=True) == wanted


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("capability", "dtype"), [(HOPPER, torch.bfloat16), (AMPERE, torch.bfloat16), (AMPERE, torch.float32)]
)
def test_kernels_have_the_expected_arguments_and_results(
    capability: tuple[int, int], dtype: torch.dtype, causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's own rules for tensors without numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    spec = AttnSpec(num_heads=8, num_kv_heads=kv_heads, head_dim=64, scale=0.125, window=None, softcap=None)
    num_queries, num_keys = (1024, 2048) if capability == HOPPER else (70, 90)
    q = torch.empty(3, 8, num_queries, 64, dtype=dtype, device="meta")
    k, v = torch.empty(2, 3, kv_heads, num_queries if causal else num_keys, 64, dtype=dtype, device="meta")
    out, lse = TorchCuda()._kernel(q, k, v, spec, causal=causal, mask=None)
    assert out.shape == q.shape and out.dtype == dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    if dtype == torch.bfloat16:
        out, lse = TorchCuda()._band(q[0], k[0], v[0], -10, k.shape[2] - num_queries, spec)
        assert out.shape == q.shape[1:] and out.dtype == dtype
        assert lse.shape == q.shape[1:3] and lse.dtype == torch.float32


# ---------------------------------------------------------------- windows


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: object,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    **_: None,
) -> tuple[Tensor, ...]:
    """Compute FlashAttention's definition of windows in float64, of one sequence or of several.

    Query i sees key j iff `i + S - T - left <= j <= i + S - T + right`, where -1 has no end. A row that sees nothing
    has a sum of plus infinity.
    """
    if others[0] is not None:
        cuts_q, cuts_k, *lengths = others
        assert isinstance(cuts_q, Tensor) and isinstance(cuts_k, Tensor) and cuts_q.dtype == cuts_k.dtype == torch.int32
        assert lengths == [int(cuts_q.diff().max()), int(cuts_k.diff().max()), 0.0, False, False]
        sides = {"scale": scale, "window_size_left": window_size_left, "window_size_right": window_size_right}
        each = []
        for (a, b), (c, d) in zip(pairwise(cuts_q.tolist()), pairwise(cuts_k.tolist()), strict=True):
            own = (q[None, a:b], k[None, c:d], v[None, c:d])
            each.append(flash(*own, None, None, b - a, d - c, 0.0, False, False, **sides))
        outs, lses, *nothing = zip(*each, strict=True)
        return torch.cat(outs, dim=1)[0], torch.cat(lses, dim=2)[0], *(one[0] for one in nothing)
    max_q, max_k = q.shape[1], k.shape[1]
    assert others == (None, None, max_q, max_k, 0.0, False, False), "one sequence, no dropout, not causal"
    assert all(one.stride(3) == 1 for one in (q, k, v)), "elements of a row are neighbours"
    rows, keys, values = (one.transpose(1, 2).double() for one in (q, k, v))
    readers = rows.shape[1] // keys.shape[1]
    scores = rows @ keys.repeat_interleave(readers, 1).transpose(2, 3) * scale
    behind = torch.arange(max_q)[:, None] + max_k - max_q - torch.arange(max_k)
    is_seen = torch.ones_like(behind, dtype=torch.bool)
    if window_size_left >= 0:
        is_seen &= behind <= window_size_left
    if window_size_right >= 0:
        is_seen &= -behind <= window_size_right
    scores.masked_fill_(~is_seen, -torch.inf)
    out = scores.softmax(3).nan_to_num() @ values.repeat_interleave(readers, 1)
    lse = scores.logsumexp(3).masked_fill(~is_seen.any(1), torch.inf)
    nothing = q.new_empty(0)
    return out.transpose(1, 2).to(q.dtype), lse.float(), nothing, nothing, nothing


class OnCpu(TorchCuda):
    """Compute attention without a window by PyTorch's kernel for CPUs."""

    _kernel = TorchCpu._kernel


@pytest.fixture(scope="module")
def windows() -> Iterator[list[None]]:
    """Has `flash` called for tensors on CPUs by PyTorch's operator, with a list of its calls."""
    calls: list[None] = []

    def counted(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        calls.append(None)
        return flash(*args, **options)

    operators = torch.library.Library("aten", "IMPL")
    operators.impl("_flash_attention_forward", counted, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: AMPERE)
        yield calls
    operators._destroy()


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.sampled_from(((4, 4), (4, 2), (3, 1))),
    st.integers(1, 80),
    st.tuples(st.integers(0, 60), st.integers(1, 60)),
    st.tuples(st.integers(0, 60), st.integers(1, 60)),
    st.integers(1, 3),
)
def test_windows_are_one_call(
    windows: list[None], heads: tuple[int, int], window: int, queries: tuple[int, int], keys: tuple[int, int], step: int
) -> None:
    """Runs begin and end anywhere: some keys are seen by all queries, some by none, and some queries see none."""
    spec = AttnSpec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=16, scale=0.25, window=window, softcap=None)
    q_run, k_run = (Run(start, start + step * number, step) for start, number in (queries, keys))
    q, k, v = random_qkv(spec, len(q_run), len(k_run), torch.bfloat16, window)
    relation = relate(q_run, k_run, window)
    num_calls = len(windows)
    out, lse = OnCpu().attend(q, k, v, relation, spec)
    assert len(windows) - num_calls == (relation.kind == "band")
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    wanted, wanted_lse = reference(q, q_run.positions, k, v, k_run.positions, spec)
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=0)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "change", [{"softcap": 20.0}, {"head_dim": 12}, {"dtype": torch.float32}, {"dense": True}], ids=str
)
def test_windows_that_flash_cannot_compute_are_tiles(windows: list[None], change: dict[str, Any]) -> None:
    given = {"softcap": None, "head_dim": 16, "dtype": torch.bfloat16, "dense": False, **change}
    dense, dtype = given.pop("dense"), given.pop("dtype")
    spec = AttnSpec(num_heads=4, num_kv_heads=2, scale=0.25, window=20, **given)
    q_run, k_run = Run(10, 40), Run(0, 40)
    q, k, v = random_qkv(spec, len(q_run), len(k_run), dtype, 0)
    num_calls = len(windows)
    out, _ = TorchCuda().attend(q, k, v, relate(q_run, k_run, 20), spec, dense=dense)
    assert len(windows) == num_calls
    wanted, _ = reference(q, q_run.positions, k, v, k_run.positions, spec)
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=0)


# ---------------------------------------------------------------- several prompts


def attend_step(spec: AttnSpec, lengths: list[tuple[int, int]], backend: TorchCuda) -> None:
    """Compare `local` for requests with (cached, new) tokens with the definition."""
    size, generator = 4, torch.Generator().manual_seed(0)
    total = sum(-(-(cached + new) // size) for cached, new in lengths)
    shape = (2, total, spec.num_kv_heads, size, spec.head_dim)
    keys, values = torch.randn(shape, generator=generator).bfloat16()
    numbers, parts, row = iter(torch.randperm(total, generator=generator).tolist()), [], 0
    for cached, new in lengths:
        blocks = [next(numbers) for _ in range(0, cached + new, size)]
        runs, held = (Run(cached, cached + new),), (Run(0, cached + new),)
        parts.append(MemberPart(rows=slice(row, row + new), q_runs=(runs,), kv_runs=(held,), blocks=blocks))
        row += new
    q = torch.randn(spec.num_heads, row, spec.head_dim, generator=generator).bfloat16()
    all_kv = [[pool[part.blocks].transpose(0, 1).flatten(1, 2) for part in parts] for pool in (keys, values)]
    new_k, new_v = (
        torch.cat([own[:, cached : cached + new] for own, (cached, new) in zip(of_parts, lengths, strict=True)], dim=1)
        for of_parts in all_kv
    )
    call = Call(
        exchange=LOCAL,
        group=ALONE,
        parts=MemberParts(parts, backend),
        q=q,
        k=new_k,
        v=new_v,
        kv=PagedKv(keys=keys, values=values),
        spec=spec,
        sinks=random_sinks(spec) if spec.has_sinks else None,
        out=torch.full_like(q, torch.nan),
    )
    local(call)
    for part, own_k, own_v, (cached, new) in zip(parts, *all_kv, lengths, strict=True):
        q_run, k_run = Run(cached, cached + new), Run(0, cached + new)
        own = (own_k[:, : len(k_run)], own_v[:, : len(k_run)])
        wanted, _ = reference(q[:, part.rows], q_run.positions, *own, k_run.positions, spec)
        torch.testing.assert_close(call.out[:, part.rows].double(), wanted, atol=3e-2, rtol=0)


STEPS = {
    "new": [(0, 5), (0, 17), (0, 3)],
    "cached": [(0, 5), (40, 6), (13, 9)],
    "decodes": [(20, 1), (0, 5), (31, 1), (7, 7)],
    "apart": [(0, 4), (0, 25), (3, 9)],
}
"""Requests of a step: cached and new tokens of each. Requests with up to 24 new tokens share a call."""


@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (6, False), (None, True), (6, True)])
@pytest.mark.parametrize("step", STEPS)
def test_short_prompts_of_a_step_are_one_call(
    windows: list[None], step: str, window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytorch_cuda, "_MAX_GROUPED", 24)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25}
    spec = AttnSpec(**sizes, window=window, softcap=None, has_sinks=has_sinks)
    num_calls = len(windows)
    attend_step(spec, STEPS[step], OnCpu())
    num_long = sum(new > 24 for _, new in STEPS[step])
    assert len(windows) - num_calls == 1 + (num_long if window else 0), "long prompts have windows of their own"


def test_one_call_returns_a_log_sum_exp_for_each_query_of_several_prompts() -> None:
    """Sinks need it. PyTorch states the shapes of its operators without a device."""
    with FakeTensorMode():
        sizes = ((50, 4, 64), (80, 2, 64))
        q, k = (torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, k, ends, ends, 30, 40, 0.0, False, False)
    assert out.shape == q.shape and lse.shape == (4, 50)


def test_many_keys_are_several_calls(windows: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the keys of a call has a limit."""
    monkeypatch.setattr(importlib.import_module("longspan.attn.exchanges.local"), "_GROUPED_KEYS", 30)
    spec = AttnSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=None, softcap=None)
    num_calls = len(windows)
    attend_step(spec, [(10, 5), (5, 5), (20, 9), (0, 20), (0, 9)], OnCpu())
    assert len(windows) - num_calls == 2, "the third prompt, with 29 keys, is computed alone"


@pytest.mark.parametrize("change", [{"softcap": 20.0}, {"head_dim": 12}, {"chunk": 7}], ids=str)
def test_prompts_that_flash_cannot_compute_are_calls_of_their_own(windows: list[None], change: dict[str, Any]) -> None:
    spec = AttnSpec(num_heads=4, num_kv_heads=2, scale=0.25, window=None, **{"softcap": None, "head_dim": 16, **change})
    num_calls = len(windows)
    attend_step(spec, STEPS["cached"], OnCpu())
    assert len(windows) == num_calls


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


# ---------------------------------------------------------------- plans of cuDNN


class Plans(TorchDispatchMode):
    """Collects the sizes and strides of cuDNN's calls, on which its plans depend.

    Attributes:
        most_bytes: of a new tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made, self.most_bytes = set[tuple[object, ...]](), 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_cudnn_attention.default:
            self.made.add((args[6:7] == (True,), *((tensor.shape, tensor.stride()) for tensor in args[:3])))
        found = func(*args, **(kwargs or {}))
        if "new_" in func.__name__ or "zeros" in func.__name__:
            self.most_bytes = max(self.most_bytes, found.nbytes)
        return found


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (1, 1), (4, 4)], ids=str)
def test_later_calls_find_the_prepared_plans(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    """Chunks behind prefixes of all kinds, whose keys are pieces of longer tensors. Plans need no memory for keys."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    spec = AttnSpec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, scale=0.1, window=None, softcap=None)
    pool = torch.empty(5000, heads[1], 16, 128, dtype=torch.bfloat16, device="meta")
    with Plans() as prepared:
        TorchCuda().prepare(PagedKv(keys=pool, values=pool), {spec}, 8192, 10**6)
    assert prepared.most_bytes <= 9216 * max(32, heads[0]) * 128 * 2, "the queries of a step"
    generator, used = torch.Generator().manual_seed(0), Plans()
    for _ in range(40):
        length, start = (int(torch.randint(1, end, (), generator=generator)) for end in (8193, 60_000))
        q, k, v = (
            torch.empty(size, number, 128, dtype=torch.bfloat16, device="meta").transpose(0, 1)
            for number, size in ((heads[0], length), (heads[1], start + length), (heads[1], start + length))
        )
        with used:
            TorchCuda().attend(q, k, v, relate(Run(start, start + length), Run(0, start + length), None), spec)
    assert used.made and used.made <= prepared.made
