"""`python -m longspan.attn.check`: every exchange between processes, compared with attention on one device.

Each rank is a process. gloo connects them, through host memory if they compute on CUDA devices, which they may share.
All ranks draw the same random cases, and each compares its own outputs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Annotated, Any, Literal

import cyclopts
import torch
import torch.distributed as dist
from cyclopts.validators import Number
from torch import Tensor

from longspan.attn.backends import Partial, backend_of
from longspan.attn.comm import Group, hidden_hops
from longspan.attn.exchanges import Call, attention_exchange
from longspan.attn.gather_hidden import AttendPiece, GatherHidden, pieces_of
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.attn.transports import TorchTransport, meet
from longspan.core.exchange import GATHER_HIDDEN, GATHER_KV, RING_KV, RING_Q, Exchange, exchanges
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.layouts import shard_span
from longspan.core.locations import hosts_of
from longspan.core.runs import Run, SpanShards, coalesce, positions
from longspan.core.steps import Link

_MAX_ERROR = 1e-5
_MAX_RANKS = 64
_TIMEOUT_S = 60.0
_CPU = torch.device("cpu")
_NOISE = 1e4
"""The value of slots that must not be read."""
_HEADS = ((4, 4), (5, 5), (9, 3), (6, 2), (14, 2), (10, 5), (8, 1), (5, 1))
_HEAD_DIMS = (16, 32, 64, 80, 96, 128)
_MAX_TOKENS = 300
_Report = tuple[dict[str, float], Counter[tuple[str, Link]]]
"""The largest error of each exchange, and the bytes sent by exchange and link."""


def _checked() -> dict[str, Exchange]:
    first = (RING_KV, RING_Q, GATHER_KV)
    checked = {}
    for kind in (*first, *(kind for kind in exchanges() if kind not in first)):
        checked[kind.kind] = kind
        if "dense" in kind.traits.parameters:
            checked[f"{kind.kind}, dense"] = kind._replace(dense=True)
        if "micro_partitions" in kind.traits.parameters:
            checked[f"{kind.kind}, x4"] = kind._replace(micro_partitions=4)
    return checked


EXCHANGES = _checked()


def main(
    *,
    ranks: Annotated[
        int, cyclopts.Parameter(validator=Number(gte=1, lte=_MAX_RANKS), help="Processes in the group.")
    ] = 2,
    exchange: Annotated[str, cyclopts.Parameter(help="all, or the name of one.")] = "all",
    seed: Annotated[int, cyclopts.Parameter(help="Seed of the random cases.")] = 0,
    cases: Annotated[
        int, cyclopts.Parameter(validator=Number(gte=1), help="How many of them, for each exchange.")
    ] = 20,
    hosts: Annotated[
        str,
        cyclopts.Parameter(
            env_var="LONGSPAN_HOSTS", help="Hosts on which the ranks pretend to lie, or rack-host of each."
        ),
    ] = "1",
    device: Annotated[Literal["cpu", "cuda"], cyclopts.Parameter(help="Where the ranks compute.")] = "cpu",
) -> int:
    """Compares exchanges with attention on one device; exit code 1 when an error exceeds 1e-5."""
    names = tuple(name for name in EXCHANGES if exchange in ("all", name.partition(",")[0]))
    if not names:
        known = ", ".join(dict.fromkeys(name.partition(",")[0] for name in EXCHANGES))
        return _failed(f"--exchange: unknown exchange {exchange!r}: choose all, {known}", code=2)
    try:
        hosts_of_all = hosts_of(locations_of_ranks(ranks, hosts))
    except ValueError as error:
        return _failed(f"--hosts: {error}", code=2)
    if device == "cuda" and not torch.cuda.is_available():
        return _failed("--device: this machine has no CUDA device that PyTorch can use; choose cpu", code=2)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background starts us with it ignored
    errors, sent = _run(hosts_of_all, names, seed, cases, device)
    for name in names:
        text = f"{sent[name, 'same_host']:,} bytes sent on the same host, {sent[name, 'other_host']:,} to another"
        print(f"{name:18}largest error {errors[name]:.1e}   {text}")
    if max(errors.values()) > _MAX_ERROR:
        return _failed(f"not exact: an error exceeds {_MAX_ERROR:.0e}", code=1)
    return 0


def _failed(message: str, *, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def _run(hosts: Sequence[int], names: Sequence[str], seed: int, num_cases: int, device: str) -> _Report:
    """Run a process per rank, and return the joint report. No process is left when it returns or raises."""
    # A fork keeps the imported modules, but CUDA does not work after it.
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    errors, sent = dict.fromkeys(names, 0.0), Counter[tuple[str, Link]]()
    processes = []
    reports: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="longspan-check-") as folder:
        try:
            for rank in range(len(hosts)):
                report, to_parent = context.Pipe(duplex=False)
                compare = partial(_compare, rank, hosts, names, seed, num_cases, device)
                arguments = (rank, len(hosts), f"{folder}/store", compare, to_parent)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                processes.append(process)
                to_parent.close()
                reports[report] = rank
            while reports:
                ready = wait(list(reports))
                for report in [report for report in reports if report in ready]:
                    rank = reports.pop(report)
                    try:
                        rank_errors, rank_sent = report.recv()
                    except EOFError:
                        sys.exit(f"rank {rank} failed")  # the rank has printed its error
                    errors = {name: max(errors[name], rank_errors[name]) for name in names}
                    sent += rank_sent
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    return errors, sent


def _work(rank: int, num_ranks: int, store: str, compare: Callable[[], _Report], report: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group, and the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    meet(store, rank, num_ranks, timeout_s=_TIMEOUT_S)
    result = compare()
    dist.barrier()
    report.send(result)
    dist.destroy_process_group()


def _compare(rank: int, hosts: Sequence[int], names: Sequence[str], seed: int, num_cases: int, kind: str) -> _Report:
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    transport = TorchTransport(staged=kind == "cuda")
    errors, sent = dict.fromkeys(names, 0.0), Counter[tuple[str, Link]]()
    num_hops = hidden_hops(len(hosts))
    first_tags = itertools.count(step=num_hops)
    for number, in_order in itertools.product(range(num_cases), (False, True)):
        draw = random.Random(f"{seed} {number}")
        spec, batch = random_spec(draw), random_batch(draw, len(hosts), in_order=in_order)
        expected = torch.cat([request.wanted(rank, spec) for request in batch], dim=1)
        for name in (name for name in names if EXCHANGES[name].traits.in_order == in_order):
            first_tag = next(first_tags)
            tags = range(first_tag, first_tag + num_hops)
            group = Group(transport, range(len(hosts)), rank, hosts=hosts, name=name, tags=tags, sent=sent)
            out = attend(member_call(EXCHANGES[name], group, batch, spec, seed=number, device=device))
            error = (out.cpu() - expected).abs().nan_to_num(torch.inf)
            errors[name] = max(errors[name], error.max().item() if error.numel() else 0.0)
            transport.complete_sends()
    return errors, sent


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is a child process"
    parent.join()
    os._exit(1)


def attend(call: Call) -> Tensor:
    if call.exchange.kind == GATHER_HIDDEN.kind:
        return _gather_hidden(call)
    attention_exchange(call.exchange).attend(call)
    return call.out


def _gather_hidden(call: Call) -> Tensor:
    """Exchange queries, keys and values instead of hidden states and projections."""
    spec, num_pieces = call.spec, pieces_of(call.exchange)
    shared = GatherHidden(call.group, call.parts, call.kv, spec, sinks=call.sinks, num_pieces=num_pieces)
    hidden = torch.cat([call.q, call.k, call.v]).transpose(0, 1)
    heads, kv_heads = (slice(x.start, x.stop) for x in (shared.share.heads, shared.share.kv_heads))

    def project(_: int, gathered: Tensor, attend_piece: AttendPiece) -> Tensor:
        tokens = gathered.view(-1, *hidden.shape[1:]).transpose(0, 1)
        q, k, v = tokens.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads])
        partial_sums: Tensor = q.new_zeros(q.shape)
        partial_sums[heads] = attend_piece(q[heads], k[kv_heads], v[kv_heads])
        return partial_sums.transpose(0, 1).flatten(1)

    own, keys, values = shared.compute(hidden.flatten(1), project)
    assert torch.equal(keys, call.k) and torch.equal(values, call.v)
    own = own[:, : spec.num_heads * spec.head_dim]  # without tokens it is as wide as the hidden states
    return own.reshape(-1, spec.num_heads, spec.head_dim).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A span of a request: the queries of each member, and the keys that each member holds up to the span's end."""

    q_runs: SpanShards
    kv_runs: SpanShards
    seed: int

    @property
    def num_tokens(self) -> int:
        """The number of cached tokens and tokens of the span."""
        return max((run.stop for runs in self.kv_runs for run in runs), default=0)

    def tensors(self, spec: AttnSpec) -> list[Tensor]:
        return random_qkv(spec, self.num_tokens, self.num_tokens, torch.float32, self.seed)

    def wanted(self, member: int, spec: AttnSpec) -> Tensor:
        q, k, v = self.tensors(spec)
        rows = positions(self.q_runs[member])
        return reference(q[:, rows], rows, k, v, range(self.num_tokens), spec)[0]


