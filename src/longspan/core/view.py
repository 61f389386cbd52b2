"""The interface between engine and policies: a `core.policy.Policy` reads a `ClusterView` and returns a `Plan`.

Protocols declare the read-only attributes of the engine's requests and KV pools, so a view costs no copy. The engine
finds the requests of a plan by their ids. Views, parts and plans are read-only, but not `frozen`, which is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # types alone
    from longspan.core.blocks import BlockRef, PrefixHit, Target
    from longspan.core.cluster import Cluster
    from longspan.core.exchange import Exchange
    from longspan.core.kv.residency import Residency
    from longspan.core.owners import Owners, Rotation
    from longspan.core.runs import SpanShards
    from longspan.core.sparse import SparseSetting


class RequestView(Protocol):
    """A request as policies see it. `core.request.Request` implements it.

    Attributes:
        id: ascends in the order of arrival.
        num_known: prompt and output tokens known so far.
        num_tokens: tokens that can be scheduled: the known tokens, and one token that a step in flight samples.
        num_scheduled, num_computed: tokens with KV after the emitted steps and loads, and after the completed ones.
        num_preemptions: preemptions so far.
        max_tokens: maximum output tokens.
        was_admitted: it was admitted before, and may have lost its KV since.
        admission: number of its admission. Preemption picks the most recently admitted request.
        in_flight: an emitted step or a load names it, so that it cannot be preempted.
        num_steps: number of steps in flight that name it.
        last_step: the number of the last step that named it. -1 before the first.
        group: the instances that hold its KV, in ring order. Empty while it waits.
        residency: the tier and state of its KV.
        rotation: the rule that assigns single tokens to members. None if members own whole blocks.
        kv_owner: the member that stores all KV computed from now on. None if all members do.
        kv_owners: the members that will store KV of further tokens.
        sampler: the instance that samples, or has sampled, its latest token.
        hosted, streamed: number of blocks in each host pool that are read there, and that its steps have offloaded.
        targets: the decode instances that its KV is sent to. Empty without transfers.
        max_cached: maximum number of tokens with cached KV. Reports about a prompt need a computation of its tokens.
    """

    @property
    def id(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_known(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_scheduled(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def was_admitted(self) -> bool: ...
    @property
    def admission(self) -> int: ...
    @property
    def in_flight(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def last_step(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def group(self) -> tuple[int, ...]: ...
    @property
    def residency(self) -> Residency: ...
    @property
    def table(self) -> Sequence[BlockRef]: ...
    @property
    def rotation(self) -> Rotation | None: ...
    @property
    def kv_owner(self) -> int | None: ...
    @property
    def kv_owners(self) -> tuple[int, ...]: ...
    @property
    def owners(self) -> Owners: ...
    @property
    def hosted(self) -> Mapping[int, int]: ...
    @property
    def streamed(self) -> Mapping[int, int]: ...
    @property
    def sampler(self) -> int: ...
    @property
    def targets(self) -> tuple[int, ...]: ...
    @property
    def max_cached(self) -> int: ...
    @property
    def sparse(self) -> SparseSetting | None: ...
    @property
    def num_preemptions(self) -> int: ...

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens fill or begin."""

    def tokens(self, start: int, stop: int) -> Sequence[int]: ...

    def parent_key(self, index: int) -> bytes:
        """Return the prefix key of all tokens before block `index`."""


