"""The parts of prompts that cuDNN and FlashAttention compute on Hopper, and cuDNN's plans. No GPU is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import _registry

from longspan.attn.backends import CudaKernel, Partial, cudnn_plans, pytorch_cuda
from longspan.attn.backends.cudnn_plans import Plan, all_plans
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.backends.pytorch_cuda import TorchCuda, use_installed_flash
from longspan.attn.check import random_qkv, reference
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run, relate

SPEC = AttnSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1, window=None, softcap=None)
SMALL = {"TOKENS": 8, "MAX_SQUARE": 32, "_ROWS": 32}
"""Lengths for tests that compute attention."""


@dataclass(frozen=True)
class Call:
    """One call of a kernel, for `num_heads` heads with `plan.num_queries` rows each."""

    kernel: CudaKernel
    num_heads: int
    plan: Plan

    @property
    def num_products(self) -> float:
        num_queries, num_keys, causal = self.plan
        return self.num_heads * num_queries * ((num_queries + 1) / 2 if causal else num_keys)


@pytest.fixture(scope="module")
def calls() -> Iterator[list[Call]]:
    """Compute calls of kernels on a Hopper device by PyTorch on CPUs, and list them."""
    made: list[Call] = []

    def call(
        kernel: CudaKernel, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None = None
    ) -> Partial:
        assert mask is None and len(q) == 1
        made.append(Call(kernel, q.shape[1], Plan(q.shape[2], k.shape[2], causal)))
        if q.device.type == "meta":
            return q, q.new_empty(q.shape[:3], dtype=torch.float32)
        return TorchCpu()._kernel(q, k, v, spec, causal=causal, mask=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr(pytorch_cuda, "_call", call)
        yield made


def attend(calls: list[Call], spec: AttnSpec, start: int, stop: int) -> list[Call]:
    """Return the calls for the tokens `[start, stop)` of a prompt."""
    calls.clear()
    q, k = (
        torch.empty(heads, size, spec.head_dim, dtype=torch.bfloat16, device="meta")
        for heads, size in ((spec.num_heads, stop - start), (spec.num_kv_heads, stop))
    )
    TorchCuda().attend(q, k, k, relate(Run(start, stop), Run(0, stop), None), spec)
    return [*calls]


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (16, 16), (40, 10)], ids=str)
@pytest.mark.parametrize("num_chats", [0, 1, 32])
def test_cudnn_computes_nearly_all_of_each_chunk_among_chats(
    calls: list[Call], num_chats: int, heads: tuple[int, int]
) -> None:
    """A step of 8,192 tokens has a token of each chat. The other tokens are a chunk of a prompt of 256K tokens."""
    spec = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1])
    step = 8192 - num_chats
    for start in range(0, 2**18 - step, step):
        made = attend(calls, spec, start, start + step)
        needed = spec.num_heads * step * (start + (step + 1) / 2)
        by_flash = sum(call.num_products for call in made if call.kernel == "flash")
        assert by_flash <= 0.05 * needed
        by_cudnn = sum(call.num_products for call in made if call.kernel == "cudnn")
        assert by_cudnn + by_flash <= 1.15 * needed, "padding is computed, too"
        assert len(made) <= 7, "each call has a launch and a merge"


@pytest.mark.parametrize("num_chats", [1, 32])
def test_cudnn_computes_nearly_all_of_prompts_in_chunks_of_any_length(calls: list[Call], num_chats: int) -> None:
    """Several prompts share steps, so that chunks have many lengths."""
    work, generator = Counter[str](), torch.Generator().manual_seed(num_chats)
    for _ in range(3):
        start = 0
        while start < 2**17:
            stop = start + int(torch.randint(256, 8193 - num_chats, (), generator=generator))
            for call in attend(calls, SPEC, start, stop):
                work[call.kernel] += int(call.num_products)
            start = stop
    assert work["cudnn"] >= 0.95 * work.total()


@pytest.mark.parametrize("length", [2, 100, 700])
def test_short_prompts_are_for_flash(calls: list[Call], length: int) -> None:
    assert {call.kernel for call in attend(calls, SPEC, 0, length)} == {"flash"}


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("heads", "max_keys", "most"), [((32, 8), 2**17, 130), ((32, 8), 2**20, 190), ((8, 1), 2**17, 130)]
)
def test_few_plans_serve_every_chunk_behind_every_prefix(
    calls: list[Call], heads: tuple[int, int], max_keys: int, most: int
) -> None:
    spec, generator = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1]), torch.Generator().manual_seed(0)
    plans = {*all_plans(heads[1], heads[0] // heads[1], 8192, max_keys)}
    assert len(plans) <= most
    for _ in range(300):
        length, cached = (int(torch.randint(1, end, (), generator=generator)) for end in (8193, max_keys - 8192))
        for start in (0, cached // 1024 * 1024, cached):
            used = {call.plan for call in attend(calls, spec, start, start + length) if call.kernel == "cudnn"}
            assert used <= plans


@pytest.mark.parametrize("length", [8193, 20000, 100_000])
def test_longer_chunks_have_the_same_plans(calls: list[Call], length: int) -> None:
    """Prompts that several instances share have no chunks."""
    made = attend(calls, SPEC, 555, 555 + length)
    assert {call.plan for call in made if call.kernel == "cudnn"} <= {*all_plans(8, 4, 8192, 555 + length)}
    flash = sum(call.num_products for call in made if call.kernel == "flash")
    assert flash <= 0.15 * sum(call.num_products for call in made), "the last square is for the kernel that pads less"


@pytest.mark.parametrize("max_queries", [512, 2048, 8192])
def test_prepared_plans_are_all_plans_once(calls: list[Call], max_queries: int) -> None:
    """The pool has 40,000 tokens."""
    pool = torch.empty(2500, 8, 16, 128, dtype=torch.bfloat16, device="meta")
    kv = PagedKv(keys=pool, values=pool)
    calls.clear()
    TorchCuda().prepare(kv, {SPEC, replace(SPEC, scale=0.2), replace(SPEC, window=4096)}, max_queries, 10**6)
    assert Counter(call.plan for call in calls) == Counter(all_plans(8, 4, max_queries, 40000))
    heads = {(call.num_heads, call.plan.causal) for call in calls}
    assert heads <= {(32, True), (8, False)}


def test_plans_of_chunks_have_no_more_keys_than_a_chunk(calls: list[Call]) -> None:
    pool = torch.empty(2500, 8, 16, 128, dtype=torch.bfloat16, device="meta")
    calls.clear()
    TorchCuda().prepare(PagedKv(keys=pool, values=pool), {replace(SPEC, chunk=8192)}, 8192, 10**6)
    assert Counter(call.plan for call in calls) == Counter(all_plans(8, 4, 8192, 8192))


def test_nothing_is_prepared_where_cudnn_is_not_used(calls: list[Call]) -> None:
    calls.clear()
    kv = PagedKv(keys=torch.empty(1, 8, 16, 128), values=torch.empty(1, 8, 16, 128))
    TorchCuda().prepare(kv, {SPEC}, 8192, 2**17)  # float32
    half = PagedKv(keys=kv.keys.bfloat16(), values=kv.values.bfloat16())
    TorchCuda("flash").prepare(half, {SPEC}, 8192, 2**17)
    TorchCuda().prepare(half, {replace(SPEC, softcap=30.0), replace(SPEC, head_dim=256)}, 8192, 2**17)
    assert not calls


# ---------------------------------------------------------------- results


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.sampled_from(((4, 4), (4, 2), (6, 1), (9, 3))),
    st.integers(0, 150),
    st.integers(1, 120),
    st.integers(0, 40),
    st.integers(0, 9),
)
def test_the_parts_are_attention(
    calls: list[Call], heads: tuple[int, int], cached: int, length: int, unseen: int, seed: int
) -> None:
    """The last keys are before the last query, or there are keys that no query sees."""
    spec = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1], head_dim=16)
    q_run = Run(cached, cached + length)
    for k_run in (Run(0, cached + length), Run(0, cached + length + unseen), Run(0, max(1, cached + length - unseen))):
        q, k, v = random_qkv(spec, length, len(k_run), torch.bfloat16, seed)
        calls.clear()
        with mock.patch.multiple(cudnn_plans, **SMALL):
            out, lse = TorchCuda().attend(q, k, v, relate(q_run, k_run, None), spec)
            plans = {*all_plans(heads[1], heads[0] // heads[1], 120, 400)}
        assert {call.plan for call in calls if call.kernel == "cudnn"} <= plans
        wanted, wanted_lse = reference(q, q_run.positions, k, v, k_run.positions, spec)
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2**-7)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-2, rtol=1e-5)


# ---------------------------------------------------------------- newer versions of FlashAttention


class Handle:
    """A version of FlashAttention that PyTorch has registered."""

    def remove(self) -> None:
        """Do nothing, as no kernel was replaced."""


def broken() -> Handle:
    raise RuntimeError("does not expose FA3 kernels")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs a module that registers a version."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def install(version: str, module: str, register: Callable[[], Handle] = Handle) -> None:
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, version, register)
        found = {module: SimpleNamespace()}
        monkeypatch.setattr(pytorch_cuda, "find_spec", found.get)

    yield install
    attention.restore_flash_attention_impl(_raise_warn=False)


def test_an_installed_flash_replaces_cudnn(installed: Callable[..., None]) -> None:
    q = torch.empty(1, 8, 128, dtype=torch.bfloat16)
    assert pytorch_cuda.chosen_kernel(q) == "cudnn"
    installed("FA3", "flash_attn_interface")
    assert use_installed_flash((8, 0)) is None and pytorch_cuda.chosen_kernel(q) == "cudnn"
    assert use_installed_flash((9, 0)) == "FA3" and pytorch_cuda.chosen_kernel(q) == "flash"


def test_flash_4_has_no_large_heads(installed: Callable[..., None]) -> None:
    installed("FA4", "flash_attn.cute.interface")
    assert use_installed_flash((10, 0)) == "FA4"
    assert pytorch_cuda.chosen_kernel(torch.empty(1, 1, 128, dtype=torch.bfloat16)) == "flash"
    assert pytorch_cuda.chosen_kernel(torch.empty(1, 1, 256, dtype=torch.bfloat16)) == "efficient"


def test_a_flash_that_cannot_be_used_is_reported(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    assert use_installed_flash((9, 0)) is None and not caplog.messages
    installed("FA3", "flash_attn_interface", broken)
    assert use_installed_flash((9, 0)) is None
    assert "FA3 kernels" in caplog.text
    assert pytorch_cuda.chosen_kernel(torch.empty(1, 1, 128, dtype=torch.bfloat16)) == "cudnn"
