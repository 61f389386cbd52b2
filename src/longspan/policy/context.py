"""Context parallelism for long prompts beside continuous batching for short ones (arXiv 2411.01783).

A long prompt is sharded zigzag over several instances, chunk by chunk, and prefilled with ring pass-KV or what else is
quickest; its decode leaves KV where it is, rotates the owner of new blocks or tokens, and moves queries. A shorter one
stays on the instance where it is expected to finish its prefill first. How many instances take a prompt is decided by
which number is expected to be done with it first (`choosing.py`). Instances that share a request step together.
Sharded prompts are prefilled one after the other; short ones may start meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

from longspan.core.blocks import PrefixHit
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.batching import Batch, Budget
from longspan.policy.chunked import admit_alone
from longspan.policy.facts import Facts
from longspan.policy.group_parts import GroupParts, Partitions, SharingOptions, expected_answer, is_too_large

_UNMEASURED_THRESHOLD = 1024


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options that tell which prompts are long, and how they get on with others.

    Attributes:
        threshold: prompts of more tokens than this are sharded over all instances; `auto` takes as many as pay off by
            the profile of this machine, and is 1024 without one.
        long_share: the part of a step's token budget that a sharded prompt may take while other requests are there.
    """

    threshold: int | Literal["auto"] = "auto"
    long_share: float = 0.75

    def __post_init__(self) -> None:
        if self.threshold != "auto" and self.threshold < 0:
            raise ParameterError("threshold", f"must be at least 0, but {self.threshold} given", self.threshold)
        if not 0 < self.long_share <= 1:
            problem = f"must be above 0 and at most 1, but {self.long_share} given"
            raise ParameterError("long_share", problem, self.long_share)


@dataclass(frozen=True, kw_only=True)
class ContextOptions(LengthOptions, SharingOptions):
    """Options of `context`: which prompts are shared, and how."""

    def __post_init__(self) -> None:
        LengthOptions.__post_init__(self)
        SharingOptions.__post_init__(self)


