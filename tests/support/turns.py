"""Engines with a prefill and a decode phase, and few blocks, so that phases change often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longspan.args import EngineArgs


def turning_args(model: Path, specs: str, **given: Any) -> EngineArgs:
    """Takes the specs of prefill and decode as two words."""
    prefill, decode = specs.split()
    small = {
        "dtype": "float32",
        "threads_per_rank": 1,
        "block_size": 16,
        "num_gpu_blocks_override": 30,
        "max_num_batched_tokens": 48,
    }
    turns = {"policy": "seesaw", "prefill_parallel": prefill, "decode_parallel": decode}
    return EngineArgs(str(model), skip_tokenizer_init=True, **(small | turns | given))
