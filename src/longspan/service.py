"""A model with its workers and its engine: what `LLM` and the server have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

import msgspec
import torch

from longspan import native
from longspan.args import EngineArgs
from longspan.core.cluster import MOST_GROWN, Cluster, ParallelSpec
from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.exchange import ALLTOALL, WeightSource, exchange_of
from longspan.core.policy import Policy, PolicySettings
from longspan.core.sparse import is_tuned
from longspan.cost.architecture import ModelShape, from_config, typical_hardware
from longspan.cost.estimate import activation_bytes, whole_prompt_tokens
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.flows import DISK_BYTES_PER_S
from longspan.cost.pricing import PricedSwap, PricedTurns
from longspan.cost.profile import ProfileKey
from longspan.csa_file import AUTO, csa_settings
from longspan.errors import OutOfMemoryError, ParameterError, WorkerLostError
from longspan.model.files import ModelFiles, cache_root
from longspan.model.info import ModelInfo
from longspan.model.sharding import check_degree
from longspan.model.source import prepare
from longspan.model.store import DTYPES, read_info
from longspan.policy.choosing import Facts
from longspan.policy.registry import PolicyChoice, make_policy
from longspan.pool_sizes import (
    KvBytes,
    by_rule,
    check_host_memory,
    measures_memory,
    memory_remedy,
    unbounded,
    with_pools,
)
from longspan.profiling.store import load_partitions, load_profile, profile_key_of
from longspan.runtime.device_memory import DeviceMemory, largest_step
from longspan.runtime.disk_pool import DiskPool
from longspan.runtime.executor.control_plane import Launcher, MonotonicClock, WorkerExecutor
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.host_pool import HostMemory, map_blocks
from longspan.runtime.messages import WorkerConfig
from longspan.runtime.pool import bytes_per_block, default_step_bytes
from longspan.runtime.split_check import check_splits
from longspan.text.input_processor import InputProcessor
from longspan.text.tokenizer import load_tokenizer

_SETTLE_S = 5.0
"""KV has so long to reach the disk before the workers are stopped."""

_CUDA_STEP_TOKENS = 8192
"""The tokens of a step on a CUDA device, which needs more than a CPU to be busy."""
_log = logging.getLogger("longspan")


class Service:
    """A model served by workers, in processes or threads; `close` stops them.

    Args:
        given: the options of its engine.
        launcher: starts the workers: as processes, or as threads of this one.
        max_worker_restarts: how often lost workers are replaced, if the caller bounds that. With 0 the instances must
            be able to serve without each of them, see `shrink`.

    Raises:
        ValueError: for a wrong argument, an unknown or unsupported model, or too little memory.
        WorkerLostError: when a worker does not start.
    """

    def __init__(
        self,
        given: EngineArgs,
        *,
        launcher: Callable[[WorkerConfig], Launcher] = ProcessLauncher,
        max_worker_restarts: int | None = None,
    ) -> None:
        self._max_worker_restarts = max_worker_restarts
        with ExitStack() as acquired:
            self._open(given, launcher, acquired)
            acquired.pop_all()  # `close` releases it from now on

    def _open(self, given: EngineArgs, launcher: Callable[[WorkerConfig], Launcher], acquired: ExitStack) -> None:
        """Does the work of the constructor; `acquired` gets all that must be released if it fails."""
        is_open = measures_memory(given)
        self._kv_bytes: KvBytes = unbounded if is_open else by_rule(given)
        setup = ResolvedEngine.of(given, kv_bytes=self._kv_bytes)
        self._given, cluster = given, setup.config.cluster
        self.files, self.info, self.block_bytes = setup.model.files, setup.model.info, setup.model.block_bytes
        tokenizer = None if given.skip_tokenizer_init else load_tokenizer(self.files)
        self._host_memory = [
            acquired.enter_context(closing(HostMemory(num_blocks * self.block_bytes)))
            for num_blocks in cluster.host_blocks
        ]
        self._disks = _open_disks(given, self.files, self.info, cluster, self._host_memory, acquired)
        self._worker_config = WorkerConfig(
            files=self.files,
            cluster=cluster,
            device=given.device,
            num_threads=setup.threads,
            most_threads=given.threads_per_rank,
            block_size=given.block_size,
            kernels=setup.model.kernels,
            host_kernels=_host_kernels(given, cluster),
            enforce_eager=given.enforce_eager,
            record_times=given.record_times,
            host_memory=tuple(memory.path for memory in self._host_memory),
        )
        self._start_workers: Callable[[Cluster], WorkerExecutor] = lambda cluster: WorkerExecutor(
            launcher(self._config_for(cluster)),
            step_timeout_s=given.step_timeout_s,
            disks=self._disks,
        )
        self.facts, self.profile_key = setup.facts, setup.profile_key
        self._policy, self._choice = setup.policy, setup.choice
        if self._max_worker_restarts == 0:
            self._check_losses(setup.config)
        if is_open:
            setup = self._with_measured_pools(setup, acquired)
        else:
            self.executor = acquired.enter_context(self._with_given_pools(cluster))
        config = setup.config
        self.facts, self._policy = setup.facts, setup.policy
        csa = self._choice.given.get("csa", "")
        self._tuned = csa if is_tuned(csa) else None
        if self.hint is not None:
            _log.info(self.hint)
        self.max_model_len = config.max_model_len
        if given.max_model_len is None and self.max_model_len < self.info.context_length:
            where = "on devices"
            if cluster.host_blocks and (config.turns or self._policy.reads_hosts):
                where += f", {'or' if config.turns else 'and'} on the host (host_kv_gib),"
            words = "the KV pools %s hold %d tokens, less than the model's context of %d"
            _log.info(words, where, self.max_model_len, self.info.context_length)
        self.input_processor = InputProcessor(
            tokenizer=tokenizer, vocab_size=self.info.vocab_size, max_model_len=self.max_model_len
        )
        saved = [disk.contents() for disk in self._disks.values()]
        self.engine = Engine(
            policy=self._policy, executor=self.executor, clock=MonotonicClock(), config=config, saved=saved
        )

    def _with_given_pools(self, cluster: Cluster) -> WorkerExecutor:
        """Start the workers; raise ValueError when the memory for their pools, or for the model, is not there."""
        try:
            return self._start_workers(cluster)
        except OutOfMemoryError as error:
            problem = f"rank {error.rank} has too little memory for the model and its KV: {memory_remedy(self._given)}"
            raise ValueError(f"{problem}; {error.reason}") from error

    def _with_measured_pools(self, setup: ResolvedEngine, acquired: ExitStack) -> ResolvedEngine:
        """Starts the workers, which measure what memory KV may take, and gives them such pools.

        Raises:
            ValueError: when devices have too little memory.
            WorkerLostError: when a worker does not start.
        """
        cluster, largest = largest_step(setup.config, self.info.context_length)
        try:
            self.executor = acquired.enter_context(self._start_workers(cluster))
            found = DeviceMemory(cluster=cluster, ranks=self.executor.measure(largest))
            self._kv_bytes = found.kv_bytes
            setup = ResolvedEngine.of(self._given, setup.model, kv_bytes=self._kv_bytes)
            self.executor.change_pools(setup.config.cluster)
        except OutOfMemoryError as error:
            step = f"a step of {setup.config.max_num_batched_tokens} tokens"
            problem = f"the device of rank {error.rank} has too little memory for the model and {step}"
            raise ValueError(f"{problem}: {memory_remedy(self._given)}; {error.reason}") from error
        return setup

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Changes the policy between requests; cached KV and the size of steps stay.

        Raises:
            ValueError: for an unknown policy, or options that it cannot work with.
            RuntimeError: when requests are unfinished.
        """
        cluster = self.engine.config.cluster
        chosen = make_policy(policy, num_instances=cluster.num_instances, options=options, facts=self.facts)
        if self.engine.config.turns and not chosen.takes_phases:
            problem = f"{policy} keeps to one cluster, but two take turns here: start anew with parallel"
            raise ParameterError("policy", problem, policy)
        _check_split(self.info, self.files, cluster, chosen)
        self.engine.set_policy(chosen)
        self._policy, self._choice = chosen, PolicyChoice(name=policy, given=chosen.given)

    @property
    def hint(self) -> str | None:
        """Advice of the policy about options that were not given."""
        return self._policy.hint

    @property
    def policy_settings(self) -> PolicySettings:
        """The policy's name and options."""
        return self._policy.settings

    def update_policy(self, options: Mapping[str, str | None]) -> None:
        """Change options of the policy between steps; None takes one back. Requests that run stay as they are.

        The `csa` that is `auto` is the tuned file that was given at the start, or else the package's.

        Raises:
            ValueError: for an option that it lacks or that may not change, or a bad value; nothing has changed then.
        """
        if options.get("csa") == AUTO:
            options = {**options, "csa": self._tuned or csa_settings(AUTO, self._given.model)}
        _check_windows(self.info, options.get("csa") or "off")
        self._policy.update(options)
        self._choice = self._choice.updated(self._policy)

    def restart(self) -> None:
        """Starts new workers in place of lost ones; every request goes on where it was.

        Raises:
            WorkerLostError: when a worker does not start.
        """
        self.executor.close()
        self.executor = self._start_workers(self.engine.config.cluster)
        self.engine.restart(self.executor)

    def _config_for(self, cluster: Cluster) -> WorkerConfig:
        """Returns the options of workers that start with this cluster."""
        first = self._worker_config
        return msgspec.structs.replace(first, cluster=cluster, num_threads=first.threads_among(cluster.num_ranks))

    def shrink(self, *ranks: int) -> None:
        """Go on without the instances of lost ranks: start new workers for as many others as the policy can use.

        Each rank has its number in the cluster without the instances of the ranks before it.

        Raises:
            ParameterError: when no instance would be left, or the policy cannot do with fewer.
            WorkerLostError: when a worker does not start.
        """
        cluster = self.engine.config.cluster
        _check_one_cluster(self.engine.config)
        for rank in ranks:
            cluster = cluster.without(rank)
        cluster, facts, policy = self._largest_part(cluster)
        self.executor.close()
        self.executor = self._start_workers(cluster)
        self.engine.restart(self.executor, cluster=cluster, policy=policy)
        self.facts, self._policy = facts, policy

    def reshard(self, spec: str) -> None:
        """Lets the workers take their places in another cluster while requests go on, see `Engine.reshard`.

        Further workers start when the spec takes more than there are; what it leaves over waits for the next change.

        Raises:
            ParameterError: for a spec that model, policy or hosts cannot do with.
            RuntimeError: while another change is under way.
        """
        before, given = self.engine.config.cluster, self._given
        if before.has_roles or self.engine.config.turns:
            raise ParameterError("parallel", f"{spec} is for instances that all do the same: start anew", spec)
        wanted, locations = ParallelSpec.parse(spec), before.locations
        num_more = max(0, wanted.num_ranks - before.num_ranks)
        if num_more and len(set(before.hosts)) > 1:
            problem = f"{spec} takes {num_more} more ranks, and nothing says on which of the hosts: start anew"
            raise ParameterError("parallel", problem, spec)
        if num_more and wanted.num_ranks > MOST_GROWN:
            problem = f"{spec} takes {wanted.num_ranks} ranks, but a fleet grows to {MOST_GROWN} at most: start anew"
            raise ParameterError("parallel", problem, spec)
        replace(given, parallel=spec, instances=None, tp=None, pp=None).check_ranks(wanted.num_ranks)
        if locations:
            more = range(before.num_ranks, before.num_ranks + num_more)
            locations += tuple(replace(locations[0], device=rank) for rank in more)
        cluster = Cluster(
            spec=wanted,
            num_spare=before.num_ranks + num_more - wanted.num_ranks,
            num_device_pools=before.host_pools.start,
            locations=locations,
        ).with_layers(self.info.num_layers, self.info.head_layers)
        cluster = with_pools(cluster, self.block_bytes, self.info, given, self._kv_bytes)
        facts, policy = self._chosen_for(cluster)
        self.engine.reshard(cluster, policy)
        self.facts, self._policy = facts, policy

    def _chosen_for(self, cluster: Cluster) -> tuple[Facts, Policy]:
        """Resolve the user's choice of a policy for another cluster."""
        choice, shape = self._choice, self.facts.shape
        assert shape is not None, "a service knows its model"
        threads = self._worker_config.threads_among(cluster.num_ranks)
        key = msgspec.structs.replace(self.profile_key, threads=threads)
        facts = _facts(key, shape, cluster, self._given.block_size)
        number = cluster.num_instances
        policy = make_policy(choice.name, num_instances=number, options=choice.given, facts=facts, is_resized=True)
        _check_split(self.info, self.files, cluster, policy)
        return facts, policy

    def _largest_part(self, cluster: Cluster) -> tuple[Cluster, Facts, Policy]:
        """Return the largest part of a cluster that the policy can serve on; raise its error if there is none."""
        while True:
            try:
                return cluster, *self._chosen_for(cluster)
            except ValueError:
                if cluster.num_instances == 1:
                    raise
                cluster = cluster.without(cluster.ranks(cluster.num_instances - 1).start)

    def _check_losses(self, config: EngineConfig) -> None:
        """Raise ParameterError when no instances would serve after the loss of a worker."""
        try:
            _check_one_cluster(config)
            for instance in config.cluster.instances:
                self._largest_part(config.cluster.without(config.cluster.ranks(instance).start))
        except ValueError as error:
            problem = f"is 0, but without a lost worker the others cannot serve ({error}): allow 1 or more"
            raise ParameterError("max_worker_restarts", problem, 0) from error

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of finished requests, also what is saved; raises RuntimeError when some are unfinished."""
        self.engine.settle(_SETTLE_S)
        self.engine.reset_prefix_cache()
        for disk in self._disks.values():
            disk.clear()

    def close(self) -> None:
        """Saves what is to be saved, stops the workers and releases the memory of hosts; can be called again."""
        self.executor.wakeup = None
        if self._disks and not self.executor.closed:
            with suppress(WorkerLostError):
                if not self.engine.settle(_SETTLE_S):
                    _log.warning("some KV was not saved, since that takes more than %g s", _SETTLE_S)
        self._stop()

    def _stop(self) -> None:
        self.executor.close()
        for memory in self._host_memory:
            memory.close()
        for disk in self._disks.values():
            disk.close()


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """A model as engines with the same options have it, however they are split.

    Attributes:
        kernel: the compiled attention kernel of our own; None when PyTorch's are used.
        block_bytes: of a KV block with all layers and heads.
    """

    files: ModelFiles
    info: ModelInfo
    kernels: Path | None
    block_bytes: int

    @classmethod
    def of(cls, given: EngineArgs) -> EngineModel:
        """Finds or fetches the model; raises ValueError when it is unknown or cannot be served."""
        kernels = _kernels(given.attention_backend, given.device, given.precision)
        if given.quantization is not None and kernels is None:
            problem = (
                f"{given.quantization} is for kernels of our own: it needs dtype bfloat16 on a CPU that has them, and "
                "attention_backend native or auto"
            )
            raise ParameterError("quantization", problem, given.quantization)
        files = prepare(
            given.model,
            dtype=given.precision,
            load_format=given.load_format,
            device=given.device,
            seed=given.seed,
            quantization=given.quantization,
            trust_remote_code=given.trust_remote_code,
        )
        info = read_info(files.weights)
        block_bytes = bytes_per_block(info.specs, given.block_size, DTYPES[given.precision])
        return cls(files=files, info=info, kernels=kernels, block_bytes=block_bytes)

    def profile_key(self, device: str, *, tp: int, threads: int) -> ProfileKey:
        """Returns the key of what was measured of instances of `tp` ranks of so many threads."""
        native = self.kernels is not None
        return profile_key_of(self.files, device, tp=tp, threads=threads, native=native, sizes=self.info.sizes)


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine:
    """An engine as its options make it on this machine, before it has any workers or memory."""

    model: EngineModel
    threads: int
    profile_key: ProfileKey
    facts: Facts
    choice: PolicyChoice
    policy: Policy
    config: EngineConfig

    @classmethod
    def of(
        cls, given: EngineArgs, model: EngineModel | None = None, *, kv_bytes: KvBytes | None = None
    ) -> ResolvedEngine:
        """Checks the options, and finds what they mean; `model` is what they name, if it was found before.

        `kv_bytes` says what memory KV may take; without, that is estimated.

        Raises:
            ValueError: for a wrong argument, an unknown or unsupported model, or too little memory.
        """
        resolved, kv_bytes = given.resolve(), kv_bytes or by_rule(given)
        if given.device == "cuda" and not torch.cuda.is_available():
            problem = "cuda was asked for, but PyTorch finds no CUDA device here: use cpu"
            raise ParameterError("device", problem, given.device)
        cluster, options = resolved.cluster, resolved.policy_options
        early_facts = Facts(cluster=cluster, turns=resolved.turns)
        wanted = make_policy(given.policy, num_instances=cluster.num_instances, options=options, facts=early_facts)
        model = model or EngineModel.of(given)  # may compile and fetch: checks first
        files, info, block_bytes = model.files, model.info, model.block_bytes
        clusters = [one.with_layers(info.num_layers, info.head_layers) for one in resolved.turns or (cluster,)]
        for one in clusters:
            _check_split(info, files, one, wanted)
        check_host_memory(given.host_kv_gib, clusters[0])
        clusters = [with_pools(one, block_bytes, info, given, kv_bytes) for one in clusters]
        cluster, turns = clusters[0], tuple(clusters) if resolved.turns else ()
        profile_key = model.profile_key(given.device, tp=cluster.spec.tp, threads=resolved.threads)
        shape = info.shape(DTYPES[given.precision].itemsize)
        facts = _facts(profile_key, shape, cluster, given.block_size)
        facts = replace(facts, turns=turns, turn_cost=_turn_cost(profile_key, shape, turns, given.block_size))
        policy = make_policy(given.policy, num_instances=cluster.num_instances, options=options, facts=facts)

        @cache  # it reads profiles, and clusters may take turns
        def swap(one: Cluster) -> SwapTimes | PricedSwap:
            clusters = (one, *(other for other in turns if other != one))
            cost = _measured_cost(profile_key, shape, clusters, given.block_size)
            return swap_times(cost, facts, info, block_bytes, one)

        config = EngineConfig.of(
            _with_step_tokens(given, files, info, cluster, policy),
            cluster,
            policy,
            turns=turns,
            context_length=info.context_length,
            eos_token_ids=info.eos_token_ids,
            rope_switch_length=info.rope_switch_length,
            seed=given.seed,
            swap=swap,
        )
        return cls(
            model=model,
            threads=resolved.threads,
            profile_key=profile_key,
            facts=facts,
            choice=PolicyChoice(name=given.policy, given=options),
            policy=policy,
            config=config,
        )


def _facts(profile_key: ProfileKey, shape: ModelShape, cluster: Cluster, block_size: int) -> Facts:
    """Takes hardware figures measured on this machine, or typical ones; the key may be of instances split otherwise."""
    profile_key = msgspec.structs.replace(profile_key, tp=cluster.spec.tp)
    profile = load_profile(profile_key)
    measured = None if profile is None else profile.hardware(shape)
    return Facts(
        shape=shape,
        hardware=measured or typical_hardware(profile_key.device, profile_key.threads),
        profile=profile,
        model=profile_key.model,
        partitions=load_partitions(profile_key, block_size),
        cluster=cluster,
    )


def _measured_cost(
    key: ProfileKey, shape: ModelShape, clusters: Sequence[Cluster], block_size: int
) -> FittedCost | None:
    """Returns the cost of steps on the first of some clusters, by the profiles that there are; None without its own."""
    found = {one.spec.tp: load_profile(msgspec.structs.replace(key, tp=one.spec.tp)) for one in clusters}
    first = found.pop(clusters[0].spec.tp)
    if first is None:
        return None
    others = [profile for profile in found.values() if profile is not None]
    try:
        return FittedCost(first, shape, block_size=block_size, cluster=clusters[0], others=others)
    except ParameterError as error:
        _log.info("nothing goes by the profile of this machine, since it %s", error.problem)
        return None


def _turn_cost(key: ProfileKey, shape: ModelShape, turns: Sequence[Cluster], block_size: int) -> PricedTurns | None:
    """Prices the turns of clusters by what was measured of both; None when something was not, or on CUDA, where nobody
    knows what a change takes.
    """
    cost = _measured_cost(key, shape, turns, block_size) if turns and key.device == "cpu" else None
    if cost is None:
        return None
    try:
        prices = PricedTurns(cost, turns, block_size)
        for one in turns:
            prices.prefill_s(one, 1, 1)
    except ParameterError as error:
        _log.info("clusters take turns as strict=true has them, since %s", error)
        return None
    return prices


@dataclass(frozen=True, kw_only=True)
class SwapTimes:
    """Prices a block's copy in from the host, or its disk, and computing `(new, cached)` tokens there instead."""

    block_s: float
    load_s: float
    prefill_s: Callable[[int, int], float]

    def recompute_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self.prefill_s(new_tokens, cached_tokens)


