"""The choice of settings of sparse attention for a prompt, by an objective (CSPS §3.2.6).

A tuned file has the loss of a model. Speeds come from the facts, or else from the machine that wrote the file. All
configurations of a group are enumerated for some lengths when the chooser first needs them. A prompt looks up its own.
Predicted seconds come from the step cost: the share of `csa_price`, times the seconds of the exact exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

import msgspec

from longspan.core.exchange import exchange_of
from longspan.core.locations import hosts_of
from longspan.cost.csa_pipeline import Rates
from longspan.cost.shape import ModelShape
from longspan.errors import ParameterError
from longspan.policy.csps.models import TimeTable
from longspan.policy.csps.objective import Objective
from longspan.policy.csps.search import Choice, Configuration, Grid, Group, least_loss, least_ttft
from longspan.policy.csps.tuned import Tuned
from longspan.policy.facts import Facts

GRID = Grid(
    drops=(0.0, 0.02, 0.04, 0.06, 0.08, 0.1, *(round(0.04 * number, 2) for number in range(3, 13))),
    near_pieces=(1, 2, 4, 8),
    far_pieces=(1, 2, 4),
)
"""The configurations that are tried. No prompt drops more than 48 % of the tokens of level 2."""
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 65536, 262144, 1048576)
"""Lengths in tokens for which configurations are enumerated. Other lengths are interpolated."""
_PER_DOUBLING = 8
"""Lengths within an eighth of a doubling have one configuration, so that their prompts can share cached KV."""


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
        self._sparse_factor = cache(lambda hosts: facts.sparse_factor(hosts, kind))
        for members in sizes:
            self.tables(members)

    def tables(self, members: int) -> list[TimeTable]:
        """Return the times of the group of this size, one table for each mode of drops."""
        hosts = self._hosts[:members]
        rates = rates_of(self._tuned, self._facts, hosts)
        group = Group(
            shape=self._shape,
            hosts=hosts,
            rates=rates,
            kind=self._exchange.kind,
            block_size=1,  # partitions are not rounded to blocks
            deviations=self._tuned.deviations,
        )
        return [_enumerated(replace(group, mode=mode)) for mode in self._tuned.modes()]

    def drop(self, choice: Choice, members: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Return the ratios of a choice by layer, KV head and level, as of `SparseSetting`."""
        return self.tables(members)[0].group.table(choice.configuration)

    def ttft_s(self, group: Group, num_tokens: int, configuration: Configuration) -> float:
        """Predict the seconds of a whole prompt on a group of `tables`. The step cost takes as long."""
        scale = self._scale(group, num_tokens)
        return group.ttft_s(num_tokens, configuration) * scale * self._factor(group.hosts, configuration.levels)

    def hint(self, objective: Objective) -> str:
        """Name the machine whose speeds are used, and the longest prompt that is expected to meet a target."""
        members = len(self._instances)
        words = f"csa goes by speeds of {self._tuned.machine}, where its file was tuned: run longspan profile"
        if self._facts.profile is not None and self._facts.rates_of(self._hosts) is not None:
            words = f"csa goes by the speeds of {self._facts.profile.profile_key.machine}"
        if objective.target_s is None or members == 1:
            return words
        met = [length for length in _LENGTHS if self.choose(length, members, objective).is_met]
        reach = f"for prompts of up to {max(met):,} tokens" if met else "for no prompt"
        return f"{words}; {objective.target_s:g} s to the first token are expected {reach}, others take the least"

    def _find_scale(self, group: Group, num_tokens: int) -> float:
        """Return the seconds of exact attention by the step cost, relative to `group.ttft_s`. 1 without a step cost."""
        exact_s = self._facts.prompt_s(self._exchange, self._instances[: len(group.hosts)], num_tokens)
        return 1.0 if exact_s is None else exact_s / group.ttft_s(num_tokens, Configuration(1))

    def _factor(self, hosts: tuple[int, ...], levels: int) -> float:
        """Return the seconds of sparse prompts relative to predicted seconds, if the profile has measured some."""
        return 1.0 if levels == 1 else self._sparse_factor(hosts)

    def _choices(self, table: TimeTable, num_tokens: int) -> list[Choice]:
        """Return a group's options of known loss, with times scaled to the step cost."""
        group = table.group
        loss, scale = self._tuned.loss_in(group.hosts, group.mode), self._scale(group, num_tokens)
        choices = (choice for choice in table.choices(num_tokens, loss) if math.isfinite(choice.loss))
        return [
            msgspec.structs.replace(
                choice, ttft_s=choice.ttft_s * scale * self._factor(group.hosts, choice.configuration.levels)
            )
            for choice in choices
        ]

    def _choose(self, num_tokens: int, members: int, objective: Objective) -> Choice:
        """Choose for a prompt. Its length is rounded up by `bucket`."""
        length, target_s, tables = bucket(num_tokens), objective.target_s, self.tables(members)
        options = [(choice, table.margin) for table in tables for choice in self._choices(table, length)]
        choices = [choice for choice, _ in options]
        if target_s is None:
            best = least_ttft(choices, objective.loss_bound)
        else:
            in_time = (choice for choice, margin in options if choice.ttft_s <= target_s / (1 + margin))
            best = least_loss(in_time, target_s)
        if best is not None:
            return best
        if target_s is not None and (quickest := least_ttft(choices, math.inf)) is not None:
            return msgspec.structs.replace(quickest, is_met=False)
        group, exact = tables[0].group, Configuration(1)
        return Choice(exact, group.mode, self.ttft_s(group, length, exact), 0.0)


def bucket(num_tokens: int) -> int:
    """Round a length up to the next eighth of a doubling, and into the range of the tables."""
    steps = math.ceil(math.log2(max(1, num_tokens)) * _PER_DOUBLING - 1e-9)
    return min(max(int(math.exp2(steps / _PER_DOUBLING)), _LENGTHS[0]), _LENGTHS[-1])


def rates_of(tuned: Tuned, facts: Facts, hosts: tuple[int, ...]) -> Rates:
    """Return the speeds of a member by the facts, or else by the tuned file.

    The members split the time outside of attention evenly, so each has less of it in a larger group.
    """
    rest_s = tuned.rates.rest_s * len(tuned.hosts) / len(hosts)
    return facts.rates_of(hosts) or msgspec.structs.replace(tuned.rates, rest_s=rest_s)


@lru_cache(maxsize=64)
def _enumerated(group: Group) -> TimeTable:
    """Time all configurations of a group."""
    return TimeTable.train(group, _LENGTHS, GRID)


def _check_shape(tuned: Tuned, shape: ModelShape) -> None:
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
        given, own = getattr(tuned.shape, name), getattr(shape, name)
        if given != own:
            problem = (
                f"was tuned for {tuned.tuned_for} with {name} {given}, but the model here has {own}: "
                "run longspan tune csa with this one"
            )
            raise ParameterError("csa", problem, tuned.tuned_for)
