"""Errors that several packages share."""

from __future__ import annotations


class ParameterError(ValueError):
    """A parameter has an invalid value. The message is the parameter's name and the problem.

    The command line and the server replace the name by their own name of the parameter. They also replace names of
    other parameters, which the message has in backticks.

    Attributes:
        parameter: its name in Python, such as `max_num_seqs`.
        problem: the rest of the sentence, such as `must be at least 1, but 0 given`. No space goes before a colon or a
            parenthesis at its beginning.
        value: the given value, if one value is the cause.
    """

    def __init__(self, parameter: str, problem: str, value: object = None) -> None:
        super().__init__(named(parameter, problem))
        self.parameter = parameter
        self.problem = problem
        self.value = value


def named(name: str, problem: str) -> str:
    """Return the message about a parameter that readers know as `name`."""
    return f"{name}{problem}" if problem[:1] in (":", "(") else f"{name} {problem}"


class PluginError(ValueError):
    """A package that adds policies or exchanges is broken. The message has its entry point and its distribution."""


class WorkerLostError(RuntimeError):
    """A worker process died or raised, so the requests in flight cannot finish.

    Attributes:
        rank: the lost rank.
        reason: its exception, or the end of its process.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"worker rank {rank} was lost: {reason}")
        self.rank = rank
        self.reason = reason


class OutOfMemoryError(WorkerLostError):
    """A worker raised because its device is out of memory, or the kernel killed it because its host is."""
