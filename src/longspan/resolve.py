"""The resolver of an engine: derives sizes, pools, costs, facts and the policy from options, model and hardware.

`sim/resolve.py` is the resolver of a simulation. Both use `policy/facts.py` and `policy/step_size.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import msgspec
import torch

from longspan.args import EngineArgs
from longspan.core.cluster import MAX_GROWN_RANKS, Cluster
from longspan.core.config import EngineConfig, check_phases
from longspan.core.exchange import ALLTOALL, WeightSource, exchange_of
from longspan.core.kv_record import KvRecord
from longspan.core.policy import Policy
from longspan.cost.profile_key import ProfileKey
from longspan.cost.shape import ModelShape, typical_hardware
from longspan.errors import ParameterError
from longspan.model.files import ModelFiles, cache_root
from longspan.model.info import ModelInfo
from longspan.model.shard import check_degree
from longspan.model.source import prepare
from longspan.model.store import DTYPES, read_info
from longspan.policy.facts import Facts, measured_phases
from longspan.policy.registry import PolicyChoice, make_policy, phases_of
from longspan.policy.step_size import with_step_tokens
from longspan.pool_sizes import KvBytes, by_rule, check_hosts, with_pools
from longspan.profiling.store import load_partitions, load_profile, load_traffic, profile_key_of
from longspan.runtime.block_records import kv_record
from longspan.runtime.pool import default_step_bytes
from longspan.runtime.split_check import check_splits

if TYPE_CHECKING:
    from longspan.core.fleets import Fleet
    from longspan.core.placement import Placement
    from longspan.cost.fitted_cost import FittedCost
    from longspan.cost.pricing import PricedPhases, SwapPrice

_log = logging.getLogger("longspan")


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The model of engines with the same options and any split.

    Attributes:
        kernels: longspan's own compiled kernels. None if PyTorch's are used, for `kernels_reason`.
        record: the record of a KV block with all layers and heads.
    """

    files: ModelFiles
    info: ModelInfo
    kernels: Path | None
    kernels_reason: str
    record: KvRecord

    @classmethod
    def of(cls, given: EngineArgs) -> EngineModel:
        """Find or fetch the model. Raise ValueError if it is unknown or cannot be served."""
        dtype, backend, device = given.required_dtype, given.attention_backend, given.device
        kernels, reason = (None, "") if dtype == "auto" else kernels_of(backend, device, dtype)
        is_known = kernels is not None or ((device, dtype) == ("cuda", "bfloat16") and find_spec("triton") is not None)
        if given.quantization is not None and not is_known:
            need = "needs longspan's own kernels: choose `dtype` bfloat16, and a CPU with them or a GPU with Triton"
            raise ParameterError("quantization", f"{given.quantization} {need}", given.quantization)
        files = prepare(
            given.model,
            dtype=dtype,
            load_format=given.load_format,
            device=given.device,
            seed=given.seed,
            quantization=given.quantization,
            trust_remote_code=given.trust_remote_code,
        )
        if dtype == "auto":
            kernels, reason = kernels_of(backend, device, files.dtype)
            if kernels is None and backend == "auto" and (device, files.dtype) == ("cpu", "bfloat16"):
                warn_of_slow_bfloat16()
        info = read_info(files.weights)
        record = kv_record(info.specs, given.block_size, DTYPES[files.dtype])
        return cls(files=files, info=info, kernels=kernels, kernels_reason=reason, record=record)

    @property
    def shape(self) -> ModelShape:
        return self.info.shape(DTYPES[self.files.dtype].itemsize)

    def profile_key(self, device: str, *, tp: int, threads: int) -> ProfileKey:
        """Return the key of profiles of instances with `tp` ranks of `threads` threads."""
        native = self.kernels is not None
        return profile_key_of(self.files, device, tp=tp, threads=threads, native=native, sizes=self.info.sizes)


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine:
    """Values of an engine on this machine that follow from its options, before it has workers or memory.

    Attributes:
        given: the options of the user.
        kv_bytes: the rule for the memory of KV pools.
        placement: the hosts that ranks were started on. None: this host has all ranks.
        threads: CPU threads of each rank.
        facts: the facts of model, hardware and cluster for the policy.
        choice: the policy and its options as given by the user.
        config: the configuration of the engine, with the sizes of pools and steps.
    """

    given: EngineArgs
    model: EngineModel
    kv_bytes: KvBytes
    placement: Placement | None
    threads: int
    profile_key: ProfileKey
    facts: Facts
    choice: PolicyChoice
    policy: Policy
    config: EngineConfig

    @classmethod
    def of(
        cls,
        given: EngineArgs,
        model: EngineModel | None = None,
        *,
        kv_bytes: KvBytes | None = None,
        placement: Placement | None = None,
    ) -> ResolvedEngine:
        """Check the options and derive all values that follow from them.

        Args:
            model: the model of the options, if it was loaded before.
            kv_bytes: the memory for KV. It is estimated if this is None.
            placement: see `EngineArgs.resolve`.

        Raises:
            ValueError: an argument is wrong, the model is unknown or unsupported, or there is too little memory.
        """
        resolved, kv_bytes = given.resolve(placement), kv_bytes or by_rule(given)
        if given.device == "cuda" and not torch.cuda.is_available():
            raise ParameterError("device", "is cuda, but PyTorch finds no CUDA device here: use cpu", given.device)
        check_phases(given, resolved.phases)
        cluster, options = resolved.cluster, resolved.policy_options
        early = Facts(cluster=cluster, phases=resolved.phases)
        draft = make_policy(given.policy, num_instances=cluster.num_instances, options=options, facts=early)
        model = model or EngineModel.of(given)  # after the checks, since it may compile and download
        clusters = _with_layers_and_pools(resolved.phases or (cluster,), given, model, draft, kv_bytes, placement)
        cluster, phases = clusters[0], tuple(clusters) if resolved.phases else ()
        profile_key = model.profile_key(given.device, tp=cluster.spec.tp, threads=resolved.threads)
        facts = _facts(profile_key, model.shape, cluster, given.block_size, phases)
        policy = make_policy(given.policy, num_instances=cluster.num_instances, options=options, facts=facts)

        @cache  # it reads profiles, and phases alternate
        def swap(phase: Cluster) -> SwapPrice:
            rest = [other for other in phases if other != phase]
            return swap_price(profile_key, model, facts, [phase, *rest], given.block_size)

        config = EngineConfig.of(
            with_step_tokens(given, policy, given.device, partial(_whole_tokens, given, model, cluster)),
            cluster,
            policy,
            phases=phases,
            context_length=model.info.context_length,
            eos_token_ids=model.info.eos_token_ids,
            rope_switch_length=model.info.rope_switch_length,
            seed=given.seed,
            swap=swap,
        )
        return cls(
            given=given,
            model=model,
            kv_bytes=kv_bytes,
            placement=placement,
            threads=resolved.threads,
            profile_key=profile_key,
            facts=facts,
            choice=PolicyChoice(name=given.policy, given=options),
            policy=policy,
            config=config,
        )

    def step_cost(self) -> FittedCost | None:
        """Return the cost of steps by stored profiles, see `measured_cost`."""
        clusters = self.facts.phases or (self.config.cluster,)
        return measured_cost(self.profile_key, self.model.shape, clusters, self.given.block_size)

    def with_policy(self, policy: str, options: Mapping[str, str]) -> ResolvedEngine:
        """Resolve another policy for the same cluster. Raise ValueError for an unknown policy or wrong options."""
        cluster = self.config.cluster
        chosen = make_policy(policy, num_instances=cluster.num_instances, options=options, facts=self.facts)
        if self.config.phases and not chosen.takes_phases:
            problem = f"{policy} supports one cluster, but this engine has two phases: start a new one with `parallel`"
            raise ParameterError("policy", problem, policy)
        check_split(self.model.info, self.model.files, cluster, chosen)
        return replace(self, policy=chosen, choice=PolicyChoice(name=policy, given=chosen.given))

    def on(self, fleet: Fleet, threads: int) -> ResolvedEngine:
        """Resolve the chosen policy for another fleet, with `threads` threads per rank.

        Raises:
            ValueError: the model or the policy does not support a cluster.
        """
        key, model, choice = msgspec.structs.replace(self.profile_key, threads=threads), self.model, self.choice
        cluster, phases = fleet[0], fleet if len(fleet) > 1 else ()
        facts = _facts(key, model.shape, cluster, self.given.block_size, phases)
        number = cluster.num_instances
        policy = make_policy(choice.name, num_instances=number, options=choice.given, facts=facts, is_resized=True)
        for phase in fleet:
            check_split(model.info, model.files, phase, policy)
            check_hosts(self.given.host_kv_gib, phase)
        return replace(self, facts=facts, policy=policy, config=replace(self.config, cluster=cluster, phases=phases))

    def fleet_of(self, spec: str, before: Cluster) -> Fleet:
        """Return the fleet, with pools, of another parallel spec in the form of `fleet_text`. Unused ranks are spare.

        Raises:
            ParameterError: the hosts, the fleet or the policy do not support the spec.
            ValueError: memory for its pools is missing.
        """
        from longspan.core.fleets import parse_fleet  # noqa: PLC0415 - most fleets stay

        given, info, name = self.given, self.model.info, self.choice.name
        roles, locations = parse_fleet(spec), before.locations
        if self.config.phases and not roles.has_roles:
            problem = f"({spec}) is one cluster, but {name} needs two: give both, such as 'pp2 prefill + tp2 decode'"
            raise ParameterError("parallel", problem, spec)
        backends = given.transfer_backends if roles.has_roles else None
        fleet: Fleet = phases_of(name, roles) or (replace(roles, transfer_backends=backends),)
        num_ranks = fleet[0].num_ranks
        num_new = max(0, num_ranks - before.num_ranks)
        if num_new and (len(set(before.hosts)) > 1 or self.placement is not None):
            problem = f"{spec} takes {num_new} more ranks, whose hosts are not known: start a new engine"
            raise ParameterError("parallel", problem, spec)
        if num_new and num_ranks > MAX_GROWN_RANKS:
            problem = (
                f"{spec} takes {num_ranks} ranks, but a fleet grows to at most {MAX_GROWN_RANKS}: start a new engine"
            )
            raise ParameterError("parallel", problem, spec)
        replace(given, parallel=spec, instances=None, tp=None, pp=None).check_ranks(num_ranks)
        if locations:
            new_ranks = range(before.num_ranks, before.num_ranks + num_new)
            locations += tuple(replace(locations[0], device=rank) for rank in new_ranks)
        num_unused = before.num_ranks + num_new - num_ranks
        dtype, clusters = DTYPES[self.model.files.dtype], []
        for phase in fleet:
            num_spare, num_pools = phase.num_spare + num_unused, before.host_pools.start
            cluster = replace(phase, num_spare=num_spare, num_device_pools=num_pools, locations=locations)
            cluster = replace(cluster, pool_hosts=before.hosts_of_pools if before.host_blocks else ())
            cluster = cluster.with_layers(info.num_layers, info.head_layers)
            clusters.append(with_pools(cluster, self.model.record, info, given, self.kv_bytes, dtype=dtype))
        return tuple(clusters)


