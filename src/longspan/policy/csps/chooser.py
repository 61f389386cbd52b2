"""The choice of settings of sparse attention for a prompt, by an objective (CSPS §3.2.6).

A tuned file has the loss of a model. Speeds are those of the facts, or else of the machine that wrote the file. All
configurations of a group are enumerated for some lengths when the chooser first needs them. A prompt looks up its own.
Predicted seconds are those of the step cost: the share of `csa_price`, times the seconds of the exact exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from longspan.core.exchange import exchange_of
from longspan.core.locations import hosts_of
from longspan.core.sparse import DropMode
from longspan.cost.architecture import ModelShape
from longspan.cost.csa_pipeline import Rates
from longspan.errors import ParameterError
from longspan.policy.csps.models import TimeTable
from longspan.policy.csps.objective import Objective
from longspan.policy.csps.search import Choice, Configuration, Grid, Group, least_loss, least_ttft
from longspan.policy.csps.tuned import Tuned
from longspan.policy.facts import Facts

GRID = Grid(
    drops=tuple(round(0.04 * number, 2) for number in range(13)), near_pieces=(1, 2, 4, 8), far_pieces=(1, 2, 4)
)
"""The configurations that are tried. No prompt drops more than 48 % of the tokens of level 2."""
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 65536, 262144, 1048576)
"""Lengths in tokens for which configurations are enumerated. Other lengths are interpolated."""
_PER_DOUBLING = 8
"""Lengths within an eighth of a doubling have one configuration, so that their prompts can share cached KV."""
_ANY_LOSS = 1e9
"""Upper bound in points that every finite loss meets."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A choice, the mode of its drops, and whether the objective is expected to be met."""

    choice: Choice
    mode: DropMode
    is_met: bool

    @property
    def configuration(self) -> Configuration:
        return self.choice.configuration


class CsaChooser:
    """Chooses settings for groups of the first instances.

    Args:
        instances: all instances, in order of proximity.
        kind: the exact exchange whose sparse form computes the prompts.
        sizes: numbers of instances whose groups are enumerated at once.

    Raises:
        ParameterError: if the file was tuned for a model of another shape.
    """

    def __init__(
        self, tuned: Tuned, facts: Facts, instances: Sequence[int], kind: str, *, sizes: Iterable[int] = ()
    ) -> None:
        assert facts.shape is not None, "the model is known"
        _check_shape(tuned, facts.shape)
        self._tuned, self._facts, self._shape = tuned, facts, facts.shape
        self._instances, self._exchange = tuple(instances), exchange_of(kind)
        self._hosts = hosts_of([facts.location(instance) for instance in instances])
        self.choose = lru_cache(maxsize=4096)(self._choose)
        self._scale = lru_cache(maxsize=4096)(self._find_scale)
        for members in sizes:
            self.tables(members)

    def tables(self, members: int) -> list[tuple[Group, TimeTable]]:
        """Return the group of this size and its times, one pair for each mode of drops."""
        hosts = self._hosts[:members]
        rates = rates_of(self._tuned, self._facts, hosts)
        kind = self._exchange.kind
        return [_enumerated(self._shape, hosts, rates, kind, mode) for mode in self._tuned.modes()]

    def ttft_s(self, group: Group, num_tokens: int, configuration: Configuration) -> float:
        """Predict the seconds of a whole prompt on a group of `tables`. The step cost takes as long."""
        return group.ttft_s(num_tokens, configuration) * self._scale(group, num_tokens)

    def hint(self, objective: Objective) -> str:
        """Name the machine whose speeds are used, and the longest prompt that is expected to meet a target."""
        members = len(self._instances)
        words = f"csa goes by speeds of {self._tuned.machine}, where its file was tuned: run longspan profile"
        if self._facts.profile is not None and _rates_of_facts(self._facts, self._hosts) is not None:
            words = f"csa goes by the speeds of {self._facts.profile.profile_key.machine}"
        if objective.target_s is None or members == 1:
            return words
        met = [length for length in _LENGTHS if self.choose(length, members, objective).is_met]
        reach = f"for prompts of up to {max(met):,} tokens" if met else "for no prompt"
        return f"{words}; {objective.target_s:g} s to the first token are expected {reach}, others take the least"

    def _find_scale(self, group: Group, num_tokens: int) -> float:
        """Return the seconds of exact attention by the step cost, relative to `group.ttft_s`. 1 without a step cost."""
        if self._facts.exact_s is None:
            return 1.0
        exact_s = self._facts.exact_s(self._exchange, self._instances[: len(group.hosts)], num_tokens)
        return 1.0 if exact_s is None else exact_s / group.ttft_s(num_tokens, Configuration(1))

    def _choices(self, group: Group, table: TimeTable, num_tokens: int) -> list[Choice]:
        """Return the options of a group whose loss was measured, with the times of the step cost."""
        loss, scale = self._tuned.loss_in(group.hosts, group.mode), self._scale(group, num_tokens)
        choices = table.choices(num_tokens, group.bytes_per_s, loss)
        return [
            Choice(choice.configuration, choice.ttft_s * scale, choice.loss)
            for choice in choices
            if math.isfinite(choice.loss)
        ]

    def _choose(self, num_tokens: int, members: int, objective: Objective) -> Chosen:
        """Choose for a prompt. Its length is rounded up by `bucket`."""
        length, best = bucket(num_tokens), list[tuple[Choice, DropMode]]()
        tables = self.tables(members)
        options = [(group, table, self._choices(group, table, length)) for group, table in tables]
        for group, table, choices in options:
            if objective.target_s is None:
                choice = least_ttft(choices, objective.loss_bound)
            else:
                choice = least_loss(choices, objective.target_s / (1 + table.margin))
            if choice is not None:
                best.append((choice, group.mode))
        if best:
            by_loss = objective.target_s is not None
            choice, mode = min(best, key=lambda pair: (pair[0].loss if by_loss else 0.0, pair[0].ttft_s))
            return Chosen(choice=choice, mode=mode, is_met=True)
        quickest = [
            (choice, group.mode)
            for group, _, choices in options
            if (choice := least_ttft(choices, _ANY_LOSS)) is not None
        ]
        if objective.target_s is not None and quickest:  # the target cannot be met
            choice, mode = min(quickest, key=lambda pair: pair[0].ttft_s)
            return Chosen(choice=choice, mode=mode, is_met=False)
        group, _ = tables[0]
        exact = Configuration(1)
        return Chosen(choice=Choice(exact, self.ttft_s(group, length, exact), 0.0), mode=group.mode, is_met=True)


