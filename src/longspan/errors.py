"""Errors that one room raises and another one catches."""

from __future__ import annotations


class ParameterError(ValueError):
    """A parameter has a value that it cannot have. The message is the parameter's name and then the problem.

    Whoever knows the parameter by another name, such as the command line, puts that name in front of `problem`.

    Attributes:
        parameter: its name in Python, such as `max_num_seqs`.
        problem: the rest of the sentence, such as `must be at least 1, but 0 given`. No space goes before a colon or a
            parenthesis that it begins with.
        value: the value that was given, if one value is the cause.
    """

    def __init__(self, parameter: str, problem: str, value: object = None) -> None:
        super().__init__(named(parameter, problem))
        self.parameter = parameter
        self.problem = problem
        self.value = value


def named(name: str, problem: str) -> str:
    """Write the message about a parameter for readers who know it as `name`."""
    return f"{name}{problem}" if problem[:1] in (":", "(") else f"{name} {problem}"


class PluginError(ValueError):
    """A package that adds policies or exchanges is broken; the message names its entry point and its distribution."""


class WorkerLostError(RuntimeError):
    """A worker process died or raised; the requests in flight cannot finish.

    Attributes:
        rank: the rank that was lost.
        reason: why, as far as it is known: its exception, or how its process ended.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"worker rank {rank} was lost: {reason}")
        self.rank = rank
        self.reason = reason


class OutOfMemoryError(WorkerLostError):
    """A worker raised because its device has no memory left, or the kernel killed it because its host has none."""
