"""Changes of the clusters of an engine: re-shard, shrink, grow, and restart after a loss of workers.

The engine is in one of four states. Each event below moves it to the next one.

- `running`: steps are planned. `ask` begins a change.
- `draining`: no step is planned. Requests are preempted, and KV leaves the devices. Then `drain` returns the `Reshard`.
- `switching`: all ranks take their places in the new cluster. `complete` takes the completion of the `Reshard`.
- `resuming`: the engine replaces all state that depends on the cluster. `resumed` ends the change.

Lost workers end a change in any state: `restart`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.policy import Policy
from longspan.core.request import Request
from longspan.core.steps import Completion, Reshard

if TYPE_CHECKING:  # types alone
    from longspan.core.transitions import Transition

State = Literal["running", "draining", "switching", "resuming"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another cluster for an engine.

    Attributes:
        policy: the policy for another fleet. None if the present policy planned the change.
        phases: the clusters of both phases. Empty without phases.
    """

    cluster: Cluster
    policy: Policy | None = None
    phases: tuple[Cluster, ...] = ()

    @classmethod
    def to(cls, config: EngineConfig, policy: Policy) -> Change:
        """Return the change to the fleet of a configuration."""
        return cls(cluster=config.cluster, policy=policy, phases=config.phases)

    def config(self, before: EngineConfig) -> EngineConfig:
        """Return the configuration of an engine after the change."""
        return replace(before, cluster=self.cluster, phases=self.phases)


class Regrouping:
    """The state of an engine between two clusters, and the changes so far.

    Attributes:
        state: steps are planned while it is `running`.
        transitions: the completed changes. A restart is none.
        swap_s, reshard_s: their seconds without computation, while KV left the devices and while ranks regrouped.
    """

    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.swap_s = self.reshard_s = 0.0
        self.state: State = "running"
        self._change: Change | None = None
        self._next: Change | None = None
        self._number = 0  # of the Reshard
        self._asked_s = self._begun_s = 0.0
        self._idle_s: float | None = None

    def phase(self, config: EngineConfig) -> str:
        """Return prefill, decode or transition for an engine with phases. Empty without phases."""
        if self._idle_s is not None or not config.phases:
            return "" if self._idle_s is None else "transition"
        from longspan.core.transitions import phase_of  # noqa: PLC0415 - most clusters stay

        return phase_of(config.cluster, config.phases)

    def target(self, policy: Policy, config: EngineConfig) -> tuple[Policy, EngineConfig]:
        """Return the policy and the configuration that apply once the changes under way are complete.

        Requests that arrive during a change are computed after it.
        """
        for change in (self._change, self._next):
            if change is not None:
                policy, config = change.policy or policy, change.config(config)
        return policy, config

    def ask(self, change: Change, now_s: float) -> None:
        """Begin a change. It follows a change of the policy that is under way.

        Raises:
            RuntimeError: a change with another policy is under way.
        """
        if self._change is None:
            self.state, self._change, self._asked_s = "draining", change, now_s
            return
        if self._change.policy is not None or self._next is not None:
            raise RuntimeError("a change of clusters is in progress: call step until it is complete")
        self._next = change

    def drain(self, number: Callable[[], int], now_s: float, *, computes: bool, moves: bool) -> Reshard | None:
        """Return the step that switches clusters, with the next number. None while steps or KV are in flight."""
        assert self.state == "draining" and self._change is not None
        if not computes and self._idle_s is None:
            self._idle_s = now_s
        if computes or moves:
            return None
        self.state, self._number, self._begun_s = "switching", number(), now_s
        return Reshard(number=self._number, cluster=self._change.cluster)

    def complete(self, done: Completion, now_s: float) -> Change | None:
        """Return the change to resume with, if this completes its Reshard. None for all other completions."""
        if self.state != "switching" or done.number != self._number:
            return None
        assert self._change is not None and self._idle_s is not None, "ranks switch when no step is in flight"
        from longspan.core.transitions import Transition  # noqa: PLC0415 - most clusters stay

        self.state = "resuming"
        transition = Transition(
            cluster=self._change.cluster,
            asked_s=self._asked_s,
            idle_s=self._idle_s,
            begun_s=self._begun_s,
            ended_s=now_s,
            copied_bytes=sum(done.bytes_sent.values()),
        )
        self.transitions.append(transition)
        self.swap_s += transition.swap_s
        self.reshard_s += transition.exposed_s - transition.swap_s
        return self._change

    def resumed(self, now_s: float) -> None:
        """Run on the new cluster, or begin the change that was asked for meanwhile."""
        assert self.state == "resuming"
        following = self._next
        self._clear()
        if following is not None:
            self.ask(following, now_s)

    def restart(self, change: Change | None, now_s: float) -> None:
        """Forget the state of the lost workers. The new ones have the places of `change`, or those before the loss.

        Without `change`, a change under way begins again. If the policy asked for it, it is left to the policy.
        """
        pending = [change for change in (self._change, self._next) if change is not None and change.policy is not None]
        self._clear()
        if change is not None:
            self.state, self._change = "resuming", change
        elif pending:
            self.ask(pending[0], now_s)

    def _clear(self) -> None:
        self.state, self._change, self._next, self._idle_s = "running", None, None, None


def bounded(requests: Iterable[Request], max_len: int) -> list[Request]:
    """Bound the outputs of requests to the capacity of a new cluster. Return the failed requests, which exceed it."""
    failed = []
    for request in requests:
        if request.num_known >= max_len:
            problem = f"it has {request.num_known} tokens, and the remaining devices hold {max_len}"
            request.fail("capacity", problem)
            failed.append(request)
        request.max_tokens = min(request.max_tokens, max_len - request.num_prompt)
    return failed