class Context(Policy, name="context"):
    """Shards long prompts over as many instances as pay off, and leaves short ones to one."""

    Options: ClassVar[type[LengthOptions]] = ContextOptions
    reads_hosts = True

    def __init__(self, instances: tuple[int, ...], options: LengthOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self._all = frozenset(instances)
        self._host = {i: facts.location(i).host_id for i in instances}
        self._sharing = self._sharing_of(options)
        self._sharing.check_instances(len(instances), facts.tp)
        self._partitions = self._partitions_of(options, facts)
        self._group_parts = GroupParts(len(instances), self._sharing, facts, self._partitions)

    def _sharing_of(self, options: Any) -> ContextOptions:  # noqa: ANN401 - of a subclass
        """Return how prompts are shared, as the options say."""
        assert isinstance(options, ContextOptions)
        return options

    def _partitions_of(self, options: Any, facts: Facts) -> Partitions | None:  # noqa: ANN401 - of a subclass
        """Return how chains cut prompts: as well as is known. None if no chain is used or its fractions are given."""
        del options
        sharing = self._sharing
        return (
            Partitions("auto", facts, len(self.instances)) if sharing.wanted is None and not sharing.fractions else None
        )

    @property
    def _side_by_side(self) -> bool:
        """Whether groups with no instance in common prefill sharded prompts at once.

        So they do where a prompt may get fewer instances than its prefill alone could use.
        """
        return self._sharing.threshold == "auto" and self._group_parts.chooser.prices_answers

    @property
    def capacity(self) -> int:
        """Counts all instances: a request that outgrows one is sharded over all."""
        return len(self.instances)

    def check_prompt(self, num_prompt_tokens: int) -> None:
        if self._partitions is not None:
            self._partitions.check(num_prompt_tokens, self._num_members(num_prompt_tokens))

    def plan(self, view: ClusterView) -> Plan:
        """Goes on with running requests, and admits waiting ones.

        Until the first in line has as many instances as it is sharded over, those that could step wait for others.
        """
        batch = Batch(view, self._all)
        if not batch.instances:
            return Plan()
        first = next(self._in_turn(view), None)
        if first is not None and self._lacks_members(first, view, batch.instances):
            return Plan()
        for request in batch.running():
            most, partition = self._long_share(view), self._partition(request, view)
            batch.add(self._group_parts.next(request, batch.budget, most, partition))
        if first is not None and self._lacks_members(first, view, batch.instances):
            return Plan()
        for request in batch.waiting(self._in_turn(view)):
            batch.add(self._first(request, batch.budget))
        return batch.plan()

    def _in_turn(self, view: ClusterView) -> Iterator[RequestView]:
        """Yields requests that may be admitted: sharded prompts one after the other, or `_side_by_side` while there are
        instances that prefill none; short ones pass those.

        What is cached is looked up for the first in line alone: the line can be long.
        """
        if not view.startable:
            return
        prefilling = _prefilling(view)
        num_open = len(self.instances) - len(prefilling) if self._side_by_side or not prefilling else 0
        for index, request in enumerate(view.startable):
            members = self._group_size(request, view) if index == 0 else self._members(request, 0, view)
            if members == 1:
                yield request
            elif members <= num_open:
                num_open = num_open - members if self._side_by_side else 0
                yield request
            else:
                num_open = 0

    def _lacks_members(self, first: RequestView, view: ClusterView, instances: frozenset[int]) -> bool:
        """Tells whether fewer instances can step than the first in line is sharded over."""
        members = self._group_size(first, view)
        return members > 1 and len(instances - self._taken(view)) < members

    def _group_size(self, request: RequestView, view: ClusterView) -> int:
        """Counts the instances for a request: all, when it is too large for as many as it would be quickest on.

        Of what one instance has cached only the rest is to be computed, which may be quickest there.
        """
        members = self._members(request, 0, view)
        if members > 1:
            hit = view.kv.match(request, self.instances)
            if len({ref.pool for ref in hit.refs}) == 1:
                members = self._members(request, hit.num_tokens, view)
        return len(self.instances) if is_too_large(request, view, members) else members

    def _taken(self, view: ClusterView) -> frozenset[int]:
        """Returns the instances on which no sharded prompt can begin beside the one that is prefilled there."""
        return _prefilling(view) if self._side_by_side else frozenset()

    def _members(self, request: RequestView, cached_tokens: int, view: ClusterView) -> int:
        """Counts the instances for a request, some of it cached, where memory has room for it."""
        del view
        return self._num_members(request.num_tokens - cached_tokens, cached_tokens, expected_answer(request))

    def _partition(self, request: RequestView, view: ClusterView) -> int:
        """Returns the tokens of a whole prompt that each member has, the last one what is left; 0 for even pieces."""
        del request, view
        return 0

    def _num_members(self, new_tokens: int, cached_tokens: int = 0, answer_tokens: int = 0) -> int:
        num_instances, threshold = len(self.instances), self._sharing.threshold
        chooser = self._group_parts.chooser
        members = chooser.members(new_tokens, cached_tokens, answer_tokens) if threshold == "auto" else None
        if members is None:
            limit = _UNMEASURED_THRESHOLD if threshold == "auto" else threshold
            members = num_instances if new_tokens > limit else 1
        return num_instances if members > 1 and self._sharing.fractions else members

    def _first(self, request: RequestView, budget: Budget) -> ScheduledPart | None:
        """Shards a long prompt over a group; puts a short one where its prefill is expected to end first."""
        view = budget.view
        if (members := self._group_size(request, view)) == 1:
            return admit_alone(request, budget, self.instances)
        group = self._group(request, budget, members)
        if len(group) < members:
            return None
        hit = budget.hit(request, group)
        new_tokens, answer_tokens = request.num_tokens - hit.num_tokens, expected_answer(request)
        exchange = self._group_parts.exchange(new_tokens, hit.num_tokens, members, answer_tokens)
        if exchange.traits.keeps == "later" and not budget.outgrows(request):
            group = _ending_at_owner(group, hit, budget)
        return self._group_parts.chunk(
            *(request, budget, group, hit),
            most=self._long_share(view),
            end=request.num_tokens,
            partition=self._partition(request, view),
        )

    def _group(self, request: RequestView, budget: Budget, members: int) -> tuple[int, ...]:
        """Returns up to `members` instances that can take it now, in order of proximity."""
        taken = self._taken(budget.view)
        able = [i for i in self.instances if i in budget.tokens and budget.seqs[i] > 0 and i not in taken]
        hit = budget.view.kv.match(request, self.instances)
        held = Counter(ref.pool for ref in hit.refs)
        if hit.num_loaded:
            from longspan.policy.loading import held_near  # noqa: PLC0415 - without other tiers nothing is loaded

            held = held_near(hit, budget.view.cluster)
        chosen = set(self._best(able, held, request, budget, members)[:members])
        return tuple(i for i in able if i in chosen)

    def _best(
        self, able: Sequence[int], held: Mapping[int, int], request: RequestView, budget: Budget, members: int
    ) -> list[int]:
        """Sorts instances for a prompt that `members` share, of which they have, or can load, `held` blocks.

        Prefers those with most of its prefix, then the least load, then hosts with most candidates, then those that
        have handed out the fewest blocks.
        """
        del request, members
        kv, host = budget.view.kv, self._host
        near, used = Counter(host[i] for i in able), self._used(able, budget)
        return sorted(
            able, key=lambda i: (-held[i], budget.load[i], -near[host[i]], used[host[i]], host[i], kv.num_allocated(i))
        )

    def _used(self, instances: Sequence[int], budget: Budget) -> Counter[tuple[int, int]]:
        """Counts the blocks that instances of each host have handed out so far."""
        used = Counter[tuple[int, int]]()
        for i in instances:
            used[self._host[i]] += budget.view.kv.num_allocated(i)
        return used

    def _long_share(self, view: ClusterView) -> int:
        tokens, num_running = view.max_num_batched_tokens, len(view.running)
        alone = num_running <= 1 and len(list(islice(self._in_turn(view), 2))) + num_running <= 1
        return tokens if alone else max(1, int(tokens * self._sharing.long_share))


def _prefilling(view: ClusterView) -> frozenset[int]:
    """Returns the instances that prefill a sharded prompt, or have tokens of a shared request to compute again."""
    return frozenset(i for r in view.running.shared if r.num_tokens - r.num_scheduled > 1 for i in r.group)


def _ending_at_owner(group: tuple[int, ...], hit: PrefixHit, budget: Budget) -> tuple[int, ...]:
    """Rotates the ring so that it ends with the member that keeps the KV: the one that holds most of it, then the one
    with most room.
    """
    held = Counter(ref.instance for ref in hit.refs)
    owner = max(reversed(group), key=lambda i: (held[i], budget.blocks[i] - budget.reserved[i]))
    after = group.index(owner) + 1
    return group[after:] + group[:after]