def swap_times(
    cost: FittedCost | None, facts: Facts, info: ModelInfo, block_bytes: int, cluster: Cluster
) -> SwapTimes | PricedSwap:
    """Takes times measured on this machine, as simulations do, or makes them of typical speeds."""
    if cost is not None:
        try:
            prices = PricedSwap(cost, cluster)
            prices.recompute_s(1, 0)
        except ParameterError as error:
            _log.info("copies from hosts go by typical speeds, since %s", error)
        else:
            return prices
    assert facts.hardware is not None and facts.shape is not None, "a service knows its model and has typical speeds"
    speeds, shape = facts.hardware, facts.shape
    token_flops = 2 * (info.num_layers * info.layer_weights + info.vocab_size * info.hidden_size)
    pair_flops = 4 * shape.num_heads * shape.head_dim * shape.num_layers

    def prefill_s(new: int, cached: int) -> float:
        return new * (token_flops + pair_flops * (cached + new / 2)) / speeds.flops_per_s

    load_s = block_bytes / DISK_BYTES_PER_S
    return SwapTimes(block_s=block_bytes / speeds.bytes_per_s, load_s=load_s, prefill_s=prefill_s)


def _with_step_tokens(
    given: EngineArgs, files: ModelFiles, info: ModelInfo, cluster: Cluster, policy: Policy
) -> EngineArgs:
    """Returns options that say how large steps are, when the user has not: as memory allows, for a policy that wants
    whole prompts, and larger on CUDA devices than on CPUs.
    """
    if given.max_num_batched_tokens is not None:
        return given
    if not policy.whole_prompts:
        return replace(given, max_num_batched_tokens=_CUDA_STEP_TOKENS) if given.device == "cuda" else given
    config = json.loads((files.config_dir / "config.json").read_text(encoding="utf-8"))
    try:
        sizes = from_config(config, name=files.name, bytes_per_element=DTYPES[files.dtype].itemsize)
    except ValueError as error:
        _log.info("steps have %d tokens: %s", EngineConfig.max_num_batched_tokens, error)
        return given
    tokens = whole_prompt_tokens(
        lambda tokens: sum(activation_bytes(sizes, tokens, cluster.spec.tp)),
        default_step_bytes(cluster, given.device),
        least=EngineConfig.max_num_batched_tokens,
        longest=given.max_model_len or info.context_length,
    )
    return replace(given, max_num_batched_tokens=tokens)