def _with_layers_and_pools(
    clusters: Sequence[Cluster],
    given: EngineArgs,
    model: EngineModel,
    policy: Policy,
    kv_bytes: KvBytes,
    placement: Placement | None,
) -> list[Cluster]:
    """Return the clusters with the layers of the model and KV pools. Raise ValueError if they cannot serve it."""
    info, dtype = model.info, DTYPES[model.files.dtype]
    clusters = [cluster.with_layers(info.num_layers, info.head_layers) for cluster in clusters]
    for cluster in clusters:
        check_split(info, model.files, cluster, policy)
    if given.host_kv_gib and placement is None:  # other hosts check their own
        from longspan.runtime.host_tiers import check_host_memory  # noqa: PLC0415 - needed with a host tier only

        check_host_memory(given.host_kv_gib, clusters[0])
    return [with_pools(cluster, model.record, info, given, kv_bytes, dtype=dtype) for cluster in clusters]


def _facts(
    key: ProfileKey, shape: ModelShape, cluster: Cluster, block_size: int, phases: tuple[Cluster, ...] = ()
) -> Facts:
    """Return facts with the profiles of this machine. The key may have another tp."""
    key = msgspec.structs.replace(key, tp=cluster.spec.tp)
    hardware, partitions = typical_hardware(key.device, key.threads), None
    if (profile := load_profile(key)) is not None:
        from longspan.core.link_classes import slowest_link  # noqa: PLC0415 - only on machines with a profile

        hardware = profile.speeds(shape, slowest_link(cluster.locations))
    if any(phase.num_instances > 1 for phase in (cluster, *phases)):
        from longspan.core.group_links import links_by_size  # noqa: PLC0415 - only for several instances

        partitions = load_partitions(key, block_size).of_sizes(links_by_size(cluster))
    return Facts(
        shape=shape,
        hardware=hardware,
        profile=profile,
        model=key.model,
        partitions=partitions,
        cluster=cluster,
        phases=phases,
        phase_cost=_phase_cost(key, shape, phases, block_size),
        traffic=load_traffic(key, _fleet_text(cluster, phases)),
    )


