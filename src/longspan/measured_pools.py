"""KV pools of CUDA devices, which workers size by their free memory when an engine starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.steps import Reshard
from longspan.errors import OutOfMemoryError
from longspan.pool_sizes import memory_remedy
from longspan.resolve import ResolvedEngine
from longspan.runtime.device_memory import DeviceMemory, largest_step
from longspan.runtime.executor.control_plane import WorkerExecutor


def start_measured(
    setup: ResolvedEngine,
    start_workers: Callable[[Cluster], WorkerExecutor],
    prepare: Callable[[WorkerExecutor, EngineConfig], None],
    acquired: ExitStack,
) -> tuple[WorkerExecutor, ResolvedEngine]:
    """Start the workers, which measure the memory for KV, and create pools of that size.

    Args:
        prepare: prepares decode steps, for which memory must be left.
        acquired: closes the workers if the start fails later.

    Raises:
        ValueError: a device has too little memory.
        WorkerLostError: a worker does not start.
    """
    cluster, largest = largest_step(setup.config, setup.model.info.context_length)
    try:
        executor = acquired.enter_context(start_workers(cluster))
        memory = DeviceMemory(cluster=cluster, record=setup.model.record, ranks=executor.measure(largest))
        place = setup.placement
        setup = ResolvedEngine.of(setup.given, setup.model, kv_bytes=memory.kv_bytes, placement=place)
        executor.run(Reshard(number=0, cluster=setup.config.cluster))
        prepare(executor, setup.config)
    except OutOfMemoryError as error:
        step = f"a step of {setup.config.max_num_batched_tokens} tokens"
        problem = f"the device of rank {error.rank} has too little memory for the model and {step}"
        raise ValueError(f"{problem}: {memory_remedy(setup.given)}; {error.reason}") from error
    return executor, setup
