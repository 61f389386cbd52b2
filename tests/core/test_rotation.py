"""Decode that rotates by token, against members that look for the one with the fewest tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longspan.attn.gathered import row_slices
from longspan.core.blocks import BlockRef
from longspan.core.owners import Owners, Rotation
from longspan.core.runs import Run, clip

HELD = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple)
STARTS, NUMBERS = st.integers(0, 20), st.integers(0, 200)


def homes_one_by_one(held: tuple[int, ...], num_tokens: int) -> list[tuple[int, int]]:
    """The owner of each token, and the number of its earlier tokens."""
    counts, owners = list(held), []
    for _ in range(num_tokens):
        home = counts.index(min(counts))
        owners.append((home, counts[home]))
        counts[home] += 1
    return owners


@given(HELD, STARTS, NUMBERS, st.integers(1, 16))
def test_the_fewest_come_first(held: tuple[int, ...], start: int, num_tokens: int, block_size: int) -> None:
    rotation, stop = Rotation(start=start, held=held), start + num_tokens
    owners = homes_one_by_one(held, num_tokens)
    assert [rotation.place(position) for position in range(start, stop)] == owners
    num_blocks = 0
    for member, before in enumerate(held):
        runs = rotation.runs(member, stop)
        own = [start + index for index, (home, _) in enumerate(owners) if home == member]
        assert [position for run in runs for position in run.positions] == own
        assert all(len(run) for run in runs) and len(runs) <= len(held)
        assert rotation.num_held(member, stop) == before + len(own)
        num_blocks += -(-(before + len(own)) // block_size)
    assert rotation.num_blocks(stop, block_size) == num_blocks


@given(HELD, st.integers(0, 60), NUMBERS, st.integers(1, 16), st.booleans(), st.data())
def test_every_token_has_its_slot(
    held: tuple[int, ...], start: int, num_tokens: int, block_size: int, rotates: bool, data: st.DataObject
) -> None:
    """Runs begin and end anywhere. Blocks of the table come first, then new blocks of members."""
    member = st.integers(0, len(held) - 1)
    rotation, stop = (Rotation(start=start, held=held) if rotates else None), start + num_tokens
    num_blocks = -(-(start if rotates else stop) // block_size)
    owned = data.draw(st.lists(member, min_size=num_blocks, max_size=num_blocks))
    homes = homes_one_by_one(held, num_tokens)
    later = [-(-(before + num_tokens) // block_size) for before in held] if rotates else []
    owned += [one for one, number in enumerate(later) for _ in range(number)]
    table = [BlockRef(one, block) for block, one in enumerate(owned)]
    owners = Owners(table=table, group=tuple(range(len(held))), block_size=block_size, rotation=rotation)
    first = data.draw(st.integers(0, stop))
    run = Run(first, data.draw(st.integers(first, stop)), data.draw(st.integers(1, 4)))
    found = [(refs[p // block_size], p % block_size) for places, refs in owners.slots(run) for p in places]
    wanted = []
    for position in run.positions:
        if not rotates or position < start:
            wanted.append((table[position // block_size], position % block_size))
        else:
            home, before = homes[position - start]
            own = [ref for ref in table if ref.pool == home]
            wanted.append((own[before // block_size], before % block_size))
    assert found == wanted


@given(HELD, STARTS, NUMBERS, st.integers(0, 240), st.none() | st.integers(0, 240))
def test_visible_tokens_have_their_places(
    held: tuple[int, ...], start: int, num_tokens: int, low: int, high: int | None
) -> None:
    rotation, stop = Rotation(start=start, held=held), start + num_tokens
    whole = [rotation.runs(member, stop) for member in range(len(held))]
    clipped = [clip(runs, low, high) for runs in whole]
    for runs, left in zip(whole, clipped, strict=True):
        positions = [position for run in runs for position in run.positions]
        assert [position for run in left for position in run.positions] == [
            position for position in positions if low <= position and (high is None or position < high)
        ]
    in_sight = range(max(start, low), stop if high is None else min(stop, high))
    if in_sight:
        rows = list(in_sight)
        found = [[rows[place] for place in member_places] for member_places in row_slices(clipped)]
        assert found == [[list(run.positions) for run in runs] for runs in clipped]


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5), st.data())
def test_counts_are_those_of_held_tokens(owners: list[int], block_size: int, data: st.DataObject) -> None:
    table = [BlockRef(owner, block) for block, owner in enumerate(owners)]
    owners = Owners(table=table, group=(2, 0, 1, 3), block_size=block_size)
    num_tokens = data.draw(st.integers(0, len(table) * block_size))
    held = owners.held(num_tokens)
    assert owners.counts(num_tokens) == tuple(sum(len(run) for run in runs) for runs in held)
