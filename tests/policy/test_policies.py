"""Policies as pure functions: names, options, sharding with unequal free blocks, coupling, and the bounds of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import pytest
from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.core.blocks import coupled_instances
from longspan.core.cluster import Cluster as Instances
from longspan.core.kv.account import KvAccount
from longspan.core.kv.residency import RESIDENT
from longspan.core.policy import Policy
from longspan.core.queues import Running
from longspan.core.request import Request, RequestMetrics
from longspan.core.runs import Layout, SpanShards
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Forward, Free, Sampled
from longspan.core.view import ClusterView
from longspan.errors import ParameterError
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.policy.shards import Capacity, Shape, block_owners, shard_chunk


@pytest.mark.parametrize(("instances", "name"), [(1, "chunked"), (2, "auto"), (7, "auto")])
def test_auto_is_chunked_on_one_instance(instances: int, name: str) -> None:
    assert make_policy("auto", num_instances=instances, options={}).settings.name == name


@pytest.mark.parametrize("options", [{"threshold": "9"}, {"exchange": "chain"}, {"fractions": "0.5,0.5"}])
def test_auto_is_context_with_options_that_only_that_has(options: dict[str, str]) -> None:
    assert make_policy("auto", num_instances=2, options=options).settings.name == "context"


@pytest.mark.parametrize("instances", [2, 4])
@pytest.mark.parametrize("option", [{"csa": '{"levels": 2, "drop": 0.3}'}, {"csa": "off"}])
def test_options_of_sparse_attention_choose_csps(instances: int, option: dict[str, str]) -> None:
    assert make_policy("auto", num_instances=instances, options=option).name == "csps"
    with pytest.raises(ParameterError, match="csa is for policy csps, but policy context given: leave `policy` out"):
        make_policy("context", num_instances=instances, options=option)


def test_an_option_of_any_type_can_be_shown() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Options:
        sizes: tuple[int, ...] = (1, 2)
        most: int | None = None

    shown = Policy((0,), Options(), None).settings.options
    assert shown == {"sizes": "(1, 2)", "most": None}


@pytest.mark.parametrize("options", [{"exchange": "ring_kv"}, {"threshold": "9"}, {"target_tbt": "0.1"}])
def test_auto_keeps_options_of_shared_prompts_when_one_instance_is_left(options: dict[str, str]) -> None:
    several = make_policy("auto", num_instances=2, options=options)
    alone = make_policy("auto", num_instances=1, options=several.given, is_resized=True)
    again = make_policy("auto", num_instances=2, options=alone.given, is_resized=True)
    assert (again.name, again.options) == (several.name, several.options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"target_tbt": "0.5"}, "auto"),
        ({"csa": '{"levels": 2, "drop": 0.5}'}, "csps"),
        ({"csa": '{"levels": 2, "drop": 0.5}', "target_tbt": "0.5"}, "csps"),
    ],
)
def test_auto_takes_options_that_count_on_one_instance(options: dict[str, str], name: str) -> None:
    """It takes them at the start as after a re-shard."""
    at_start, resized = (
        make_policy("auto", num_instances=1, options=options, is_resized=is_resized) for is_resized in (False, True)
    )
    assert (at_start.name, at_start.options) == (resized.name, resized.options)
    assert at_start.name == name


def test_auto_names_the_roles_that_rule_an_option_out() -> None:
    facts = Facts(cluster=Instances.of("2", "1"))
    with pytest.raises(ValueError, match="fractions: policy auto has no such option where instances have roles"):
        make_policy("auto", num_instances=3, options={"fractions": "0.5,0.5"}, facts=facts)


@pytest.mark.parametrize(
    ("name", "instances", "options", "message"),
    [
        ("fast", 1, {}, "policy 'fast' is unknown: choose from auto, chunked, context, runahead, tetris, fixed-sp"),
        ("chunked", 1, {"threshold": "9"}, "threshold: policy chunked has no such option: .* it has none, but context"),
        (
            "auto",
            1,
            {"exchange": "ring_kv"},
            "exchange is for prompts .* there is 1 instance: set `parallel` to 2",
        ),
        ("auto", 1, {"foo": "1"}, "foo: policy auto has no such option: .*target_tbt.*csa"),
        ("auto", 1, {"target_tbt": "0.5", "layout": "zigzag"}, "layout is for prompts that instances share"),
        ("auto", 2, {"target_tbt": "0.5", "threshold": "9"}, "target_tbt and threshold exclude .* policy context"),
        ("auto", 2, {"target_tbt": "0.5", "exchange": "chain"}, "target_tbt and exchange exclude each other"),
        ("context", 2, {"exchange": None}, "exchange must be a text, but None given"),
        ("context", 2, {"exchange": "ring"}, "exchange is one of auto, ring_kv, .*, chain, but 'ring' given"),
        ("runahead", 2, {"exchange": "ring_kv"}, "exchange is one of auto, chain, but 'ring_kv' given"),
        (
            "auto",
            2,
            {"treshold": "9"},
            "treshold: policy auto has no such option: .* exchange, decode, .*, threshold, long_share, .*csa",
        ),
        ("context", 2, {"threshold": "many"}, "threshold must be one of a whole number, auto, but 'many' given"),
        ("context", 2, {"threshold": "-1"}, "threshold must be at least 0, but -1 given"),
        ("context", 2, {"threshold": "1.5"}, r"threshold .*\(policy context\)"),
        ("context", 2, {"long_share": "0"}, "long_share must be above 0 and at most 1, but 0.0 given"),
        ("context", 2, {"long_share": "1.01"}, "long_share must be above 0 and at most 1, but 1.01 given"),
        ("context", 2, {"long_share": "nan"}, "long_share must be above 0"),
        ("context", 2, {"exchange": "ring"}, r"exchange .*\(policy context\)"),
        (
            "context",
            2,
            {"exchange": "chain", "layout": "zigzag"},
            "exchange chain computes with layout contiguous, but layout zigzag",
        ),
        ("context", 2, {"layout": "striped", "fractions": "0.5,0.5"}, "fractions are for layout contiguous"),
        ("context", 2, {"dense": "perhaps"}, "dense must be one of true, false, but 'perhaps' given"),
        ("context", 2, {"long_share": "x"}, "long_share must be a number, but 'x' given"),
        ("context", 2, {"dense": "true"}, "dense is for exchange gather_kv, but auto given"),
        ("context", 2, {"exchange": "ring_kv", "home": "computed"}, "home is for exchange chain, but ring_kv given"),
        ("context", 2, {"weights": "host"}, "weights are for exchange alltoall, but auto given"),
        ("context", 2, {"exchange": "alltoall", "weights": "disk"}, "weights must be one of auto, host, peers, but"),
        ("context", 2, {"micro_partitions": "2"}, "micro_partitions are for exchange gather_hidden, but auto given"),
        ("context", 2, {"exchange": "gather_hidden", "micro_partitions": "17"}, "must be from 1 to 16, but 17 given"),
        ("context", 2, {"rotate": "never"}, "rotate must be one of block, token, but 'never' given"),
        ("context", 2, {"fractions": "0.5,0.6"}, "add up to 1"),
        ("context", 3, {"fractions": "0.5,0.5"}, "fractions 0.5,0.5 are 2, but there are 3 instances"),
    ],
)
def test_a_policy_refuses_invalid_options(name: str, instances: int, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(name, num_instances=instances, options=options)


@pytest.mark.parametrize(
    ("name", "options", "parameter"),
    [
        ("context", {"exchange": "ring"}, "exchange"),
        ("context", {"decode": "chain"}, "decode"),
        ("context", {"exchange": "chain", "layout": "zigzag"}, "exchange"),
        ("context", {"layout": "striped", "fractions": "0.5,0.5"}, "fractions"),
        ("context", {"dense": "true"}, "dense"),
        ("context", {"weights": "host"}, "weights"),
        ("context", {"micro_partitions": "0"}, "micro_partitions"),
        ("context", {"exchange": "ring_kv", "home": "computed"}, "home"),
        ("context", {"threshold": "-1"}, "threshold"),
        ("context", {"long_share": "0"}, "long_share"),
        ("runahead", {"exchange": "ring_kv"}, "exchange"),
        ("tetris", {"min_chunk": "0"}, "min_chunk"),
        ("fixed-sp", {"sp": "0"}, "sp"),
    ],
)
def test_the_error_carries_the_option_and_names_the_policy(name: str, options: dict[str, str], parameter: str) -> None:
    with pytest.raises(ParameterError, match=rf"^{parameter}.* \(policy {name}\)$") as caught:
        make_policy(name, num_instances=2, options=options)
    assert caught.value.parameter == parameter


def test_whole_weights_need_instances_that_are_split() -> None:
    """Without a cluster the number of ranks of an instance is not known, so they are accepted."""
    options = {"exchange": "alltoall", "weights": "host"}
    with pytest.raises(ValueError, match=r"weights\(host\) are for instances split by tensor parallelism, but tp is 1"):
        make_policy("context", num_instances=2, options=options, facts=Facts(cluster=Instances.of("2")))
    for cluster in (None, Instances.of("2xtp2")):
        make_policy("context", num_instances=2, options=options, facts=Facts(cluster=cluster))


def test_options_are_read_from_text() -> None:
    cluster = Cluster(Setup(num_instances=2, options={"threshold": "7", "long_share": "0.5"}))
    short, long = cluster.add(range(7), max_tokens=1), cluster.add(range(8), max_tokens=1)
    cluster.run()
    assert [len(cluster.parts_of(request)[0].group) for request in (short, long)] == [1, 2]


@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 4, 16]), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_capacity_is_the_longest_request_that_always_fits(
    num_instances: int, num_blocks: int, size: int, tokens: int, first: int
) -> None:
    """A request of that length, alone, finishes as a prompt, or by decoding, and also behind a cached prefix."""
    cluster = Cluster(
        Setup(num_instances=num_instances, num_blocks=num_blocks, block_size=size, max_num_batched_tokens=tokens)
    )
    capacity = num_instances * num_blocks * size
    assert cluster.engine.config.max_model_len == capacity
    for length in (capacity - 1, min(first, capacity - 1), capacity // 2, capacity - 1):
        if length > 0:
            request = cluster.add(range(length), max_tokens=capacity)
            cluster.run()
            assert request.num_tokens == capacity


# ---------------------------------------------------------------- sharding a chunk


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, int, list[int], Capacity]:
    num_members, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 4, 16]))
    start = draw(st.integers(0, 100))
    owners = draw(st.lists(st.integers(0, num_members - 1), min_size=-(-start // size), max_size=-(-start // size)))
    room = Capacity(
        tokens=tuple(draw(st.lists(st.integers(0, 100), min_size=num_members, max_size=num_members))),
        blocks=tuple(draw(st.lists(st.integers(0, 30), min_size=num_members, max_size=num_members))),
        block_size=size,
    )
    return start, start + draw(st.integers(1, 300)), owners, room


@st.composite
def shapes(draw: st.DrawFn, num_members: int) -> Shape:
    layout = draw(st.sampled_from(get_args(Layout)).filter(lambda name: name != "single"))
    weights = draw(st.lists(st.integers(1, 9), min_size=num_members, max_size=num_members))
    uneven = layout == "contiguous" and draw(st.booleans())
    return Shape(layout=layout, fractions=tuple(weight / sum(weights) for weight in weights) if uneven else ())


@given(chunks(), st.data())
@settings(max_examples=600)
def test_a_chunk_fits_its_budget_and_free_blocks(
    case: tuple[int, int, list[int], Capacity], data: st.DataObject
) -> None:
    start, stop, owners, room = case
    size = room.block_size
    sharded = shard_chunk(start, stop, owners, room, data.draw(shapes(len(room.tokens))))
    head = owners[start // size] if start % size else None
    if sharded is None:
        with_block = [member for member, number in enumerate(room.blocks) if number] or range(len(room.tokens))
        able = with_block if head is None else [head]
        assert not any(room.tokens[member] for member in able), "only want of tokens makes a request wait"
        return
    by_position = {p: member for member, runs in enumerate(sharded) for run in runs for p in run.positions}
    end = max(by_position) + 1
    assert sorted(by_position) == list(range(start, end))
    assert start < end <= stop
    assert head is None or by_position[start] == head
    assert all(sum(map(len, runs)) <= tokens for runs, tokens in zip(sharded, room.tokens, strict=True))
    new = block_owners(sharded, len(owners), -(-end // size), size)
    for block, member in enumerate([*owners, *new]):
        assert {by_position[p] for p in range(block * size, block * size + size) if p in by_position} <= {member}
    wanted = [new.count(member) for member in range(len(room.blocks))]
    if any(number > free for number, free in zip(wanted, room.blocks, strict=True)):
        assert sum(wanted) == 1, "a block that is not free is asked for alone ..."
        able = [m for m, tokens in enumerate(room.tokens) if tokens > 0]
        assert not any(room.blocks[m] for m in able), "... and only when none is"


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 16]), st.integers(0, 3))
def test_with_equal_free_blocks_a_chunk_is_even_and_as_large_as_blocks_allow(
    num_members: int, num_blocks: int, size: int, num_before: int
) -> None:
    """An even number of blocks each: an odd one would make one member's causal work longer."""
    start = num_before * 2 * num_members * size
    owners = [member for _ in range(2 * num_before) for member in range(num_members)]
    most = 2 * num_blocks * size
    room = Capacity(tokens=(most + size,) * num_members, blocks=(99,) * num_members, block_size=size)
    sharded = shard_chunk(start, start + 10_000, owners, room)
    assert sharded is not None
    assert sizes(sharded) == [most] * num_members


