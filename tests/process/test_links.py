"""The speeds of links, between real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from forked import run_ranks

from longspan.args import locations
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.link_classes import LinkClass
from longspan.cost.profile import Transfer, TransferKind
from longspan.errors import WorkerLostError
from longspan.profiling import links
from longspan.profiling.links import main, time_links
from longspan.profiling.plan import kinds_of_links

SMALL = (2**12, 2**14, 2**16, 2**18, 2**22)


def time_as(max_call_s: float, store: str, num_ranks: int, rank: int) -> None:
    """Time small messages. The largest one takes less than `max_call_s`, or is left out."""
    links._SIZES, links._MAX_CALL_S = SMALL, max_call_s
    found = main(rank, ",".join(["0-0"] * num_ranks), store, "cpu")
    print(msgspec.json.encode(found).decode())


def forked(num_ranks: int, folder: Path, max_call_s: float = float("inf")) -> list[Transfer]:
    first, *others = run_ranks(partial(time_as, max_call_s), folder / "store", num_ranks)
    assert not any(rank.returncode for rank in (first, *others)), (first, others)
    return msgspec.json.decode(first.stdout, type=list[Transfer])


def started(num_ranks: int, _: Path) -> list[Transfer]:
    return time_links(locations(num_ranks), "cpu")


@pytest.mark.parametrize(
    ("num_ranks", "timed"),
    [(3, forked), pytest.param(1, started, marks=pytest.mark.full), pytest.param(3, started, marks=pytest.mark.full)],
)
def test_transfers_of_every_kind_are_timed(
    num_ranks: int, timed: Callable[[int, Path], list[Transfer]], tmp_path: Path
) -> None:
    """At sizes far apart, and as often at each: enough for a rate, whatever the clock says meanwhile."""
    calls: dict[tuple[TransferKind, int, LinkClass], dict[int, int]] = {}
    for transfer in timed(num_ranks, tmp_path):
        calls.setdefault((transfer.kind, transfer.members, transfer.link_class), {})[transfer.num_bytes] = len(
            transfer.seconds
        )
    assert set(calls) == kinds_of_links(locations(num_ranks))
    for by_size in calls.values():
        assert max(by_size) >= 1000 * min(by_size) and len(by_size) >= 4
        assert len(set(by_size.values())) == 1 and min(by_size.values()) >= 5


def test_links_are_timed_with_large_messages_unless_they_are_slow(tmp_path: Path) -> None:
    """All ranks leave out the same sizes. Copies to the memory of a host are always quick."""
    assert links._SIZES[-1] == 2**28
    for name, max_call_s, sizes in (("fast", float("inf"), SMALL), ("slow", 0.0, SMALL[:-1])):
        (tmp_path / name).mkdir()
        for transfer in (found := forked(2, tmp_path / name, max_call_s)):
            assert transfer.num_bytes in (SMALL if transfer.kind == "host_copy" else sizes)
        assert max(each.num_bytes for each in found if each.kind == "alltoall") == sizes[-1]


@pytest.mark.full
def test_links_between_hosts_are_timed_apart_from_links_within() -> None:
    places = locations_of_ranks(3, "0-0,0-0,0-1")
    found = {(each.kind, each.members, each.link_class) for each in time_links(places, "cpu")}
    assert found == kinds_of_links(places)
    pairs = {link_class for kind, _, link_class in found if kind == "point_to_point"}
    assert pairs == {"same_host", "other_host"}


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the current folder that exit when they are imported."""
    for name in ("random", "resource", "selectors", "msgspec", "threading"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)


@pytest.mark.full
@pytest.mark.usefixtures("hostile_folder")
def test_ranks_run_no_code_of_the_current_folder() -> None:
    assert time_links(locations(1), "cpu")


@pytest.mark.usefixtures("hostile_folder")
@pytest.mark.skipif(torch.cuda.is_available(), reason="what fails is the search for a device")
def test_a_failed_rank_reports_its_own_error() -> None:
    """Its own error, so it has run no code of the current folder before."""
    with pytest.raises(WorkerLostError, match=r"rank 0 was lost: \w*Error: "):
        time_links(locations(1), "cuda")
