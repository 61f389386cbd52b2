"""Splits of a model: parallel degrees, heads over tensor-parallel members, layers over pipeline stages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from longspan.core.options import at_least_one
from longspan.errors import ParameterError

_MAX_RANKS = 2**12
_MAX_DIGITS = 100
"""Digits of a degree that are read. Any number with more digits is too large, too."""
_SPEC = re.compile(r"(?:(?P<n>\d+)(?:x(?=[tp]))?)?(?:tp(?P<tp>\d+))?(?:pp(?P<pp>\d+))?")
_HEAD_SHARE = 1 / 16
"""Share of the tokens that also need the output head: output tokens, and one token of each prompt."""


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """`instances` copies of the model, each on `tp * pp` ranks."""

    instances: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        at_least_one(instances=self.instances, tp=self.tp, pp=self.pp)
        if self.num_ranks > _MAX_RANKS:
            largest = max(("instances", "tp", "pp"), key=lambda name: int(getattr(self, name)))
            problem = (
                f"{getattr(self, largest)} makes {self.instances} * {self.tp} * {self.pp} = {self.num_ranks:,} ranks, "
                f"but at most {_MAX_RANKS:,} can be planned: use fewer"
            )
            raise ParameterError(largest, problem, getattr(self, largest))

    @classmethod
    def parse(cls, spec: str, parameter: str = "parallel") -> ParallelSpec:
        """Parse `N` or `[Nx][tpT][ppP]`: `4`, `tp2pp2`, `2xtp2`.

        Raises:
            ParameterError: `spec`, the value of `parameter`, does not have that form, or a degree is 0 or too large.
        """
        match = _SPEC.fullmatch(spec.strip())
        if match is None or not spec.strip():
            problem = f"{spec!r:.60} is neither N nor [Nx][tpT][ppP], such as 4, tp2pp2 or 2xtp2"
            if spec.strip() == "auto":
                problem = "auto is for longspan batch: give N or [Nx][tpT][ppP], such as 4, tp2pp2 or 2xtp2"
            raise ParameterError(parameter, problem, spec)
        degrees = {name: int((match[name] or "1")[:_MAX_DIGITS]) for name in ("n", "tp", "pp")}
        try:
            return cls(instances=degrees["n"], tp=degrees["tp"], pp=degrees["pp"])
        except ParameterError as error:
            raise ParameterError(parameter, f"{spec!r:.60}: {error}", spec) from error

    @property
    def num_ranks(self) -> int:
        return self.instances * self.tp * self.pp

    def __str__(self) -> str:
        tp = f"tp{self.tp}" if self.tp > 1 else ""
        pp = f"pp{self.pp}" if self.pp > 1 else ""
        if not (tp or pp):
            return str(self.instances)
        return f"{self.instances}x{tp}{pp}" if self.instances > 1 else f"{tp}{pp}"


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one member, and the KV heads that they read. Both are empty, or neither."""

    heads: range
    kv_heads: range


def split_heads(num_heads: int, num_kv_heads: int, num_members: int) -> tuple[HeadShare, ...]:
    """Split query heads over members, in order. Each query head goes to one member.

    KV heads are split as evenly as possible, each with all query heads that read it. If members outnumber KV heads,
    members are split over KV heads instead. The members of a KV head split its query heads as evenly as possible, and
    each reads a copy of the KV head. With more members than query heads, some members have no head.
    """
    readers = _readers(num_heads, num_kv_heads, num_members)
    if num_members <= num_kv_heads:
        return tuple(
            HeadShare(range(first * readers, last * readers), range(first, last))
            for first, last in cut_evenly(num_kv_heads, num_members)
        )
    return tuple(
        HeadShare(range(head * readers + first, head * readers + last), range(head, head + (last > first)))
        for head, (first_member, last_member) in enumerate(cut_evenly(num_members, num_kv_heads))
        for first, last in cut_evenly(readers, last_member - first_member)
    )


@lru_cache(maxsize=1024)
def spread_heads(num_heads: int, num_kv_heads: int, num_members: int) -> tuple[HeadShare, ...]:
    """Split query heads over members as evenly as possible, in order. KV heads go to all members that read them."""
    readers = _readers(num_heads, num_kv_heads, num_members)
    return tuple(
        HeadShare(
            range(first, last), range(first // readers, -(-last // readers) if last > first else first // readers)
        )
        for first, last in cut_evenly(num_heads, num_members)
    )


def uniform_pieces(share: HeadShare, readers: int) -> list[HeadShare]:
    """Cut a share into pieces in which all KV heads have the same number of query heads, out of `readers` each."""
    first, last = share.heads.start, share.heads.stop
    borders = (-(-first // readers) * readers, last // readers * readers)
    cuts = sorted({first, last, *(border for border in borders if first < border < last)})
    return [
        HeadShare(range(start, stop), range(start // readers, -(-stop // readers))) for start, stop in pairwise(cuts)
    ]


def _readers(num_heads: int, num_kv_heads: int, num_members: int) -> int:
    """Return the number of query heads per KV head. Raise ValueError if it is not a whole number."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads or num_members < 1:
        raise ValueError(
            f"{num_heads} query heads on {num_kv_heads} KV heads cannot be split over {num_members} members"
        )
    return num_heads // num_kv_heads


def split_layers(num_layers: int, num_stages: int, head_layers: float) -> tuple[range, ...]:
    """Split layers over pipeline stages to minimise the time of the slowest stage. Each stage has at least one layer.

    The last stage also computes the output head, which has as many weights as `head_layers` layers. The cost of the
    embedding is neglected. Ties go to the split with the most layers in the last stage.
    """
    if num_stages == 1:
        return (range(num_layers),)

    def slowest(last: int) -> float:
        return max(-(-(num_layers - last) // (num_stages - 1)), last + _HEAD_SHARE * head_layers)

    last = min(range(num_layers - num_stages + 1, 0, -1), key=slowest)
    cuts = [*cut_evenly(num_layers - last, num_stages - 1), (num_layers - last, num_layers)]
    return tuple(range(first, stop) for first, stop in cuts)


def cut_evenly(total: int, num_pieces: int) -> list[tuple[int, int]]:
    return list(pairwise(-(-total * index // num_pieces) for index in range(num_pieces + 1)))