def _fleet_text(cluster: Cluster, phases: tuple[Cluster, ...]) -> str:
    if not phases:
        return str(cluster)
    from longspan.core.fleets import fleet_text  # noqa: PLC0415 - most fleets have one cluster

    return fleet_text(phases)


def measured_cost(
    key: ProfileKey, shape: ModelShape, clusters: Sequence[Cluster], block_size: int
) -> FittedCost | None:
    """Return the cost of steps on the first cluster by stored profiles, or None if its profile is missing.

    Raises:
        ParameterError: a profile has no measurements of a single instance.
    """
    profiles = {phase.spec.tp: load_profile(msgspec.structs.replace(key, tp=phase.spec.tp)) for phase in clusters}
    first = profiles.pop(clusters[0].spec.tp)
    if first is None:
        return None
    from longspan.cost.fitted_cost import FittedCost  # noqa: PLC0415 - needed with a profile only

    rest = [profile for profile in profiles.values() if profile is not None]
    return FittedCost(first, shape, block_size=block_size, cluster=clusters[0], others=rest)


def _phase_cost(key: ProfileKey, shape: ModelShape, phases: Sequence[Cluster], block_size: int) -> PricedPhases | None:
    """Return the costs of phases by the profiles of their clusters, or None if a measurement is missing."""
    try:
        cost = measured_cost(key, shape, phases, block_size) if phases else None
        return None if cost is None else measured_phases(cost, phases, block_size)
    except ParameterError as error:
        _log.info("phases alternate as with strict=true, since %s", error)
        return None


