"""The memory of devices, as their ranks measure it: they compute the largest step, and KV gets what that leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.exchange import LOCAL
from longspan.core.kv_record import KvRecord
from longspan.core.runs import Run
from longspan.core.splits import cut_evenly
from longspan.core.steps import Forward, Part, Sample, Sampling
from longspan.cost.memory import USED_MEMORY
from longspan.runtime.messages import RankMemory
from longspan.runtime.pool import move_bytes

_COPIES_ALONE, _COPIES_EXCHANGED = 1, 3
"""Copies of the largest layer's KV: one is gathered from its blocks. Exchanges receive one, and send one."""
_LARGEST = Sampling(seed=0, temperature=1.0, top_p=0.5, repetition_penalty=1.1, logprobs=0, prompt_logprobs=0)
"""The sampling that takes most memory; the answer does not matter."""


class MemoryProbe(Protocol):
    """Counts the memory of one rank's device.

    Attributes:
        num_devices: the devices that ranks are on, one after the other.
    """

    num_devices: int

    def begin(self) -> None:
        """Frees what nobody uses, and begins to count."""

    def step_bytes(self) -> int:
        """Frees what nobody uses; returns how much more than what is left then was taken at most since `begin`."""

    def free_and_total(self) -> tuple[int, int]:
        """Returns the bytes of the device that no process has taken, and all of them."""


class CudaMemory:
    """Counts what PyTorch's allocator took from a CUDA device, and what the driver says is free."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.num_devices = device, torch.cuda.device_count()

    def begin(self) -> None:
        self._free()
        torch.cuda.reset_peak_memory_stats(self._device)

    def step_bytes(self) -> int:
        self._free()
        return torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)

    def _free(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def measured(probe: MemoryProbe, *, pool_bytes: int, weight_bytes: int) -> RankMemory:
    """Returns what one rank finds after the largest step."""
    step_bytes = probe.step_bytes()
    free, total = probe.free_and_total()
    return RankMemory(
        room_bytes=free - total + int(USED_MEMORY * total),
        pool_bytes=pool_bytes,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        num_devices=probe.num_devices,
    )


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory that the ranks of a cluster found, in their order; spare ones too.

    Attributes:
        record: of a KV block of the whole model.
    """

    cluster: Cluster
    record: KvRecord
    ranks: tuple[RankMemory, ...]

    def kv_bytes(self, cluster: Cluster, instance: int, weight_bytes: int) -> int:
        """Returns what the KV of each rank of an instance may take, of a cluster on these devices: the least that a
        rank has left. It is negative when there is less than the rest takes.

        Ranks that were not measured with such a share have `weight_bytes` of weights, and for steps as much as those
        with the largest shares, or more if their own are larger.
        """
        left = self._left(cluster, instance, weight_bytes) - move_bytes(cluster)
        copies = _COPIES_ALONE if cluster.num_instances == 1 else _COPIES_EXCHANGED
        stages = (self.record.of_layers(cluster.layers(instance, stage)) for stage in range(cluster.pp(instance)))
        fullest = max(stages, key=lambda record: record.block_bytes)
        copied = copies * max(layer.block_bytes for layer in fullest.layers)
        return left * fullest.block_bytes // (fullest.block_bytes + copied)

    def _left(self, cluster: Cluster, instance: int, weight_bytes: int) -> int:
        before, rooms = self.cluster, [self._room(rank, cluster.num_ranks) for rank in range(len(self.ranks))]
        splits = {rank: (before.tp(i), before.pp(i)) for i in before.instances for rank in before.ranks(i)}
        tp, pp = cluster.tp(instance), cluster.pp(instance)
        alike = [rank for rank, split in splits.items() if split == (tp, pp)]
        if alike:
            return min(rooms[rank] - self.ranks[rank].weight_bytes - self.ranks[rank].step_bytes for rank in alike)
        step_bytes = max(self.ranks[rank].step_bytes * max(tp, shards) // tp for rank, (shards, _) in splits.items())
        return min(rooms) - weight_bytes - step_bytes

    def _room(self, rank: int, num_ranks: int) -> int:
        """Returns what one of so many ranks has for weights, steps and KV on the device of this one."""
        found = self.ranks[rank]
        own = [self.ranks[other] for other in range(rank % found.num_devices, len(self.ranks), found.num_devices)]
        room = found.room_bytes + sum(one.pool_bytes + one.weight_bytes for one in own)
        return room // -(-num_ranks // found.num_devices)


def largest_step(config: EngineConfig, context_length: int) -> tuple[Cluster, Forward]:
    """Returns a step in which every instance computes as many tokens, and samples as many, as it may at once, and the
    cluster with pools that are just large enough for that.

    Its requests write to the same blocks: nobody reads what they compute.
    """
    cluster, num_tokens = config.cluster, config.max_num_batched_tokens
    num_singles = min(config.max_num_seqs, num_tokens) - 1
    cuts = cut_evenly(num_tokens - num_singles, -(-(num_tokens - num_singles) // context_length))
    lengths = [stop - start for start, stop in cuts] + [1] * num_singles
    num_blocks = -(-lengths[0] // config.block_size)
    parts = [
        Part(
            request_id=instance * len(lengths) + number,
            start=0,
            stop=length,
            tokens=[0] * length,
            group=(instance,),
            runs=((Run(0, length),),),
            exchange=LOCAL,
            first_block=0,
            blocks=tuple(BlockRef(instance, block) for block in range(-(-length // config.block_size))),
            sample=Sample(instance=instance, position=length),
            sampling=_LARGEST,
            targets=[0] * (length - 1),
            rope_length=config.rope_length(length),
        )
        for instance in cluster.instances
        for number, length in enumerate(lengths)
    ]
    return cluster.with_blocks([num_blocks] * cluster.num_instances), Forward(number=0, parts=tuple(parts))
