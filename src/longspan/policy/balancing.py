"""How the KV of earlier chunks is spread anew over a group that has grown (Tetris §4.1)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from longspan.core.steps import BlockRef


def even_moves(
    blocks: Sequence[BlockRef], group: Sequence[int], room: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Pairs of a place among the `blocks` and the member that it goes to, so that members differ by one block at most.

    There are as few moves as can be: whoever has most keeps the odd blocks, and only the last blocks of a member leave
    it. No member is given more blocks than it has `room` for.
    """
    places = defaultdict[int, list[int]](list)
    for place, ref in enumerate(blocks):
        places[ref.instance].append(place)
    held = Counter({instance: len(found) for instance, found in places.items()})
    each, odd = divmod(len(blocks), len(group))
    most = sorted(group, key=lambda instance: -held[instance])
    wanted = {instance: each + (rank < odd) for rank, instance in enumerate(most)}
    takers = [i for i in group for _ in range(min(max(0, wanted[i] - held[i]), max(0, room[i])))]
    givers = [place for i in group for place in places[i][wanted[i] :]]
    return tuple(sorted(zip(givers, takers, strict=False)))