def _check_split(info: ModelInfo, files: ModelFiles, cluster: Cluster, policy: Policy) -> None:
    """Raises ValueError when ranks cannot share the model so, or the policy cannot drop tokens of it."""
    _check_windows(info, policy.given.get("csa", "off"))
    kind = getattr(policy.options, "exchange", "auto")
    exchange = None if kind == "auto" else exchange_of(kind)
    shares_layers = exchange is not None and exchange.traits.level == "layer"
    for tp in sorted({cluster.tp(instance) for instance in cluster.instances}):
        check_degree(info.specs, tp, cluster.num_instances if shares_layers else 1)
    source = getattr(policy.options, "weights", None) if exchange in (None, ALLTOALL) else None
    weights = () if source is None else get_args(WeightSource) if source == "auto" else (source,)
    check_splits(files, info, cluster, gathers_hidden=shares_layers, weights=weights)


def _check_one_cluster(config: EngineConfig) -> None:
    """Raise ParameterError when ranks have places in several clusters."""
    if config.turns:
        problem = "ranks have places in two clusters, which need all of them: the workers of all must start anew"
        raise ParameterError("parallel", problem, str(config.cluster.spec))


def _check_windows(info: ModelInfo, csa: str) -> None:
    """Raises ParameterError when sparse attention is asked for, but the model has sliding windows."""
    if csa != "off" and any(spec.window is not None for spec in info.specs):
        problem = "is for models without sliding windows, which drop all that is far themselves: leave it out"
        raise ParameterError("csa", problem, csa[:60])


