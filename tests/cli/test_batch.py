"""Packing a Forward for each rank, against a plain reading of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cluster import Cluster, Setup, Slots, rank_requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.attn.backends import backend_of
from longspan.core.blocks import BlockRef
from longspan.core.exchange import LOCAL, RING_KV, RING_Q
from longspan.core.runs import Run, SpanShards
from longspan.core.steps import UNKNOWN, Forward, Free, Part, Sample, Sampling
from longspan.runtime.batch import Packed, pack

CPU = torch.device("cpu")
BACKEND = backend_of(CPU)


@given(
    st.integers(1, 3),
    st.sampled_from([1, 4, 16]),
    st.integers(4, 90),
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from(["block", "token"]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_packed_batches_equal_the_parts(
    num_instances: int, size: int, tokens: int, requests: list[tuple[int, int]], rotate: str
) -> None:
    """All steps of a random run, packed for every rank."""
    cluster = Cluster(
        Setup(
            num_instances=num_instances,
            block_size=size,
            num_blocks=200 // size,
            options={"threshold": "40", "rotate": rotate} if num_instances > 1 else {},
            max_num_batched_tokens=tokens,
            rope_switch_length=100,
        )
    )
    for number, (length, max_tokens) in enumerate(requests):
        cluster.add([(number + position) % 64 for position in range(length)], max_tokens=max_tokens)
    cluster.run()
    ranks = [rank_requests() for _ in range(num_instances)]
    tables: dict[int, list[BlockRef]] = {}
    slots: dict[int, Slots] = {}
    for step in cluster.executor.steps:
        if isinstance(step, Free):
            for rank in ranks:
                rank.forget(step.request_ids)
            for request_id in step.request_ids:
                tables.pop(request_id, None)
                slots.pop(request_id, None)
            continue
        for part in step.parts:
            tables[part.request_id] = [*tables.get(part.request_id, [])[: part.first_block], *part.blocks]
            slots.setdefault(part.request_id, Slots(size=size)).follow(part, tables[part.request_id])
        for instance in step.instances:
            packed = pack(step, ranks[instance], instance=instance, block_size=size, device=CPU, backend=BACKEND)
            check(packed, step, instance, tables, slots)


def check(
    packed: Packed, forward: Forward, instance: int, tables: dict[int, list[BlockRef]], told: dict[int, Slots]
) -> None:
    mine = [part for part in forward.parts if instance in part.group]
    rows = [(part, position) for part in mine for run in runs_of(part, instance) for position in run.positions]
    assert packed.tokens.tolist() == [part.tokens[position - part.start] for part, position in rows]
    assert packed.positions.tolist() == [position for _, position in rows]
    assert packed.rope_lengths.tolist() == [part.rope_length for part, _ in rows]
    wanted = [told[part.request_id].of[position] for part, position in rows]
    assert all(ref.instance == instance for ref, _ in wanted)
    slots = packed.slots
    assert slots.rows.tolist() == list(range(len(rows)))
    assert list(zip(slots.blocks.tolist(), slots.offsets.tolist(), strict=True)) == [
        (ref.block, offset) for ref, offset in wanted
    ]
    for tensor in (packed.tokens, packed.positions, packed.rope_lengths, slots.blocks, slots.offsets, packed.keep):
        assert tensor.dtype == torch.int64
    assert sum(len(channel.parts) for channel in packed.channels) == len(mine)
    for channel in packed.channels:
        assert channel.members[channel.rank] == instance
        expected = [part for part in mine if (part.exchange, part.group) == (channel.exchange, channel.members)]
        for seen, part in zip(channel.parts, expected, strict=True):
            assert [rows[i] for i in range(len(rows))[seen.rows]] == [row for row in rows if row[0] is part]
            assert seen.q_runs == part.runs
            refs = [ref for ref, _ in told[part.request_id].of]
            for member, runs in zip(part.group, seen.kv_runs, strict=True):
                held = [position for position, ref in enumerate(refs) if ref.instance == member]
                assert [p for run in runs for p in run.positions] == held
            assert seen.blocks == tuple(ref.block for ref in tables[part.request_id] if ref.instance == instance)
    sampled = [part for part in mine if part.sample is not None and part.sample.instance == instance]
    assert packed.request_ids == tuple(part.request_id for part in sampled)
    assert packed.samples == tuple(part.sample for part in sampled)
    assert [rows[row] for row in packed.keep.tolist()] == [(part, part.stop - 1) for part in sampled]


def runs_of(part: Part, instance: int) -> tuple[Run, ...]:
    return part.runs[part.group.index(instance)]


def part_of(
    request_id: int, group: tuple[int, ...], *, first_block: int = 0, instance: int | None = None, num_tokens: int = 4
) -> Part:
    holder = group[0] if instance is None else instance
    start, stop = 4 * first_block, 4 * first_block + num_tokens
    return Part(
        request_id=request_id,
        start=start,
        stop=stop,
        tokens=(1, 2, 3, 4)[:num_tokens],
        group=group,
        runs=tuple((Run(start, stop),) if i == holder else () for i in group),
        exchange=LOCAL if len(group) == 1 else RING_KV,
        first_block=first_block,
        blocks=(BlockRef(holder, 9 + first_block),),
        sample=None,
        sampling=Sampling(seed=0) if first_block == 0 else None,
    )


def packed_for(forward: Forward, instance: int) -> Packed:
    return pack(forward, rank_requests(), instance=instance, block_size=4, device=CPU, backend=BACKEND)


def test_members_without_tokens_still_take_part() -> None:
    packed = packed_for(Forward(number=1, parts=(part_of(0, (0, 1)),)), 1)
    assert len(packed.tokens) == 0 == packed.slots.blocks.numel()
    ((seen,),) = [channel.parts for channel in packed.channels]
    assert seen.kv_runs == ((Run(0, 4),), ())
    assert seen.blocks == ()


def test_members_know_a_channel_by_the_same_number_and_parts_in_the_same_order() -> None:
    """Whatever else a rank has to do: local parts, and channels with other groups, may come first."""
    groups = [(0,), (2, 0), (0, 1, 2), (1,), (1, 2), (0, 1, 2), (2, 0)]
    parts = (part_of(number, group, num_tokens=1 + number // 4) for number, group in enumerate(groups))
    forward = Forward(number=1, parts=tuple(parts))
    known: dict[tuple[int, ...], set[tuple[int, tuple[SpanShards, ...]]]] = {}
    for instance in range(3):
        packed = packed_for(forward, instance)
        for channel in packed.channels:
            if channel.exchange != LOCAL:
                spans = tuple(part.q_runs for part in channel.parts)
                known.setdefault(channel.members, set()).add((channel.number, spans))
    assert all(len(seen) == 1 for seen in known.values())
    assert len({number for ((number, _),) in known.values()}) == len(known) == 3


def test_tables_follow_the_controller() -> None:
    tables = rank_requests()
    first, second = part_of(5, (0,)), part_of(5, (0,), first_block=1)
    assert tables.apply(first).table == [BlockRef(0, 9)]
    assert tables.apply(second).table == [BlockRef(0, 9), BlockRef(0, 10)]
    tables.forget([5, 6])
    with pytest.raises(KeyError):
        tables.apply(second)
    assert tables.apply(first).table == [BlockRef(0, 9)]


def test_the_sampling_rank_sends_a_token_to_the_computing_ranks() -> None:
    """Row numbers only where the token is computed. Members without either part get nothing."""
    runs = (Run(3, 4),)
    part = replace(
        part_of(7, (2, 0, 1)),
        start=3,
        stop=4,
        tokens=(UNKNOWN,),
        runs=((), runs, ()),
        blocks=(BlockRef(0, 1),),
        exchange=RING_Q,
        sample=Sample(instance=0, position=4),
        unknown_on=2,
    )
    forward = Forward(number=1, parts=(part_of(1, (0,)), part))
    found = {instance: packed_for(forward, instance).unknown for instance in range(3)}
    assert found[1] == ()
    assert [(one.source, one.target, one.row) for one in (*found[0], *found[2])] == [(2, 0, 4), (2, 0, -1)]


def test_the_target_of_a_prompt_token_may_lie_elsewhere() -> None:
    """Every member reports the tokens after its own, on any member, but none after the prompt."""
    part = replace(
        part_of(7, (0, 1)),
        stop=4,
        tokens=(10, 11, 12, 13),
        runs=((Run(0, 1), Run(3, 4)), (Run(1, 3),)),
        blocks=(BlockRef(0, 1), BlockRef(1, 1), BlockRef(1, 2), BlockRef(0, 2)),
        targets=(11, 12, 13),
    )
    seen = []
    for instance in range(2):
        packed = pack(
            Forward(number=1, parts=(part,)),
            rank_requests(),
            instance=instance,
            block_size=1,
            device=CPU,
            backend=BACKEND,
        )
        (prompt,) = packed.prompts
        seen += list(zip(prompt.positions, prompt.targets, packed.tokens[list(prompt.rows)].tolist(), strict=True))
    assert sorted(seen) == [(1, 11, 10), (2, 12, 11), (3, 13, 12)]