def test_fractions_fill_the_free_blocks_of_the_busiest_member() -> None:
    room = Capacity(tokens=(2048, 2048), blocks=(99, 99), block_size=256)
    sharded = shard_chunk(0, 9000, [], room, Shape(layout="contiguous", fractions=(0.6, 0.4)))
    assert sharded is not None and sizes(sharded) == [2048, 1280]
    assert sharded[0][-1].stop == sharded[1][0].start


def test_a_whole_rest_that_fits_is_dealt_at_once() -> None:
    room = Capacity(tokens=(50, 50), blocks=(9, 9), block_size=16)
    sharded = shard_chunk(0, 90, [], room)
    assert sharded is not None and sum(sizes(sharded)) == 90


def test_members_alternate_and_a_member_two_blocks_ahead_waits() -> None:
    room = Capacity(tokens=(8, 8, 8), blocks=(9, 9, 9), block_size=4)
    for owners, first, expected in (
        ([0, 1, 2], 0, 0),
        ([0, 1, 2, 0], 0, 1),
        ([0, 1, 2], 2, 2),
        ([0, 1, 2, 0], 2, 0),
        ([0, 0, 1], 0, 1),
        ([1, 1, 1, 0, 2], 2, 2),
    ):
        start = 4 * len(owners)
        sharded = shard_chunk(start, start + 1, owners, room, first=first)
        assert sharded is not None and sizes(sharded).index(1) == expected
    full = Capacity(tokens=(8, 8, 8), blocks=(9, 0, 9), block_size=4)
    sharded = shard_chunk(16, 17, [0, 1, 2, 0], full)
    assert sharded is not None and sizes(sharded) == [0, 0, 1], "a member without a free block is passed over"


