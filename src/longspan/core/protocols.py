"""The parts that an engine is given: a policy that decides (`core.view`), an executor that runs steps, and a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from longspan.core.steps import Completion, Step
from longspan.core.view import Policy

OptionValue = str | int | float | bool
"""Of a policy's option, as its policy reads it."""


def option_text(value: OptionValue) -> str:
    """Writes an option's value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class SettledError(ValueError):
    """An option that only a new start can change."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """A policy by its name, and how it is set.

    Attributes:
        name: of the policy.
        options: all that it has, as they are in force.
        changeable: those that may change while it serves.
    """

    name: str
    options: Mapping[str, OptionValue]
    changeable: tuple[str, ...] = ()

    def check_changes(self, names: Iterable[str]) -> None:
        """Checks that options of these names may change while the policy serves.

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


class EnginePolicy(Policy, Protocol):
    """A policy, and what an engine must know of it beside its plans."""

    @property
    def settings(self) -> PolicySettings:
        """The policy has a name and options."""

    def update(self, options: Mapping[str, str]) -> None:
        """Changes options between two plans; requests that run stay as they are.

        Raises:
            ValueError: for an option that it lacks or that may not change, see `PolicySettings.check_changes`, or a bad
                value. Nothing has changed then.
        """

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
