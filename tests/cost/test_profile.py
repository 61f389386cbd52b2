"""Profiles and the fits that follow from them, as plain data."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.core.exchange import LOCAL, RING_KV, RING_Q, Exchange
from longspan.core.locations import Location
from longspan.cost.profile import (
    Decode,
    Prefill,
    Profile,
    Times,
    Transfer,
    TransferKind,
    fit_link,
    fit_times,
    profiled_prompts,
)
from longspan.cost.profile_key import ProfileKey
from longspan.cost.shape import ModelShape
from longspan.profiling.plan import (
    SHARED,
    KvCapacity,
    all_missing,
    default_lengths,
    kinds_of_links,
)

SUBJECT = ProfileKey(
    model="m", dtype="float32", device="cpu", tp=1, threads=1, kernel="torch", machine="a processor of some kind"
)
ROOM = KvCapacity(max_model_len=8192, block_size=256, num_blocks=1000)
COEFFICIENTS = st.tuples(
    st.floats(1e-4, 1e-2), st.sampled_from([0.0, 1e-5, 1e-3]), st.sampled_from([0.0, 1e-8, 1e-7]), st.just(5e-8)
)
PROMPTS = profiled_prompts([512, 1024, 2048, 4096], 8192)


def num_prompts(profile: Profile) -> int:
    """How many have been timed."""
    return sum(len(one.seconds) for one in profile.prefills)


def prefill(new: int, cached: int, *seconds: float, members: int = 2, exchange: str = "ring_kv") -> Prefill:
    return Prefill(
        members=members,
        exchange=exchange,  # type: ignore[arg-type]  # a name of one
        new_tokens=new,
        cached_tokens=cached,
        seconds=seconds,
    )


@given(COEFFICIENTS)
def test_a_fit_recovers_the_coefficients_of_the_times(coefficients: tuple[float, float, float, float]) -> None:
    a, b, c, d = coefficients
    fit = fit_times([(n, p, a + b * n + c * p * n + d * n * n) for n, p in PROMPTS])
    assert fit is not None and fit.max_error < 1e-6
    for new, cached in ((100, 0), (30_000, 50_000)):
        assert fit.seconds(new, cached) == pytest.approx(a + b * new + c * cached * new + d * new * new, rel=1e-4)


@given(st.lists(st.tuples(st.integers(1, 9999), st.integers(0, 9999), st.floats(1e-3, 1e3)), min_size=1, max_size=12))
@settings(deadline=None)
def test_no_term_is_negative_whatever_was_measured(samples: list[tuple[int, int, float]]) -> None:
    fit = fit_times(samples)
    if fit is None:
        assert len({sample[:2] for sample in samples}) == 1
        return
    assert min(fit.start_s, fit.token_s, fit.cached_s, fit.square_s) >= 0
    assert 0 <= fit.mean_error <= fit.max_error
    assert fit.seconds(20_000, 20_000) >= fit.seconds(10_000, 10_000) >= fit.seconds(1)


def test_errors_are_those_of_the_samples() -> None:
    draw = random.Random(0)
    samples = [(n, p, (1e-3 * n + 1e-7 * n * n) * draw.uniform(0.9, 1.1)) for n, p in PROMPTS for _ in range(3)]
    fit = fit_times(samples)
    assert fit is not None and fit.num_samples == len(samples)
    errors = [abs(fit.seconds(n, p) / seconds - 1) for n, p, seconds in samples]
    assert fit.mean_error == pytest.approx(sum(errors) / len(errors))
    assert fit.max_error == pytest.approx(max(errors))
    assert fit.max_error < 0.2


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell", "SkylakeX"])
def test_a_fit_is_the_same_on_every_cpu(cpu: str) -> None:
    """OpenBLAS sums in a different order on each of these. Processors of other vendors ignore the variable."""
    code = f"from longspan.cost.profile import fit_times; [print(fit_times(s).square_s) for s in {_uneven_samples()!r}]"
    environment = os.environ | {"OPENBLAS_CORETYPE": cpu, "OPENBLAS_NUM_THREADS": "1"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [str(fit.square_s) for fit in map(fit_times, _uneven_samples()) if fit is not None]


def _uneven_samples() -> list[list[tuple[int, int, float]]]:
    draw = random.Random(2)
    return [[(n, p, (1e-3 * n + 1e-7 * n * n) * draw.uniform(0.9, 1.1)) for n, p in PROMPTS] for _ in range(20)]


def test_predictions_at_measured_points_equal_the_measurements() -> None:
    draw = random.Random(1)
    samples = tuple((n, p, (1e-3 * n + 1e-7 * n * n) * draw.uniform(0.8, 1.2)) for n, p in PROMPTS)
    fit = fit_times(samples)
    assert fit is not None
    times = Times(fit=fit, samples=samples)
    for new, cached, seconds in samples:
        assert times.seconds(new, cached) == pytest.approx(seconds, rel=1e-3)
    errors = [seconds / fit.seconds(new, cached) for new, cached, seconds in samples]
    for new, cached in ((700, 0), (100_000, 100_000), (1, 0)):
        correction = times.seconds(new, cached) / fit.seconds(new, cached)
        assert min(errors) <= correction <= max(errors)


def test_fits_of_samples_at_the_same_places_keep_their_own_times() -> None:
    fit = fit_times([(n, p, 1e-3 * n) for n, p in PROMPTS])
    assert fit is not None
    for factor in (1.0, 1.5, 0.5):
        for prompts in (PROMPTS, PROMPTS[:3]):
            times = Times(fit=fit, samples=tuple((n, p, factor * fit.seconds(n, p)) for n, p in prompts))
            assert times.seconds(700, 30) == pytest.approx(factor * fit.seconds(700, 30))


@given(st.floats(0, 1e-2), st.floats(1e3, 1e12))
def test_a_link_is_found_again(start_s: float, bytes_per_s: float) -> None:
    link = fit_link([(size, start_s + size / bytes_per_s) for size in (2**12, 2**16, 2**20, 2**24)])
    assert link is not None and link.max_error < 1e-6
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert link.start_s == pytest.approx(start_s, rel=1e-3, abs=1e-6 * 2**12 / bytes_per_s)


@pytest.mark.parametrize("samples", [[], [(5, 1.0)], [(5, 1.0), (5, 2.0)], [(1, 1.0), (1000, 0.5)]])
def test_links_of_one_size_or_without_bytes_have_no_speed(samples: list[tuple[int, float]]) -> None:
    assert fit_link(samples) is None


def test_times_add_up_and_survive_the_file() -> None:
    profile = Profile(profile_key=SUBJECT).with_measured(prefill(512, 0, 3.0)).with_measured(prefill(512, 0, 1.0, 2.0))
    profile = profile.with_measured(prefill(512, 8, 9.0))
    found = profile.find(prefill(512, 0))
    assert found is not None and found.seconds == (3.0, 1.0, 2.0)
    assert (found.median_s, num_prompts(profile)) == (2.0, 4)
    assert profile.find(prefill(512, 0, members=3)) is None
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    "text", ["", "{}", '{"subject": {}, "prefills": []}', '{"prefills": [{"members": 2, "exchange": "local"}]}']
)
def test_an_invalid_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a profile: "):
        Profile.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": 1},
        {"exchange": "local"},
        {"new_tokens": 0},
        {"cached_tokens": -1},
        {"seconds": ()},
        {"seconds": (0.0,)},
    ],
)
def test_an_invalid_prefill_is_refused(wrong: dict[str, object]) -> None:
    good = {"members": 2, "exchange": "ring_kv", "new_tokens": 5, "cached_tokens": 0, "seconds": (1.0,)}
    with pytest.raises(ValueError, match=r"not a profile: "):
        Profile.from_json(in_profile(prefills=[good | wrong]))
    assert Profile.from_json(in_profile(prefills=[good])).prefills == (prefill(5, 0, 1.0),)


def in_profile(**fields: list[dict[str, object]]) -> str:
    return json.dumps({"subject": msgspec.to_builtins(SUBJECT), **fields})


def test_fits_are_of_groups() -> None:
    profile = Profile(profile_key=SUBJECT)
    assert profile.fits() == {}
    for new, cached in PROMPTS:
        kv, q = 1e-4 * (new + cached), 3e-4 * new
        profile = profile.with_measured(prefill(new, cached, kv)).with_measured(
            prefill(new, cached, q, exchange="ring_q")
        )
        profile = profile.with_measured(prefill(new, cached, 1e-3 * new, members=1, exchange="local"))
    assert list(profile.fits()) == [(1, LOCAL), (2, RING_KV), (2, RING_Q)]


def transfer(kind: TransferKind, num_bytes: int, *seconds: float, members: int = 2) -> Transfer:
    return Transfer(kind=kind, members=members, num_bytes=num_bytes, seconds=seconds)


def test_links_are_of_a_kind_and_a_number_of_ranks() -> None:
    profile = Profile(profile_key=SUBJECT)
    assert profile.link("alltoall", 2) is None
    for size in (1000, 2000):
        profile = profile.with_transfer(transfer("alltoall", size, 5.0))
        profile = profile.with_transfer(transfer("alltoall", size, 9.0, 1e-3 + size * 1e-6, 0.0001))
        profile = profile.with_transfer(transfer("alltoall", size, size * 1e-3, members=3))
    assert profile.links == [("alltoall", 2, "same_host"), ("alltoall", 3, "same_host")]
    two, three = profile.link("alltoall", 2), profile.link("alltoall", 3)
    assert two is not None and two.bytes_per_s == pytest.approx(1e6)
    assert three is not None and three.bytes_per_s == pytest.approx(1e3)
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("wrong", [(0, 1.0), (5, 0.0), (5,)])
def test_an_invalid_transfer_is_refused(wrong: tuple[float, ...]) -> None:
    transfer = {"kind": "host_copy", "members": 1, "num_bytes": int(wrong[0]), "seconds": wrong[1:]}
    with pytest.raises(ValueError, match="not a profile: "):
        Profile.from_json(in_profile(transfers=[transfer]))


def test_every_number_of_ranks_has_links_of_its_own() -> None:
    one, two, three = (kinds_of_links([Location(device=rank) for rank in range(number)]) for number in (1, 2, 3))
    assert one == {("host_copy", 1, "same_host")}
    assert three - two == {("alltoall", 3, "same_host"), ("all_gather", 3, "same_host")}


def test_hardware_as_it_showed() -> None:
    """10 GFLOP/s in attention, which is 4 * heads * head_dim operations for each pair and layer."""
    shape = ModelShape(num_layers=10, hidden_size=1, num_heads=5, num_kv_heads=5, head_dim=50, bytes_per_element=4)
    pair_s = 10 * 4 * 5 * 50 / 1e10
    profile = Profile(profile_key=SUBJECT)
    for new, cached in PROMPTS:
        seconds = 1e-3 * new + pair_s * new * (cached + new / 2)
        profile = profile.with_measured(prefill(new, cached, seconds, members=1, exchange="local"))
    assert profile.hardware(shape) is None, "no link is known"
    for size in (1000, 2000):
        profile = profile.with_transfer(transfer("point_to_point", size, size / 1e8))
    hardware = profile.hardware(shape)
    assert hardware is not None
    assert hardware.flops_per_s == pytest.approx(1e10, rel=1e-3)
    assert hardware.bytes_per_s == pytest.approx(1e8)


# ---------------------------------------------------------------- missing measurements


@given(st.integers(2, 200_000))
def test_default_lengths_are_prompts_of_the_model(max_model_len: int) -> None:
    lengths = default_lengths(max_model_len)
    assert list(lengths) == sorted(set(lengths))
    assert lengths[0] >= 1 and lengths[-1] < max_model_len
    prompts = profiled_prompts(lengths, max_model_len)
    assert all(new >= 1 and new + cached < max_model_len for new, cached in prompts)
    assert {(length, 0) for length in lengths} <= set(prompts)
    if max_model_len > 513:
        assert lengths[-1] == max_model_len - 1


def test_missing_measurements_alternate_and_are_taken_once() -> None:
    profile, prompts = Profile(profile_key=SUBJECT), [(512, 0), (16, 512)]
    tasks = all_missing(profile, {1, 2}, prompts, ROOM, 2)
    once = tasks[: len(tasks) // 2]
    assert tasks == [*once, *once]
    alone, decodes = [LOCAL] * 2, [LOCAL] * 3  # batches of up to four of the longest
    with_singles = [RING_Q] * 3
    assert [task.kind[1] for task in once] == [*alone, *decodes, *SHARED, *SHARED, *[RING_Q] * 3, *with_singles]
    assert [task.singles for task in once if isinstance(task, Decode)] == [*[0] * 6, *[2] * 3]
    assert [task.batch for task in once[2:5] if isinstance(task, Decode)] == [1, 2, 4]
    for task in tasks[:2]:
        profile = profile.with_measured(timed(task, 1.0))
    assert all_missing(profile, {1, 2}, prompts, ROOM, 2) == tasks[2:]
    assert len(all_missing(profile, {1, 2}, prompts, ROOM, 3)) == 3 * len(once) - 2


def test_the_quickest_exchange_is_measured_twice_as_often() -> None:
    """Until the quickest has been: the first one turns out not to be."""
    profile, prompts, room = Profile(profile_key=SUBJECT), [(512, 0), (16, 512)], ROOM
    seconds = {"ring_kv": 1.0, "ring_q": 0.9, "alltoall": 1.1, "gather_kv": 1.2, "chain": 1.3, "local": 2.0}
    for task in all_missing(profile, {1, 2}, prompts, room, 2):
        profile = profile.with_measured(timed(task, seconds[task.exchange]))
    assert {len(one.seconds) for one in (*profile.prefills, *profile.decodes)} == {2}
    again = all_missing(profile, {1, 2}, prompts, room, 2)
    wanted = [(RING_Q, 512, 0), (RING_Q, 16, 512)]
    assert named(again) == [*wanted, *wanted]
    for task in again:
        assert isinstance(task, Prefill)
        profile = profile.with_measured(timed(task, 1.5 if task.cached_tokens else 0.9))
    again = all_missing(profile, {1, 2}, prompts, room, 2)
    assert named(again) == [(RING_KV, 16, 512)] * 2
    profile = profile.with_measured(timed(again[0], 1.0))
    assert all_missing(profile, {1, 2}, prompts, room, 2) == again[1:]
    assert not all_missing(profile.with_measured(timed(again[1], 1.0)), {1, 2}, prompts, room, 2)


def timed(task: Prefill | Decode, seconds: float) -> Prefill | Decode:
    return msgspec.structs.replace(task, seconds=(seconds,))


def named(tasks: list[Prefill | Decode]) -> list[tuple[Exchange, int, int]]:
    return [(task.kind[1], task.new_tokens, task.cached_tokens) for task in tasks if isinstance(task, Prefill)]


def test_a_single_instance_is_measured_again_for_another_number_of_busy_instances() -> None:
    profile, prompts = Profile(profile_key=SUBJECT), [(512, 0), (16, 512)]
    tasks = all_missing(profile, {1}, prompts, ROOM, 1)
    for one in (prefill(512, 0, 1.0, members=1, exchange="local"), prefill(16, 512, 1.0, members=1, exchange="local")):
        profile = profile.with_measured(msgspec.structs.replace(one, beside=1))
    profile = profile.with_measured(prefill(512, 0, 1.0))
    assert all_missing(profile.of_one_beside(1), {1}, prompts, ROOM, 1) == tasks[2:]
    for busy in (0, 3):
        kept = profile.of_one_beside(busy)
        assert all_missing(kept, {1}, prompts, ROOM, 1) == tasks and kept.find(prefill(512, 0)) is not None
    profile = profile.with_measured(prefill(512, 0, 2.0, members=1, exchange="local"))
    assert [(one.seconds, one.beside) for one in profile.prefills if one.members == 1] == [((1.0,), 1), ((2.0,), 0)]


def test_prompts_that_a_group_cannot_hold_are_left_out() -> None:
    room = msgspec.structs.replace(ROOM, num_blocks=4)  # 1,024 tokens of each member
    found = all_missing(Profile(profile_key=SUBJECT), {1, 2}, [(1023, 0), (1024, 0), (128, 1024)], room, 1)
    prompts = {(task.members, task.new_tokens, task.cached_tokens) for task in found if isinstance(task, Prefill)}
    assert prompts == {(1, 1023, 0), (2, 1023, 0), (2, 1024, 0), (2, 128, 1024)}


def test_decodes_are_measured_up_to_the_kv_capacity() -> None:
    prompts = [(100, 0), (1000, 0), (8000, 0)]

    def decodes(members: int, room: KvCapacity) -> list[tuple[int, int]]:
        found = all_missing(Profile(profile_key=SUBJECT), {members}, prompts, room, 1)
        return [(task.batch, task.context_tokens) for task in found if isinstance(task, Decode)]

    whole = [(1, 100), (1, 1000), (1, 8000), (2, 100), (2, 1000), (2, 8000), (4, 100), (4, 1000), (4, 8000)]
    assert decodes(1, ROOM) == [*whole, (8, 100), (8, 1000)]
    assert {context for _, context in decodes(2, ROOM)} == {512, 1000, 8000}  # of which each member has a block
    assert (1, 4080) in decodes(1, msgspec.structs.replace(ROOM, max_model_len=4096))
    assert (4, 1000) not in decodes(1, msgspec.structs.replace(ROOM, num_blocks=15))
