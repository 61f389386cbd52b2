"""The place of a request's KV: one value per request, which the manager alone changes.

    WAITING --admit--> RESIDENT or Loading --all loaded--> RESIDENT
    RESIDENT --offload--> Offloading --copied--> OFFLOADED --admit--> Loading
    RESIDENT --transfer--> Transferring --all there--> RESIDENT

Every state with KV goes back to WAITING when the request ends, or when workers are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """The request has no KV of its own. The prefix cache may have some of it."""

    can_compute: ClassVar[bool] = False
    can_start: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """The KV is on `request.group`. Of a request that outgrows its instance, the oldest is on the host."""

    can_compute: ClassVar[bool] = True
    can_start: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """The KV is on its way to hosts: the request has given it up, and waits."""

    can_compute: ClassVar[bool] = False
    can_start: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """Hosts keep what they had room for, until the request is admitted again or ends."""

    can_compute: ClassVar[bool] = False
    can_start: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """The first `num_tokens` tokens are on their way to blocks of `request.group`, which are the request's already."""

    num_tokens: int
    can_compute: ClassVar[bool] = False
    can_start: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferring:
    """The KV goes to the instances that are to decode the request, `request.targets`, as it is computed."""

    can_compute: ClassVar[bool] = True
    can_start: ClassVar[bool] = False


Residency = Waiting | Resident | Offloading | Offloaded | Loading | Transferring
WAITING, RESIDENT, TRANSFERRING = Waiting(), Resident(), Transferring()
OFFLOADING, OFFLOADED = Offloading(), Offloaded()
