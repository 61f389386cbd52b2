"""The parts that an engine is given: a policy that decides (`core.view`), an executor that runs steps, and a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from longspan.core.steps import Completion, Step
from longspan.core.view import Policy


class EnginePolicy(Policy, Protocol):
    """A policy, and what an engine must know of it beside its plans."""

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that it cannot place as its options say."""

    def capacity_tokens(self, *, num_blocks: int, block_size: int) -> int:
        """Returns the longest request, in tokens, that is sure to fit when it is alone and pools have `num_blocks`."""


class Clock(Protocol):
    """Time in seconds from any origin."""

    def now(self) -> float:
        """Returns seconds, which never go back."""


class Executor(Protocol):
    """Runs steps in the order of their numbers, as far as they share ranks.

    Attributes:
        wakeup: something that the host can wait for, such as a zmq socket. When it can be read, `poll` returns early,
            with nothing. Its owner sets it; None for no such thing. A virtual clock waits for nothing and ignores it.
    """

    wakeup: Any

    def submit(self, step: Step) -> None:
        """Sends a step to its ranks; returns at once."""

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Waits for completions: at least one, at most one per request, none when `timeout_s` (None: no limit) passes.

        Raises:
            WorkerLostError: when a worker died or raised; none of the steps in flight will complete.
        """

    def close(self) -> None:
        """Ends its workers, if any; nothing of them is left. May be called again."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load: how much the engine has to do.

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
