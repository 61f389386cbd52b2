"""The cause of a loss. Ranks that lose a peer report that, too, possibly before the end of the peer is known."""

from __future__ import annotations

import time
from collections.abc import Callable

from longspan.runtime import messages
from longspan.runtime.child import how_ended

TIMEOUT_S = 3.0
"""Seconds to wait for the report of the causing rank."""
_DISCONNECTED = "its connection has ended, or its host is silent"


def cause_of(
    first: messages.Failed | messages.Exited, receive: Callable[[float], messages.Report | None]
) -> messages.Failed | messages.Exited:
    """Return the report of the rank that caused the first one: a failure that has no peer as cause, or an exit.

    A rank that lost a peer, or exited with code 1 after an exception, is a victim: its end has another cause. A rank
    whose connection ended is the cause, unless its exit code or an exception of another rank follows.

    Args:
        receive: returns the next report, or None after a timeout in seconds.
    """
    rank, is_victim = first.rank, True
    if isinstance(first, messages.Failed):
        reason = first.reason
    else:
        is_victim = first.code != messages.DISCONNECTED
        reason = how_ended(first.code) if is_victim else _DISCONNECTED
    deadline_s, victims = time.monotonic() + TIMEOUT_S, {rank} if is_victim else set()
    while (report := receive(deadline_s - time.monotonic())) is not None:
        match report:
            case messages.Failed(peer=False):
                return report
            case messages.Failed(other, text):
                victims.add(other)
                reason = text if other == rank and is_victim else reason
            case messages.Exited(other, messages.DISCONNECTED) if is_victim and other not in victims:
                rank, reason, is_victim = other, _DISCONNECTED, False
            case messages.Exited(other, code) if code not in (1, messages.DISCONNECTED) and other not in victims:
                return report
    return messages.Failed(rank, reason, peer=False)
