"""A model with its workers and its engine: what `LLM` and the server have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar, Self, get_args

from longspan import args
from longspan.args import Arguments, unpacked
from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig, capacity_tokens
from longspan.core.engine import Engine
from longspan.core.protocols import EnginePolicy
from longspan.core.steps import Link
from longspan.cost.architecture import ModelShape, typical_hardware
from longspan.cost.profile import ProfileKey
from longspan.model.info import ModelInfo
from longspan.model.source import prepare
from longspan.model.store import DTYPES, read_info
from longspan.policy import make_policy
from longspan.policy.choosing import Facts
from longspan.policy.spec import PolicySettings
from longspan.policy.tetris.policy import hint_of_a_constant_rate
from longspan.profiling.store import load_partitions, load_profile, profile_key_of
from longspan.runtime.executor.control_plane import Launcher, MonotonicClock, WorkerExecutor, start_workers
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.messages import WorkerConfig
from longspan.text.input_processor import InputProcessor

_log = logging.getLogger("longspan")


class Deployment:
    """A model served by worker processes; close it with `shutdown`, or use it as a context manager.

    Args:
        given: what `Arguments` has, `model` first and the others by name.

    Raises:
        ValueError: for a wrong argument, an unknown or unsupported model, or too little memory.
        WorkerLostError: when a worker does not start.
    """

    launcher: ClassVar[Callable[[Sequence[WorkerConfig]], Launcher]] = ProcessLauncher
    """How workers are started; a subclass with `ThreadLauncher` has them in this process."""

    @unpacked(Arguments)
    def __init__(self, given: Arguments) -> None:
        given.check()
        cluster, options = given.cluster, given.policy_options or {}
        cheap = Facts(cluster=cluster)
        make_policy(given.policy, num_instances=cluster.num_instances, options=options, facts=cheap)
        kernel = args.attention_kernel(given.attention_backend, given.device, given.dtype)  # compiles: checks first
        self.files = files = prepare(
            given.model,
            dtype=given.dtype,
            load_format=given.load_format,
            seed=given.seed,
            trust_remote_code=given.trust_remote_code,
        )
        tokenizer = None if given.skip_tokenizer_init else args.require_tokenizer(files)
        self.info = read_info(files.weights)
        args.check_split(self.info, files, cluster, options)
        self.profile_key = profile_key_of(
            files, given.device, tp=cluster.spec.tp, threads=given.threads, native=kernel is not None
        )
        self.facts = _facts(self.profile_key, self.info.shape(DTYPES[given.dtype].itemsize), given)
        self._policy = make_policy(given.policy, num_instances=cluster.num_instances, options=options, facts=self.facts)
        if (hint := hint_of_a_constant_rate(self._policy.settings, has_roles=cluster.has_roles)) is not None:
            _log.info(hint)
        self._cluster = cluster.with_blocks(args.num_blocks(self.info, files, given))
        config = _config(given, self.info, self._policy, self._cluster)
        self.max_model_len = config.max_model_len
        self.input_processor = InputProcessor(
            tokenizer=tokenizer, vocab_size=self.info.vocab_size, max_model_len=self.max_model_len
        )
        self._start_workers = partial(
            start_workers,
            *(files, self._cluster, given.device, given.threads, given.block_size),
            launch=type(self).launcher,
            attention_kernel=kernel,
            record_times=given.record_times,
            step_timeout_s=given.step_timeout_s,
        )
        self.executor: WorkerExecutor = self._start_workers()
        self.engine = Engine(policy=self._policy, executor=self.executor, clock=MonotonicClock(), config=config)

    @property
    def bytes_exchanged(self) -> dict[str, int]:
        """Payload bytes that the ranks have sent so far, per exchange, and in `total`."""
        return self._bytes_over(get_args(Link))

    @property
    def bytes_between_hosts(self) -> dict[str, int]:
        """Those of `bytes_exchanged` that went from one host to another."""
        return self._bytes_over(("other_host",))

    def _bytes_over(self, links: Collection[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for (exchange, link), num_bytes in self.engine.bytes_sent.items():
            found[exchange] = found.get(exchange, 0) + (num_bytes if link in links else 0)
        return {**found, "total": sum(found.values())}

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank."""
        return self.executor.pids

    def worker_times(self) -> list[dict[str, float]]:
        """By rank, seconds in attention, linear layers, everything else, and waiting for messages and the controller.

        They count from the start to the latest step; empty without `record_times`.
        """
        return [dict(times) for times in self.executor.worker_times]

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Changes the policy between requests; cached KV stays.

        Raises:
            ValueError: for an unknown policy, or options that it cannot work with.
            RuntimeError: when requests are unfinished.
        """
        args.check_split(self.info, self.files, self._cluster, options)
        num_instances = self._cluster.num_instances
        chosen = make_policy(policy, num_instances=num_instances, options=options, facts=self.facts)
        self.engine.set_policy(chosen)
        self._policy = chosen

    @property
    def policy_settings(self) -> PolicySettings:
        """The policy's name and options."""
        return self._policy.settings

    def update_policy(self, options: Mapping[str, str]) -> None:
        """Changes options of the policy, between steps; requests that run stay as they are.

        Raises:
            ValueError: for an option that it lacks or that may not change, or a bad value; nothing has changed then.
        """
        self._policy.update(options)

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of finished requests, so that no prompt starts from any of it.

        Raises:
            RuntimeError: when requests are unfinished.
        """
        self.engine.reset_prefix_cache()

    def restart(self) -> None:
        """Starts new workers in place of lost ones; every request goes on where it was.

        Raises:
            WorkerLostError: when a worker does not start.
        """
        self.executor.close()
        self.executor = self._start_workers()
        self.engine.restart(self.executor)

    def shutdown(self) -> None:
        """Stops the workers; nothing of them is left. May be called again."""
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _facts(profile_key: ProfileKey, shape: ModelShape, given: Arguments) -> Facts:
    """With what was measured on this machine, if anything was."""
    profile = load_profile(profile_key)
    measured = None if profile is None else profile.hardware(shape)
    return Facts(
        shape=shape,
        hardware=measured or typical_hardware(profile_key.device, profile_key.threads),
        profile=profile,
        model=profile_key.model,
        partitions=load_partitions(profile_key),
        cluster=given.cluster,
    )


def _config(given: Arguments, info: ModelInfo, policy: EnginePolicy, cluster: Cluster) -> EngineConfig:
    capacity = capacity_tokens(policy, cluster, given.block_size)
    return EngineConfig(
        cluster=cluster,
        block_size=given.block_size,
        max_model_len=args.max_model_len(info.context_length, capacity, given.max_model_len),
        eos_token_ids=info.eos_token_ids,
        rope_switch_length=info.rope_switch_length,
        limits=given.limits,
        prefix_caching=given.enable_prefix_caching,
        max_steps_in_flight=2 if given.async_scheduling else 1,
        seed=given.seed,
    )
