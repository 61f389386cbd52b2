"""Prompts that devices compute before requests arrive, since the first calls load libraries and compile kernels.

`AttentionBackend.prepare` makes the plans of further lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.core.blocks import BlockRef
from longspan.core.config import EngineConfig
from longspan.core.exchange import LOCAL
from longspan.core.runs import Run
from longspan.core.steps import Forward, Free, Part, Sample, Sampling

if TYPE_CHECKING:
    from longspan.runtime.executor.control_plane import WorkerExecutor

_LENGTHS = (128, 8192)
"""A short and a long prompt have different kernels."""


def prompt_part(config: EngineConfig, instance: int, request_id: int, length: int, sampling: Sampling) -> Part:
    """Return a prompt of token 0 on one instance, in its first blocks. Its results are not used."""
    return Part(
        request_id=request_id,
        start=0,
        stop=length,
        tokens=[0] * length,
        group=(instance,),
        runs=((Run(0, length),),),
        exchange=LOCAL,
        first_block=0,
        blocks=tuple(BlockRef(instance, block) for block in range(-(-length // config.block_size))),
        sample=Sample(instance=instance, position=length),
        sampling=sampling,
        targets=[0] * (length - 1),
        rope_length=config.rope_length(length),
    )


def warm_up_lengths(config: EngineConfig) -> list[int]:
    """Return the lengths, as far as they fit a step, the context and every pool."""
    longest = min(
        config.max_num_batched_tokens, config.max_model_len - 1, min(config.cluster.num_blocks) * config.block_size
    )
    return sorted({min(length, longest) for length in _LENGTHS})


def warm_up(executor: WorkerExecutor, config: EngineConfig) -> None:
    """Compute a prompt of each length on all instances. Raises WorkerLostError as `WorkerExecutor.run` does."""
    for length in warm_up_lengths(config):
        instances = tuple(config.cluster.instances)
        parts = tuple(prompt_part(config, instance, instance, length, Sampling(seed=0)) for instance in instances)
        executor.run(Forward(number=0, parts=parts))
        executor.submit(Free(number=0, request_ids=instances))
