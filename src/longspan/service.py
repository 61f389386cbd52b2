"""A model with its workers and its engine, for `LLM` and the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from longspan.args import EngineArgs
from longspan.core.checks import check_text
from longspan.core.cluster import Cluster
from longspan.core.engine import Engine
from longspan.core.options import PolicySettings
from longspan.core.sparse import is_tuned
from longspan.errors import OutOfMemoryError, WorkerLostError
from longspan.model.files import ModelFiles, lock_folder
from longspan.pool_sizes import by_rule, measures_memory, memory_remedy, unbounded
from longspan.resolve import ResolvedEngine, check_windows, kernels_of
from longspan.runtime.executor.control_plane import Launcher, MonotonicClock, WorkerExecutor
from longspan.runtime.messages import WorkerConfig
from longspan.text.input_processor import InputProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longspan.core.config import EngineConfig
    from longspan.core.fleets import Fleet
    from longspan.extras.recording import Recorder
    from longspan.runtime.executor.ray_hosts import RayHosts
    from longspan.runtime.host_tiers import HostTiers

_SETTLE_S = 5.0
"""Seconds in which KV may be written to the disk before the workers are stopped."""
_log = logging.getLogger("longspan")


class Service:
    """A model served by workers, in processes or threads. `close` stops them, and writes the files of a recording.

    Args:
        given: the options of its engine.
        launcher: starts the workers, by default as processes. Not used if the options name another executor.
        max_worker_restarts: number of times that lost workers are replaced, if the caller bounds it. With 0, any
            instance must be able to stop while the rest serve, see `shrink`.

    Raises:
        ValueError: an argument is wrong, the model is unknown or unsupported, or there is too little memory.
        WorkerLostError: a worker does not start.
    """

    def __init__(
        self,
        given: EngineArgs,
        *,
        launcher: Callable[[WorkerConfig], Launcher] | None = None,
        max_worker_restarts: int | None = None,
    ) -> None:
        self._launcher, self._max_worker_restarts = launcher or _processes, max_worker_restarts
        self._hosts: RayHosts | None = None
        self.recorder: Recorder | None = None
        with ExitStack() as acquired:
            self._open(given, acquired)
            self._acquired = acquired.pop_all()  # `close` releases the resources from now on

    def _open(self, given: EngineArgs, acquired: ExitStack) -> None:
        """Do the work of the constructor. `acquired` holds the resources to release if it fails."""
        is_measured, placement = measures_memory(given), None
        if given.executor != "local" or given.ray_address is not None or given.topology is not None:
            from longspan.remote_ranks import reserve_hosts  # noqa: PLC0415 - needed for several hosts only

            self._hosts = acquired.enter_context(closing(reserve_hosts(given)))
            self._launcher, placement = self._hosts.launch, self._hosts.placement
        kv_bytes = unbounded if is_measured else by_rule(given)
        self.setup = setup = ResolvedEngine.of(given, kv_bytes=kv_bytes, placement=placement)
        cluster = setup.config.cluster
        self.files, self.info, self.block_bytes = setup.model.files, setup.model.info, setup.model.record.block_bytes
        with suppress(OSError):  # a cache that this user cannot write to
            acquired.enter_context(closing(lock_folder(self.files.config_dir, shared=True)))
        tokenizer = None if given.skip_tokenizer_init else _load_tokenizer(self.files)
        self.tiers: HostTiers | None = None
        if cluster.host_blocks:
            from longspan.runtime.host_tiers import open_tiers  # noqa: PLC0415 - needed with a host tier only

            record, kv_dir = setup.model.record, given.disk_kv_dir
            tiers = open_tiers(cluster, record, self.files, given.block_size, kv_dir=kv_dir, hosts=self._hosts)
            self.tiers = acquired.enter_context(closing(tiers))
        self._worker_config = _worker_config(setup, cluster)
        self._check_smaller(setup)
        if is_measured:
            from longspan.measured_pools import start_measured  # noqa: PLC0415 - only on CUDA devices

            self.executor, setup = start_measured(setup, self._start_workers, self._prepare, acquired)
            self.setup = setup
        else:
            self.executor = acquired.enter_context(self._with_given_pools(cluster))
        config, policy, self._wanted = setup.config, setup.policy, setup.config.fleet
        csa = setup.choice.given.get("csa", "")
        self._tuned = csa if is_tuned(csa) else None
        max_len = config.longest(policy)
        if _log.isEnabledFor(logging.INFO):
            from longspan.start_facts import facts_of  # noqa: PLC0415 - not needed if the log level is above info

            _log.info("%s", facts_of(setup, self.executor.fallbacks).block())
        vocab_size = self.info.vocab_size
        self.input_processor = InputProcessor(tokenizer=tokenizer, vocab_size=vocab_size, max_model_len=max_len)
        self._clock = MonotonicClock()
        self.engine = Engine(
            policy=policy,
            executor=self.executor,
            clock=self._clock,
            config=config,
            saved=() if self.tiers is None else self.tiers.contents(cluster),
            seal_disks=self.tiers is not None and self.tiers.are_kept,
        )
        if given.trace is not None or given.report is not None:
            self.start_recording()

    def _with_given_pools(self, cluster: Cluster) -> WorkerExecutor:
        """Start the workers. Raise ValueError if memory for the model or the pools is missing."""
        try:
            executor = self._start_workers(cluster)
            self._prepare(executor, self.setup.config)
            return executor
        except OutOfMemoryError as error:
            problem = f"rank {error.rank} has too little memory for the model and its KV"
            raise ValueError(f"{problem}: {memory_remedy(self.setup.given)}; {error.reason}") from error

    def _prepare(self, executor: WorkerExecutor, config: EngineConfig) -> None:
        """Prepare new workers: CUDA devices compute two prompts, make cuDNN's plans and record graphs."""
        if self.setup.given.device != "cpu":
            from longspan.runtime.warm_up import warm_up  # noqa: PLC0415 - only on CUDA devices

            warm_up(executor, config)
            executor.prepare(config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens)

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Change the policy between requests. Cached KV and the size of steps stay.

        Raises:
            ValueError: the policy is unknown, or its options are wrong.
            RuntimeError: requests are unfinished.
        """
        if "csa" in options:
            from longspan.csa_file import csa_settings  # noqa: PLC0415 - needed for sparse attention only

            options = {**options, "csa": csa_settings(options["csa"], self.setup.given.model)}
        setup = self.setup.with_policy(policy, options)
        self.engine.set_policy(setup.policy)
        self._set(setup)

    def _set(self, setup: ResolvedEngine) -> None:
        """Set the resolved engine, which is in force now or after a change. New requests are checked by it."""
        self.setup = setup
        self.input_processor.max_model_len = setup.config.longest(setup.policy)

    @property
    def policy_settings(self) -> PolicySettings:
        """The policy's name and options."""
        return self.setup.policy.settings

    @property
    def max_model_len(self) -> int:
        """The longest new request, prompt and output together, in tokens, as after a change under way."""
        return self.input_processor.max_model_len

    def update_policy(self, options: Mapping[str, str | None]) -> None:
        """Change options of the policy between steps, for new requests. None removes an option.

        The value `auto` of `csa` is the tuned file that was given at the start, or else the file of the package.

        Raises:
            ValueError: an option is unknown, fixed or has a wrong value. Nothing has changed.
        """
        from longspan.csa_file import AUTO, csa_settings  # noqa: PLC0415 - needed for sparse attention only

        if options.get("csa") == AUTO:
            options = {**options, "csa": self._tuned or csa_settings(AUTO, self.setup.given.model)}
        check_windows(self.info, options.get("csa") or "off")
        policy, choice = self.setup.policy, self.setup.choice
        policy.update(options)
        if policy.hint is not None:
            _log.info("%s", policy.hint)
        self.setup = replace(self.setup, choice=choice.updated(policy))

    def start_recording(self) -> None:
        """Record requests and steps from now on, see `Recorder`. Does nothing if they are recorded already."""
        if self.recorder is None:
            from longspan.extras.recording import Recorder  # noqa: PLC0415 - few runs are recorded

            self.recorder = Recorder(self.engine, self._clock.now)

    def stop_recording(self) -> None:
        """End a recording, and write its files if the options of the engine name some."""
        if self.recorder is not None:
            recorder, self.recorder = self.recorder, None
            recorder.stop()
            recorder.write(self.setup.policy.name, self.setup.given)

    def trace(self, last_s: float) -> str | None:
        """Return a Perfetto trace of the last seconds as JSON. None if nothing is recorded."""
        if self.recorder is None:
            return None
        from longspan.extras.trace import chrome_trace  # noqa: PLC0415 - few runs are recorded

        return chrome_trace([self.recorder.record(self.policy_settings.name, last_s=last_s)])

    def restart(self) -> None:
        """Replace all workers. Every request resumes. Ranks of lost hosts get other places, or their instances end.

        Raises:
            WorkerLostError: a worker does not start, or no live host has a place.
        """
        self.executor.close()
        setup = self.setup
        if self._hosts is not None:
            from longspan.losses import on_live_hosts  # noqa: PLC0415 - needed for several hosts only

            setup = on_live_hosts(setup, self._wanted, self._hosts, self._on)
        self._continue_with(setup)

    def can_grow(self) -> bool:
        """Return True if `restart` would use more hosts than now, because hosts have returned or are new."""
        if self._hosts is None:
            return False
        from longspan.losses import can_grow  # noqa: PLC0415 - needed for several hosts only

        return can_grow(self.setup, self._wanted, self._hosts, self._on)

    def _continue_with(self, setup: ResolvedEngine) -> None:
        """Start new workers, also for another fleet. Every request resumes."""
        change = None
        if setup is not self.setup:
            from longspan.core.regrouping import Change  # noqa: PLC0415 - most fleets stay

            change = Change.to(setup.config, setup.policy)
        config = self.engine.config if change is None else setup.config
        if self.tiers is not None:
            self.tiers.renew(config.cluster)
        self.executor = self._start_workers(config.cluster)
        self._prepare(self.executor, config)
        lost_pools = {} if self.tiers is None else self.tiers.lost_pools(config.cluster)
        self.engine.restart(self.executor, change)
        if self.tiers is not None and lost_pools:
            self.tiers.replace_pools(lost_pools, self.engine.kv, cluster=config.cluster)
        self._set(setup)

    def _start_workers(self, cluster: Cluster) -> WorkerExecutor:
        """Start the workers of a cluster. Raise WorkerLostError if one does not start."""
        first, step_timeout_s = self._worker_config, self.setup.given.step_timeout_s
        memory, threads = () if self.tiers is None else self.tiers.memory, first.threads_among(cluster.num_ranks)
        config = msgspec.structs.replace(first, cluster=cluster, num_threads=threads, host_memory=memory)
        return WorkerExecutor(self._launcher(config), step_timeout_s=step_timeout_s, tiers=self.tiers)

    def shrink(self, *ranks: int) -> None:
        """Remove the instances of lost ranks. Start new workers for as many other instances as the policy can use.

        Each rank has its number in the cluster without the instances of the previous ranks.

        Raises:
            ParameterError: a role or phase would have no instance, or the policy does not support fewer.
            WorkerLostError: a worker does not start.
        """
        from longspan.losses import without_ranks  # noqa: PLC0415 - most fleets stay

        setup = without_ranks(self.setup, ranks, self.engine.config.fleet, self._on)
        self.executor.close()
        self._continue_with(setup)
        self._wanted = setup.config.fleet

    def reshard(self, spec: str, changes: Mapping[str, str | None] = MappingProxyType({})) -> None:
        """Move the workers to their places in another fleet while requests go on, see `Engine.reshard`.

        Missing workers start, and unused workers stay idle until the next change.

        Args:
            spec: the parallel spec. With roles or phases it is `A prefill + B decode`.
            changes: options of the policy that change at the same time. None removes an option.

        Raises:
            ParameterError: the model, the policy or the hosts do not support the spec, or the fleet cannot lose a
                worker although none is replaced.
            RuntimeError: another change is under way.
        """
        from longspan.core.regrouping import Change  # noqa: PLC0415 - most fleets stay

        check_text("parallel", spec)
        chosen = replace(self.setup, choice=self.setup.choice.changed(changes))
        setup = self._on(chosen, chosen.fleet_of(spec, self.engine.config.cluster))
        self._check_smaller(setup, spec)
        self.engine.reshard(Change.to(setup.config, setup.policy))
        self._wanted = setup.config.fleet
        self._set(setup)

    def _on(self, setup: ResolvedEngine, fleet: Fleet) -> ResolvedEngine:
        """Resolve the chosen policy for another fleet."""
        return setup.on(fleet, self._worker_config.threads_among(fleet[0].num_ranks))

    def _check_smaller(self, setup: ResolvedEngine, spec: str | None = None) -> None:
        """Raise ParameterError if no worker is replaced, but the engine cannot lose any of its instances."""
        if self._max_worker_restarts == 0:
            from longspan.losses import check_smaller  # noqa: PLC0415 - rarely needed

            check_smaller(setup, self._on, spec)

    def reset_prefix_cache(self) -> None:
        """Remove the KV of finished requests, also from disks. Raise RuntimeError if requests are unfinished."""
        self.engine.settle(_SETTLE_S)
        self.engine.reset_prefix_cache()
        if self.tiers is not None:
            self.tiers.clear()

    def close(self) -> None:
        """Save KV to disks, stop the workers, and write the files of a recording. Can be called again."""
        self.executor.wakeup = None
        if self.engine.config.cluster.disk_blocks and not self.executor.closed:
            with suppress(WorkerLostError):
                if not self.engine.settle(_SETTLE_S):
                    _log.warning("some KV was not saved, since that takes more than %g s", _SETTLE_S)
        self.executor.close()
        self._acquired.close()
        self.stop_recording()


def _processes(config: WorkerConfig) -> Launcher:
    from longspan.runtime.executor.processes import ProcessLauncher  # noqa: PLC0415 - not for other launchers

    return ProcessLauncher(config)


def _worker_config(setup: ResolvedEngine, cluster: Cluster) -> WorkerConfig:
    given, files, placement = setup.given, setup.model.files, setup.placement
    hosts_attend = given.device != "cpu" and bool(cluster.host_blocks)
    return WorkerConfig(
        files=files,
        cluster=cluster,
        device=given.device,
        num_threads=setup.threads,
        max_threads=given.threads_per_rank if placement is None else placement.threads,
        block_size=given.block_size,
        kernels=setup.model.kernels,
        host_kernels=kernels_of("auto", "cpu", files.dtype)[0] if hosts_attend else None,
        enforce_eager=given.enforce_eager,
        record_times=given.record_times,
    )


def _load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    from longspan.text.tokenizer import load_tokenizer  # noqa: PLC0415 - not for token ids alone

    return load_tokenizer(files)
