"""Checks that every block of every pool is accounted for: `violations` of a manager's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from longspan.core.blocks import BlockRef
from longspan.core.kv.manager import KvManager
from longspan.core.kv.residency import Loading
from longspan.core.request import Request


def violations(kv: KvManager, requests: Iterable[Request]) -> list[str]:
    """Return one sentence per violation of the laws below; an empty list if they hold.

    The reference count of each block equals the number of its uses by tables, copies, transfers and offloaded requests.
    Blocks in use and free blocks add up to the size of their pool. Each residency follows from who has the blocks.

    Args:
        requests: all that have not been dropped.
    """
    everyone = list(requests)
    return [*_references(kv, everyone), *_pools(kv), *_residencies(kv, everyone)]


def _references(kv: KvManager, requests: list[Request]) -> Iterator[str]:
    expected = Counter[BlockRef](chain(*(request.table for request in requests)))
    held = Counter[BlockRef](chain(*(request.copying.values() for request in requests)))
    for transfer in kv.transfers_in_progress:
        expected.update(transfer.blocks)
    held.update(kv.blocks_of_transfers)
    if (swaps := kv.swaps) is not None:
        expected.update(swaps.offload.kept_blocks)
        held.update(swaps.offload.read_blocks)
        for copy in swaps.copies:
            expected.update(copy.kept)
            expected.update(above for above, _, _ in copy.behind)
            held.update(copy.held)
    for number in range(kv.account.num_pools):
        pool = kv.pool(number)
        for block in range(pool.num_blocks):
            ref = BlockRef(number, block)
            if pool.references(block) != expected[ref] + held[ref] or pool.num_held(block) != held[ref]:
                yield (
                    f"block {block} of pool {number} has {pool.references(block)} references, {pool.num_held(block)} "
                    f"of them held; named are {expected[ref] + held[ref]} and {held[ref]}"
                )


def _pools(kv: KvManager) -> Iterator[str]:
    for number in range(kv.account.num_pools):
        pool = kv.pool(number)
        used = sum(pool.references(block) > 0 for block in range(pool.num_blocks))
        if used + pool.num_free != pool.num_blocks:
            yield f"pool {number} has {pool.num_blocks} blocks, of which {used} are in use and {pool.num_free} free"


def _residencies(kv: KvManager, requests: list[Request]) -> Iterator[str]:
    for request in requests:
        if request.residency != (found := kv.residency(request)):
            yield f"request {request.id} is {request.residency}, and should be {found}"
        if isinstance(request.residency, Loading) and not kv.is_copying:
            yield f"request {request.id} loads, and nothing is on its way"
