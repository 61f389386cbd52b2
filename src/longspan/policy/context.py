"""Context parallelism for long prompts, with continuous batching for short ones (arXiv 2411.01783).

A long prompt is sharded zigzag over several instances, chunk by chunk, and prefilled with ring pass-KV or a quicker
exchange. Its decode leaves KV in place, rotates the owner of new blocks or tokens, and moves queries. A short prompt
runs on the instance where its prefill is expected to finish first. A `Placement` decides the number of instances, and
whether several sharded prompts are prefilled at a time. Instances that share a request step together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Literal

from longspan.core.blocks import PrefixHit
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.batching import Batch, Budget
from longspan.policy.by_length import ByLength
from longspan.policy.chunked import admit_alone
from longspan.policy.facts import Facts
from longspan.policy.group_parts import GroupParts, expected_answer, is_too_large
from longspan.policy.sharing import SharingOptions

if TYPE_CHECKING:
    from longspan.policy.chain_cuts import ChainCuts
    from longspan.policy.placement import Placement


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options for the length of sharded prompts, and for their share of a step.

    Attributes:
        threshold: prompts with more tokens are sharded over all instances. `auto` chooses the number of instances by
            the profile of this machine, and is 1024 without a profile.
        long_share: the share of a step's token budget that a sharded prompt may use if there are other requests.
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
    """Options of `context`: which prompts are sharded, and how."""

    def __post_init__(self) -> None:
        LengthOptions.__post_init__(self)
        SharingOptions.__post_init__(self)


class Context(Policy, name="context"):
    """Shards long prompts over several instances, and runs short prompts on one.

    Args:
        sharing: how prompts are sharded. By default the options say so.
        chain_cuts: the pieces of chains. `auto` looks for cuts if an exchange may be a chain. None is even pieces.
        placement: makes the placement of requests from the default one.
        step_tokens: bounds the tokens of a sharded prompt in a step, by view, number of members and cached tokens.
    """

    Options: ClassVar[type[LengthOptions]] = ContextOptions
    reads_hosts = True

    def __init__(
        self,
        instances: tuple[int, ...],
        options: LengthOptions,
        facts: Facts,
        *,
        sharing: ContextOptions | None = None,
        chain_cuts: ChainCuts | Literal["auto"] | None = "auto",
        placement: Callable[[ByLength], Placement] | None = None,
        step_tokens: Callable[[ClusterView, int, int], float] | None = None,
    ) -> None:
        super().__init__(instances, options, facts)
        if sharing is None:
            assert isinstance(options, ContextOptions)
            sharing = options
        sharing.check_instances(len(instances), facts.tp)
        if chain_cuts == "auto":
            chain_cuts = None
            if sharing.wanted is None and not sharing.fractions:
                from longspan.policy.chain_cuts import ChainCuts  # noqa: PLC0415 - only chains are cut

                chain_cuts = ChainCuts("auto", facts, len(instances))
        self._all, self._sharing, self._chain_cuts = frozenset(instances), sharing, chain_cuts
        self.parts = GroupParts(len(instances), sharing, facts, chain_cuts)
        self._step_tokens = step_tokens
        self._by_length = ByLength(instances, sharing, facts, self.parts.chooser)
        self.placement: Placement = self._by_length if placement is None else placement(self._by_length)

    @property
    def capacity(self) -> int:
        """The number of instances: a request that exceeds one pool is sharded over all."""
        return len(self.instances)

    def check_prompt(self, num_prompt_tokens: int) -> None:
        if self._chain_cuts is not None:
            self._chain_cuts.check(num_prompt_tokens, self._by_length.num_members(num_prompt_tokens))

    def plan(self, view: ClusterView) -> Plan:
        """Continue running requests and admit new ones. Instances wait if too few can step for the first prompt."""
        batch = Batch(view, self._all)
        if not batch.instances:
            return Plan()
        first = next(self._candidates(view), None)
        if first is not None and self._lacks_members(first, view, batch.instances):
            return Plan()
        for request in batch.running():
            max_tokens = self._max_long_tokens(view, len(request.group), request.num_scheduled)
            partition = self.placement.partition(request, view)
            batch.add(self.parts.next(request, batch.budget, max_tokens, partition))
        if first is not None and self._lacks_members(first, view, batch.instances):
            return Plan()
        for request in batch.waiting(self._candidates(view)):
            batch.add(self._first(request, batch.budget))
        return batch.plan()

    def _candidates(self, view: ClusterView) -> Iterator[RequestView]:
        """Yield the requests that may be admitted. A short prompt may overtake a sharded prompt that has to wait.

        Sharded prompts are prefilled one at a time, or several on separate instances if the placement is concurrent.
        The cache is looked up for the first request only, because many may wait.
        """
        if not view.startable:
            return
        prefilling, is_concurrent = _prefilling(view), self.placement.is_concurrent
        num_open = len(self.instances) - len(prefilling) if is_concurrent or not prefilling else 0
        for index, request in enumerate(view.startable):
            members = self._group_size(request, view) if index == 0 else self.placement.members(request, 0, view)
            if members == 1:
                yield request
            elif members <= num_open:
                num_open = num_open - members if is_concurrent else 0
                yield request
            else:
                num_open = 0

    def _lacks_members(self, first: RequestView, view: ClusterView, instances: frozenset[int]) -> bool:
        """Return True if fewer of these instances can begin a prompt than it is sharded over."""
        members = self._group_size(first, view)
        return members > 1 and len(instances - self._taken(view)) < members

    def _group_size(self, request: RequestView, view: ClusterView) -> int:
        """Return the number of instances for a request, or all instances if it exceeds their pools.

        If one instance has the whole hit, the number is that for the other tokens, which may be 1.
        """
        members = self.placement.members(request, 0, view)
        if members > 1:
            hit = view.kv.match(request, self.instances)
            if len({ref.pool for ref in hit.refs}) == 1:
                members = self.placement.members(request, hit.num_tokens, view)
        return len(self.instances) if is_too_large(request, view, members) else members

    def _taken(self, view: ClusterView) -> frozenset[int]:
        """Return the instances that prefill a sharded prompt, and cannot begin another one."""
        return _prefilling(view) if self.placement.is_concurrent else frozenset()

    def _first(self, request: RequestView, budget: Budget) -> ScheduledPart | None:
        """Shard a long prompt over a group, or place a short one where its prefill is expected to finish first."""
        view = budget.view
        if (members := self._group_size(request, view)) == 1:
            return admit_alone(request, budget, self.instances)
        group = self._group(request, budget, members)
        if len(group) < members:
            return None
        hit = budget.hit(request, group)
        new_tokens, answer_tokens = request.num_tokens - hit.num_tokens, expected_answer(request)
        exchange = self.parts.exchange(new_tokens, hit.num_tokens, group, answer_tokens)
        if exchange.traits.keeps == "later" and not budget.outgrows(request):
            group = _ending_at_owner(group, hit, budget)
        return self.parts.chunk(
            *(request, budget, group, hit),
            most=self._max_long_tokens(view, members, hit.num_tokens),
            end=request.num_tokens,
            partition=self.placement.partition(request, view),
        )

    def _group(self, request: RequestView, budget: Budget, members: int) -> tuple[int, ...]:
        """Return up to `members` instances that can take the request now, in order of proximity."""
        taken = self._taken(budget.view)
        able = [i for i in self.instances if i in budget.tokens and budget.seqs[i] > 0 and i not in taken]
        hit = budget.view.kv.match(request, self.instances)
        cached = Counter(ref.pool for ref in hit.refs)
        if hit.num_loaded:
            from longspan.policy.loading import held_near  # noqa: PLC0415 - only hosts and disks need it

            cached = held_near(hit, budget.view.cluster)
        chosen = set(self.placement.ranked(able, cached, request, budget, members)[:members])
        return tuple(i for i in able if i in chosen)

    def _max_long_tokens(self, view: ClusterView, members: int = 1, cached_tokens: int = 0) -> int:
        """Return the tokens of a step that each member may compute for a sharded prompt."""
        tokens, num_running = view.max_num_batched_tokens, len(view.running)
        alone = num_running <= 1 and len(list(islice(self._candidates(view), 2))) + num_running <= 1
        if alone:
            return tokens
        bound = tokens * self._sharing.long_share
        if self._step_tokens is not None:
            bound = min(bound, self._step_tokens(view, members, cached_tokens) / members)
        return max(1, int(bound))


def _prefilling(view: ClusterView) -> frozenset[int]:
    """Return the instances that prefill a sharded prompt, or recompute tokens of a shared request."""
    return frozenset(i for r in view.running.shared if r.num_tokens - r.num_scheduled > 1 for i in r.group)


def _ending_at_owner(group: tuple[int, ...], hit: PrefixHit, budget: Budget) -> tuple[int, ...]:
    """Rotate the ring so that its last member, which keeps the KV, has the most cached blocks, then free blocks."""
    cached = Counter(ref.instance for ref in hit.refs)
    owner = max(reversed(group), key=lambda i: (cached[i], budget.blocks[i] - budget.reserved[i]))
    after = group.index(owner) + 1
    return group[after:] + group[:after]
