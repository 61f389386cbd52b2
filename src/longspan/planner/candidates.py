"""Candidates of a plan: devices, the layout of the model on them, and the options of scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

from longspan.core.fleets import parse_fleet
from longspan.core.splits import ParallelSpec
from longspan.errors import ParameterError

STATIC = "chunked"
"""The policy of static layouts: each request runs on one instance."""
POLICIES = (STATIC, "auto", "tetris", "context", "csps")
"""The searched policies, with requests that arrive over time.

`auto` and `chunked` are for any traffic. `tetris` chooses a group for each long prompt, `context` shares it over all
instances, and `csps` also chooses between exchanges of heads. The other policies are baselines of papers, except
`runahead`, whose chains `auto` forms too.
"""
OFFLINE_POLICIES = (STATIC, "auto", "seesaw")
"""The searched policies if all requests arrive at the start.

Shared prompts then cost throughput, and `seesaw` re-shards seldom.
"""
STEP_BUDGETS = (2048, 4096, 8192, 16384)
"""Searched values of `max_num_batched_tokens`. Larger steps are quicker for prompts, smaller ones for decodes."""
_KNOWS_ROLES = ("tetris", "seesaw")
_MAX_PP = 4
"""Stages of an instance. More stages make a prompt wait longer than it gains."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to serve a model.

    Attributes:
        hardware: a device of the catalog, or the name of a measured machine.
        spec: the instances, or the instances that only prefill if there is `decode`.
        decode: the instances that only decode. With policy `seesaw` they use the same devices in another phase.
        policy_options: sorted options of the policy, as texts.
        max_num_batched_tokens: the step budget. None is the default.
        scheduling: further options of `SchedulingArgs` that a recorded engine had, by name.
    """

    hardware: str
    spec: ParallelSpec
    decode: ParallelSpec | None = None
    policy: str = STATIC
    policy_options: tuple[tuple[str, str], ...] = ()
    max_num_batched_tokens: int | None = None
    host_kv_gib: float = 0.0
    scheduling: tuple[tuple[str, int | float | bool | str], ...] = ()

    @property
    def num_gpus(self) -> int:
        if self.decode is None:
            return self.spec.num_ranks
        ranks = (self.spec.num_ranks, self.decode.num_ranks)
        return max(ranks) if self.policy == "seesaw" else sum(ranks)

    @property
    def is_static(self) -> bool:
        """Whether it is a layout without roles with policy `chunked`."""
        return self.policy == STATIC and self.decode is None

    @property
    def family(self) -> Candidate:
        """The same layout and policy without step budget and host tier."""
        return replace(self, max_num_batched_tokens=None, host_kv_gib=0.0)

    @property
    def layout(self) -> str:
        """The instances, as `4xtp2` or `2xtp4 prefill + tp8 decode`."""
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
        for name, option in self.scheduling:
            flag = name.replace("_", "-")
            flags += [f"--{'' if option else 'no-'}{flag}"] if isinstance(option, bool) else [f"--{flag}", str(option)]
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
            "scheduling": dict(self.scheduling),
        }

    def __str__(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.policy_options)
        budget = "" if self.max_num_batched_tokens is None else f", steps of {self.max_num_batched_tokens:,}"
        tier = f", {self.host_kv_gib:g} GiB on hosts" if self.host_kv_gib else ""
        others = "".join(f", {name}={value}" for name, value in self.scheduling)
        return f"{self.layout} {self.policy}{options}{budget}{tier}{others} on {self.hardware}"


@dataclass(frozen=True, kw_only=True)
class Space:
    """The combinations that a plan searches.

    Attributes:
        max_gpus: the number of devices. With `fewer`, candidates may use a part of them.
        max_tp: a tensor-parallel instance stays on one host.
        tensor_parallel: the degrees to search. None is all powers of two up to `max_tp`.
        layouts: only these layouts, such as `4xtp2` or `2xtp4 prefill + tp8 decode`. Empty is all.
        host_kv_gib: sizes of the host tier. Workloads without common prefixes have no use for one.
    """

    hardware: tuple[str, ...]
    max_gpus: int
    fewer: bool = True
    max_tp: int = 8
    tensor_parallel: tuple[int, ...] | None = None
    num_layers: int
    layouts: tuple[str, ...] = ()
    policies: tuple[str, ...] = POLICIES
    step_budgets: tuple[int | None, ...] = STEP_BUDGETS
    host_kv_gib: tuple[float, ...] = (0.0,)

    @property
    def specs(self) -> list[ParallelSpec]:
        """The searched parallel specs, in order of ascending devices."""
        powers = tuple(2**power for power in range(self.max_tp.bit_length()) if 2**power <= self.max_tp)
        specs = [
            ParallelSpec(instances=instances, tp=tp, pp=pp)
            for tp, pp in product(self.tensor_parallel or powers, (1, 2, _MAX_PP))
            if pp <= self.num_layers
            for instances in range(1, self.max_gpus // (tp * pp) + 1)
        ]
        return sorted(specs, key=lambda spec: (spec.num_ranks, -spec.instances, spec.pp))


def candidates(space: Space) -> Iterator[Candidate]:
    """Yield all candidates of a space. Raise ParameterError for given layouts with more devices than there are."""
    for hardware, (spec, decode, policy) in product(space.hardware, list(_layouts(space))):
        for budget, gib in product(space.step_budgets, space.host_kv_gib):
            if policy == "seesaw" and not gib:
                continue  # it keeps KV on hosts while clusters change
            layout = Candidate(hardware=hardware, spec=spec, decode=decode, policy=policy)
            if layout.num_gpus > space.max_gpus:
                problem = f"has {layout.layout} with {layout.num_gpus} devices, more than `gpus` ({space.max_gpus})"
                raise ParameterError("layouts", f"{problem}: give more devices or another layout", layout.layout)
            yield replace(layout, max_num_batched_tokens=budget, host_kv_gib=gib)


def _layouts(space: Space) -> Iterator[tuple[ParallelSpec, ParallelSpec | None, str]]:
    """Yield prefill specs, decode specs and policies."""
    if space.layouts:
        clusters = list(map(parse_fleet, space.layouts))
        for cluster, policy in product(clusters, space.policies):
            if policy in _KNOWS_ROLES if cluster.decode_spec else policy != "seesaw":
                yield cluster.spec, cluster.decode_spec, policy
        return
    specs = space.specs
    smallest = 1 if space.fewer else space.max_gpus
    for spec, policy in product(specs, space.policies):
        shares = policy not in {STATIC, "seesaw"}
        if spec.num_ranks >= smallest and policy != "seesaw" and (spec.instances > 1 or not shares):
            yield spec, None, policy
    yield from _with_roles(space, specs, smallest)


def _with_roles(
    space: Space, specs: Sequence[ParallelSpec], smallest: int
) -> Iterator[tuple[ParallelSpec, ParallelSpec, str]]:
    """Yield prefill with decode instances, on their own devices for `tetris`, and on the same for `seesaw`."""
    if "tetris" in space.policies:
        simple = [spec for spec in specs if spec.pp == 1]
        for prefill, decode in product(simple, simple):
            if smallest <= prefill.num_ranks + decode.num_ranks <= space.max_gpus:
                yield prefill, decode, "tetris"
    if "seesaw" in space.policies:
        for prefill, decode in permutations(specs, 2):
            if prefill.num_ranks == decode.num_ranks >= smallest:
                yield prefill, decode, "seesaw"


def offline_candidates(
    specs: Sequence[ParallelSpec], *, hardware: str, policy: str, with_pairs: bool
) -> list[Candidate]:
    """Return candidates for one batch of requests: specs for `chunked`, pairs for `seesaw`, both for `auto`.

    The specs of a pair have equal instances.
    """
    single = [Candidate(hardware=hardware, spec=spec) for spec in specs] if policy != "seesaw" else []
    pairs = [
        Candidate(hardware=hardware, spec=prefill, decode=decode, policy="seesaw")
        for prefill, decode in permutations(specs, 2)
        if prefill.instances == decode.instances
    ]
    return single + (pairs if with_pairs and policy != STATIC else [])


def specs_of(num_ranks: int, num_layers: int) -> list[ParallelSpec]:
    """Return all specs with `num_ranks` ranks and at least one layer per stage, in order of decreasing instances."""
    degrees = [degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0]
    return [
        ParallelSpec(instances=num_ranks // (tp * pp), tp=tp, pp=pp)
        for size in degrees
        for tp in degrees
        for pp in degrees
        if tp * pp == size and pp <= num_layers
    ]