def _host_kernels(given: EngineArgs, cluster: Cluster) -> Path | None:
    """Returns the compiled kernels by which hosts of other devices compute, if they have KV."""
    if given.device == "cpu" or not cluster.host_blocks:
        return None
    return _kernels("auto", "cpu", given.precision)


def _kernels(backend: str, device: str, dtype: str) -> Path | None:
    """Returns the compiled kernels of our own, if they are used."""
    fits = (device, dtype) == ("cpu", "bfloat16")
    if backend == "native" and not fits:
        problem = f"native is for bfloat16 on cpu, not for {dtype} on {device}: choose auto"
        raise ParameterError("attention_backend", problem, backend)
    if backend == "torch" or not fits:
        return None
    try:
        return native.build(cache_root() / "native")
    except native.UnavailableError as error:
        if backend == "native":
            raise ParameterError("attention_backend", f"native is not possible here: {error}; choose auto") from error
        _log.info("computing with PyTorch's kernels, since %s", error)
        return None


def _open_disks(
    given: EngineArgs,
    files: ModelFiles,
    info: ModelInfo,
    cluster: Cluster,
    host_memory: Sequence[HostMemory],
    acquired: ExitStack,
) -> dict[int, DiskPool]:
    """Opens the pool on the disk of each host, by its number. What depends on the model or on the size of blocks is in
    a folder of its own; so is each host.
    """
    model, dtype = f"{files.weights.parent.name}-{given.block_size}", DTYPES[given.precision]
    folder = cache_root() / "kv" if given.disk_kv_dir is None else Path(given.disk_kv_dir).expanduser()
    disks = {}
    for host, (pool, num_blocks) in enumerate(zip(cluster.disk_pools, cluster.disk_blocks, strict=True)):
        size, memory = cluster.host_blocks[host], host_memory[host].path
        blocks = map_blocks(memory, info.specs, num_blocks=size, block_size=given.block_size, dtype=dtype)
        path = folder / model / f"host-{host}"
        disks[pool] = acquired.enter_context(closing(DiskPool(path, model, num_blocks=num_blocks, host=blocks)))
    return disks
