"""`alltoall` with unsharded weights on split instances: exact in steps with every other exchange, and to the byte.

Ranks are threads with mailboxes, each with its share of a real model. The formulas are in docs/exchanges.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cluster import rank_requests
from hypothesis import given
from hypothesis import strategies as st
from oracle import Oracle
from test_exchanges import HEADS, LAW, Case, bytes_of_alltoall, spec_of
from tiny_models import TINY
from torch import Tensor
from transports import FaultyTransport, Wires, run_members

from longspan.attn.backends import backend_of
from longspan.attn.check import Request
from longspan.attn.comm import NO_PEERS, Group, Transport
from longspan.attn.spec import AttnSpec
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.exchange import ALLTOALL, CHAIN, GATHER_HIDDEN, LOCAL, RING_KV, RING_Q, Exchange
from longspan.core.layouts import shard_span
from longspan.core.locations import Location
from longspan.core.owners import Owners
from longspan.core.runs import positions
from longspan.core.splits import cut_evenly, split_heads
from longspan.core.steps import Forward, Part, Sample, Sampling
from longspan.model.adapter import Model
from longspan.model.shard import Shard
from longspan.model.sharding import attention_modules
from longspan.model.source import prepare
from longspan.runtime.attention import StepAttention
from longspan.runtime.batch import pack
from longspan.runtime.block_records import kv_record
from longspan.runtime.layerwise import Layerwise
from longspan.runtime.layerwise.unsharded_alltoall import HeadTokenSwap, joined_weights, share_layouts, share_message
from longspan.runtime.pool import KvPool
from longspan.runtime.step_comm import StepComm, StepLanes
from longspan.runtime.timing import Stopwatch

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16
CPU = torch.device("cpu")
BACKEND = backend_of(CPU)


def inside_bytes(spec: AttnSpec, num_tokens: int, tp: int, width: int) -> int:
    """Of an instance: heads to their ranks and back, then all tokens to all ranks."""
    shares = split_heads(spec.num_heads, spec.num_kv_heads, tp)
    lengths = [last - first for first, last in cut_evenly(num_tokens, tp)]
    vectors = sum(
        lengths[maker] * 2 * (len(shares[reader].heads) + len(shares[reader].kv_heads))
        for maker, reader in itertools.permutations(range(tp), 2)
    )
    return 4 * (vectors * spec.head_dim + (tp - 1) * num_tokens * width)


# ---------------------------------------------------------------- the pieces


@LAW
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.sampled_from(HEADS),
    st.one_of(st.integers(0, 4), st.integers(0, 60)),
)
def test_heads_of_slices_become_slices_of_heads_and_back(
    hosts: list[int], heads: tuple[int, int], num_tokens: int
) -> None:
    spec, size = spec_of(heads=heads), len(hosts)
    draw = torch.Generator().manual_seed(num_tokens)
    whole = [torch.randn(number, num_tokens, spec.head_dim, generator=draw) for number in (heads[0], *heads[1:] * 2)]
    rows = torch.randn(num_tokens, 7, generator=draw)
    sent: list[Counter[tuple[str, str]]] = [Counter() for _ in hosts]
    wires = Wires()

    def rank(me: int, transport: Transport) -> None:
        inside = HeadTokenSwap(Group(transport, range(size), me, hosts=hosts, sent=sent[me]), spec, num_tokens)
        share = split_heads(*heads, size)[me]
        wanted = [slice(one.start, one.stop) for one in (share.heads, share.kv_heads, share.kv_heads)]
        found = inside.to_heads(*(tensor[:, inside.own_tokens] for tensor in whole))
        assert all(torch.equal(one, all_[some]) for one, all_, some in zip(found, whole, wanted, strict=True))
        assert torch.equal(inside.to_tokens(found[0]), whole[0][:, inside.own_tokens])
        assert torch.equal(inside.gather(rows[inside.own_tokens]), rows)

    faults = lambda me, inner: FaultyTransport(inner, seed=me, max_delay_s=0.002)  # noqa: E731
    assert run_members(size, rank, wires=wires, faults=faults) == [None] * size
    assert sum(counter.total() for counter in sent) == inside_bytes(spec, num_tokens, size, 7)
    assert wires.left() == 0


@pytest.mark.parametrize("name", TINY)
def test_shares_joined_are_the_whole(folders: dict[str, Path], name: str) -> None:
    """No weight is sent twice if there are as many ranks as KV heads, or fewer, or more, which have copies of heads."""
    model = Model(prepare(str(folders[name]), dtype="float32"), CPU)
    for attention, tp in itertools.product(attention_modules(model.module).values(), (2, 3, 5)):
        whole, layer = dict(attention.named_parameters()), attention.layer_idx
        shards = [Shard(index=rank, size=tp, specs=model.info.specs) for rank in range(tp)]
        path = f"model.layers.{layer}.self_attn."
        shares = [{n: shard.cut(path + n, weight) for n, weight in whole.items()} for shard in shards]
        layouts = share_layouts(shards[0], layer, {n: weight.shape for n, weight in whole.items()})
        messages = [share_message(layout, share) for layout, share in zip(layouts, shares, strict=True)]
        for share in shares:
            joined = joined_weights(layouts, share, messages)
            assert all(torch.equal(joined[n], weight) for n, weight in whole.items())
        assert sum(message.payload_bytes for message in messages) == weight_bytes(whole)


def weight_bytes(whole: dict[str, Tensor]) -> int:
    """Bytes of projections and their biases. Every rank has the norms."""
    return sum(weight.nbytes for name, weight in whole.items() if "norm" not in name)


# ---------------------------------------------------------------- whole steps of real models


@dataclass(frozen=True)
class Chat:
    """A request: its group, where its two spans end, and the exchange of each."""

    group: tuple[int, ...]
    stops: tuple[int, int]
    exchanges: tuple[Exchange, Exchange]
    layout: str = "zigzag"


CHATS = (
    Chat((0, 1), (70, 111), (ALLTOALL._replace(weights="host"), ALLTOALL._replace(weights="peers"))),
    Chat((0, 1), (33, 90), (ALLTOALL._replace(weights="host"), ALLTOALL._replace(weights="host"))),
    Chat((1, 0), (50, 83), (ALLTOALL._replace(weights="peers"), ALLTOALL._replace(weights="host"))),
    Chat(
        (0, 1), (1, 40), (ALLTOALL._replace(weights="peers"), ALLTOALL._replace(weights="peers")), "single"
    ),  # a rank, and an instance, without tokens
    Chat((0, 1), (40, 75), (GATHER_HIDDEN, GATHER_HIDDEN)),
    Chat((0, 1), (60, 61), (RING_KV, RING_Q)),
    Chat((0, 1), (48, 80), (CHAIN, CHAIN), "contiguous"),
    Chat((0,), (20, 31), (LOCAL, LOCAL)),
)


def prompt_of(index: int) -> list[int]:
    return np.random.default_rng(index).integers(3, 199, CHATS[index].stops[1]).tolist()


def steps_of(chosen: Sequence[int]) -> list[Forward]:
    """Two Forwards: the first span of each chat, then the second."""
    tables: dict[int, list[BlockRef]] = {index: [] for index in chosen}
    free = [itertools.count(), itertools.count()]
    forwards = []
    for number in range(2):
        parts = []
        for index in chosen:
            chat, table = CHATS[index], tables[index]
            start, stop = (0, *chat.stops)[number : number + 2]
            head = chat.group.index(table[-1].instance) if start % BLOCK else 0
            runs = shard_span(chat.layout, start, stop, len(chat.group), align=BLOCK, head=head)
            first = len(table)
            for block in range(first, -(-stop // BLOCK)):
                holder = next(m for m, own in enumerate(runs) if block * BLOCK in positions(own))
                table.append(BlockRef(chat.group[holder], next(free[chat.group[holder]])))
            last = next(m for m, own in enumerate(runs) if stop - 1 in positions(own))
            parts.append(
                Part(
                    request_id=index,
                    start=start,
                    stop=stop,
                    tokens=tuple(prompt_of(index)[start:stop]),
                    group=chat.group,
                    runs=runs,
                    exchange=chat.exchanges[number],
                    first_block=first,
                    blocks=tuple(table[first:]),
                    sample=Sample(instance=chat.group[last], position=stop),
                    sampling=Sampling(seed=0) if first == 0 else None,
                )
            )
        forwards.append(Forward(number=number, parts=tuple(parts)))
    return forwards


def run_ranks(folder: Path, tp: int, forwards: Sequence[Forward]) -> tuple[dict[int, Tensor], list[Counter[str]]]:
    """Return logits after each request's latest token, equal on all its ranks, and the bytes of each step by kind."""
    files = prepare(str(folder), dtype="float32")
    models = [Model(files, CPU, tp_index=rank % tp, tp=tp) for rank in range(2 * tp)]
    apart = tuple(Location(host=rank % 2, device=rank) for rank in range(2 * tp))  # neighbours are on two hosts
    cluster = replace(Cluster.of(f"2xtp{tp}"), locations=apart)
    logits: list[dict[int, Tensor]] = [{} for _ in models]
    sent: list[Counter[str]] = [Counter() for _ in forwards]
    wires = Wires(timeout_s=10)

    def rank(me: int, transport: Transport) -> None:
        model, instance = models[me], me // tp
        pool = KvPool(
            kv_record(model.specs, BLOCK, torch.float32),
            num_blocks=64,
            block_size=BLOCK,
            dtype=torch.float32,
            device=CPU,
        )
        requests, watch, layerwise = rank_requests(), Stopwatch(enabled=False, device=CPU), Layerwise(model)
        for forward in forwards:
            packed = pack(forward, requests, instance=instance, block_size=BLOCK, device=CPU, backend=BACKEND)
            layers = model.info.num_layers
            comm = StepComm(StepLanes.one(transport), forward.number, cluster=cluster, rank=me, num_layers=layers)
            attention = StepAttention(packed, comm, pool=pool, specs=model.specs, watch=watch, layerwise=layerwise)
            if len(packed.tokens):
                found = model.trunk.run(packed, attention, reduce=comm.all_reduce).result
                logits[me].update(zip(packed.request_ids, found, strict=True))
            else:
                with model.summed_by(comm.all_reduce):
                    attention.without_tokens(torch.float32, CPU)
            for (kind, _), num_bytes in comm.sent.items():
                sent[forward.number][kind] += num_bytes

    for result in run_members(2 * tp, rank, wires=wires):
        if isinstance(result, Exception):
            raise result
    assert wires.left() == 0
    for first, other in itertools.pairwise(logits):
        assert all(torch.equal(first[index], other[index]) for index in first.keys() & other.keys())
    return {index: row for found in logits for index, row in found.items()}, sent


