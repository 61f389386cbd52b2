"""The seam between deciding and doing: a `Policy` reads a `ClusterView` and returns a `Plan`.

A view is read-only. What it shows of requests and KV pools is declared here as protocols without a single way to change
anything, and type checks hold policies to them; the engine's own objects stand behind, so that a view costs nothing to
make and a plan costs no more the more there is that it does not touch. The engine finds the requests of a plan again by
their ids. Scheduled parts and plans are not `frozen`, which would take thrice as long for every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from longspan.core.cluster import Cluster
from longspan.core.exchange import Exchange
from longspan.core.owners import BlockRef, Owners, PrefixHit, Rotation
from longspan.core.runs import SpanShards
from longspan.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one step.

    Attributes:
        max_num_batched_tokens: tokens that one instance computes in one step, at most.
        max_num_seqs: requests that one instance takes part in at once, at most.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ParameterError(name, f"must be at least 1, but {getattr(self, name)} given", getattr(self, name))


class RequestView(Protocol):
    """A request as policies see it. `core.request.Request` says more about every counter."""

    @property
    def id(self) -> int:
        """Ids ascend in the order of arrival."""

    @property
    def num_prompt(self) -> int:
        """The prompt has this many tokens."""

    @property
    def num_known(self) -> int:
        """Prompt and output have this many tokens so far."""

    @property
    def num_tokens(self) -> int:
        """So many tokens can be scheduled: the known ones, and one that a step in flight will sample."""

    @property
    def num_scheduled(self) -> int:
        """Emitted steps compute the tokens up to here."""

    @property
    def num_computed(self) -> int:
        """Completed steps have computed the tokens up to here."""

    @property
    def max_tokens(self) -> int:
        """The output ends with this many tokens at the latest."""

    @property
    def arrival_s(self) -> float:
        """The request arrived at this second of the engine's clock."""

    @property
    def was_admitted(self) -> bool:
        """It has held KV before, though it may have lost that since."""

    @property
    def admission(self) -> int:
        """Admissions are counted; the last admitted gives way first."""

    @property
    def in_flight(self) -> bool:
        """An emitted step names it, so that it cannot be preempted."""

    @property
    def block_size(self) -> int:
        """A KV block holds this many tokens."""

    @property
    def group(self) -> tuple[int, ...]:
        """The instances that hold its KV, in ring order; empty while it waits."""

    @property
    def table(self) -> Sequence[BlockRef]:
        """Its blocks, in order of their tokens."""

    @property
    def rotation(self) -> Rotation | None:
        """The rule that gives single tokens to members; None while members own whole blocks."""

    @property
    def kv_owner(self) -> int | None:
        """The member that keeps all that is computed from now on; None when all members do."""

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """The members that will hold what is still to come."""

    @property
    def owners(self) -> Owners:
        """Where its tokens lie while it has a group."""

    @property
    def sampler(self) -> int:
        """The instance that samples, or has sampled, its latest token."""

    @property
    def target(self) -> int | None:
        """The instance that its KV is on its way to; None when it stays where it is."""

    @property
    def scores_prompt(self) -> bool:
        """The logprobs of its prompt are still to be reported, so that all of it must be computed."""

    def blocks_for(self, num_tokens: int) -> int:
        """Counts the blocks that so many tokens fill or begin."""

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Returns the token ids at positions `[start, stop)`."""

    def parent_key(self, index: int) -> bytes:
        """Names all tokens before block `index`, as the prefix cache does."""


class RunningView(Protocol):
    """The requests that hold KV, first admitted first, also by instance.

    Attributes below that are numbers of every instance are indexed by it.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestView]: ...

    @property
    def changes(self) -> Sequence[int]:
        """How often anything has changed of what runs on each instance."""

    @property
    def coupled_sets(self) -> Sequence[frozenset[int]]:
        """The sets of instances that share requests, see `coupled_instances`."""

    @property
    def shared(self) -> Iterator[RequestView]:
        """The requests that several instances take part in."""

    @property
    def occupied(self) -> Collection[int]:
        """The instances that take part in any request."""

    @property
    def due_tokens(self) -> Sequence[int]:
        """The tokens still to be computed on each instance, if the members of a group share evenly."""

    @property
    def due_blocks(self) -> Sequence[int]:
        """The blocks still asked of each instance for the tokens that its requests have."""

    def get(self, request_id: int) -> RequestView | None:
        """Returns the request of that id, if it runs."""

    def on(self, instance: int) -> Collection[RequestView]:
        """Returns the requests that an instance takes part in."""

    def within(self, instances: frozenset[int]) -> Iterator[RequestView]:
        """Iterates, in no order, over the requests that no other instances take part in."""