def sizes(sharded: SpanShards) -> list[int]:
    return [sum(map(len, runs)) for runs in sharded]


# ---------------------------------------------------------------- teams


@given(st.lists(st.sets(st.integers(0, 5), min_size=1).map(lambda group: tuple(sorted(group))), max_size=6))
def test_teams_are_the_connected_instances(groups: list[tuple[int, ...]]) -> None:
    coupled_sets = coupled_instances(groups)
    named = sorted({i for group in groups for i in group})
    assert sorted(i for coupled in coupled_sets for i in coupled) == named
    reach = {i: {i} for i in range(6)}
    for _ in range(6):
        for group in groups:
            joined = set().union(*(reach[i] for i in group))
            for i in joined:
                reach[i] = joined | reach[i]
    assert {frozenset(reach[i]) for i in named} == set(coupled_sets)


# ---------------------------------------------------------------- bounds and order of a batch


def test_requests_start_first_come_first() -> None:
    cluster = Cluster(Setup(max_num_seqs=2, max_num_batched_tokens=50))
    requests = [cluster.add([number] * (60 - 10 * number), max_tokens=3) for number in range(5)]
    cluster.run()
    starts = [cluster.forwards.index(next(f for f in cluster.forwards if names(f, r.id))) for r in requests]
    assert starts == sorted(starts)