def expected_bytes(forwards: Sequence[Forward], number: int, model: Model, tp: int) -> dict[str, int]:
    """By kind, of whole channels and of sums over instances."""
    width, num_layers = model.module.config.hidden_size, model.info.num_layers
    found = Counter[str]()
    summed = 0
    tables: dict[int, list[BlockRef]] = {}
    for forward in forwards[: number + 1]:
        for part in forward.parts:
            tables.setdefault(part.request_id, []).extend(part.blocks)
    tokens: Counter[tuple[Exchange, tuple[int, ...], int]] = Counter()
    for part in forwards[number].parts:
        length = part.stop - part.start
        summed += length * (
            1 + len(part.group) if part.exchange == GATHER_HIDDEN else 2 - (part.exchange.weights is not None)
        )
        if part.exchange.weights is not None:
            kv_runs = Owners(table=tables[part.request_id], group=part.group, block_size=BLOCK).held(part.stop)
            request = Request(q_runs=part.runs, kv_runs=kv_runs, seed=0)
            for place in range(tp):
                for spec in Shard(index=place, size=tp, specs=model.info.specs).local_specs:
                    found["alltoall"] += bytes_of_alltoall(Case(hosts=(0, 0), batch=(request,), spec=spec))
            for instance, runs in zip(part.group, part.runs, strict=True):
                tokens[part.exchange, part.group, instance] += len(positions(runs))
    for num_tokens in tokens.values():
        found["alltoall"] += sum(inside_bytes(spec, num_tokens, tp, width) for spec in model.info.specs)
    fetching = {
        instance for (exchange, _, instance), number in tokens.items() if number and exchange.weights == "peers"
    }
    whole = sum(weight_bytes(dict(layer.named_parameters())) for layer in attention_modules(model.module).values())
    found["weights"] = len(fetching) * (tp - 1) * whole
    found["all_reduce"] = 2 * (tp - 1) * summed * width * 4 * num_layers
    return found


