"""The place of a request's KV: one value per request, which the manager alone changes.

    WAITING --admit--> RESIDENT or Loading --all loaded--> RESIDENT
    RESIDENT --offload--> OFFLOADING --copied--> OFFLOADED --admit--> Loading
    RESIDENT --transfer--> TRANSFERRING --all there--> RESIDENT

Every state with KV goes back to WAITING when the request ends, or when workers are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from longspan.core.kv.swaps import Swaps
    from longspan.core.request import Request


class _Place:
    """Base of residencies in which the request can neither compute nor be admitted, unless a subclass says otherwise.

    Attributes:
        can_compute: the request may take part in steps.
        can_start: the request waits and may be admitted.
    """

    __slots__ = ()
    can_compute: ClassVar[bool] = False
    can_start: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Waiting(_Place):
    """The request has no KV of its own. The prefix cache may have some of it."""

    can_start: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Resident(_Place):
    """The KV is on `request.group`. Of a request that outgrows its instance, the oldest blocks are on the host."""

    can_compute: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Offloading(_Place):
    """The request has lost its device blocks, and copies of them to hosts are in flight."""


@dataclass(frozen=True, slots=True)
class Offloaded(_Place):
    """Hosts keep the offloaded blocks until the request is admitted again or ends."""

    can_start: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Loading(_Place):
    """Copies of the first `num_tokens` tokens are in flight, to blocks that the request owns on its group."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Transferring(_Place):
    """The KV is sent to the instances that are to decode the request, `request.targets`, as it is computed."""

    can_compute: ClassVar[bool] = True


Residency = Waiting | Resident | Offloading | Offloaded | Loading | Transferring
WAITING, RESIDENT, TRANSFERRING = Waiting(), Resident(), Transferring()
OFFLOADING, OFFLOADED = Offloading(), Offloaded()


def residency_of(request: Request, swaps: Swaps | None) -> Residency:
    """Derive the residency of a request from the owners of its blocks."""
    if request.group:
        if swaps is not None and (num_tokens := swaps.loads.num_tokens(request)) is not None:
            return Loading(num_tokens=num_tokens)
        return TRANSFERRING if request.targets else RESIDENT
    if swaps is None or not swaps.offload.was_offloaded(request):
        return WAITING
    return OFFLOADING if swaps.offload.is_offloading(request) else OFFLOADED
