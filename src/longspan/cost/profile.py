"""Measurements of one model on one machine (prefills and decodes of instances and groups, links), and fits to them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import mul, truediv
from typing import Annotated, ClassVar, Literal, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from longspan.core.exchange import LOCAL, Exchange, exchange_named
from longspan.core.link_classes import SAME_HOST, LinkClass
from longspan.cost.profile_key import Count, ProfileKey, Stored
from longspan.cost.shape import Hardware, ModelShape, typical_hardware

Kind = tuple[int, Exchange]
"""The number of instances that share a request, and their exchange."""
Sample = tuple[int, int, float]
"""New tokens, cached tokens and seconds of a prefill. Or requests, tokens before each and seconds of a decode."""
Array = NDArray[np.float64]
Seconds = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1)]
"""Repeated measurements of one quantity."""
MeasuredKey = tuple[int | str, ...]
"""The fields of a prefill or a decode without its times. Equal keys mean repeated measurements."""


class _Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a prefill or a decode.

    Attributes:
        members: number of instances that shared each request. With one, the exchange is `local`.
        seconds: empty for a planned measurement.
        beside: number of other instances of the same host that were busy meanwhile.
        link_class: the slowest class of link between the members. `same_host` with one member.
    """

    members: Count
    exchange: str
    seconds: Seconds
    beside: int = 0
    link_class: LinkClass = SAME_HOST

    def __post_init__(self) -> None:
        if (self.members == 1) != (exchange_named(self.exchange) == LOCAL):
            raise ValueError(f"{self.members} members do not compute with exchange {self.exchange}")
        if self.members == 1 and self.link_class != SAME_HOST:
            raise ValueError(f"one member has no link of class {self.link_class}")

    @property
    def kind(self) -> Kind:
        return self.members, exchange_named(self.exchange)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


MeasuredT = TypeVar("MeasuredT", bound=_Measured)


class Prefill(_Measured, frozen=True, kw_only=True):
    """Seconds to the first token of a prompt with `new_tokens` after `cached_tokens`."""

    new_tokens: Count
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def key(self) -> MeasuredKey:
        return self.members, self.exchange, self.link_class, self.new_tokens, self.cached_tokens


class Decode(_Measured, frozen=True, kw_only=True):
    """Seconds between tokens of several requests that decode together.

    Attributes:
        batch: number of requests.
        context_tokens: tokens of each request before the new one.
        singles: requests on one instance that decode in the same steps, one on each member.
    """

    batch: Count
    context_tokens: Count
    singles: int = 0

    @property
    def key(self) -> MeasuredKey:
        return self.members, self.exchange, self.link_class, self.batch, self.context_tokens, self.singles


TransferKind = Literal["point_to_point", "alltoall", "all_gather", "host_copy"]
"""Messages one way between two ranks, all-to-all, all-gather, and copies between a device and its host."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a call in which each sending rank sends `num_bytes`, one per repetition.

    Attributes:
        link_class: the slowest class of link between the ranks.
    """

    kind: TransferKind
    members: int
    num_bytes: Count
    seconds: Seconds
    link_class: LinkClass = SAME_HOST


