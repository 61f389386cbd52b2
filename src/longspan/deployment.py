"""A model with its workers and its engine: what `LLM` and the server have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Self, get_args

from longspan import arguments
from longspan.core.config import EngineConfig, capacity_tokens
from longspan.core.engine import Engine
from longspan.core.fleet import Roles
from longspan.core.places import Place, hosts_of
from longspan.core.protocols import Limits, PolicySettings
from longspan.core.steps import Link
from longspan.cost.profile import Subject
from longspan.cost.shapes import ModelShape, typical_hardware
from longspan.jobs import JobMaker
from longspan.model.profiles import load_partitions, load_profile, subject_of
from longspan.model.source import prepare
from longspan.model.store import DTYPES, read_info
from longspan.policy import make_policy
from longspan.policy.choosing import Facts
from longspan.runtime.launch import start_workers
from longspan.runtime.local import LocalExecutor, MonotonicClock


class Deployment:
    """A model served by worker processes; close it with `shutdown`, or use it as a context manager.

    Args:
        model: the alias `smollm2-135m`, a local folder, or a hub id.
        instances, tp, pp: copies of the model and their inner split; or all three as `parallel="2xtp2"`.
        prefill_parallel, decode_parallel: instead, specs of instances that only prefill and of others that only decode.
        transfer_backends: how many transfers of KV a decode instance receives at once; by default one per prefill
            instance.
        threads_per_rank: CPU threads per worker; by default the cores are shared evenly.
        attention_backend: `native` is a kernel of our own, compiled on first use, for bfloat16 on CPUs with
            AVX512_BF16; `torch` is PyTorch's; `auto` takes the former where it can be had.
        policy: `auto`, `chunked`, `context`, `runahead`, `tetris` or `fixed-sp`, with `policy_options`.
        seed: of the random numbers of requests that bring no seed, and of dummy weights.
        skip_tokenizer_init: serve token ids only; no tokenizer files are needed.
        load_format: `auto`, or `dummy` for random weights.
        max_model_len: the longest request in tokens; by default the model's context.
        block_size: tokens per KV block.
        max_num_batched_tokens, max_num_seqs: bounds of one step per instance.
        kv_cache_memory_bytes, num_gpu_blocks_override: KV memory, or number of blocks, per instance (the latter on any
            device).
        enable_prefix_caching: reuse the KV of earlier requests that begin alike.
        async_scheduling: plan and send the next step while the present one runs.
        record_times: measure where workers spend their time, see `worker_times`; costs a little.
        step_timeout_s: a worker that has a step to run and completes none for so long is taken for lost.

    Raises:
        ValueError: for a wrong argument, an unknown or unsupported model, or too little memory.
        WorkerLostError: when a worker does not start.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        instances: int = 1,
        tp: int = 1,
        pp: int = 1,
        parallel: str | None = None,
        prefill_parallel: str | None = None,
        decode_parallel: str | None = None,
        transfer_backends: int | None = None,
        threads_per_rank: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        attention_backend: str = "auto",
        policy: str = "auto",
        policy_options: Mapping[str, str] | None = None,
        seed: int = 0,
        skip_tokenizer_init: bool = False,
        load_format: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 256,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = True,
        record_times: bool = False,
        trust_remote_code: bool = False,
        step_timeout_s: float = 300.0,
    ) -> None:
        fleet = arguments.fleet(parallel, instances, tp, pp, prefill_parallel, decode_parallel)
        roles = arguments.roles(fleet, transfer_backends)
        places = arguments.places(fleet.num_ranks)
        threads = arguments.threads_per_rank(threads_per_rank, fleet.num_ranks)
        arguments.check_device(device)
        arguments.at_least_one(
            block_size=block_size, max_model_len=max_model_len, num_gpu_blocks_override=num_gpu_blocks_override
        )
        arguments.check_timeout(step_timeout_s)
        limits = Limits(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        cheap = Facts(tp=fleet.spec.tp, roles=roles)
        make_policy(policy, num_instances=fleet.num_instances, options=policy_options or {}, facts=cheap)
        kernel = arguments.attention_kernel(attention_backend, device, dtype)  # compiles: after the cheap checks
        self.files = files = prepare(
            model, dtype=dtype, load_format=load_format, seed=seed, trust_remote_code=trust_remote_code
        )
        tokenizer = None if skip_tokenizer_init else arguments.require_tokenizer(files)
        self.info = read_info(files.weights)
        self._fleet = fleet
        arguments.check_split(self.info, files, fleet, policy_options or {})
        self.subject = subject_of(files, device, tp=fleet.spec.tp, threads=threads, native=kernel is not None)
        self.facts = _facts(
            self.subject,
            self.info.shape(DTYPES[dtype].itemsize),
            [places[fleet.ranks(i)[0]] for i in range(fleet.num_instances)],
            roles,
        )
        self._policy = chosen = make_policy(
            policy, num_instances=fleet.num_instances, options=policy_options or {}, facts=self.facts
        )
        num_blocks = arguments.num_blocks(
            *(self.info, files, device, fleet, block_size, kv_cache_memory_bytes),
            override=num_gpu_blocks_override,
            backends=0 if roles is None else roles.backends,
        )
        decode_blocks = None if roles is None else num_blocks[-1]
        capacity = capacity_tokens(chosen, num_blocks=num_blocks[0], block_size=block_size, decode_blocks=decode_blocks)
        self.max_model_len = arguments.max_model_len(self.info.context_length, capacity, max_model_len)
        self.jobs = JobMaker(tokenizer=tokenizer, vocab_size=self.info.vocab_size, max_model_len=self.max_model_len)
        self._start_workers = partial(
            start_workers,
            *(files, fleet, device, threads, num_blocks, block_size),
            hosts=hosts_of(places),
            attention_kernel=kernel,
            record_times=record_times,
            step_timeout_s=step_timeout_s,
        )
        self.executor: LocalExecutor = self._start_workers()
        self.engine = Engine(
            policy=chosen,
            executor=self.executor,
            clock=MonotonicClock(),
            config=EngineConfig(
                num_instances=fleet.num_instances,
                num_blocks=num_blocks[0],
                decode_blocks=decode_blocks,
                roles=roles,
                block_size=block_size,
                max_model_len=self.max_model_len,
                eos_token_ids=self.info.eos_token_ids,
                rope_switch_length=self.info.rope_switch_length,
                limits=limits,
                prefix_caching=enable_prefix_caching,
                max_steps_in_flight=2 if async_scheduling else 1,
                seed=seed,
            ),
        )

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
        arguments.check_split(self.info, self.files, self._fleet, options)
        num_instances = self._fleet.num_instances
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


def _facts(subject: Subject, shape: ModelShape, places: Sequence[Place], roles: Roles | None) -> Facts:
    """With what was measured on this machine, if anything was; `places` are those of the instances."""
    profile = load_profile(subject)
    measured = None if profile is None else profile.hardware(shape)
    return Facts(
        shape=shape,
        hardware=measured or typical_hardware(subject.device, subject.threads),
        profile=profile,
        model=subject.model,
        partitions=load_partitions(subject),
        tp=subject.tp,
        places=tuple(places),
        roles=roles,
    )
