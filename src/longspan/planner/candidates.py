"""Candidates of a plan: devices, the layout of the model on them, and the options of scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longspan.core.splits import ParallelSpec

_STATIC = "chunked"
"""The policy of static layouts: each request runs on one instance."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to serve a model.

    Attributes:
        hardware: a device of the catalog, or the name of a measured machine.
        spec: the instances, or the instances that only prefill if there is `decode`.
        decode: the instances that only decode. With policy `seesaw` they use the same devices in another phase.
        policy_options: sorted options of the policy, as texts.
        max_num_batched_tokens: the step budget. None is the default.
    """

    hardware: str
    spec: ParallelSpec
    decode: ParallelSpec | None = None
    policy: str = _STATIC
    policy_options: tuple[tuple[str, str], ...] = ()
    max_num_batched_tokens: int | None = None
    host_kv_gib: float = 0.0

    @property
    def num_gpus(self) -> int:
        if self.decode is None:
            return self.spec.num_ranks
        ranks = (self.spec.num_ranks, self.decode.num_ranks)
        return max(ranks) if self.policy == "seesaw" else sum(ranks)

    @property
    def is_static(self) -> bool:
        """Whether it is a layout without roles with policy `chunked`."""
        return self.policy == _STATIC and self.decode is None

    @property
    def layout(self) -> str:
        """The instances, as `4xtp2` or `2xtp4 prefill + 1xtp8 decode`."""
        return str(self.spec) if self.decode is None else f"{self.spec} prefill + {self.decode} decode"

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of the verbs `serve` and `simulate` for this layout and policy."""
        roles = ("--prefill-parallel", str(self.spec), "--decode-parallel", str(self.decode))
        flags = [*(("--parallel", str(self.spec)) if self.decode is None else roles), "--policy", self.policy]
        for key, value in self.policy_options:
            flags += ["--policy-option", f"{key}={value}"]
        if self.max_num_batched_tokens is not None:
            flags += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        if self.host_kv_gib:
            flags += ["--host-kv-gib", f"{self.host_kv_gib:g}"]
        return tuple(flags)

    def as_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "num_gpus": self.num_gpus,
            "layout": self.layout,
            "policy": self.policy,
            "policy_options": dict(self.policy_options),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "host_kv_gib": self.host_kv_gib,
        }

    def __str__(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.policy_options)
        budget = "" if self.max_num_batched_tokens is None else f", steps of {self.max_num_batched_tokens:,}"
        tier = f", {self.host_kv_gib:g} GiB on hosts" if self.host_kv_gib else ""
        return f"{self.layout} {self.policy}{options}{budget}{tier} on {self.hardware}"