class Profile(Stored, frozen=True, kw_only=True):
    """A key and all measurements under it."""

    called: ClassVar[str] = "profile"

    profile_key: ProfileKey = msgspec.field(name="subject")  # the name in existing files
    prefills: tuple[Prefill, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    decodes: tuple[Decode, ...] = ()

    def with_measured(self, measured: Prefill | Decode) -> Self:
        """Return a profile with these times. They replace times with another number of busy instances."""
        if (before := self.find(measured)) is not None and before.beside == measured.beside:
            measured = msgspec.structs.replace(measured, seconds=before.seconds + measured.seconds)
        name = "prefills" if isinstance(measured, Prefill) else "decodes"
        kept = (other for other in getattr(self, name) if other is not before)
        return msgspec.structs.replace(self, **{name: (*kept, measured)})

    def with_transfer(self, transfer: Transfer) -> Self:
        before = (msgspec.structs.replace(other, seconds=transfer.seconds) for other in self.transfers)
        kept = tuple(other for other, alike in zip(self.transfers, before, strict=True) if alike != transfer)
        return msgspec.structs.replace(self, transfers=(*kept, transfer))

    def over(self, link_class: LinkClass) -> Self:
        """Return a profile with the times of single instances, and of groups over links of this class."""
        return self._only(lambda measured: measured.members == 1 or measured.link_class == link_class)

    def of_groups(self, link_class: LinkClass) -> Self:
        """Return a profile with the times of groups over links of this class, without single instances."""
        return self._only(lambda measured: measured.members > 1 and measured.link_class == link_class)

    def of_sizes(self, classes: Mapping[int, LinkClass]) -> Self:
        """Return a profile with the times of groups over the class of link that their size has here. Keeps links."""
        return self._only(lambda measured: classes.get(measured.members) == measured.link_class)

    def _only(self, keeps: Callable[[_Measured], bool]) -> Self:
        prefills, decodes = tuple(filter(keeps, self.prefills)), tuple(filter(keeps, self.decodes))
        return msgspec.structs.replace(self, prefills=prefills, decodes=decodes)

    @property
    def link_classes(self) -> list[LinkClass]:
        """The classes of links that groups were measured over, after `same_host`."""
        return sorted({SAME_HOST, *(measured.link_class for measured in self.prefills + self.decodes)}, reverse=True)

    def slowed(self, factor: float) -> Self:
        """Return the profile of instances slowed by this factor, with the same links."""

        def scaled(one: MeasuredT) -> MeasuredT:
            return msgspec.structs.replace(one, seconds=tuple(factor * seconds for seconds in one.seconds))

        prefills, decodes = tuple(map(scaled, self.prefills)), tuple(map(scaled, self.decodes))
        return msgspec.structs.replace(self, prefills=prefills, decodes=decodes)

    def of_one_beside(self, busy: int) -> Self:
        """Return a profile without times of one instance with another number of busy instances."""

        def stays(one: _Measured) -> bool:
            return one.members > 1 or one.beside == busy

        return self._only(stays)

    def find(self, wanted: Prefill | Decode) -> Prefill | Decode | None:
        """Return the measurement with the same key in this profile, or None."""
        key = wanted.key
        return next((one for one in self.prefills + self.decodes if one.key == key), None)

    def num_times(self, wanted: Prefill | Decode) -> int:
        """Return the number of repetitions of a measurement."""
        return 0 if (measured := self.find(wanted)) is None else len(measured.seconds)

    def times(self, new_tokens: Callable[[Prefill], int] | None = None) -> dict[Kind, Times]:
        """Fit prefills of each kind with enough measurements. `new_tokens` may replace the count of new tokens."""
        assert _has_one_class(self.prefills), "a kind has times over several classes of links: use `over` or `of_sizes`"
        samples = _by_kind(
            (one.kind, (new_tokens(one) if new_tokens else one.new_tokens, one.cached_tokens, one.median_s))
            for one in self.prefills
        )
        fits = ((kind, fit_times(of_kind)) for kind, of_kind in samples.items())
        return {kind: Times(fit=fit, samples=tuple(samples[kind])) for kind, fit in fits if fit is not None}

    def fits(self) -> dict[Kind, TimeFit]:
        return {kind: times.fit for kind, times in self.times().items()}

    def decode_fits(self) -> dict[Kind, DecodeFit]:
        assert _has_one_class(self.decodes), "a kind has times over several classes of links: use `over` or `of_sizes`"
        alone = (one for one in self.decodes if not one.singles)
        samples = _by_kind((one.kind, (one.batch, one.context_tokens, one.median_s)) for one in alone)
        fits = ((kind, fit_decodes(of_kind)) for kind, of_kind in samples.items())
        return {kind: fit for kind, fit in fits if fit is not None}

    def waits_s(self) -> dict[Kind, float]:
        """Return the increase of a group's decode time when each member also decodes a request of its own.

        Members then wait for each other in each layer, and compete for shared resources. The cost of the members' own
        tokens is subtracted. Groups without such measurements are left out.
        """
        fits, waits = self.decode_fits(), defaultdict[Kind, list[float]](list)
        own_s = fits[1, LOCAL].request_s if (1, LOCAL) in fits else 0.0
        for decode in self.decodes:
            if decode.singles and decode.kind in fits:
                expected_s = fits[decode.kind].seconds(decode.batch, decode.context_tokens) + own_s
                waits[decode.kind].append(decode.median_s - expected_s)
        return {kind: max(0.0, statistics.median(more)) for kind, more in waits.items()}

    @property
    def links(self) -> list[tuple[TransferKind, int, LinkClass]]:
        """Kind, number of ranks and class of link of all measured transfers."""
        return sorted({(transfer.kind, transfer.members, transfer.link_class) for transfer in self.transfers})

    def link(self, kind: TransferKind, members: int, link_class: LinkClass = SAME_HOST) -> LinkFit | None:
        """Return the fit of transfers among `members` ranks over this class of link. None if they were not measured."""
        transfers = (t for t in self.transfers if (t.kind, t.members, t.link_class) == (kind, members, link_class))
        return fit_link([(t.num_bytes, statistics.median(t.seconds)) for t in transfers])

    def hardware(self, shape: ModelShape, link_class: LinkClass = SAME_HOST) -> Hardware | None:
        """Return the measured speeds of an instance, and of its ranks' links together. None if either is missing."""
        alone, link = self.over(link_class).fits().get((1, LOCAL)), self.link("point_to_point", 2, link_class)
        if alone is None or link is None or alone.pair_s == 0:
            return None
        flops = shape.pair_flops * shape.num_layers
        return Hardware(flops_per_s=flops / alone.pair_s, bytes_per_s=link.bytes_per_s * self.profile_key.tp)

    def speeds(self, shape: ModelShape, link_class: LinkClass = SAME_HOST) -> Hardware:
        """Return the measured speeds, or typical speeds of the device if they were not measured."""
        return self.hardware(shape, link_class) or typical_hardware(self.profile_key.device, self.profile_key.threads)


def _has_one_class(measured: Sequence[_Measured]) -> bool:
    kinds = {(each.members, each.exchange, each.link_class) for each in measured}
    return len(kinds) == len({kind[:2] for kind in kinds})


def _by_kind(samples: Iterable[tuple[Kind, Sample]]) -> dict[Kind, list[Sample]]:
    by_kind = defaultdict[Kind, list[Sample]](list)
    for kind, sample in samples:
        by_kind[kind].append(sample)
    return dict(sorted(by_kind.items()))


_PARTIAL_PARTS = (32, 4)
"""Partial prefills have one new token per 32 cached ones, and one per 4."""


def profiled_prompts(lengths: Iterable[int], max_model_len: int) -> list[tuple[int, int]]:
    """Return the (new, cached) tokens of a profile's prefills, shorter than the longest sequence.

    Each length is prefilled without a cache. As a cached prefix, it is followed by 1/32 and by 1/4 as many new tokens.
    """
    every = sorted(set(lengths))
    partial = [(max(1, cached // part), cached) for cached in every for part in _PARTIAL_PARTS]
    return [(n, p) for n, p in dict.fromkeys([*((n, 0) for n in every), *partial]) if n + p < max_model_len]


# ---------------------------------------------------------------- fits

_MIN_LENGTHS = 2
_SAME_PLACE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Errors of a fit over its samples, relative to the measurements."""

    mean_error: float
    max_error: float
    num_samples: int


FitT = TypeVar("FitT", bound=Fit)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTime:
    """T(L, P) = start_s + token_s L + cached_s P L + square_s L² for L new and P cached tokens (Tetris, Eq. 1).

    No term is negative, so predictions are monotone in both lengths, also outside the measured range.
    """

    start_s: float
    token_s: float
    cached_s: float
    square_s: float

    @property
    def pair_s(self) -> float:
        """The mean cost of a query-key pair over both quadratic terms. A prompt has L²/2 pairs."""
        return (self.cached_s + 2 * self.square_s) / 2

    def seconds(self, new_tokens: float, cached_tokens: float = 0) -> float:
        per_token = self.token_s + self.cached_s * cached_tokens + self.square_s * new_tokens
        return self.start_s + per_token * new_tokens

    def most_tokens(self, budget_s: float, cached_tokens: float = 0) -> float:
        """Return the tokens that take `budget_s`: the root of the quadratic, in a form without cancellation."""
        rest = budget_s - self.start_s
        if rest <= 0:
            return 0.0
        slope = self.token_s + self.cached_s * cached_tokens
        return 2 * rest / (slope + math.sqrt(slope * slope + 4 * self.square_s * rest))


@dataclass(frozen=True, kw_only=True)
class TimeFit(Fit, PrefillTime):
    """A fit of prefill seconds."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """A fit with a correction by its samples: near a sample it predicts the measured time.

    The correction is the weighted mean of measured over fitted seconds. Weights are inverse squares of the distance, in
    doublings of new and of cached tokens.
    """

    fit: TimeFit
    samples: tuple[Sample, ...]

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> float:
        fitted = self.fit.seconds(new_tokens, cached_tokens)
        places, measured, expected = self._known
        if not places:
            return fitted
        nearness, weight = _nearness(places, new_tokens, cached_tokens)
        corrections: float = sum(map(truediv, map(mul, nearness, measured), expected))
        return fitted * corrections / weight

    @cached_property
    def _known(self) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...], tuple[float, ...]]:
        """New and cached tokens, seconds, and fitted seconds, of samples not fitted to 0."""
        fitted = [(new, cached, seconds, self.fit.seconds(new, cached)) for new, cached, seconds in self.samples]
        known = [sample for sample in fitted if sample[-1]]
        return (
            tuple((new, cached) for new, cached, _, _ in known),
            tuple(seconds for _, _, seconds, _ in known),
            tuple(expected for _, _, _, expected in known),
        )


@lru_cache(maxsize=1024)
def _nearness(places: tuple[tuple[int, int], ...], new_tokens: int, cached_tokens: int) -> tuple[list[float], float]:
    """Return the weight of each sample for a prefill of these tokens, and the sum of the weights.

    It is cached, since fits of all groups and exchanges have samples at the same token counts.
    """
    behind, log2 = cached_tokens + 1, math.log2
    weights = [
        1 / max(_SAME_PLACE, log2(new / new_tokens) ** 2 + log2((cached + 1) / behind) ** 2) for new, cached in places
    ]
    return weights, sum(weights)


@dataclass(frozen=True, kw_only=True)
class DecodeFit(Fit):
    """T(B, C) = start_s + request_s B + context_s B C, for B requests that decode after C tokens each.

    No term is negative.
    """

    start_s: float
    request_s: float
    context_s: float

    def seconds(self, batch: int, context_tokens: float) -> float:
        return self.start_s + batch * (self.request_s + self.context_s * context_tokens)


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """T(bytes) = start_s + bytes / bytes_per_s. `max_error` is the largest relative error of the samples."""

    start_s: float
    bytes_per_s: float
    max_error: float

    def seconds(self, num_bytes: float) -> float:
        return self.start_s + num_bytes / self.bytes_per_s


_PREFILL_TERMS = {
    "start_s": lambda new, _: np.ones_like(new),
    "token_s": lambda new, _: new,
    "cached_s": lambda new, cached: new * cached,
    "square_s": lambda new, _: new * new,
}
_DECODE_TERMS = {
    "start_s": lambda batch, _: np.ones_like(batch),
    "request_s": lambda batch, _: batch,
    "context_s": lambda batch, context: batch * context,
}


def fit_times(samples: Sequence[Sample]) -> TimeFit | None:
    """Solve non-negative least squares over relative errors, so that short prompts count as much as long ones.

    Return None for samples of fewer than two lengths.
    """
    return _fit(TimeFit, samples, _PREFILL_TERMS)


def fit_decodes(samples: Sequence[Sample]) -> DecodeFit | None:
    return _fit(DecodeFit, samples, _DECODE_TERMS)


def fit_link(samples: Sequence[tuple[int, float]]) -> LinkFit | None:
    """Fit transfers, from (bytes, seconds). Return None if the time does not grow with bytes."""
    num_bytes, seconds = np.array(samples, dtype=np.float64).reshape(-1, 2).T
    if len(set(num_bytes)) < _MIN_LENGTHS:
        return None
    (start_s, byte_s), errors = _least_squares(np.column_stack([np.ones(len(samples)), num_bytes]), seconds)
    if not byte_s:
        return None
    return LinkFit(start_s=start_s, bytes_per_s=1 / byte_s, max_error=float(errors.max()))


def _fit(
    kind: type[FitT], samples: Sequence[Sample], terms: Mapping[str, Callable[[Array, Array], Array]]
) -> FitT | None:
    """Fit a coefficient for each term, which is a function of a sample's first two numbers."""
    if len({sample[:2] for sample in samples}) < _MIN_LENGTHS:
        return None
    first, second, seconds = np.array(samples, dtype=np.float64).T
    weights, errors = _least_squares(np.column_stack([term(first, second) for term in terms.values()]), seconds)
    return kind(
        **dict(zip(terms, weights, strict=True)),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        num_samples=len(samples),
    )


def _least_squares(terms: Array, seconds: Array) -> tuple[list[float], Array]:
    """Return a non-negative weight of each column of `terms` [samples, terms], and the relative error of each sample.

    With few terms, the solution is the best ordinary fit without negative weights over all subsets of terms. If samples
    do not separate terms, the smallest subset wins. Weights are rounded to nine digits: LAPACK's last digits differ
    between CPUs, and would decide ties, so that plans would differ.
    """
    num_terms = terms.shape[1]
    relative = terms / seconds[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    relative = relative / scale
    best, least = np.zeros(num_terms), np.inf
    sizes = range(1, num_terms + 1)
    for chosen in (list(c) for size in sizes for c in itertools.combinations(range(num_terms), size)):
        fitted, _, rank, _ = np.linalg.lstsq(relative[:, chosen], np.ones(len(seconds)), rcond=None)
        if rank < len(chosen) or fitted.min() < 0:
            continue
        missed = float(np.square(relative[:, chosen] @ fitted - 1).sum())
        if missed < least - 1e-12:
            best, least = np.zeros(num_terms), missed
            best[chosen] = fitted
    return [float(f"{weight:.9g}") for weight in best / scale], np.abs(relative @ best - 1)
