"""The choice of settings of sparse attention for a prompt, by an objective (CSPS §3.2.6).

A tuned file says what a model loses; speeds are those of the machine's profile, or else of the machine that tuned. With
them configurations are enumerated for some lengths when a group is first asked for; a prompt looks up its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from longspan.core.sparse import DropMode
from longspan.cost.architecture import ModelShape
from longspan.cost.csa_models import TimeTable
from longspan.cost.csa_pipeline import Rates
from longspan.cost.csa_search import Choice, Configuration, Grid, Group
from longspan.cost.csa_tuned import NO_LOSS, Tuned
from longspan.errors import ParameterError
from longspan.policy.facts import Facts

GRID = Grid(
    drops=tuple(round(0.04 * number, 2) for number in range(13)), near_pieces=(1, 2, 4, 8), far_pieces=(1, 2, 4)
)
"""The configurations that are tried: a prompt that drops half of all tokens nearby has lost enough."""
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 65536, 262144, 1048576)
_PER_DOUBLING = 8
"""Lengths within an eighth of a doubling have one configuration, so that they find each other's KV."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective: the least time with at most so many points lost, or the least loss within a time.

    Attributes:
        target_s: time to the first token; None to limit the loss instead.
    """

    max_loss: float = 0.0
    target_s: float | None = None

    @property
    def most_lost(self) -> float:
        """The points below which predictions must stay."""
        return max(self.max_loss, NO_LOSS)


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
    """Chooses for groups of the first so many instances.

    Args:
        hosts: of all instances, in order of proximity.
        sizes: the numbers of instances that may share a prompt. Enumeration for these is done at once.

    Raises:
        ParameterError: when the file was tuned for a model of other sizes.
    """

    def __init__(self, tuned: Tuned, facts: Facts, hosts: tuple[int, ...], sizes: Iterable[int]) -> None:
        assert facts.shape is not None, "whoever chooses knows the model"
        _check_shape(tuned, facts.shape)
        self._tuned, self._facts, self._shape, self._hosts = tuned, facts, facts.shape, hosts
        self.choose = lru_cache(maxsize=4096)(self._choose)
        for members in sizes:
            self.tables(members)

    def tables(self, members: int) -> list[tuple[Group, TimeTable]]:
        """Returns groups of so many members, by mode of drops, with their times."""
        hosts = self._hosts[:members]
        rates = rates_of(self._tuned, self._facts, hosts)
        return [_enumerated(self._shape, hosts, rates, mode) for mode in self._tuned.modes()]

    def hint(self, objective: Objective) -> str:
        """Says whose speeds are gone by, and up to which length of prompts a target is expected to be met."""
        members = len(self._hosts)
        words = f"csa goes by speeds of {self._tuned.machine}, where its file was tuned: run longspan profile"
        if self._facts.profile is not None and _of_facts(self._facts, self._hosts) is not None:
            words = f"csa goes by the speeds of {self._facts.profile.profile_key.machine}"
        if objective.target_s is None or members == 1:
            return words
        met = [length for length in _LENGTHS if self.choose(length, members, objective).is_met]
        reach = f"for prompts of up to {max(met):,} tokens" if met else "for no prompt"
        return f"{words}; {objective.target_s:g} s to the first token are expected {reach}, others take the least"

    def _choose(self, num_tokens: int, members: int, objective: Objective) -> Chosen:
        """Chooses for a prompt; its length is rounded up to one that many have."""
        known = bucket(num_tokens)
        found = []
        for group, table in self.tables(members):
            loss, link = self._tuned.loss_in(group.hosts, group.mode), group.bytes_per_s
            if objective.target_s is None:
                choice = table.least_ttft(known, link, loss, objective.most_lost)
            else:
                choice = table.least_loss(known, link, loss, objective.target_s)
            if choice is not None and math.isfinite(choice.loss):
                found.append((choice, group.mode))
        if not found:
            return self._second_best(known, members, objective)
        if objective.target_s is None:
            best, mode = min(found, key=lambda one: one[0].ttft_s)
        else:
            best, mode = min(found, key=lambda one: (one[0].loss, one[0].ttft_s))
        return Chosen(choice=best, mode=mode, is_met=True)

    def _second_best(self, num_tokens: int, members: int, objective: Objective) -> Chosen:
        """Chooses what is nearest to an objective that cannot be met: exact attention, or the least time."""
        tables = self.tables(members)
        if objective.target_s is None:
            group, _ = tables[0]
            exact = Configuration(1)
            return Chosen(choice=Choice(exact, group.ttft_s(num_tokens, exact), 0.0), mode=group.mode, is_met=True)
        found = []
        for group, table in tables:
            loss = self._tuned.loss_in(group.hosts, group.mode)
            if (choice := table.least_ttft(num_tokens, group.bytes_per_s, loss, 1e9)) is not None:
                found.append((choice, group.mode))
        if not found:
            return self._second_best(num_tokens, members, Objective())
        best, mode = min(found, key=lambda one: one[0].ttft_s)
        return Chosen(choice=best, mode=mode, is_met=False)


def bucket(num_tokens: int) -> int:
    """Returns the length that stands for those up to an eighth of a doubling below it, within the table's."""
    steps = math.ceil(math.log2(max(1, num_tokens)) * _PER_DOUBLING - 1e-9)
    return min(max(int(math.exp2(steps / _PER_DOUBLING)), _LENGTHS[0]), _LENGTHS[-1])


def rates_of(tuned: Tuned, facts: Facts, hosts: tuple[int, ...]) -> Rates:
    """Return the speeds of a member: those of the facts if there are some, or else of the machine that tuned.

    What is not attention is shared by the members: by more than tuned it, each has less.
    """
    rest_s = tuned.rates.rest_s * len(tuned.hosts) / len(hosts)
    return _of_facts(facts, hosts) or msgspec.structs.replace(tuned.rates, rest_s=rest_s)


def _of_facts(facts: Facts, hosts: tuple[int, ...]) -> Rates | None:
    return None if facts.rates is None else facts.rates(hosts)


@lru_cache(maxsize=64)
def _enumerated(shape: ModelShape, hosts: tuple[int, ...], rates: Rates, mode: DropMode) -> tuple[Group, TimeTable]:
    """Times all configurations of a group; blocks do not count."""
    group = Group(shape=shape, hosts=hosts, rates=rates, mode=mode, block_size=1)
    return group, TimeTable.train(group, _LENGTHS, [group.bytes_per_s], GRID)


def _check_shape(tuned: Tuned, shape: ModelShape) -> None:
    sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        given, own = getattr(tuned.shape, name), getattr(shape, name)
        if given != own:
            problem = (
                f"was tuned for {tuned.tuned_for} with {name} {given}, but the model here has {own}: "
                "run longspan tune csa with this one"
            )
            raise ParameterError("csa", problem, tuned.tuned_for)
