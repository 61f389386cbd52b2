"""What was measured on one machine with one model: prefills alone and in groups, and links. Text in, text out."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Self

import msgspec

from longspan.core.steps import Exchange
from longspan.cost.ring_fit import RingFit, RingSample, fit_appendix_d
from longspan.cost.time_fit import TimeFit, fit_times


class Subject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a profile is of. Times of one subject say nothing of another.

    Attributes:
        tp: ranks of an instance.
        threads: of a rank.
        kernel: of attention, `native` or `torch`.
        machine: the processor, and the accelerator if that computes.
    """

    model: str
    dtype: str
    device: str
    tp: int
    threads: int
    kernel: str
    machine: str


class Prefill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds to the first token of a prompt, time after time.

    Attributes:
        members: how many instances shared it; with one, the exchange is `local`.
        cached_tokens: whose KV was there before.
    """

    members: int
    exchange: Exchange
    new_tokens: int
    cached_tokens: int
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        timed = self.seconds and min(self.seconds) > 0
        if self.members < 1 or self.new_tokens < 1 or self.cached_tokens < 0 or not timed:
            raise ValueError(f"not a measured prefill: {self}")
        if (self.members == 1) != (self.exchange == "local"):
            raise ValueError(f"{self.members} members do not prefill with exchange {self.exchange}")

    @property
    def median_s(self) -> float:
        """Of all times."""
        return statistics.median(self.seconds)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything measured of a subject so far."""

    subject: Subject
    prefills: tuple[Prefill, ...] = ()

    def with_prefill(self, prefill: Prefill) -> Self:
        """A profile that also has these times, beside those that it has of such a prefill."""
        before = self.find(prefill.members, prefill.exchange, prefill.new_tokens, prefill.cached_tokens)
        kept = tuple(one for one in self.prefills if one is not before)
        seconds = (*(before.seconds if before else ()), *prefill.seconds)
        joined = msgspec.structs.replace(prefill, seconds=seconds)
        return msgspec.structs.replace(self, prefills=(*kept, joined))

    def find(self, members: int, exchange: Exchange, new_tokens: int, cached_tokens: int) -> Prefill | None:
        """What was measured of such a prefill, if it was."""
        wanted = (members, exchange, new_tokens, cached_tokens)
        found = (p for p in self.prefills if (p.members, p.exchange, p.new_tokens, p.cached_tokens) == wanted)
        return next(found, None)

    @property
    def num_times(self) -> int:
        """How many prompts have been timed."""
        return sum(len(prefill.seconds) for prefill in self.prefills)

    def fits(self) -> dict[tuple[int, Exchange], TimeFit]:
        """By members and exchange, as far as there are measurements enough."""
        samples = defaultdict(list)
        for prefill in self.prefills:
            kind = prefill.members, prefill.exchange
            samples[kind].append((prefill.new_tokens, prefill.cached_tokens, prefill.median_s))
        fits = ((kind, fit_times(of_kind)) for kind, of_kind in sorted(samples.items()))
        return {kind: fit for kind, fit in fits if fit is not None}

    def ring_rule(self, members: int) -> RingFit | None:
        """Appendix D's rule from prefills that so many members did with both rings; None when there is none."""
        times = {(p.exchange, p.new_tokens, p.cached_tokens): p.median_s for p in self.prefills if p.members == members}
        samples = [
            RingSample(new_tokens=new, cached_tokens=cached, ring_kv_s=seconds, ring_q_s=times["ring_q", new, cached])
            for (exchange, new, cached), seconds in times.items()
            if exchange == "ring_kv" and ("ring_q", new, cached) in times
        ]
        return fit_appendix_d(samples) if samples else None

    def to_json(self) -> str:
        """As text for a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote.

        Raises:
            ValueError: for text that is no such profile, with what is wrong with it and where.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a profile: {error}") from error


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill to measure, once."""

    members: int
    exchange: Exchange
    new_tokens: int
    cached_tokens: int


SHARED: tuple[Exchange, ...] = ("ring_kv", "ring_q", "alltoall", "gather_kv", "chain")
"""The exchanges of groups that are measured."""

_PARTIAL_PARTS = (32, 4)
"""Of so many cached tokens, one part in so many is new."""


def default_lengths(max_model_len: int) -> tuple[int, ...]:
    """512, 1024, 2048 and so on up to the longest prompt, which leaves room for one token; fewer for small models."""
    doubled = (512 * 2**power for power in range(max_model_len.bit_length()))
    shorter = [length for length in doubled if length < max_model_len - 1]
    return tuple(sorted({*(shorter or [max(1, max_model_len // 2 - 1)]), max_model_len - 1}))


def prompts_of(lengths: Iterable[int], max_model_len: int) -> list[tuple[int, int]]:
    """New and cached tokens of the prefills to measure: every length, and as much cached with a part of it behind."""
    every = sorted(set(lengths))
    partial = ((max(1, cached // part), cached) for cached in every for part in _PARTIAL_PARTS)
    return [(n, p) for n, p in dict.fromkeys(chain(((n, 0) for n in every), partial)) if n + p < max_model_len]


def missing(profile: Profile, members: int, prompts: Iterable[tuple[int, int]], repeats: int) -> list[Task]:
    """What is left to measure for groups of so many, in an order in which exchanges take turns: machines drift."""
    exchanges: tuple[Exchange, ...] = SHARED if members > 1 else ("local",)
    tasks = []
    for new, cached in prompts:
        done = {exchange: profile.find(members, exchange, new, cached) for exchange in exchanges}
        counts = {exchange: len(found.seconds) if found else 0 for exchange, found in done.items()}
        tasks += [
            Task(members=members, exchange=exchange, new_tokens=new, cached_tokens=cached)
            for repeat in range(repeats)
            for exchange in exchanges
            if counts[exchange] <= repeat
        ]
    return tasks
