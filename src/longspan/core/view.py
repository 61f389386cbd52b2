"""The seam between deciding and doing: a `core.policy.Policy` reads a `ClusterView` and returns a `Plan`.

A view is read-only: what it shows of requests and KV pools is declared here as protocols, to which type checks hold
policies. The engine's own objects stand behind, so that a view costs nothing to make. The engine finds the requests of
a plan again by their ids. Nobody writes to a view, a scheduled part or a plan; they are not `frozen`, since making one
would take thrice as long, and there are some for every token.
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
    """A request as policies see it; `core.request.Request` is one.

    Attributes:
        id: ascends in the order of arrival.
        num_known: prompt and output tokens known so far.
        num_tokens: tokens that can be scheduled: the known ones, and one that a step in flight will sample.
        num_scheduled, num_computed: emitted steps and loads fill, and completed ones have filled, the KV up to here.
        max_tokens: the output ends with this many tokens at the latest.
        was_admitted: it has held KV before, though it may have lost that since.
        admission: counts admissions; the last admitted gives way first.
        in_flight: an emitted step or a load names it, so that it cannot be preempted.
        num_steps: how many of them do.
        last_step: the number of the last step that named it; -1 before the first.
        group: the instances that hold its KV, in ring order; empty while it waits.
        residency: where its KV is, or is on its way to.
        rotation: the rule that gives single tokens to members; None while members own whole blocks.
        kv_owner: the member that keeps all that is computed from now on; None when all members do.
        kv_owners: the members that will hold what is still to come.
        sampler: the instance that samples, or has sampled, its latest token.
        hosted: how many of its blocks are read in the pool of each host.
        targets: the instances that its KV is on its way to; none when it stays where it is.
        scores_prompt: all of its prompt must be computed, because logprobs of it are still to be reported.
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
    def sampler(self) -> int: ...
    @property
    def targets(self) -> tuple[int, ...]: ...
    @property
    def scores_prompt(self) -> bool: ...
    @property
    def sparse(self) -> SparseSetting | None: ...

    def blocks_for(self, num_tokens: int) -> int:
        """Counts the blocks that `num_tokens` tokens fill or begin."""

    def tokens(self, start: int, stop: int) -> Sequence[int]: ...

    def parent_key(self, index: int) -> bytes:
        """Names all tokens before block `index`, as the prefix cache does."""


class RunningView(Protocol):
    """The requests that hold KV, first admitted first, also by instance.

    Attributes:
        changes: counts the changes of what runs on each instance.
        coupled_sets: the instances that share requests, see `coupled_instances`.
        shared: the requests that several instances take part in.
        occupied: the instances that take part in any request.
        due_tokens: known tokens still to be computed on each instance, if the members of a group share evenly.
        due_blocks: blocks still asked of each instance for the tokens that its requests have.
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
        """Iterates, in no order, over the requests that no other instances take part in."""


class KvView(Protocol):
    """The KV pools of all instances, and what a request would find in them."""

    def num_blocks(self, instance: int) -> int: ...

    def num_free(self, instance: int) -> int:
        """Counts the blocks that can be allocated now, cached ones included."""

    def num_leaving(self, instance: int) -> int:
        """Counts the blocks that only copies under way hold: they become free when these are done."""

    def num_allocated(self, instance: int) -> int:
        """Counts the blocks handed out so far. A pool with few is the emptiest, or what it caches is the oldest."""

    def changes(self, instances: Sequence[int]) -> int:
        """Counts how often anything has changed in these pools."""

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        """Finds the longest beginning of a request on `group`, or on its hosts and disks if it pays to load that."""

    def match_beside(self, request: RequestView, most: Mapping[int, int], hosts: Sequence[int]) -> PrefixHit:
        """Return the longest prefix of a request on the instances of `most` or in the pools of `hosts`, read in place.

        `most` bounds the unreferenced full blocks that the hit uses on each instance. The last blocks are kept.
        """

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        """Counts the free blocks per instance that taking a hit uses up; `claimed` ones are taken before."""

    def reclaimable(self, request: RequestView) -> Counter[int]:
        """Counts the blocks per instance that become free when the request is preempted."""


@dataclass(kw_only=True, slots=True)
class ClusterView:
    """Everything that a policy may look at.

    Attributes:
        max_num_batched_tokens, max_num_seqs: the bounds of a step on one instance.
        max_steps_in_flight: the steps that may be in flight, with its own, when one of them samples a request's token.
        waiting: requests that hold no KV on devices, in order of arrival. Those of a leader that is still computing
            their common prompt are left out.
        startable: the waiting requests that can start now. Others wait behind one whose KV is on its way to a host.
        busy, full: instances that have a step in flight, and those that can be given no further step now.
        now_s: the engine's clock.
        expected: blocks on decode instances that KV on its way will need, and that are not allocated yet.
        queue_changes: how often requests have begun or ceased to wait, or have become able to start.
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
        """Returns a number that grows with all that matters to these instances while `kv` is the same: who waits, runs
        and is in flight there, and the contents of their pools, and of hosts where they read them.
        """
        changes = self.running.changes
        pools = instances if self.device_limit is None else (*instances, *self.cluster.host_pools)
        return self.queue_changes + sum([changes[i] for i in instances]) + self.kv.changes(pools)


@dataclass(kw_only=True, slots=True)
class ScheduledPart:
    """A part as a policy asks for it, of one request in one step; the engine makes a `Part` of it.

    Attributes:
        runs: of the span `[start, stop)`, per member of `group`.
        block_owners: the instances of the new blocks that the span needs, or that are loaded, in order of position.
        rotation: the rule that gives the span, a single token, to a member; None where members own blocks.
        kv_owner: the member that keeps all that is computed of the request from now on; None when all members do.
        hit: for a request that is admitted: the prefix that it starts from. While that is loaded, the span is empty.
        targets: for a request that is admitted where instances have roles: those that are to decode it, for all blocks
            of its tokens; none when it ends with its next token.
        moves: pairs of an index into the request's table and a member of `group`: full blocks that are there before the
            attention of this step.
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
        """Blocks that the part asks of each instance."""
        return Counter([*self.block_owners, *(instance for _, instance in self.moves)])


@dataclass(kw_only=True, slots=True)
class Plan:
    """The next preemptions, and one Forward per batch; batches share no instance.

    Attributes:
        loads: requests that are admitted and compute nothing before their KV is loaded, see `ScheduledPart.hit`.
        parked: requests in no step in flight that give up their KV on devices, though they are in nobody's way.
        reshard: the cluster that takes the place of this one once all who run are parked; nothing is planned before.
    """

    preempted: tuple[RequestView, ...] = ()
    loads: tuple[ScheduledPart, ...] = ()
    parked: tuple[RequestView, ...] = ()
    reshard: Cluster | None = None
    batches: tuple[tuple[ScheduledPart, ...], ...] = ()


Admitted = Literal["all", "new", "started"]
