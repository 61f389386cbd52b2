"""The speeds of links, between real processes."""

from __future__ import annotations

import pytest
import torch

from longspan.cost.profile import TransferKind
from longspan.errors import WorkerLostError
from longspan.profiling.links import time_links
from longspan.profiling.plan import kinds_of_links


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.full), 3])
def test_transfers_of_every_kind_are_timed(num_ranks: int) -> None:
    """At sizes far apart, and as often at each: enough for a rate, whatever the clock says meanwhile."""
    calls: dict[tuple[TransferKind, int], dict[int, int]] = {}
    for transfer in time_links(num_ranks, "cpu"):
        calls.setdefault((transfer.kind, transfer.members), {})[transfer.num_bytes] = len(transfer.seconds)
    assert set(calls) == kinds_of_links(num_ranks)
    for by_size in calls.values():
        assert max(by_size) == 2**24 >= 1000 * min(by_size) and len(by_size) >= 3
        assert len(set(by_size.values())) == 1 and min(by_size.values()) >= 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="what fails is the search for a device")
def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(WorkerLostError, match=r"rank 0 was lost: \w*Error: "):
        time_links(1, "cuda")
