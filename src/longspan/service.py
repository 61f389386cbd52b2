"""A model with its workers and its engine: what `LLM` and the server have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from longspan.args import EngineArgs
from longspan.core.checks import check_text
from longspan.core.cluster import Cluster
from longspan.core.engine import Engine
from longspan.core.fleets import Fleet, parts, without
from longspan.core.kv_record import KvRecord
from longspan.core.options import PolicySettings
from longspan.core.regrouping import Change
from longspan.core.sparse import is_tuned
from longspan.cost.profile_key import ProfileKey
from longspan.errors import OutOfMemoryError, ParameterError, WorkerLostError
from longspan.model.files import ModelFiles, cache_root
from longspan.model.store import DTYPES
from longspan.policy.facts import Facts
from longspan.pool_sizes import by_rule, measures_memory, memory_remedy, unbounded
from longspan.resolve import ResolvedEngine, check_windows, kernels_of
from longspan.runtime.executor.control_plane import Launcher, MonotonicClock, WorkerExecutor
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.messages import WorkerConfig
from longspan.text.input_processor import InputProcessor
from longspan.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from longspan.runtime.disk_pool import DiskPool
    from longspan.runtime.host_pool import HostMemory

_SETTLE_S = 5.0
"""KV has so long to reach the disk before the workers are stopped."""
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
        """Do the work of the constructor; `acquired` gets all that must be released if it fails."""
        is_open = measures_memory(given)
        self.setup = setup = ResolvedEngine.of(given, kv_bytes=unbounded if is_open else by_rule(given))
        cluster = setup.config.cluster
        self.files, self.info, self.block_bytes = setup.model.files, setup.model.info, setup.model.record.block_bytes
        tokenizer = None if given.skip_tokenizer_init else load_tokenizer(self.files)
        self._host_memory: list[HostMemory] = []
        self._disks: dict[int, DiskPool] = {}
        if cluster.host_blocks:
            self._host_memory = _map_hosts(cluster, self.block_bytes, acquired)
        if cluster.disk_blocks:
            self._disks = _open_disks(given, self.files, setup.model.record, cluster, self._host_memory, acquired)
        self._worker_config = WorkerConfig(
            files=self.files,
            cluster=cluster,
            device=given.device,
            num_threads=setup.threads,
            most_threads=given.threads_per_rank,
            block_size=given.block_size,
            kernels=setup.model.kernels,
            host_kernels=_host_kernels(given, self.files.dtype, cluster),
            enforce_eager=given.enforce_eager,
            record_times=given.record_times,
            host_memory=tuple(memory.path for memory in self._host_memory),
        )
        self._start_workers: Callable[[Cluster], WorkerExecutor] = lambda cluster: WorkerExecutor(
            launcher(self._config_for(cluster)),
            step_timeout_s=given.step_timeout_s,
            disks=self._disks,
        )
        if self._max_worker_restarts == 0:
            self._check_losses(setup)
        if is_open:
            self.setup = setup = self._with_measured_pools(setup, acquired)
        else:
            self.executor = acquired.enter_context(self._with_given_pools(cluster))
        config, policy = setup.config, setup.policy
        csa = setup.choice.given.get("csa", "")
        self._tuned = csa if is_tuned(csa) else None
        if self.hint is not None:
            _log.info(self.hint)
        longest = config.longest(policy)
        if given.max_model_len is None and longest < self.info.context_length:
            where = "on devices"
            if cluster.host_blocks and (config.turns or policy.reads_hosts):
                where += f", {'or' if config.turns else 'and'} on the host (host_kv_gib),"
            words = "the KV pools %s hold %d tokens, less than the model's context of %d"
            _log.info(words, where, longest, self.info.context_length)
        self.input_processor = InputProcessor(
            tokenizer=tokenizer, vocab_size=self.info.vocab_size, max_model_len=longest
        )
        saved = [disk.contents() for disk in self._disks.values()]
        self.engine = Engine(policy=policy, executor=self.executor, clock=MonotonicClock(), config=config, saved=saved)

    def _with_given_pools(self, cluster: Cluster) -> WorkerExecutor:
        """Start the workers; raise ValueError when the memory for their pools, or for the model, is not there."""
        try:
            return self._start_workers(cluster)
        except OutOfMemoryError as error:
            problem = (
                f"rank {error.rank} has too little memory for the model and its KV: {memory_remedy(self.setup.given)}"
            )
            raise ValueError(f"{problem}; {error.reason}") from error

    def _with_measured_pools(self, setup: ResolvedEngine, acquired: ExitStack) -> ResolvedEngine:
        """Start the workers, which measure what memory KV may take, and gives them such pools.

        Raises:
            ValueError: when devices have too little memory.
            WorkerLostError: when a worker does not start.
        """
        from longspan.runtime.device_memory import DeviceMemory, largest_step  # noqa: PLC0415 - CUDA devices alone

        cluster, largest = largest_step(setup.config, self.info.context_length)
        try:
            self.executor = acquired.enter_context(self._start_workers(cluster))
            found = DeviceMemory(cluster=cluster, record=setup.model.record, ranks=self.executor.measure(largest))
            setup = setup.with_pools_of(found.kv_bytes)
            self.executor.change_pools(setup.config.cluster)
        except OutOfMemoryError as error:
            step = f"a step of {setup.config.max_num_batched_tokens} tokens"
            problem = f"the device of rank {error.rank} has too little memory for the model and {step}"
            raise ValueError(f"{problem}: {memory_remedy(setup.given)}; {error.reason}") from error
        return setup

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Change the policy between requests; cached KV and the size of steps stay.

        Raises:
            ValueError: for an unknown policy, or options that it cannot work with.
            RuntimeError: when requests are unfinished.
        """
        if "csa" in options:
            from longspan.csa_file import csa_settings  # noqa: PLC0415 - exact attention needs no settings

            options = {**options, "csa": csa_settings(options["csa"], self.setup.given.model)}
        setup = self.setup.with_policy(policy, options)
        self.engine.set_policy(setup.policy)
        self._take(setup)

    def _take(self, setup: ResolvedEngine) -> None:
        """Check the requests to come by other options of the engine. They are in force, or will be after a change."""
        self.setup = setup
        self.input_processor.max_model_len = setup.config.longest(setup.policy)

    @property
    def facts(self) -> Facts:
        """The facts of the model, the hardware and the present cluster, which policies go by."""
        return self.setup.facts

    @property
    def max_model_len(self) -> int:
        """The longest request to come, prompt and output together, in tokens. A change under way counts as made."""
        return self.input_processor.max_model_len

    @property
    def profile_key(self) -> ProfileKey:
        return self.setup.profile_key

    @property
    def hint(self) -> str | None:
        """Advice of the policy about options that were not given."""
        return self.setup.policy.hint

    @property
    def policy_settings(self) -> PolicySettings:
        """The policy's name and options."""
        return self.setup.policy.settings

    def update_policy(self, options: Mapping[str, str | None]) -> None:
        """Change options of the policy between steps; None takes one back. Requests that run stay as they are.

        The `csa` that is `auto` is the tuned file that was given at the start, or else the package's.

        Raises:
            ValueError: for an option that it lacks or that may not change, or a bad value; nothing has changed then.
        """
        from longspan.csa_file import AUTO, csa_settings  # noqa: PLC0415 - exact attention needs no settings

        if options.get("csa") == AUTO:
            options = {**options, "csa": self._tuned or csa_settings(AUTO, self.setup.given.model)}
        check_windows(self.info, options.get("csa") or "off")
        policy, choice = self.setup.policy, self.setup.choice
        policy.update(options)
        self.setup = replace(self.setup, choice=choice.updated(policy))

    def restart(self) -> None:
        """Start new workers in place of lost ones; every request goes on where it was.

        Raises:
            WorkerLostError: when a worker does not start.
        """
        self.executor.close()
        self.executor = self._start_workers(self.engine.config.cluster)
        self.engine.restart(self.executor)

    def _config_for(self, cluster: Cluster) -> WorkerConfig:
        """Return the options of workers that start with this cluster."""
        first = self._worker_config
        return msgspec.structs.replace(first, cluster=cluster, num_threads=first.threads_among(cluster.num_ranks))

    def shrink(self, *ranks: int) -> None:
        """Go on without the instances of lost ranks: start new workers for as many others as the policy can use.

        Each rank has its number in the cluster without the instances of the ranks before it.

        Raises:
            ParameterError: no instance of a role or phase would be left, or the policy cannot do with fewer.
            WorkerLostError: when a worker does not start.
        """
        fleet = self.engine.config.fleet
        for rank in ranks:
            fleet = without(fleet, rank)
        setup = self._largest_part(self.setup, fleet)
        self.executor.close()
        self.executor = self._start_workers(setup.config.cluster)
        self.engine.restart(self.executor, Change.to(setup.config, setup.policy))
        self._take(setup)

    def reshard(self, spec: str, changes: Mapping[str, str | None] = MappingProxyType({})) -> None:
        """Move the workers to their places in another fleet while requests go on, see `Engine.reshard`.

        Further workers start if the spec needs more. Workers that it does not need wait for the next change.

        Args:
            spec: the parallel spec. With roles or phases it is `A prefill + B decode`.
            changes: options of the policy that change at the same time. None takes one back.

        Raises:
            ParameterError: for a spec that model, policy or hosts cannot do with, or that could not serve without a
                lost worker where none is replaced.
            RuntimeError: while another change is under way.
        """
        check_text("parallel", spec)
        chosen = replace(self.setup, choice=self.setup.choice.changed(changes))
        setup = self._on(chosen, chosen.fleet_of(spec, self.engine.config.cluster))
        reason = self._why_not_smaller(setup) if self._max_worker_restarts == 0 else None
        if reason is not None:
            problem = (
                f"{spec} cannot serve without a lost worker, and max_worker_restarts is 0 ({reason}): choose more "
                "instances, or start anew with max_worker_restarts of 1 or more"
            )
            raise ParameterError("parallel", problem, spec)
        self.engine.reshard(Change.to(setup.config, setup.policy))
        self._take(setup)

    def _on(self, setup: ResolvedEngine, fleet: Fleet) -> ResolvedEngine:
        """Resolve the choice of a policy for another fleet."""
        return setup.on(fleet, self._worker_config.threads_among(fleet[0].num_ranks))

    def _largest_part(self, setup: ResolvedEngine, fleet: Fleet) -> ResolvedEngine:
        """Resolve the largest part of a fleet that the policy can serve on. Raise its last error if there is none."""
        refused: ValueError | None = None
        for part in parts(fleet):
            try:
                return self._on(setup, part)
            except ValueError as error:
                refused = error
        assert refused is not None, "a fleet has parts"
        raise refused

    def _check_losses(self, setup: ResolvedEngine) -> None:
        """Raise ParameterError when no instances would serve after the loss of a worker."""
        if (reason := self._why_not_smaller(setup)) is not None:
            problem = f"is 0, but without a lost worker the others cannot serve ({reason}): allow 1 or more"
            raise ParameterError("max_worker_restarts", problem, 0)

    def _why_not_smaller(self, setup: ResolvedEngine) -> str | None:
        """Return why an engine cannot serve without one of its workers. None if it can without each of them."""
        cluster = setup.config.cluster
        try:
            for instance in cluster.instances:
                self._largest_part(setup, without(setup.config.fleet, cluster.ranks(instance).start))
        except ValueError as error:
            return str(error)
        return None

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests, also what is saved; raise RuntimeError when some are unfinished."""
        self.engine.settle(_SETTLE_S)
        self.engine.reset_prefix_cache()
        for disk in self._disks.values():
            disk.clear()

    def close(self) -> None:
        """Save what is to be saved, stop the workers and releases the memory of hosts; can be called again."""
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


def _host_kernels(given: EngineArgs, dtype: str, cluster: Cluster) -> Path | None:
    """Return the compiled kernels by which hosts of other devices compute, if they have KV."""
    if given.device == "cpu" or not cluster.host_blocks:
        return None
    return kernels_of("auto", "cpu", dtype)


def _map_hosts(cluster: Cluster, block_bytes: int, acquired: ExitStack) -> list[HostMemory]:
    """Map the memory of the KV pool of each host."""
    from longspan.runtime.host_pool import HostMemory  # noqa: PLC0415 - an engine with a host tier alone

    return [acquired.enter_context(closing(HostMemory(num_blocks * block_bytes))) for num_blocks in cluster.host_blocks]


def _open_disks(
    given: EngineArgs,
    files: ModelFiles,
    record: KvRecord,
    cluster: Cluster,
    host_memory: Sequence[HostMemory],
    acquired: ExitStack,
) -> dict[int, DiskPool]:
    """Open the pool on the disk of each host, by its number. What depends on the model or on the size of blocks is in
    a folder of its own; so is each host.
    """
    from longspan.runtime.disk_pool import DiskPool  # noqa: PLC0415 - an engine with a disk tier alone
    from longspan.runtime.host_pool import map_blocks  # noqa: PLC0415

    model, dtype = f"{files.weights.parent.name}-{given.block_size}", DTYPES[files.dtype]
    folder = cache_root() / "kv" if given.disk_kv_dir is None else Path(given.disk_kv_dir).expanduser()
    disks = {}
    for host, (pool, num_blocks) in enumerate(zip(cluster.disk_pools, cluster.disk_blocks, strict=True)):
        size, memory = cluster.host_blocks[host], host_memory[host].path
        blocks = map_blocks(memory, record, num_blocks=size, block_size=given.block_size, dtype=dtype)
        path = folder / model / f"host-{host}"
        disks[pool] = acquired.enter_context(closing(DiskPool(path, model, num_blocks=num_blocks, host=blocks)))
    return disks