class RunningView(Protocol):
    """The requests that hold KV, in order of admission, also by instance.

    Attributes:
        changes: number of changes of the running requests and steps in flight of each instance.
        coupled_sets: the instances that share requests, see `coupled_instances`.
        shared: the requests on groups of several instances.
        occupied: the instances that take part in any request.
        due_tokens: known tokens still to be computed on each instance, if the members of a group share evenly.
        due_blocks: blocks that the tokens of running requests still need on each instance.
    """

    @property
    def changes(self) -> Sequence[int]: ...
    @property
    def coupled_sets(self) -> Sequence[frozenset[int]]: ...
    @property
    def shared(self) -> Iterator[RequestView]: ...
    @property
    def occupied(self) -> Collection[int]: ...
    @property
    def due_tokens(self) -> Sequence[int]: ...
    @property
    def due_blocks(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[RequestView]: ...

    def get(self, request_id: int) -> RequestView | None: ...

    def on(self, instance: int) -> Collection[RequestView]: ...

    def within(self, instances: frozenset[int]) -> Iterator[RequestView]:
        """Iterate, in no order, over the requests on groups of only these instances."""


class KvView(Protocol):
    """The KV pools of all instances, and lookups of cached prefixes."""

    def num_blocks(self, instance: int) -> int: ...

    def num_free(self, instance: int) -> int:
        """Return the number of blocks that can be allocated now, including cached blocks."""

    def num_pending_free(self, instance: int) -> int:
        """Return the number of blocks held only by in-flight copies. They are free when the copies are done."""

    def num_allocated(self, instance: int) -> int:
        """Return the number of blocks allocated so far. A pool with fewer is emptier, or has older contents."""

    def changes(self, instances: Sequence[int]) -> int:
        """Return the number of changes in these pools so far."""

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        """Return the longest prefix on `group`, or on its hosts and disks if a load costs less than recomputation."""

    def match_in_place(self, request: RequestView, max_blocks: Mapping[int, int], hosts: Sequence[int]) -> PrefixHit:
        """Return the longest prefix on the instances of `max_blocks` or in the pools of `hosts`, read in place.

        `max_blocks` bounds the unreferenced full blocks that the hit uses on each instance. The last blocks are kept.
        """

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        """Return the free blocks per instance that a hit uses. `claimed` blocks are in use by then."""

    def reclaimable(self, request: RequestView) -> Counter[int]:
        """Return the number of blocks per instance that are free after a preemption of the request."""


@dataclass(kw_only=True, slots=True)
class ClusterView:
    """The state that a policy reads.

    Attributes:
        max_num_batched_tokens, max_num_seqs: the bounds of a step on one instance.
        max_steps_in_flight: maximum steps in flight that name a request, including the step that samples its token.
        waiting: requests without KV on devices, in order of arrival. Followers of a computing leader are left out.
        startable: the waiting requests that can start now, up to the first with an offload in flight.
        busy, full: instances with a step in flight, and instances that cannot take another step now.
        now_s: the engine's clock.
        expected: blocks on decode instances that transfers will need, and that are not allocated yet.
        queue_changes: number of times that a request began or ceased to wait, or became startable.
        device_limit: maximum device blocks of one request. Older blocks are read on hosts. None: host reads are off.
    """

    cluster: Cluster
    max_num_batched_tokens: int
    max_num_seqs: int
    waiting: Sequence[RequestView]
    startable: Sequence[RequestView]
    running: RunningView
    kv: KvView
    busy: frozenset[int]
    full: frozenset[int]
    now_s: float
    expected: Mapping[int, int] = field(default_factory=dict)
    queue_changes: int = 0
    max_steps_in_flight: int = 2
    device_limit: int | None = None

    def changes(self, instances: Sequence[int]) -> int:
        """Return a number that grows with each change of requests, steps and pools, while `kv` is the same object."""
        changes = self.running.changes
        pools = instances if self.device_limit is None else (*instances, *self.cluster.host_pools)
        return self.queue_changes + sum([changes[i] for i in instances]) + self.kv.changes(pools)


@dataclass(kw_only=True, slots=True)
class ScheduledPart:
    """The part of one request in one step that a policy plans. The engine turns it into a `Part`.

    Attributes:
        runs: of the span `[start, stop)`, per member of `group`.
        block_owners: the instances of the new blocks that the span or a load needs, in order of position.
        rotation: the rule that assigns the span, a single token, to a member. None if members own blocks.
        kv_owner: the member that stores all KV of the request from now on. None if all members do.
        hit: the prefix of a request that is admitted. If it is loaded, the span is empty.
        targets: decode instances of a request that is admitted. Empty without roles, or if one token remains.
        moves: pairs of an index into the request's table and the member that gets the block before attention.
    """

    request: RequestView
    group: tuple[int, ...]
    start: int
    stop: int
    runs: SpanShards
    block_owners: tuple[int, ...]
    exchange: Exchange
    rotation: Rotation | None = None
    kv_owner: int | None = None
    hit: PrefixHit | None = None
    targets: tuple[Target, ...] = ()
    moves: tuple[tuple[int, int], ...] = ()

    @property
    def new_blocks(self) -> Counter[int]:
        """Number of blocks that the part allocates on each instance."""
        return Counter([*self.block_owners, *(instance for _, instance in self.moves)])


@dataclass(kw_only=True, slots=True)
class Plan:
    """The next preemptions, and one Forward per batch. Batches share no instance.

    Attributes:
        loads: requests that are admitted and compute nothing before their KV is loaded, see `ScheduledPart.hit`.
        parked: requests without steps in flight whose KV is offloaded for a change of clusters.
        reshard: the cluster that replaces this one when all running requests are parked. No step is planned before.
        offloads: steps offload the blocks that they fill, layer by layer, since their requests will be parked.
    """

    preempted: tuple[RequestView, ...] = ()
    loads: tuple[ScheduledPart, ...] = ()
    parked: tuple[RequestView, ...] = ()
    reshard: Cluster | None = None
    offloads: bool = False
    batches: tuple[tuple[ScheduledPart, ...], ...] = ()


Admitted = Literal["all", "new", "started"]
