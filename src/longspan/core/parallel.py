"""Parallel specs: how many instances, and how each is split inside."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPEC = re.compile(r"(?:(?P<n>\d+)(?:x(?=[tp]))?)?(?:tp(?P<tp>\d+))?(?:pp(?P<pp>\d+))?")


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """`instances` copies of the model, each on `tp * pp` ranks.

    Raises:
        ValueError: when a degree is below 1, or not supported yet.
    """

    instances: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, degree in (("instances", self.instances), ("tp", self.tp), ("pp", self.pp)):
            if degree < 1:
                raise ValueError(f"{name} must be at least 1, but {degree} given")
        if self.pp > 1:
            raise ValueError(
                f"pp({self.pp}) pipeline stages per instance, but only 1 works so far: use tp to split the weights, or "
                f"--parallel {self.instances * self.tp * self.pp} to spread prompts over that many instances"
            )

    @classmethod
    def parse(cls, spec: str) -> ParallelSpec:
        """Reads `[N][xtpT][ppP]`: `4`, `tp2pp2`, `2xtp2`.

        Raises:
            ValueError: when `spec` is not of that form.
        """
        match = _SPEC.fullmatch(spec.strip())
        if match is None or not spec.strip():
            raise ValueError(f"parallel spec {spec!r} is not of the form [N][xtpT][ppP], such as 4, tp2pp2 or 2xtp2")
        degrees = {name: int(match[name] or 1) for name in ("n", "tp", "pp")}
        return cls(instances=degrees["n"], tp=degrees["tp"], pp=degrees["pp"])

    @property
    def num_ranks(self) -> int:
        """Worker processes in all."""
        return self.instances * self.tp * self.pp

    def __str__(self) -> str:
        tp = f"tp{self.tp}" if self.tp > 1 else ""
        pp = f"pp{self.pp}" if self.pp > 1 else ""
        return f"{self.instances}{'x' if tp or pp else ''}{tp}{pp}"
