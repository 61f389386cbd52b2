"""No exchange: one member holds all keys of the request, some of them perhaps in the pool of its host."""

from __future__ import annotations

from longspan.attn.exchanges import Call, exchange
from longspan.attn.member import MemberParts
from longspan.core.exchange import LOCAL


@exchange(LOCAL)
def local(call: Call) -> None:
    """Attend to the keys on the device, and merge the results over keys on the host."""
    host, parts = call.host, call.parts
    batches = [call.own_queries(indices) for indices in parts.once("batches", lambda: _batches(parts))]
    on_host = host.ask(batches, call.spec) if host is not None else []
    partials = [call.attend_batch(batch) for batch in batches]
    if host is not None:
        host.merge(parts.backend, batches, on_host, partials, call.spec)
    for batch, partial in zip(batches, partials, strict=True):
        call.merge(batch.indices, partial)


def _batches(parts: MemberParts) -> list[tuple[int, ...]]:
    """Put all single queries into one batch, and each part with more queries into one of its own."""
    counts = parts.num_queries(0, tuple(range(len(parts))))
    single = tuple(index for index, count in enumerate(counts) if count == 1)
    return [*([single] if single else []), *((index,) for index, count in enumerate(counts) if count > 1)]
