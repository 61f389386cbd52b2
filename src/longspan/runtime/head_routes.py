"""Which KV heads go from which rank to which, when KV moves between instances that may be split differently."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from longspan.core.heads import deal_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Heads that one rank of the source sends to one of the target, both named by their place in their instance.

    Attributes:
        given, taken: the same heads, as the source and as the target counts its own.
    """

    source: int
    target: int
    given: range
    taken: range


@lru_cache
def head_routes(num_heads: int, num_kv_heads: int, source_tp: int, target_tp: int) -> tuple[Route, ...]:
    """All routes of a layer. A target gets each of its heads once; who have the same head share those who need it.

    Raises:
        ValueError: see `deal_heads`.
    """
    has = [share.kv_heads for share in deal_heads(num_heads, num_kv_heads, source_tp)]
    needs = [share.kv_heads for share in deal_heads(num_heads, num_kv_heads, target_tp)]
    sent: dict[tuple[int, int], list[int]] = {}
    for head in range(num_kv_heads):
        givers = [place for place, heads in enumerate(has) if head in heads]
        takers = [place for place, heads in enumerate(needs) if head in heads]
        for index, taker in enumerate(takers):
            sent.setdefault((givers[index * len(givers) // len(takers)], taker), []).append(head)
    return tuple(
        Route(source=source, target=target, given=_within(has[source], heads), taken=_within(needs[target], heads))
        for (source, target), heads in sent.items()
    )


def _within(share: range, heads: list[int]) -> range:
    """Neighbouring heads, counted from the first of a share."""
    assert heads == list(range(heads[0], heads[-1] + 1)), "a rank has neighbouring heads, or a single one"
    return range(heads[0] - share.start, heads[-1] + 1 - share.start)
