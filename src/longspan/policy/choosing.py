"""How many instances share a prompt, and by which exchange: by measured times, or by rules where nobody measured."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.core.steps import Exchange
from longspan.cost.exchange_rules import ring_kv_or_ring_q
from longspan.cost.partition_table import PartitionTable
from longspan.cost.profile import Profile
from longspan.cost.shapes import Hardware, ModelShape

_CANDIDATES: tuple[Exchange, ...] = ("ring_kv", "ring_q", "alltoall", "gather_kv")
"""What any layout can be computed with, so that every step may take another. A chain cannot."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a model and its hardware when a policy is made.

    Attributes:
        shape, hardware: what rules go by.
        profile: what was measured.
        model: what the table of partitions calls it.
        partitions: searched ones; None when nobody looked for them yet, so that nothing is refused for want of one.
    """

    shape: ModelShape | None = None
    hardware: Hardware | None = None
    profile: Profile | None = None
    model: str = ""
    partitions: PartitionTable | None = None


class Chooser:
    """Predicts what all instances would take for a prefill, and what one would; the quicker one is chosen.

    Groups of some instances are not considered: what they leave idle has nothing to do while a prompt is alone, and the
    next dealt prompt waits for it anyway.

    Args:
        num_instances: of the group.
        facts: times of groups of other sizes in its profile do not count.
        exchange: the only candidate; None for any that suits all layouts.
    """

    def __init__(self, num_instances: int, facts: Facts, exchange: Exchange | None = None) -> None:
        times = facts.profile.times() if facts.profile is not None else {}
        candidates = _CANDIDATES if exchange is None else (exchange,)
        self._alone = times.get((1, "local"))
        self._shared = {name: times[num_instances, name] for name in candidates if (num_instances, name) in times}
        self._num_instances, self._facts = num_instances, facts
        self._known: dict[int, bool] = {}

    def shares(self, num_tokens: int) -> bool | None:
        """Whether all instances are expected to be done with a prompt before one alone would be.

        None when that was not measured. Every length is predicted once: it is asked of all that wait, at every step.
        """
        if self._alone is None or not self._shared:
            return None
        if num_tokens not in self._known:
            shared_s = min(times.seconds(num_tokens) for times in self._shared.values())
            self._known[num_tokens] = shared_s < self._alone.seconds(num_tokens)
        return self._known[num_tokens]

    def exchange(self, new_tokens: int, cached_tokens: int) -> Exchange:
        """The one expected to be quickest for what is left of a prompt.

        Without measurements `ring_kv`, or behind cached tokens what Algorithm 5 says of a known model and hardware.
        """
        if self._shared:
            return min(self._shared, key=lambda name: self._shared[name].seconds(new_tokens, cached_tokens))
        shape, hardware = self._facts.shape, self._facts.hardware
        if cached_tokens == 0 or shape is None or hardware is None:
            return "ring_kv"
        return ring_kv_or_ring_q(shape, hardware, new_tokens, cached_tokens, self._num_instances)
