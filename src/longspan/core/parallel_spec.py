"""The parallel spec: number of instances, and their tensor and pipeline parallel degrees."""

from __future__ import annotations

import re
from dataclasses import dataclass

from longspan.core.options import at_least_one

_MAX_RANKS = 2**12
_SPEC = re.compile(r"(?:(?P<n>\d+)(?:x(?=[tp]))?)?(?:tp(?P<tp>\d+))?(?:pp(?P<pp>\d+))?")


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """`instances` copies of the model, each on `tp * pp` ranks."""

    instances: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        at_least_one(instances=self.instances, tp=self.tp, pp=self.pp)
        if self.num_ranks > _MAX_RANKS:
            raise ValueError(
                f"instances({self.instances}) * tp({self.tp}) * pp({self.pp}) = {self.num_ranks:,} ranks, but at most "
                f"{_MAX_RANKS:,} can be planned: use fewer"
            )

    @classmethod
    def parse(cls, spec: str) -> ParallelSpec:
        """Parse `N` or `[Nx][tpT][ppP]`: `4`, `tp2pp2`, `2xtp2`.

        Raises:
            ValueError: `spec` does not have that form.
        """
        match = _SPEC.fullmatch(spec.strip())
        if match is None or not spec.strip():
            raise ValueError(f"parallel spec {spec!r} is neither N nor [Nx][tpT][ppP], such as 4, tp2pp2 or 2xtp2")
        degrees = {name: int(match[name] or 1) for name in ("n", "tp", "pp")}
        return cls(instances=degrees["n"], tp=degrees["tp"], pp=degrees["pp"])

    @property
    def num_ranks(self) -> int:
        return self.instances * self.tp * self.pp

    def __str__(self) -> str:
        tp = f"tp{self.tp}" if self.tp > 1 else ""
        pp = f"pp{self.pp}" if self.pp > 1 else ""
        if not (tp or pp):
            return str(self.instances)
        return f"{self.instances}x{tp}{pp}" if self.instances > 1 else f"{tp}{pp}"