def names(forward: Forward, request_id: int) -> bool:
    return any(part.request_id == request_id for part in forward.parts)


def test_a_step_uses_its_whole_token_budget() -> None:
    """Decodes and the pieces of prompts fill steps to the last token while there is work."""
    cluster = Cluster(Setup(max_num_batched_tokens=48))
    for number in range(6):
        cluster.add([number] * 100, max_tokens=2)
    cluster.run()
    tokens = [sum(part.stop - part.start for part in forward.parts) for forward in cluster.forwards]
    assert set(tokens[: 600 // 48]) == {48}


def test_a_prompt_starts_only_when_all_its_blocks_are_free() -> None:
    cluster = Cluster(Setup(num_blocks=10, block_size=4, max_num_batched_tokens=16))
    first, second = cluster.add([1] * 24, max_tokens=2), cluster.add([2] * 20, max_tokens=2)
    third = cluster.add([3] * 4, max_tokens=2)
    cluster.step()
    cluster.step()
    assert first.output and not second.table, "6 blocks are held, 5 asked for"
    assert not third.table, "no request is overtaken"
    cluster.run()
    assert [request.metrics.num_preemptions for request in cluster.requests] == [0, 0, 0]


def test_the_latest_request_is_preempted() -> None:
    cluster = Cluster(Setup(num_blocks=6, block_size=4))
    first, second, third = (cluster.add([number] * 7, max_tokens=10) for number in range(3))
    cluster.run()
    assert first.metrics.num_preemptions == 0 < third.metrics.num_preemptions
    assert cluster.engine.counts.num_preemptions == sum(request.metrics.num_preemptions for request in cluster.requests)
    assert cluster.engine.counts.num_prefix_queries == 3 * 7, "each prompt once, though they were admitted more often"
    freed = [step.request_ids for step in cluster.executor.steps if isinstance(step, Free)]
    assert freed[0] == (third.id,)
    finished = [request.metrics.finished_s for request in (first, second, third)]
    assert finished == sorted(finished, key=lambda time: time or 0.0)


def test_a_request_without_blocks_on_the_full_instance_is_no_victim() -> None:
    """The first request needs a third block of an instance that has two. The last request has no blocks there."""
    account = KvAccount([2, 2], block_size=4)
    growing, elsewhere = running(account, 0, num_tokens=8), running(account, 1, num_tokens=3)
    plan = make_policy("context", num_instances=2, options={}).plan(view_of(account, [growing, elsewhere]))
    assert plan.preempted == (growing,)
    assert [[share.request for share in batch] for batch in plan.batches] == [[elsewhere]]


@pytest.mark.parametrize("last_step", [-1, 5])
def test_recomputed_output_does_not_delay_decodes(last_step: int) -> None:
    """On two stages one of two requests would have to wait: the request with the later last step."""
    account = KvAccount([20, 20], block_size=4)
    decoding, back = running(account, 0, num_tokens=12), running(account, 0, num_tokens=12)
    decoding.last_step, back.last_step = 3, last_step
    back.id = back.admission = 1
    for _ in range(5):
        back.take_token(Sampled(request_id=back.id, token=1), ())
    view = replace(view_of(account, [decoding, back]), cluster=Instances.of("2xpp2"))
    [batch] = make_policy("chunked", num_instances=2, options={}).plan(view).batches
    assert [(part.request, part.start, part.stop) for part in batch] == [(decoding, 12, 13), (back, 12, 18)]


def running(account: KvAccount, instance: int, *, num_tokens: int) -> Request:
    """A request about to decode, with `num_tokens` computed on one instance."""
    request = Request(
        id=instance,
        prompt=(instance,) * num_tokens,
        params=SamplingParams(),
        seed=0,
        block_size=account.block_size,
        max_tokens=9,
        metrics=RequestMetrics(arrival_s=0.0),
        output=[1],
        num_computed=num_tokens,
        num_scheduled=num_tokens,
        group=(instance,),
        residency=RESIDENT,
    )
    account.extend(request, (instance,) * request.blocks_for(num_tokens))
    return request


def view_of(account: KvAccount, requests: list[Request]) -> ClusterView:
    running = Running(2)
    for request in requests:
        running.add(request)
    return ClusterView(
        cluster=Instances.of("2"),
        max_num_batched_tokens=2048,
        max_num_seqs=128,
        waiting=[],
        startable=[],
        running=running,
        busy=frozenset(),
        full=frozenset(),
        kv=account,
        now_s=0.0,
    )


def test_a_dealt_prompt_leaves_other_requests_their_part_of_the_budget() -> None:
    cluster = Cluster(
        Setup(num_instances=2, options={"threshold": "100", "long_share": "0.5"}, max_num_batched_tokens=64)
    )
    long = cluster.add([1] * 1000, max_tokens=1)
    cluster.step(0.0)
    assert sizes(cluster.parts_of(long)[-1].runs) == [64, 64], "alone, it takes all"
    cluster.step()
    cluster.add([2] * 50, max_tokens=50)
    for _ in range(4):
        cluster.step()
        assert sizes(cluster.parts_of(long)[-1].runs) == [32, 32]
    cluster.run()


@pytest.mark.parametrize("policy", ["context", "chunked", "prefill-first", "decode-first"])
def test_a_short_request_goes_where_its_prefill_ends_first(policy: str) -> None:
    options = {"threshold": "500"} if policy == "context" else {}
    cluster = Cluster(Setup(policy=policy, num_instances=3, options=options))
    lengths = [300, 100, 200, 50, 60]
    requests = [cluster.add([number] * length, max_tokens=2) for number, length in enumerate(lengths)]
    cluster.step(0.0)
    assert [request.group for request in requests] == [(0,), (1,), (2,), (1,), (1,)]
    cluster.run()


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("chunked", {}),
        ("prefill-first", {}),
        ("decode-first", {}),
        ("context", {"threshold": "500"}),
        ("tetris", {}),
        ("fixed-sp", {"sp": "1"}),
    ],
)
def test_requests_that_come_alone_use_the_caches_of_all_instances(policy: str, options: dict[str, str]) -> None:
    cluster = Cluster(Setup(policy=policy, num_instances=4, options=options))
    for number in range(8):
        cluster.add([number] * 100, max_tokens=2)
        cluster.run()
    kv = cluster.engine.kv.account
    used = [kv.num_allocated(instance) for instance in range(4)]
    assert max(used) < 1.5 * min(used)


