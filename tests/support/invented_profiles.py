"""Profiles without measurements, in place of stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.args import EngineArgs
from longspan.core.exchange import exchange_named
from longspan.cost.profile import Decode, Prefill, Profile, Transfer
from longspan.profiling.store import save_profile
from longspan.resolve import EngineModel


def measure(model: Path, *, tp: int, token_s: float, decode_s: float, exchanges: Sequence[str] = ()) -> None:
    """Store a profile of instances that take `token_s` for a token of a prompt, and `decode_s` for a decode step.

    Args:
        exchanges: measured between two instances, which share tokens evenly. Sparse forms take a tenth of the time.
    """
    key = EngineModel.of(EngineArgs(model=str(model), dtype="float32")).profile_key("cpu", tp=tp, threads=1)
    alone: dict[str, Any] = {"members": 1, "exchange": "local"}
    kinds = [(1, "local"), *((2, exchange) for exchange in exchanges)]
    prefills = [
        Prefill(
            members=members,
            exchange=exchange,
            new_tokens=new,
            cached_tokens=cached,
            seconds=(1e-5 + token_s * new / members * (0.1 if exchange_named(exchange).is_sparse_form else 1.0),),
        )
        for members, exchange in kinds
        for new in (16, 64, 256, 1024)
        for cached in (0, 512)
    ]
    decodes = [
        Decode(batch=number, context_tokens=context, seconds=(decode_s + 1e-6 * number,), **alone)
        for number in (1, 4, 8)
        for context in (16, 512)
    ]
    transfers = [
        Transfer(kind="point_to_point", members=2, num_bytes=size, seconds=(1e-6 + size * 1e-10,))
        for size in (2**12, 2**20)
    ]
    save_profile(Profile(profile_key=key, prefills=tuple(prefills), decodes=tuple(decodes), transfers=tuple(transfers)))
