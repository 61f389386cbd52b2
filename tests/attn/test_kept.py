"""Attention over kept keys, and the merge of results of some queries, compared with each head alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.attn.backends import merge, nothing_seen, pytorch
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.check import random_qkv, reference
from longspan.attn.spec import AttnSpec

pytestmark = pytest.mark.usefixtures("one_thread")
BACKEND = TorchCpu()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@st.composite
def specs(draw: st.DrawFn, *, head_dims: tuple[int, ...] = (16, 40, 64, 80)) -> AttnSpec:
    num_kv_heads, head_dim = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from(head_dims))
    return AttnSpec(
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3))),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from((head_dim**-0.5, 0.05))),
        window=None,
        softcap=draw(st.sampled_from((None, None, 2.0, 30.0))),
    )


def kept_by(num_heads: int, num_tokens: int, num_kept: int, seed: int) -> Tensor:
    """Draws some tokens for each KV head, in any order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(num_tokens, generator=generator)[:num_kept] for _ in range(num_heads)]
    return torch.stack(drawn).to(torch.int32)


def attended_by_head(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Computes in float64, with the keys that a KV head drops hidden."""
    readers = spec.num_heads // spec.num_kv_heads
    found = []
    for head, kept in enumerate(indices.tolist()):
        heads = slice(head * readers, (head + 1) * readers)
        keys = k[head : head + 1, sorted(kept)], v[head : head + 1, sorted(kept)]
        found.append(reference(q[heads], [len(kept)] * q.shape[1], *keys, range(len(kept)), spec))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


@settings(max_examples=150)
@given(specs(), st.integers(1, 40), st.integers(1, 90), st.data(), st.sampled_from(list(TOLERANCE)), st.integers(0, 9))
def test_each_kv_head_attends_to_its_own_keys(
    spec: AttnSpec, num_queries: int, num_keys: int, data: st.DataObject, dtype: torch.dtype, seed: int
) -> None:
    q, k, v = random_qkv(spec, num_queries, num_keys, dtype, seed)
    indices = kept_by(spec.num_kv_heads, num_keys, data.draw(st.integers(1, num_keys)), seed)
    out, lse = BACKEND.attend_kept(q, k, v, indices, spec)
    wanted, wanted_lse = attended_by_head(q, k, v, indices, spec)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=TOLERANCE[dtype], rtol=1e-6)


def test_no_kept_keys_or_no_queries() -> None:
    spec = AttnSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, window=None, softcap=None)
    q, k, v = random_qkv(spec, 3, 5, torch.float32, 0)
    out, lse = BACKEND.attend_kept(q, k, v, torch.empty(2, 0, dtype=torch.int32), spec)
    assert not out.any() and lse.isneginf().all()
    out, lse = BACKEND.attend_kept(q[:, :0], k, v, torch.zeros(2, 1, dtype=torch.int32), spec)
    assert out.shape == (6, 0, 16) and lse.shape == (6, 0)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("num_kept", [0, 1, 8])
def test_kept_tokens_are_copied_only_into_their_tensor(readers: int, num_kept: int) -> None:
    num_kv_heads, num_tokens, dim = 2, 11, 16
    tokens = torch.randn(2, num_tokens, num_kv_heads * readers, dim).transpose(1, 2)
    whole = torch.full((2, num_kv_heads * readers, num_kept + 3, dim), torch.nan)
    rooms = whole[:, :, 2 : num_kept + 2]
    indices = kept_by(num_kv_heads, num_tokens, num_kept, seed=0)
    BACKEND.select((tokens[0], tokens[1]), indices, (rooms[0], rooms[1]))
    for all_tokens, room in zip(tokens, whole, strict=True):
        for head, place in zip(range(num_kv_heads * readers), room, strict=True):
            assert torch.equal(place[2:-1], all_tokens[head, indices[head // readers].long()])
            assert place[:2].isnan().all() and place[-1:].isnan().all()


@settings(max_examples=150)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(list(TOLERANCE)), st.integers(0, 999))
def test_results_of_some_queries_are_merged_into_theirs(
    data: st.DataObject, num_kv_heads: int, readers: int, dtype: torch.dtype, seed: int
) -> None:
    """Before, or in the partial result, a query may have seen nothing."""
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_heads = data.draw(st.integers(1, 9)), num_kv_heads * readers
    in_order = data.draw(st.booleans())
    count = num_queries if in_order else data.draw(st.integers(0, num_queries))
    rows = kept_by(num_kv_heads, num_queries, num_queries, seed)
    share = data.draw(st.sampled_from((0.0, 0.4, 1.0)))

    def random_partial(size: int) -> tuple[Tensor, Tensor]:
        out = torch.randn(num_heads, size, 4, generator=generator)
        lse = 5 * torch.randn(num_heads, size, generator=generator)
        nothing = torch.rand(num_heads, size, generator=generator) < share
        return out.masked_fill(nothing[..., None], 0), lse.masked_fill(nothing, -torch.inf)

    out, lse = random_partial(num_queries)
    some, some_lse = random_partial(count)
    some = some.to(dtype)
    wanted, wanted_lse = out.clone(), lse.clone()
    for head in range(num_heads):
        for index in range(count):
            row = index if in_order else int(rows[head // readers, index])
            pair = torch.stack([out[head, row], some[head, index].float()])[:, None, None]
            merged, merged_lse = merge(pair, torch.stack([lse[head, row], some_lse[head, index]])[:, None, None])
            wanted[head, row], wanted_lse[head, row] = merged[0, 0], merged_lse[0, 0]
    room = torch.empty(num_queries, num_heads, 4).transpose(0, 1)
    found = BACKEND.merge_into(room, [(out, lse), (some, some_lse)], None if in_order else rows)
    torch.testing.assert_close(room, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, wanted_lse, atol=1e-5, rtol=1e-6)


def test_regions_of_kept_keys_add_up_to_full_attention() -> None:
    spec = AttnSpec(num_heads=9, num_kv_heads=3, head_dim=32, scale=0.2, window=None, softcap=None)
    q, k, v = random_qkv(spec, 21, 50, torch.float32, 0)
    everything = kept_by(3, 50, 50, seed=1)
    regions = [BACKEND.attend_kept(q, k, v, some, spec) for some in everything.split((7, 30, 13), dim=1)]
    out = torch.empty_like(q)
    lse = BACKEND.merge_into(out, [*regions, nothing_seen(q)])
    wanted, wanted_lse = reference(q, [50] * 21, k, v, range(50), spec)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-6)


def rated_by_key(q: Tensor, lse: Tensor, seen: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
    """Sums pair by pair, in float64."""
    readers, found = spec.num_heads // spec.num_kv_heads, torch.zeros(k.shape[:2], dtype=torch.float64)
    for head in range(spec.num_heads):
        for row, limit in enumerate(seen.tolist()):
            for key in range(limit):
                score = q[head, row].double() @ k[head // readers, key].double() * spec.scale
                score = score if spec.softcap is None else spec.softcap * torch.tanh(score / spec.softcap)
                found[head // readers, key] += torch.exp(score - lse[head, row].double())
    return found


def rating_case(
    spec: AttnSpec, num_queries: int, num_keys: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, AttnSpec]:
    """Draw the arguments of `rate`. Some queries see no key, and some see all keys."""
    generator = torch.Generator().manual_seed(seed)
    q, k, _ = random_qkv(spec, num_queries, num_keys, dtype, seed)
    seen = torch.randint(0, num_keys + 1, (num_queries,), generator=generator)
    return q, 1 + torch.rand(spec.num_heads, num_queries, generator=generator), seen, k, spec


@settings(max_examples=60)
@given(specs(), st.integers(1, 7), st.integers(1, 12), st.sampled_from(list(TOLERANCE)), st.integers(0, 9))
def test_keys_are_rated_by_the_queries_that_see_them(
    spec: AttnSpec, num_queries: int, num_keys: int, dtype: torch.dtype, seed: int
) -> None:
    case = rating_case(spec, num_queries, num_keys, dtype, seed)
    # PyTorch rounds products of bfloat16 to that type, before they become exponents.
    torch.testing.assert_close(
        BACKEND.rate(*case).double(),
        rated_by_key(*case),
        atol=1e-5,
        rtol={torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype],
    )


def test_more_keys_than_are_rated_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttnSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=None, softcap=None)
    case = rating_case(spec, 9, 100, torch.float32, 0)
    whole = BACKEND.rate(*case)
    monkeypatch.setattr(pytorch, "_RATED", 32)
    torch.testing.assert_close(BACKEND.rate(*case), whole, atol=1e-5, rtol=1e-5)
