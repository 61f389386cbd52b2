"""Device memory measured by the ranks: run the largest step, then size the KV pools from the remaining memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.kv_record import KvRecord
from longspan.core.splits import cut_evenly
from longspan.core.steps import Forward, Sampling
from longspan.cost.memory import USED_MEMORY
from longspan.runtime.messages import RankMemory
from longspan.runtime.pool import move_bytes
from longspan.runtime.warm_up import prompt_part

_COPIES_ALONE, _COPIES_EXCHANGED = 1, 3
"""Temporary copies of the largest layer's KV: attention gathers one. Exchanges also send one and receive one."""
_LARGEST = Sampling(seed=0, temperature=1.0, top_p=0.5, repetition_penalty=1.1, logprobs=0, prompt_logprobs=0)
"""The sampling parameters with the largest memory use."""


class MemoryProbe(Protocol):
    """Measures the memory of one rank's device.

    Attributes:
        num_devices: number of devices. Ranks are assigned round-robin.
    """

    num_devices: int

    def begin(self) -> None:
        """Free unused memory and start to measure."""

    def step_bytes(self) -> int:
        """Free unused memory. Return the peak since `begin`, minus the memory still in use."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the device's free bytes, over all processes, and its total bytes."""


class CudaMemory:
    """Measures memory with the statistics of PyTorch's CUDA allocator and the driver's free memory.

    Args:
        num_devices: number of devices of all ranks. None: the devices that this process sees.
    """

    def __init__(self, device: torch.device, num_devices: int | None = None) -> None:
        self._device, self.num_devices = device, num_devices or torch.cuda.device_count()

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
    """Build one rank's report after the largest step."""
    step_bytes = probe.step_bytes()
    free, total = probe.free_and_total()
    return RankMemory(
        available_bytes=free - total + int(USED_MEMORY * total),
        pool_bytes=pool_bytes,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        num_devices=probe.num_devices,
    )


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The measured memory of a cluster's ranks, in order, including spare ranks.

    Attributes:
        record: of a KV block of the whole model.
    """

    cluster: Cluster
    record: KvRecord
    ranks: tuple[RankMemory, ...]

    def kv_bytes(self, cluster: Cluster, instance: int, weight_bytes: int) -> int:
        """Return the KV memory per rank of an instance: the minimum over its ranks. Negative if memory is too small.

        Splits that were not measured are taken to need `weight_bytes` of weights and the step memory of the measured
        ranks with the largest shares. That memory is scaled up for larger shares.
        """
        usable = self._usable_by(cluster, instance, weight_bytes) - move_bytes(cluster)
        copies = _COPIES_ALONE if cluster.num_instances == 1 else _COPIES_EXCHANGED
        stages = (self.record.of_layers(cluster.layers(instance, stage)) for stage in range(cluster.pp(instance)))
        fullest = max(stages, key=lambda record: record.block_bytes)
        copied = copies * max(layer.block_bytes for layer in fullest.layers)
        return usable * fullest.block_bytes // (fullest.block_bytes + copied)

    def _usable_by(self, cluster: Cluster, instance: int, weight_bytes: int) -> int:
        before, usable = self.cluster, [self._usable(rank, cluster.num_ranks) for rank in range(len(self.ranks))]
        splits = {rank: (before.tp(i), before.pp(i)) for i in before.instances for rank in before.ranks(i)}
        tp, pp = cluster.tp(instance), cluster.pp(instance)
        alike = [rank for rank, split in splits.items() if split == (tp, pp)]
        if alike:
            return min(usable[rank] - self.ranks[rank].weight_bytes - self.ranks[rank].step_bytes for rank in alike)
        step_bytes = max(self.ranks[rank].step_bytes * max(tp, shards) // tp for rank, (shards, _) in splits.items())
        return min(usable) - weight_bytes - step_bytes

    def _usable(self, rank: int, num_ranks: int) -> int:
        """Return the bytes for weights, steps and KV of one of `num_ranks` ranks, on the device of `rank`."""
        memory = self.ranks[rank]
        neighbours = self.ranks[rank % memory.num_devices :: memory.num_devices]
        device_bytes = memory.available_bytes + sum(other.pool_bytes + other.weight_bytes for other in neighbours)
        return device_bytes // -(-num_ranks // memory.num_devices)


def largest_step(config: EngineConfig, context_length: int) -> tuple[Cluster, Forward]:
    """Return the largest step, and the cluster with the smallest pools for it.

    Every instance computes the maximum number of tokens and samples the maximum number of requests. All requests
    write to the same blocks, since their results are not used.
    """
    cluster, num_tokens = config.cluster, config.max_num_batched_tokens
    num_singles = min(config.max_num_seqs, num_tokens) - 1
    cuts = cut_evenly(num_tokens - num_singles, -(-(num_tokens - num_singles) // context_length))
    lengths = [stop - start for start, stop in cuts] + [1] * num_singles
    num_blocks = -(-lengths[0] // config.block_size)
    parts = [
        prompt_part(config, instance, instance * len(lengths) + number, length, _LARGEST)
        for instance in cluster.instances
        for number, length in enumerate(lengths)
    ]
    return cluster.with_blocks([num_blocks] * cluster.num_instances), Forward(number=0, parts=tuple(parts))
