"""Checks that every block of every pool is accounted for. `Watch` reports violations in production.

The time depends on the number of blocks in use, not on the size of the pools. An idle engine has few blocks in use.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from longspan.core.blocks import BlockRef
from longspan.core.kv.manager import KvManager
from longspan.core.kv.residency import residency_of
from longspan.core.request import Request

_log = logging.getLogger("longspan")
_MAX_SHOWN = 20
"""The largest number of violations in one log message, and of blocks per pool in a dump. More make the log long."""


class Watch:
    """Checks the manager of an idle engine, and logs each violation once.

    Attributes:
        num_violations: the number of different violations so far.
    """

    def __init__(self) -> None:
        self.num_violations = 0
        self._logged: set[str] = set()

    def check(self, kv: KvManager) -> None:
        """Log the violations that were not there before, with a dump of the manager's state. The engine is idle."""
        new = [violation for violation in violations(kv, ()) if violation not in self._logged]
        if new:
            self._logged.update(new)
            self.num_violations += len(new)
            shown = "; ".join(new[:_MAX_SHOWN])
            _log.error("%d violations in the account of KV blocks: %s\n%s", len(new), shown, dump(kv))


def violations(kv: KvManager, requests: Iterable[Request]) -> list[str]:
    """Return one sentence per violation of the invariants below.

    The reference count of each block equals the number of its uses by tables, copies, transfers and offloaded requests.
    Kept blocks have one more. Blocks in use and free blocks add up to the size of their pool. Each residency matches
    the owners of the blocks. Loads, transfers and offloaded blocks belong to one of the requests. A request waits for
    each load in flight.

    Args:
        requests: all that have not been dropped.
    """
    listed = list(requests)
    return [*_references(kv, listed), *_pools(kv), *_residencies(kv, listed), *_owners(kv, listed)]


def _references(kv: KvManager, requests: list[Request]) -> Iterator[str]:
    pins = Counter[BlockRef](chain(*(request.copying.values() for request in requests)))
    named = Counter[BlockRef](chain(kv.kept, *(request.table for request in requests)))
    if kv.transfers is not None:
        named.update(chain(*(transfer.blocks for transfer in kv.transfers.in_progress)))
        pins.update(kv.transfers.moving_blocks)
    if (swaps := kv.swaps) is not None:
        named.update(swaps.offload.offloaded_blocks)
        pins.update(swaps.offload.read_blocks)
        for copy in swaps.copies:
            named.update(copy.owned)
            named.update(source for source, _, _ in copy.followers)
            pins.update(copy.pinned)
    named.update(pins)
    expected, expected_pins = _by_pool(named), _by_pool(pins)
    for number in range(kv.account.num_pools):
        pool, references, pinned = kv.pool(number), expected[number], expected_pins[number]
        if references == pool.in_use and pinned == pool.pinned:
            continue
        for block in sorted({*references, *pool.in_use}):
            before, after = (pool.references(block), pool.pinned.get(block, 0)), (references[block], pinned[block])
            if before != after:
                yield (
                    f"block {block} of pool {number} has {before[0]} references, {before[1]} of them pins, instead of "
                    f"{after[0]} and {after[1]}"
                )


def _by_pool(counts: Mapping[BlockRef, int]) -> defaultdict[int, Counter[int]]:
    by_pool: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for (pool, block), number in counts.items():
        by_pool[pool][block] = number
    return by_pool


def _pools(kv: KvManager) -> Iterator[str]:
    for number in range(kv.account.num_pools):
        pool = kv.pool(number)
        if not pool.has_all_blocks():
            used, free = len(pool.in_use), pool.num_free
            yield f"pool {number} has {pool.num_blocks} blocks, of which {used} are in use and {free} free"


def _residencies(kv: KvManager, requests: list[Request]) -> Iterator[str]:
    for request in requests:
        if request.residency != (derived := residency_of(request, kv.swaps)):
            yield f"request {request.id} is {request.residency} instead of {derived}"
        if request.residency.num_loading is not None and not kv.is_copying:
            yield f"request {request.id} loads, but no copy is in flight"


def _owners(kv: KvManager, requests: list[Request]) -> Iterator[str]:
    ids = {request.id for request in requests}
    for kind, owners in _owners_by_kind(kv).items():
        if unknown := sorted(owners - ids):
            yield f"{kind} belong to requests {unknown}, which the engine has dropped"
    if kv.swaps is not None:
        loads = (copy for copy in kv.swaps.copies if copy.move.way in ("in", "load") and copy.owner is None)
        loading = {copy.move.number for copy in loads}
        if unwaited := sorted(loading - kv.swaps.loads.numbers):
            yield f"no request waits for loads {unwaited}"


def _owners_by_kind(kv: KvManager) -> dict[str, set[int]]:
    """Return the ids of the requests that own transfers, loads and offloaded blocks."""
    owners = dict[str, set[int]]()
    if kv.transfers is not None:
        owners["transfers"] = {transfer.request.id for transfer in kv.transfers.in_progress}
    if kv.swaps is not None:
        owners["loads"] = {request.id for request in kv.swaps.loads.waiting}
        owners["offloaded blocks"] = kv.swaps.offload.owners
    return owners


def dump(kv: KvManager) -> str:
    """Describe the pools of an idle engine that have blocks in use, and the owners of transfers, loads and blocks."""
    lines = []
    for number in range(kv.account.num_pools):
        pool = kv.pool(number)
        if pool.in_use or not pool.has_all_blocks():
            references = dict(list(pool.in_use.items())[:_MAX_SHOWN])
            lines.append(
                f"pool {number}: {pool.num_blocks} blocks, {len(pool.in_use)} in use (references by block: "
                f"{references}), {len(pool.pinned)} pinned, {pool.num_free} free, {pool.num_cached} of them cached"
            )
    lines += [f"{kind} of requests {sorted(owners)}" for kind, owners in _owners_by_kind(kv).items() if owners]
    return "\n".join(lines)
