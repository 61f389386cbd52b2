"""Measurements on one machine with one model: prefills and decodes alone and in groups, links. Also as text."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, Self, TypeVar

import msgspec

from longspan.core.exchange import LOCAL, Exchange, named
from longspan.cost.architecture import Hardware, ModelShape
from longspan.cost.catalog import Stored
from longspan.cost.time_fit import DecodeFit, LinkFit, Sample, TimeFit, Times, fit_decodes, fit_link, fit_times


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names what a profile is of. Times under one key say nothing of another.

    Attributes:
        tp: ranks of an instance.
        threads: of a rank.
        kernel: of attention, `native` or `torch`.
        machine: the processor, and the accelerator if that computes.
        revision: of longspan, as far as it changes times or how they are measured; 0 is unknown.
    """

    model: str
    dtype: str
    device: str
    tp: int
    threads: int
    kernel: str
    machine: str
    revision: int = 0


class Prefill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds to the first token of a prompt, time after time.

    Attributes:
        members: how many instances shared it; with one, the exchange is `local`.
        cached_tokens: whose KV was there before.
        beside: how many other instances of the machine were busy meanwhile.
    """

    members: int
    exchange: str
    new_tokens: int
    cached_tokens: int
    seconds: tuple[float, ...]
    beside: int = 0

    def __post_init__(self) -> None:
        timed = self.seconds and min(self.seconds) > 0
        if self.members < 1 or self.new_tokens < 1 or self.cached_tokens < 0 or not timed:
            raise ValueError(f"not a measured prefill: {self}")
        if (self.members == 1) != (named(self.exchange) == LOCAL):
            raise ValueError(f"{self.members} members do not prefill with exchange {self.exchange}")

    @property
    def median_s(self) -> float:
        """The median is of all times."""
        return statistics.median(self.seconds)


class Decode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds between tokens of several requests that decode together, time after time.

    Attributes:
        members: how many instances shared each of them; with one, the exchange is `local`.
        batch: how many requests.
        context_tokens: tokens of each before the new ones.
        singles: requests of one instance that decode in the same steps, one on each member.
        beside: how many other instances of the machine were busy meanwhile.
    """

    members: int
    exchange: str
    batch: int
    context_tokens: int
    seconds: tuple[float, ...]
    singles: int = 0
    beside: int = 0

    def __post_init__(self) -> None:
        timed = self.seconds and min(self.seconds) > 0
        if self.members < 1 or self.batch < 1 or self.context_tokens < 1 or not timed:
            raise ValueError(f"not a measured decode: {self}")
        if (self.members == 1) != (named(self.exchange) == LOCAL):
            raise ValueError(f"{self.members} members do not decode with exchange {self.exchange}")

    @property
    def median_s(self) -> float:
        """The median is of all times."""
        return statistics.median(self.seconds)


_TimesT = TypeVar("_TimesT", Prefill, Decode)


def _joined(before: _TimesT | None, after: _TimesT) -> _TimesT:
    if before is None or before.beside != after.beside:
        return after
    earlier: tuple[float, ...] = before.seconds
    return msgspec.structs.replace(after, seconds=earlier + after.seconds)


TransferKind = Literal["point_to_point", "alltoall", "all_gather", "host_copy"]
"""One way between two ranks; among all ranks, each to each its own or the same; between a device and its host."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a call in which each rank that sends anything sends so many bytes, time after time."""

    kind: TransferKind
    members: int
    num_bytes: int
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or not self.seconds or min(self.seconds) <= 0:
            raise ValueError(f"not a measured transfer: {self}")