def swap_price(
    key: ProfileKey, model: EngineModel, facts: Facts, clusters: Sequence[Cluster], block_size: int
) -> SwapPrice:
    """Return the cost of copies from hosts to the first cluster, by profiles or else by typical speeds."""
    from longspan.cost.pricing import SwapPrice  # noqa: PLC0415 - needed with a host tier only

    try:
        cost = measured_cost(key, model.shape, clusters, block_size)
        if cost is not None:
            return SwapPrice.of(cost, clusters[0])
    except ParameterError as error:
        _log.info("the cost of copies from hosts is estimated by typical speeds, since %s", error)
    assert facts.hardware is not None, "an engine has typical speeds"
    info = model.info
    token_flops = 2 * (info.num_layers * info.layer_weights + info.vocab_size * info.hidden_size)
    return SwapPrice.typical(model.shape, facts.hardware, token_flops=token_flops, block_bytes=model.record.block_bytes)


def _whole_tokens(given: EngineArgs, model: EngineModel, cluster: Cluster, min_tokens: int) -> int:
    """Return the tokens of a step that should hold a whole prompt, as far as memory allows."""
    from longspan.cost.architecture import from_config  # noqa: PLC0415 - for few policies
    from longspan.cost.estimate import activation_bytes, whole_prompt_tokens  # noqa: PLC0415
    from longspan.cost.precision import Format, Precision  # noqa: PLC0415

    files = model.files
    config = json.loads((files.config_dir / "config.json").read_text(encoding="utf-8"))
    try:
        sizes = from_config(config, name=files.name, precision=Precision.of(cast("Format", files.dtype)))
    except ValueError as error:
        _log.info("steps have %d tokens: %s", min_tokens, error)
        return min_tokens
    return whole_prompt_tokens(
        lambda tokens: sum(activation_bytes(sizes, tokens, cluster.spec.tp)),
        default_step_bytes(cluster, given.device),
        least=min_tokens,
        longest=given.max_model_len or model.info.context_length,
    )