@pytest.mark.parametrize(
    ("name", "tp"),
    [("llama", 2), ("llama", 3), ("phi3", 2), ("qwen2", 3), ("qwen3", 2), ("gemma2", 2), ("glm4", 2)],
)
def test_whole_weights_with_all_other_exchanges(
    folders: dict[str, Path], oracles: dict[str, Oracle], name: str, tp: int
) -> None:
    """Two instances, heads that do not divide, fused projections, biases, head norms, windows, partial rotation."""
    forwards = steps_of(range(len(CHATS)))
    logits, sent = run_ranks(folders[name], tp, forwards)
    for index in range(len(CHATS)):
        expected = torch.from_numpy(oracles[name].logprobs(prompt_of(index))[-1])
        torch.testing.assert_close(logits[index].log_softmax(dim=-1), expected, rtol=0, atol=1e-3)
    model = Model(prepare(str(folders[name]), dtype="float32"), CPU)
    for number in range(2):
        expected = expected_bytes(forwards, number, model, tp)
        assert {kind: sent[number][kind] for kind in expected} == expected


def test_more_ranks_than_kv_heads(folders: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    forwards = steps_of(range(4))
    logits, sent = run_ranks(folders["qwen2"], 5, forwards)
    for index in range(4):
        expected = torch.from_numpy(oracles["qwen2"].logprobs(prompt_of(index))[-1])
        torch.testing.assert_close(logits[index].log_softmax(dim=-1), expected, rtol=0, atol=1e-3)
    model = Model(prepare(str(folders["qwen2"]), dtype="float32"), CPU)
    assert sent == [expected_bytes(forwards, number, model, 5) for number in range(2)]


def test_layers_are_taken_over_from_their_first_layerwise_part_until_the_end(folders: dict[str, Path]) -> None:
    """And only unsharded weights are looked for in the host's memory."""
    model = Model(prepare(str(folders["llama"]), dtype="float32"), CPU)
    layerwise, modules = Layerwise(model), attention_modules(model.module).values()
    own = [module.forward for module in modules]
    pool = KvPool(
        kv_record(model.specs, BLOCK, torch.float32), num_blocks=64, block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    requests, watch, cluster = rank_requests(), Stopwatch(enabled=False, device=CPU), Cluster.of("1")
    for kind, is_taken in ((LOCAL, False), (GATHER_HIDDEN, True)):
        [chat] = [index for index, chat in enumerate(CHATS) if chat.exchanges[0] == kind]
        packed = pack(steps_of([chat])[0], requests, instance=0, block_size=BLOCK, device=CPU, backend=BACKEND)
        comm = StepComm(StepLanes.one(NO_PEERS), 0, cluster=cluster, rank=0, num_layers=model.info.num_layers)
        with patch(
            "longspan.runtime.layerwise.unsharded_alltoall.HostWeights",
            side_effect=AssertionError("no step needs them"),
        ):
            StepAttention(packed, comm, pool=pool, specs=model.specs, watch=watch, layerwise=layerwise)
        assert all((module.forward != forward) == is_taken for module, forward in zip(modules, own, strict=True))
    layerwise.close()
    assert [module.forward for module in modules] == own