class Profile(Stored, frozen=True, kw_only=True):
    """Everything measured of a subject so far."""

    called: ClassVar[str] = "profile"

    profile_key: ProfileKey = msgspec.field(name="subject")  # the name in files that people have
    prefills: tuple[Prefill, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    decodes: tuple[Decode, ...] = ()

    def with_prefill(self, prefill: Prefill) -> Self:
        """Returns a profile that also has these times of such a prefill; in place of those beside more or fewer
        instances.
        """
        before = self.find(prefill.members, prefill.exchange, prefill.new_tokens, prefill.cached_tokens)
        kept = tuple(one for one in self.prefills if one is not before)
        return msgspec.structs.replace(self, prefills=(*kept, _joined(before, prefill)))

    def of_one_beside(self, busy: int) -> Self:
        """Returns a profile without what one instance was timed at beside more or fewer busy ones."""

        def stays(one: Prefill | Decode) -> bool:
            return one.members > 1 or one.beside == busy

        return msgspec.structs.replace(
            self, prefills=tuple(filter(stays, self.prefills)), decodes=tuple(filter(stays, self.decodes))
        )

    def with_transfer(self, transfer: Transfer) -> Self:
        """Returns a profile with these times of such a transfer, in place of those that it has."""
        key = transfer.kind, transfer.members, transfer.num_bytes
        kept = tuple(one for one in self.transfers if (one.kind, one.members, one.num_bytes) != key)
        return msgspec.structs.replace(self, transfers=(*kept, transfer))

    def find(self, members: int, exchange: Exchange | str, new_tokens: int, cached_tokens: int) -> Prefill | None:
        """Finds the measurement of such a prefill."""
        wanted = (members, str(exchange), new_tokens, cached_tokens)
        found = (p for p in self.prefills if (p.members, p.exchange, p.new_tokens, p.cached_tokens) == wanted)
        return next(found, None)

    def with_decode(self, decode: Decode) -> Self:
        """Returns a profile that also has these times of such a decode; in place of those beside more or fewer
        instances.
        """
        before = self.find_decode(
            decode.members, named(decode.exchange), decode.batch, decode.context_tokens, decode.singles
        )
        kept = tuple(one for one in self.decodes if one is not before)
        return msgspec.structs.replace(self, decodes=(*kept, _joined(before, decode)))

    def find_decode(
        self, members: int, exchange: Exchange | str, batch: int, context_tokens: int, singles: int = 0
    ) -> Decode | None:
        """Finds the measurement of such a decode."""
        wanted = (members, str(exchange), batch, context_tokens, singles)
        found = (d for d in self.decodes if (d.members, d.exchange, d.batch, d.context_tokens, d.singles) == wanted)
        return next(found, None)

    def joined(self, other: Profile) -> Self:
        """Returns a profile with the times of both; with those of the other alone of transfers, and where other numbers
        of instances were busy.
        """
        found = self
        for prefill in other.prefills:
            found = found.with_prefill(prefill)
        for decode in other.decodes:
            found = found.with_decode(decode)
        for transfer in other.transfers:
            found = found.with_transfer(transfer)
        return found

    def decode_fits(self) -> dict[tuple[int, Exchange], DecodeFit]:
        """Fits times by members and exchange, as far as there are measurements enough."""
        samples: dict[tuple[int, Exchange], list[Sample]] = defaultdict(list)
        for decode in self.decodes:
            if not decode.singles:
                samples[decode.members, named(decode.exchange)].append(
                    (decode.batch, decode.context_tokens, decode.median_s)
                )
        fits = ((kind, fit_decodes(of_kind)) for kind, of_kind in sorted(samples.items()))
        return {kind: fit for kind, fit in fits if fit is not None}

    def waits_s(self) -> dict[tuple[int, Exchange], float]:
        """Finds, by members and exchange, how much longer decodes of a group take when each member computes one of its
        own.

        They wait for each other in each layer then, and compete for what they share. What the members' own tokens cost
        by themselves does not count. Groups of which that was not measured are left out.
        """
        fits, found = self.decode_fits(), defaultdict[tuple[int, Exchange], list[float]](list)
        own_s = fits[1, LOCAL].request_s if (1, LOCAL) in fits else 0.0
        for decode in self.decodes:
            kind = decode.members, named(decode.exchange)
            if decode.singles and kind in fits:
                expected_s = fits[kind].seconds(decode.batch, decode.context_tokens) + own_s
                found[kind].append(decode.median_s - expected_s)
        return {kind: max(0.0, statistics.median(more)) for kind, more in found.items()}

    @property
    def links(self) -> list[tuple[TransferKind, int]]:
        """Transfers of these kinds, among so many ranks, have times."""
        return sorted({(transfer.kind, transfer.members) for transfer in self.transfers})

    def fits(self) -> dict[tuple[int, Exchange], TimeFit]:
        """Fits times by members and exchange, as far as there are measurements enough."""
        return {kind: times.fit for kind, times in self.times().items()}

    def times(self, new_tokens: Callable[[Prefill], int] | None = None) -> dict[tuple[int, Exchange], Times]:
        """The same, to predict from; by new tokens, or whatever else is told to count as that."""
        samples: dict[tuple[int, Exchange], list[Sample]] = defaultdict(list)
        for prefill in self.prefills:
            kind = prefill.members, named(prefill.exchange)
            new = new_tokens(prefill) if new_tokens else prefill.new_tokens
            samples[kind].append((new, prefill.cached_tokens, prefill.median_s))
        fits = ((kind, fit_times(of_kind)) for kind, of_kind in sorted(samples.items()))
        return {kind: Times(fit=fit, samples=tuple(samples[kind])) for kind, fit in fits if fit is not None}

    def hardware(self, shape: ModelShape) -> Hardware | None:
        """Returns the speeds that one instance showed, and the links of all its ranks together; None where one was not
        measured.
        """
        alone, link = self.fits().get((1, LOCAL)), self.link("point_to_point", 2)
        if alone is None or link is None or alone.pair_s == 0:
            return None
        flops = 4 * shape.num_heads * shape.head_dim * shape.num_layers
        return Hardware(flops_per_s=flops / alone.pair_s, bytes_per_s=link.bytes_per_s * self.profile_key.tp)

    def link(self, kind: TransferKind, members: int) -> LinkFit | None:
        """Returns how fast such transfers are among so many ranks; None when that was not measured."""
        found = (t for t in self.transfers if (t.kind, t.members) == (kind, members))
        return fit_link([(t.num_bytes, statistics.median(t.seconds)) for t in found])


_PARTIAL_PARTS = (32, 4)
"""Of so many cached tokens, one part in so many is new."""


def profiled_prompts(lengths: Iterable[int], max_model_len: int) -> list[tuple[int, int]]:
    """Returns new and cached tokens of the prefills that a profile has.

    These are every length, and as many cached tokens with a part of them behind.
    """
    every = sorted(set(lengths))
    partial = [(max(1, cached // part), cached) for cached in every for part in _PARTIAL_PARTS]
    return [(n, p) for n, p in dict.fromkeys([*((n, 0) for n in every), *partial]) if n + p < max_model_len]
