"""The speeds of links, between real processes."""

from __future__ import annotations

import pytest
import torch

from longspan.cost.profile import Profile, ProfileKey
from longspan.errors import WorkerLostError
from longspan.profiling.links import time_links
from longspan.profiling.plan import kinds_of_links

SUBJECT = ProfileKey(model="m", dtype="float32", device="cpu", tp=1, threads=1, kernel="torch", machine="m")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_transfers_of_every_kind_are_timed(num_ranks: int) -> None:
    profile = Profile(profile_key=SUBJECT)
    for transfer in time_links(num_ranks, "cpu"):
        assert transfer.num_bytes <= 2**24
        profile = profile.with_transfer(transfer)
    assert set(profile.links) == kinds_of_links(num_ranks)
    for kind, members in profile.links:
        link = profile.link(kind, members)
        assert link is not None, "more bytes take longer"
        assert 1e6 < link.bytes_per_s < 1e13


@pytest.mark.skipif(torch.cuda.is_available(), reason="what fails is the search for a device")
def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(WorkerLostError, match=r"rank 0 was lost: \w*Error: "):
        time_links(1, "cuda")