def test_a_following_turn_goes_where_its_prefix_lies() -> None:
    cluster = Cluster(Setup(num_instances=3))
    firsts = [cluster.add([number] * 100, max_tokens=5) for number in range(3)]
    cluster.run()
    owners = [cluster.parts_of(request)[0].group for request in firsts]
    order = (2, 0, 1)
    seconds = [cluster.add([*firsts[i].prompt, *firsts[i].output, 9], max_tokens=2) for i in order]
    cluster.run()
    assert [cluster.parts_of(request)[0].group for request in seconds] == [owners[i] for i in order]
    assert all(request.metrics.num_cached_tokens == 104 for request in seconds)
    assert cluster.engine.counts.num_prefix_hits == 3 * 104
    assert cluster.engine.counts.num_prefix_queries == 3 * 100 + 3 * 106


def test_short_requests_pass_long_requests_that_wait_for_a_long_request() -> None:
    options = {"threshold": "100"}
    cluster = Cluster(Setup(num_instances=2, num_blocks=200, options=options, max_num_batched_tokens=64))
    first, second = (cluster.add([number] * 1000, max_tokens=2) for number in (1, 2))
    short = cluster.add([3] * 20, max_tokens=2)
    cluster.run()
    assert short.metrics.finished_s is not None
    assert first.metrics.ttft_s is not None
    assert second.metrics.ttft_s is not None
    assert short.metrics.finished_s < first.metrics.ttft_s < second.metrics.ttft_s


@pytest.mark.parametrize("policy", ["chunked", "prefill-first"])
def test_a_copy_evicts_nothing_that_another_admission_has_hit(policy: str) -> None:
    """Both are admitted by one plan. The prefix of the second request would be evicted first."""
    setup = Setup(num_instances=1, num_blocks=12, block_size=4, policy=policy, max_model_len=40)
    cluster = Cluster(setup)
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]
    for prompt in (first, second, *([20 + number] * 8 for number in range(4))):
        cluster.add(prompt, max_tokens=1)
        cluster.run()
    copies = cluster.add([*second[:6], 9], max_tokens=4)
    shares = cluster.add([*first, 10], max_tokens=4)
    cluster.engine.emit()
    assert copies.table and shares.table and not {*copies.table} & {*shares.table}
    cluster.run()
