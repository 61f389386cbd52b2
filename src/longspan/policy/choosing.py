"""The choice of group size and exchange for a prompt: by measured times, or by rules where nobody measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from longspan.core.cluster import Cluster, Location
from longspan.core.exchange import CHAIN, LOCAL, RING_KV, Exchange, WeightSource, of_any_layout
from longspan.cost.architecture import Hardware, ModelShape
from longspan.cost.exchange_rules import cheaper_weights, ring_kv_or_ring_q, unsharded_weights_pay
from longspan.cost.partitions import PartitionTable
from longspan.cost.profile import Profile

_MOST_KNOWN = 100_000


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The knowledge of a model and its hardware that a policy is made with.

    Attributes:
        model: what the table of partitions calls it.
        partitions: searched ones; None when nobody looked for them yet, so that nothing is refused for want of one.
        cluster: None when nothing is known of it: then all instances do everything and are near each other.
    """

    shape: ModelShape | None = None
    hardware: Hardware | None = None
    profile: Profile | None = None
    model: str = ""
    partitions: PartitionTable | None = None
    cluster: Cluster | None = None

    @property
    def tp(self) -> int | None:
        """Each prefill instance has so many shards; None when that is not known yet."""
        return None if self.cluster is None else self.cluster.spec.tp

    @property
    def has_roles(self) -> bool:
        return self.cluster is not None and self.cluster.has_roles

    def prefill(self, num_instances: int) -> range:
        return range(num_instances) if self.cluster is None else self.cluster.prefill

    @property
    def decode(self) -> range:
        """Returns the instances that only decode, none without roles."""
        return range(0) if self.cluster is None else self.cluster.decode

    def location(self, instance: int) -> Location:
        return Location(device=instance) if self.cluster is None else self.cluster.location(instance)


class Chooser:
    """Predicts what groups of every size would take for a prefill, and what one instance would; the quickest is chosen.

    Args:
        exchange: the only candidate; None for all that a layout can be computed with.
        chains: whether prompts may be cut into consecutive pieces, as a chain needs.
        weights: whence `alltoall` gets unsharded weights on instances that are split.
    """

    def __init__(
        self,
        num_instances: int,
        facts: Facts,
        exchange: Exchange | None = None,
        *,
        chains: bool = False,
        weights: Literal["auto", WeightSource] = "auto",
    ) -> None:
        times = facts.profile.times() if facts.profile is not None else {}
        if exchange is not None:
            candidates: tuple[Exchange, ...] = (exchange,)
        else:
            candidates = (*of_any_layout(), CHAIN) if chains else of_any_layout()
        self._alone = times.get((1, LOCAL))
        self._shared = {
            members: found
            for members in range(2, num_instances + 1)
            if (found := {one: times[members, one] for one in candidates if (members, one) in times})
        }
        self._facts, self._weights = facts, weights
        self.members = lru_cache(maxsize=_MOST_KNOWN)(self._members)
        """Every length is predicted once: it is asked of all that wait, at every step."""

    def _members(self, new_tokens: int, cached_tokens: int = 0) -> int | None:
        """Returns the number of instances expected to be done with a prompt first; the fewest of equals.

        None when that was not measured.
        """
        if self._alone is None or not self._shared:
            return None
        seconds = {1: self._alone.seconds(new_tokens, cached_tokens)}
        for members, times in self._shared.items():
            seconds[members] = min(one.seconds(new_tokens, cached_tokens) for one in times.values())
        return min(seconds, key=seconds.__getitem__)

    def exchange(self, new_tokens: int, cached_tokens: int, members: int) -> Exchange:
        """The one expected to be quickest for a step of a prompt, in a group of so many.

        Without measurements `ring_kv`, or behind cached tokens what Algorithm 5 says of a known model and hardware.
        """
        if times := self._shared.get(members):
            return min(times, key=lambda one: times[one].seconds(new_tokens, cached_tokens))
        shape, hardware = self._facts.shape, self._facts.hardware
        if cached_tokens == 0 or shape is None or hardware is None:
            return RING_KV
        return ring_kv_or_ring_q(shape, hardware, new_tokens, cached_tokens, members)

    def of_step(self, exchange: Exchange, new_tokens: int, members: int) -> Exchange:
        """Chooses where a step gets weights from: `alltoall` of several with unsharded weights where these are
        wanted, or send less; every other exchange as it is.
        """
        shape, tp, weights = self._facts.shape, self._facts.tp or 1, self._weights
        if "weights" not in exchange.traits.parameters or new_tokens == 1 or tp == 1:
            return exchange
        if weights == "auto":
            if shape is None or not unsharded_weights_pay(shape, new_tokens, members, tp, self._source(shape, tp)):
                return exchange
            weights = self._source(shape, tp)
        return exchange._replace(weights=weights)

    def _source(self, shape: ModelShape, tp: int) -> WeightSource:
        """Takes weights from the host on CPUs, which map its copy; else goes by measured links."""
        profile = self._facts.profile
        if profile is None or profile.profile_key.device == "cpu":
            return "host"
        peers = profile.link("all_gather", tp) or profile.link("point_to_point", 2)
        return cheaper_weights(shape, tp, host=profile.link("host_copy", 1), peers=peers)
