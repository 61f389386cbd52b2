"""The seam between deciding and doing: a `Policy` plans shares from a `ClusterView`, an `Executor` runs steps.

Nobody changes a view, a share or a plan. They are not `frozen`, which would take thrice as long for every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from longspan.core.account import KvAccount, PrefixHit
from longspan.core.owners import Rotation
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.runs import SpanShards
from longspan.core.steps import Completion, Exchange, Step


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
                raise ValueError(f"{name} must be at least 1, but {getattr(self, name)} given")


@dataclass(kw_only=True, slots=True)
class ClusterView:
    """What a policy may look at. It must change none of it.

    Attributes:
        waiting: requests that hold no KV, first come first.
        running: requests that hold KV, first admitted first; also by instance.
        busy: instances that have a step in flight.
        full: instances that can be given no further step now.
        now_s: the engine's clock.
        promised: blocks on decode instances that KV on its way will need, and that are not allocated yet.
        arrivals: how many requests have begun or ceased to wait.
    """

    num_instances: int
    limits: Limits
    waiting: Sequence[Request]
    running: Running
    busy: frozenset[int]
    full: frozenset[int]
    account: KvAccount
    now_s: float
    promised: Mapping[int, int] = field(default_factory=dict)
    arrivals: int = 0

    def changes(self, instances: Sequence[int]) -> int:
        """A number that grows with whatever can make a difference to these instances, as long as the account is the
        same: who waits; who runs there and how far; what is in flight there; what their pools hold.
        """
        changes = self.running.changes
        return self.arrivals + sum([changes[i] for i in instances]) + self.account.changes(instances)


@dataclass(kw_only=True, slots=True)
class ScheduledPart:
    """One request's share of a step, as a policy wishes it.

    Attributes:
        runs: of the span `[start, stop)`, per member of `group`.
        block_owners: the instances of the new blocks that the span needs, in order of position.
        rotation: by which the span, a single token, is homed; None where blocks are.
        kv_owner: the member that keeps all that is computed of the request from now on; None when all members do.
        hit: for a request that is admitted: the prefix that it starts from.
        target: for a request that is admitted where instances have roles: the one that is to decode it; None when it
            ends with its next token.
        moves: pairs of a place in the request's table and a member of `group`: full blocks that go there, and are there
            before the attention of this step.
    """

    request: Request
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
        """How many blocks it asks of each instance."""
        return Counter([*self.block_owners, *(instance for _, instance in self.moves)])


@dataclass(kw_only=True, slots=True)
class Plan:
    """What happens next: first the preemptions, then one Forward per batch; batches share no instance."""

    preempted: tuple[Request, ...] = ()
    batches: tuple[tuple[ScheduledPart, ...], ...] = ()


OptionValue = str | int | float | bool
"""Of a policy's option, as its policy reads it."""


def option_text(value: OptionValue) -> str:
    """An option's value as the command line would have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class SettledError(ValueError):
    """An option that only a new start can change."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What decides, and how it is set.

    Attributes:
        name: of the policy.
        options: all that it has, as they are in force.
        changeable: those that may change while it serves.
    """

    name: str
    options: Mapping[str, OptionValue]
    changeable: tuple[str, ...] = ()

    def check_changes(self, names: Iterable[str]) -> None:
        """Whether options of these names may change while the policy serves.

        Raises:
            SettledError: when it has one of them, but it may not.
            ValueError: when it has no such option.
        """
        others = f"that may change while it serves: {', '.join(self.changeable) or 'none'}"
        for name in names:
            if name not in self.options:
                raise ValueError(f"policy {self.name} has no option {name[:60]!r}; its options {others}")
            if name not in self.changeable:
                raise SettledError(
                    f"option {name} of policy {self.name} cannot change while it serves: start anew with "
                    f"-o {name}=VALUE; options {others}"
                )


class Policy(Protocol):
    """Decides the next steps. Pure: the same views and updates, one after the other, give the same plans."""

    @property
    def settings(self) -> PolicySettings:
        """Its name and its options."""

    def update(self, options: Mapping[str, str]) -> None:
        """Changes options between two plans; requests that run stay as they are.

        Raises:
            ValueError: for an option that it lacks or that may not change, see `PolicySettings.check_changes`, or a bad
                value. Nothing has changed then.
        """

    def plan(self, view: ClusterView) -> Plan:
        """Shares for instances that are not full; an empty plan waits for the next event.

        A step for a busy instance is planned ahead: what steps in flight compute and sample counts as done, though the
        last token of a request may be unknown. Only requests that no step in flight names can be preempted.
        """

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that it cannot place as its options say."""

    def capacity_tokens(self, *, num_blocks: int, block_size: int) -> int:
        """The longest request, in tokens, that is sure to fit when it is alone and every pool has `num_blocks`."""


class Clock(Protocol):
    """Time in seconds from any origin."""

    def now(self) -> float:
        """Seconds, never going back."""


class Executor(Protocol):
    """Runs steps in the order of their numbers, as far as they share ranks."""

    def submit(self, step: Step) -> None:
        """Sends a step to its ranks; returns at once."""

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Waits for completions: at least one, at most one per request, none when `timeout_s` (None: no limit) passes.

        Raises:
            WorkerLostError: when a worker died or raised; none of the steps in flight will complete.
        """


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much the engine has to do.

    Attributes:
        num_waiting, num_waiting_tokens: requests that could run if there were room, and their tokens.
        used_blocks: KV blocks per instance that requests hold.
        busy_s: seconds per instance in which it had a step to run, since the engine was made.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    used_blocks: list[int]
    busy_s: list[float]
