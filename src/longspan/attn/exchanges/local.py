"""No exchange: one member holds all keys of the request, some of them perhaps in the pool of its host."""

from __future__ import annotations

from longspan.attn.exchanges import Call, exchange
from longspan.attn.member import MemberParts
from longspan.core.exchange import LOCAL
from longspan.core.runs import num_tokens

_GROUPED_KEYS = 2**16
"""Keys of the prompts that share a call. Their copy takes 256 MB of the 8B shape."""


@exchange(LOCAL)
def local(call: Call) -> None:
    """Attend to the keys on the device, and merge the results over keys on the host."""
    host, parts = call.host, call.parts
    grouped = parts.backend.max_grouped(call.q, call.spec) if host is None else 0
    batches = [
        call.own_queries(indices) for indices in parts.once(("batches", grouped), lambda: _batches(parts, grouped))
    ]
    on_host = host.ask(batches, call.spec) if host is not None else []
    partials = [call.attend_batch(batch) for batch in batches]
    if host is not None:
        host.merge(parts.backend, batches, on_host, partials, call.spec)
    for batch, partial in zip(batches, partials, strict=True):
        call.merge(batch.indices, partial)


def _batches(parts: MemberParts, grouped: int) -> list[tuple[int, ...]]:
    """Put all single queries into one batch, and each part with more queries into one of its own.

    Parts with up to `grouped` queries share batches.
    """
    counts = parts.num_queries(0, tuple(range(len(parts))))
    single = tuple(index for index, count in enumerate(counts) if count == 1)
    several = [index for index, count in enumerate(counts) if count > 1]
    batches, num_keys = [single] if single else [], _GROUPED_KEYS
    for index in sorted(several, key=lambda index: counts[index] > grouped):
        own = num_tokens(parts[index].kv_runs[0]) if counts[index] <= grouped else _GROUPED_KEYS
        if num_keys + own > _GROUPED_KEYS:
            batches.append(())
            num_keys = 0
        batches[-1] += (index,)
        num_keys += own
    return batches