class KvView(Protocol):
    """The KV pools of all instances, and what a request would find in them."""

    def num_blocks(self, instance: int) -> int:
        """Counts all blocks of an instance's pool."""

    def num_free(self, instance: int) -> int:
        """Counts the blocks that can be allocated now, cached ones included."""

    def num_leaving(self, instance: int) -> int:
        """Counts the blocks that only copies under way hold: they become free when these are done."""

    def changes(self, instances: Sequence[int]) -> int:
        """Counts how often anything has changed in these pools."""

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        """Finds the longest beginning of a request whose KV lies on members of `group`."""

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        """Counts the free blocks that taking a hit uses up, per instance; `claimed` ones are taken before."""

    def reclaimable(self, request: RequestView) -> Counter[int]:
        """Counts the blocks per instance that become free when the request is preempted."""


@dataclass(kw_only=True, slots=True)
class ClusterView:
    """What a policy may look at.

    Attributes:
        waiting: requests that hold no KV, first come first.
        busy: instances that have a step in flight.
        full: instances that can be given no further step now.
        now_s: the engine's clock.
        promised: blocks on decode instances that KV on its way will need, and that are not allocated yet.
        arrivals: how many requests have begun or ceased to wait.
    """

    cluster: Cluster
    limits: Limits
    waiting: Sequence[RequestView]
    running: RunningView
    kv: KvView
    busy: frozenset[int]
    full: frozenset[int]
    now_s: float
    promised: Mapping[int, int] = field(default_factory=dict)
    arrivals: int = 0

    def changes(self, instances: Sequence[int]) -> int:
        """Returns a number that grows with whatever can make a difference to these instances, as long as `kv` is the
        same: who waits; who runs there and how far; what is in flight there; what their pools hold.
        """
        changes = self.running.changes
        return self.arrivals + sum([changes[i] for i in instances]) + self.kv.changes(instances)


@dataclass(kw_only=True, slots=True)
class ScheduledPart:
    """One request's share of a step, as a policy wishes it.

    Attributes:
        runs: of the span `[start, stop)`, per member of `group`.
        block_owners: the instances of the new blocks that the span needs, in order of position.
        rotation: the rule that gives the span, a single token, to a member; None where members own blocks.
        kv_owner: the member that keeps all that is computed of the request from now on; None when all members do.
        hit: for a request that is admitted: the prefix that it starts from.
        target: for a request that is admitted where instances have roles: the one that is to decode it; None when it
            ends with its next token.
        moves: pairs of an index into the request's table and a member of `group`: full blocks that go there, and are
            there before the attention of this step.
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
    target: int | None = None
    moves: tuple[tuple[int, int], ...] = ()

    @property
    def new_blocks(self) -> Counter[int]:
        """The number of blocks that the part asks of each instance."""
        return Counter([*self.block_owners, *(instance for _, instance in self.moves)])


@dataclass(kw_only=True, slots=True)
class Plan:
    """What happens next: first the preemptions, then one Forward per batch; batches share no instance."""

    preempted: tuple[RequestView, ...] = ()
    batches: tuple[tuple[ScheduledPart, ...], ...] = ()


class Policy(Protocol):
    """Decides the next steps. Pure: the same views and updates, one after the other, give the same plans."""

    def plan(self, view: ClusterView) -> Plan:
        """Schedules parts on instances that are not full; an empty plan waits for the next event.

        A step for a busy instance is planned ahead: what steps in flight compute and sample counts as done, though the
        last token of a request may be unknown. Only requests that no step in flight names can be preempted.
        """