def member_call(
    exchange: Exchange,
    group: Group,
    batch: Sequence[Request],
    spec: AttnSpec,
    *,
    block_size: int = 16,
    seed: int = 0,
    device: torch.device = _CPU,
) -> Call:
    """Make the call of one member for some requests. All unused slots have noise, and odd seeds scatter the blocks.

    If the exchange stores KV afterwards, the pool also has noise for the keys and values of the spans.
    """
    counts = [-(-len(positions(request.kv_runs[group.rank])) // block_size) for request in batch]
    shape = (sum(counts) + 3, spec.num_kv_heads, block_size, spec.head_dim)
    keys, values = torch.full((2, *shape), _NOISE)
    free = list(range(shape[0]))
    if seed % 2:
        random.Random(seed).shuffle(free)
    parts: list[MemberPart] = []
    rows: list[list[Tensor]] = [[], [], []]
    for request, count in zip(batch, counts, strict=True):
        tensors = request.tensors(spec)
        queries, keys_held = positions(request.q_runs[group.rank]), positions(request.kv_runs[group.rank])
        first = sum(tensor.shape[1] for tensor in rows[0])
        for kind, tensor in zip(rows, tensors, strict=True):
            kind.append(tensor[:, queries])
        blocks, free = free[:count], free[count:]
        place = slice(first, first + len(queries))
        part = MemberPart(rows=place, q_runs=request.q_runs, kv_runs=request.kv_runs, blocks=blocks)
        if exchange.stores_after and part.span_start is not None:
            keys_held = [position for position in keys_held if position < part.span_start]
        token = torch.arange(len(keys_held))
        block = torch.tensor(blocks, dtype=torch.int64)[token // block_size]
        for pool, tensor in zip((keys, values), tensors[1:], strict=True):
            pool[block, :, token % block_size] = tensor[:, keys_held].transpose(0, 1)
        parts.append(part)
    q, k, v = (torch.cat(kind, dim=1).to(device) for kind in rows)
    kv = PagedKv(keys=keys.to(device), values=values.to(device))
    backed, out = MemberParts(parts, backend_of(q.device)), torch.full_like(q, torch.nan)
    sinks = random_sinks(spec).to(device) if spec.has_sinks else None
    return Call(exchange=exchange, group=group, parts=backed, q=q, k=k, v=v, kv=kv, spec=spec, sinks=sinks, out=out)


def random_sinks(spec: AttnSpec) -> Tensor:
    """Draw a sink for each head: a score without effect, one of the size of the keys' scores, or a larger one."""
    return torch.randn(spec.num_heads, generator=torch.Generator().manual_seed(spec.num_heads)) * 3


def random_qkv(spec: AttnSpec, num_queries: int, num_keys: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Draw normal `q, k, v` with the memory layout of projections, `[tokens, heads, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_queries, spec.num_heads), (num_keys, spec.num_kv_heads), (num_keys, spec.num_kv_heads)]
    return [torch.randn(*shape, spec.head_dim, generator=generator).to(dtype).transpose(0, 1) for shape in shapes]


def reference(
    q: Tensor, q_positions: Sequence[int], k: Tensor, v: Tensor, k_positions: Sequence[int], spec: AttnSpec
) -> Partial:
    """Compute attention of `q [H, T, D]` over `k, v [K, S, D]`, each token at its position, in float64.

    The softmax has a column for each key, and for the sink if the layer has sinks. The log-sum-exp is over the keys.
    """
    age = torch.tensor(list(q_positions))[:, None] - torch.tensor(list(k_positions))[None]
    visible = age >= 0
    if spec.window is not None:
        visible &= age < spec.window
    if spec.chunk is not None:
        queries, keys_at = (torch.tensor(list(each)) // spec.chunk for each in (q_positions, k_positions))
        visible &= queries[:, None] == keys_at[None]
    groups = q.shape[0] // k.shape[0]
    keys, values = (x.double().repeat_interleave(groups, dim=0) for x in (k, v))
    scores = q.double() @ keys.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if spec.has_sinks:
        sinks = random_sinks(spec).double()[:, None, None].expand(-1, len(q_positions), 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1] @ values, lse
    weights = torch.exp(scores - torch.where(visible.any(-1), lse, 0.0)[..., None])
    return weights @ values, lse


def random_spec(draw: random.Random) -> AttnSpec:
    num_heads, num_kv_heads = draw.choice(_HEADS)
    head_dim = draw.choice(_HEAD_DIMS)
    limit = draw.randint(1, _MAX_TOKENS)
    window, chunk = draw.choice(((None, None), (None, None), (limit, None), (None, limit)))
    return AttnSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        chunk=chunk,
        softcap=draw.choice((None, None, draw.uniform(2, 50))),
        has_sinks=draw.random() < 0.5,
    )


def random_batch(draw: random.Random, num_members: int, *, in_order: bool) -> list[Request]:
    """Draw 1 to 4 requests of 0 to 300 new tokens, with up to 300 cached tokens that are sharded at random.

    With `in_order` the new tokens of members are consecutive, otherwise they are sharded at random, too.
    """
    batch = []
    for _ in range(draw.randint(1, 4)):
        start = draw.choice((0, draw.randint(0, _MAX_TOKENS)))
        stop = start + draw.choice((0, 1, *(draw.randint(0, _MAX_TOKENS) for _ in range(4))))
        cached, new = _random_shards(draw, 0, start, num_members), _random_cuts(draw, start, stop, num_members)
        if not in_order:
            new = draw.choice(
                (new, shard_span("zigzag", start, stop, num_members), _random_shards(draw, start, stop, num_members))
            )
        kv_runs = tuple(coalesce([*old, *more]) for old, more in zip(cached, new, strict=True))
        batch.append(Request(q_runs=new, kv_runs=kv_runs, seed=draw.randrange(10**6)))
    return batch


def _random_cuts(draw: random.Random, start: int, stop: int, num_members: int) -> SpanShards:
    if draw.random() < 0.5:
        return shard_span("contiguous", start, stop, num_members)
    bounds = [start, *sorted(draw.randint(start, stop) for _ in range(num_members - 1)), stop]
    return tuple(coalesce([Run(bounds[member], bounds[member + 1])]) for member in range(num_members))


def _random_shards(draw: random.Random, start: int, stop: int, num_members: int) -> SpanShards:
    pieces: list[list[Run]] = [[] for _ in range(num_members)]
    for runs in _random_cuts(draw, start, stop, draw.randint(1, 6)):
        pieces[draw.randrange(num_members)] += runs
    return tuple(coalesce(sharded) for sharded in pieces)


if __name__ == "__main__":
    cyclopts.run(main)
