"""A CUDA device copies blocks to and from page-locked memory of its host by itself. Substitutes show it on a CPU."""

from __future__ import annotations

import gc
import queue
from contextlib import closing
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from longspan.attn.spec import AttnSpec
from longspan.core.steps import MoveKV
from longspan.runtime.block_records import kv_record
from longspan.runtime.host_pool import map_blocks
from longspan.runtime.host_tiers import HostMemory
from longspan.runtime.messages import Moved
from longspan.runtime.move_channels import SwapLane


class FakeCudart:
    """Replaces `torch.cuda.cudart()`. Registration returns `error`."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.calls = error, list[tuple[object, ...]]()

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802 - as in CUDA
        self.calls.append(arguments)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - as in CUDA
        self.calls.append((address,))
        return 0


def cudart(error: int = 0) -> Any:
    return FakeCudart(error)


SPEC = AttnSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, window=None, softcap=None)


def test_host_pool_is_page_locked_once_and_as_long_as_it_is_used() -> None:
    """Views of layers and heads register nothing. The memory is mapped until it is unregistered."""
    record, cuda = kv_record([SPEC] * 3, 4, torch.float32), cudart()
    with closing(HostMemory(5 * record.block_bytes)) as memory:
        records = map_blocks(memory.path, record, num_blocks=5, block_size=4, dtype=torch.float32, cuda=cuda)
        views = [records.kv[layer].heads(range(1)) for layer in range(3)]
    address = records.kv[0].keys.data_ptr()
    assert cuda.calls == [(address, 5 * record.block_bytes, 0)]
    del records
    gc.collect()
    assert cuda.calls[1:] == [(address,)] and views[2].keys.sum() == 0


def test_host_pool_that_cannot_be_page_locked_names_its_option() -> None:
    record, cuda = kv_record([SPEC], 4, torch.float32), cudart(error=2)
    with closing(HostMemory(record.block_bytes)) as memory, pytest.raises(MemoryError, match="host-kv-gib"):
        map_blocks(memory.path, record, num_blocks=1, block_size=4, dtype=torch.float32, cuda=cuda)
    gc.collect()
    assert len(cuda.calls) == 1


class Recorded(torch.Tensor):
    """Logs the functions that are called with it."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ != "__get__":  # of `nbytes`
            cls.calls.append(f"{func.__name__}{' non_blocking' if (kwargs or {}).get('non_blocking') else ''}")
        return super().__torch_function__(func, types, args, kwargs)


def test_swap_copies_each_piece_once_without_other_memory() -> None:
    """The device copies between the pools. No piece passes through memory that is allocated for it."""
    pairs = [(torch.zeros(2, 6).as_subclass(Recorded), torch.full((2, 6), float(number))) for number in range(5)]
    done: queue.SimpleQueue[Moved | Exception] = queue.SimpleQueue()
    host: Any = SimpleNamespace(copies=lambda _, layer: iter(pairs[layer : layer + 1]))
    messages: Any = SimpleNamespace(device=torch.device("cpu"), layers=range(5), rank=3, mark=lambda: None)
    Recorded.calls.clear()
    lane = SwapLane(host, messages, done.put)
    for layer in range(5):
        lane.put(MoveKV(number=8, request_id=1, copies=(), way="out"), layer, None)
    moved = done.get(timeout=60)
    lane.close()
    assert moved == Moved(rank=3, number=8, bytes_sent={("host_copy", "same_host"): 5 * 48})
    assert Recorded.calls == ["copy_ non_blocking"] * 5
    assert all(torch.equal(target.as_subclass(torch.Tensor), source) for target, source in pairs)