def check_split(info: ModelInfo, files: ModelFiles, cluster: Cluster, policy: Policy) -> None:
    """Raise ValueError if the model cannot be split like the cluster, or if the policy cannot drop its tokens."""
    check_windows(info, policy.given.get("csa", "off"))
    kind = getattr(policy.options, "exchange", "auto")
    exchange = None if kind == "auto" else exchange_of(kind)
    shares_layers = exchange is not None and exchange.traits.level == "layer"
    for tp in sorted({cluster.tp(instance) for instance in cluster.instances}):
        check_degree(info.specs, tp, cluster.num_instances if shares_layers else 1)
    source = getattr(policy.options, "weights", None) if exchange in (None, ALLTOALL) else None
    weights = () if source is None else get_args(WeightSource) if source == "auto" else (source,)
    check_splits(files, info, cluster, gathers_hidden=shares_layers, weights=weights)


def check_windows(info: ModelInfo, csa: str) -> None:
    """Raise ParameterError for sparse attention with a model that has sliding windows or chunks."""
    if csa != "off" and any(spec.visibility.max_keys is not None for spec in info.specs):
        problem = "is for models without sliding windows or chunks, which already drop distant tokens: leave it out"
        raise ParameterError("csa", problem, csa[:60])


def kernels_of(backend: str, device: str, dtype: str) -> tuple[Path | None, str]:
    """Return longspan's own compiled kernels, or None and the reason why they are not used."""
    fits = (device, dtype) == ("cpu", "bfloat16")
    if backend == "native" and not fits:
        problem = f"native is for bfloat16 on cpu, not for {dtype} on {device}: choose auto"
        raise ParameterError("attention_backend", problem, backend)
    if not fits:
        return None, f"longspan's own are for bfloat16 on cpu, not for {dtype} on {device}"
    if backend == "torch":
        return None, "attention_backend is torch"
    from longspan import native  # noqa: PLC0415 - only for the type and the device of our own kernels

    try:
        return native.build(cache_root() / "native"), ""
    except native.UnavailableError as error:
        if backend == "native":
            raise ParameterError("attention_backend", f"native is not possible here: {error}; choose auto") from error
        return None, str(error)


@cache  # once per process: planning and the engine resolve the same options
def warn_of_slow_bfloat16() -> None:
    """Warn that a bfloat16 checkpoint is slow without longspan's own kernels."""
    _log.warning(
        "computing in bfloat16, the precision of the checkpoint, with PyTorch's kernels instead of longspan's: prefill "
        "can take more than twice the time of dtype float32, which needs twice the memory"
    )