def bucket(num_tokens: int) -> int:
    """Round a length up to the next eighth of a doubling, and into the range of the tables."""
    steps = math.ceil(math.log2(max(1, num_tokens)) * _PER_DOUBLING - 1e-9)
    return min(max(int(math.exp2(steps / _PER_DOUBLING)), _LENGTHS[0]), _LENGTHS[-1])


def rates_of(tuned: Tuned, facts: Facts, hosts: tuple[int, ...]) -> Rates:
    """Return the speeds of a member by the facts, or else by the tuned file.

    The members split the time outside of attention evenly, so each has less of it in a larger group.
    """
    rest_s = tuned.rates.rest_s * len(tuned.hosts) / len(hosts)
    return _rates_of_facts(facts, hosts) or msgspec.structs.replace(tuned.rates, rest_s=rest_s)


def _rates_of_facts(facts: Facts, hosts: tuple[int, ...]) -> Rates | None:
    return None if facts.rates is None else facts.rates(hosts)


@lru_cache(maxsize=64)
def _enumerated(
    shape: ModelShape, hosts: tuple[int, ...], rates: Rates, kind: str, mode: DropMode
) -> tuple[Group, TimeTable]:
    """Time all configurations of a group. Partitions are not rounded to blocks."""
    group = Group(shape=shape, hosts=hosts, rates=rates, kind=kind, mode=mode, block_size=1)
    return group, TimeTable.train(group, _LENGTHS, [group.bytes_per_s], GRID)


def _check_shape(tuned: Tuned, shape: ModelShape) -> None:
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
        given, own = getattr(tuned.shape, name), getattr(shape, name)
        if given != own:
            problem = (
                f"was tuned for {tuned.tuned_for} with {name} {given}, but the model here has {own}: "
                "run longspan tune csa with this one"
            )
            raise ParameterError("csa", problem, tuned.tuned_for)
