"""The place of a request's KV: one value per request, which the manager alone changes.

    WAITING --admit--> RESIDENT or Loading --all loaded--> RESIDENT
    RESIDENT --offload--> OFFLOADING --copied--> OFFLOADED --admit--> Loading
    RESIDENT --transfer--> TRANSFERRING --all there--> RESIDENT

Every state with KV goes back to WAITING when the request ends, or when workers are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from longspan.core.kv.swaps import Swaps
    from longspan.core.request import Request


class Residency(NamedTuple):
    """The tier and state of a request's KV.

    Attributes:
        can_compute: the request may take part in steps.
        can_start: the request waits and may be admitted.
        num_loading: the tokens at the start of the request whose copies are in flight, to blocks that it owns on its
            group. None unless the request loads.
    """

    name: str
    can_compute: bool = False
    can_start: bool = False
    num_loading: int | None = None

    def __str__(self) -> str:
        return self.name if self.num_loading is None else f"{self.name} ({self.num_loading} tokens)"


WAITING = Residency("Waiting", can_start=True)
"""The request has no KV of its own. The prefix cache may have some of it."""
RESIDENT = Residency("Resident", can_compute=True)
"""The KV is on `request.group`. Of a request that outgrows its instance, the oldest blocks are on the host."""
OFFLOADING = Residency("Offloading")
"""The request has lost its device blocks, and copies of them to hosts are in flight."""
OFFLOADED = Residency("Offloaded", can_start=True)
"""Hosts keep the offloaded blocks until the request is admitted again or ends."""
TRANSFERRING = Residency("Transferring", can_compute=True)
"""The KV is sent to the instances that are to decode the request, `request.targets`, as it is computed."""


def residency_of(request: Request, swaps: Swaps | None) -> Residency:
    """Derive the residency of a request from the owners of its blocks."""
    if request.group:
        if swaps is not None and (num_tokens := swaps.loads.num_tokens(request)) is not None:
            return Residency("Loading", num_loading=num_tokens)
        return TRANSFERRING if request.targets else RESIDENT
    if swaps is None or not swaps.offload.was_offloaded(request):
        return WAITING
    return OFFLOADING if swaps.offload.is_offloading(request) else OFFLOADED
