"""The cost model's laws: bounds, monotony, bytes as in docs/exchanges.md, and one result for one question."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_part import part_of
from refusals import refused
from step_seconds import seconds_of

from longspan.core.cluster import Cluster
from longspan.core.exchange import ALLTOALL, CHAIN, GATHER_HIDDEN, GATHER_KV, LOCAL, RING_KV, RING_Q, Exchange
from longspan.core.layouts import shard_span
from longspan.core.runs import Run
from longspan.core.splits import ParallelSpec
from longspan.core.steps import Forward, Part, Sample
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.catalog import Kernels
from longspan.cost.channels import Channel, Share, Shares, channel_time, exchanged_bytes, shares_of
from longspan.cost.estimate import Estimate, decode_channel, estimate_decode, estimate_prefill
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.partitions import Member, skewed
from longspan.cost.precision import HALF, Precision
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices

EXCHANGES: tuple[Exchange, ...] = (RING_KV, RING_Q, ALLTOALL, GATHER_KV, GATHER_HIDDEN, CHAIN)
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
NARROW = Precision.of("bfloat16", ffn="fp8")
A100S = Devices(hardware="a100-sxm-80g", gpus_per_host=8, hosts=2)


def model_on(
    cluster: Devices = A100S,
    instances: int = 1,
    tp: int = 1,
    kernels: Kernels = "flash",
    name: str = "llama-3-8b",
    pp: int = 1,
) -> Roofline:
    model = from_config(catalog.model_config(name), name=name)
    return rooflines(model, cluster, Cluster(spec=ParallelSpec(instances=instances, tp=tp, pp=pp)), kernels)[0]


def prefill(instances: int, exchange: Exchange, length: int, cached: int = 0, **options: object) -> Estimate:
    return estimate_prefill(model_on(instances=instances, **options), instances, exchange, length, cached)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A random question."""

    name: str
    hardware: str
    kernels: Kernels
    instances: int
    tp: int
    pp: int
    exchange: Exchange
    length: int

    def model(self, link_gbytes_per_s: float | None = None) -> Roofline:
        cluster = Devices(hardware=self.hardware, gpus_per_host=4, hosts=12, link_gbytes_per_s=link_gbytes_per_s)
        return model_on(cluster, self.instances, self.tp, self.kernels, self.name, self.pp)


DRAWN = st.builds(
    Drawn,
    name=st.sampled_from(catalog.names("models")),
    hardware=st.sampled_from(catalog.names("hardware")),
    kernels=st.sampled_from(KERNELS),
    instances=st.integers(1, 8),
    tp=st.sampled_from((1, 2)),
    pp=st.sampled_from((1, 1, 2, 3)),
    exchange=st.sampled_from(EXCHANGES),
    length=st.integers(1, 10**6),
)


@settings(max_examples=80, deadline=None)
@given(DRAWN, st.floats(0, 0.99), st.integers(1, 64))
def test_estimates_keep_their_bounds_and_add_up(drawn: Drawn, part: float, batch: int) -> None:
    model = drawn.model()
    decoding: Exchange = RING_Q if drawn.exchange == GATHER_HIDDEN else drawn.exchange
    for found in (
        estimate_prefill(model, drawn.instances, drawn.exchange, drawn.length, int(part * drawn.length), batch=batch),
        estimate_decode(model, drawn.instances, decoding, drawn.length, batch),
    ):
        assert 0 < found.lower_bound_s <= found.seconds
        assert found.seconds == pytest.approx(sum(found.breakdown.as_dict().values()))
        assert min(found.breakdown.as_dict().values()) >= -1e-12
        assert 0 < found.mfu < 1
        answer = found.as_json()
        assert answer["compute_s"] + answer["exposed_communication_s"] == pytest.approx(found.seconds)
        capacity = catalog.device(drawn.hardware).memory_bytes / 2**30
        assert answer["fits"] == (answer["memory_gib_per_gpu"] <= capacity)


@settings(max_examples=60, deadline=None)
@given(DRAWN)
def test_more_tokens_and_slower_links_take_longer(drawn: Drawn) -> None:
    model = drawn.model(link_gbytes_per_s=100)
    found = estimate_prefill(model, drawn.instances, drawn.exchange, drawn.length).seconds
    assert estimate_prefill(model, drawn.instances, drawn.exchange, 2 * drawn.length).seconds > found
    slow = drawn.model(link_gbytes_per_s=1)
    assert estimate_prefill(slow, drawn.instances, drawn.exchange, drawn.length).seconds >= found


def test_decoding_reads_all_weights_but_the_embedding() -> None:
    model = model_on()
    layer = model.layer.model
    read = (
        2 * (layer.num_parameters - layer.head_weights) + 1000 * layer.attention.kv_bytes * layer.attention.num_layers
    )
    found = estimate_decode(model, 1, LOCAL, 1000).lower_bound_s
    assert found == pytest.approx(read / model.layer.device.bytes_per_s)
    with pytest.raises(ValueError, match="gather_hidden is for prompts only"):
        estimate_decode(model_on(instances=2), 2, GATHER_HIDDEN, 1000)


def test_stages_share_a_prompt_and_pass_it_on() -> None:
    """Chunks fill four stages, except while the first and the last chunk pass. Three links carry the hidden states."""
    alone, staged = (estimate_prefill(model_on(pp=pp), 1, LOCAL, 65_536) for pp in (1, 4))
    assert alone.seconds / 4 < staged.seconds < alone.seconds / 4 * 1.4
    assert staged.breakdown.pipeline_s > 0 == alone.breakdown.pipeline_s
    assert staged.bytes_exchanged == 3 * 65_536 * 4096 * 2
    assert staged.memory.weights < 0.4 * alone.memory.weights
    assert staged.memory.kv == alone.memory.kv / 4


def test_a_token_passes_through_all_stages_and_a_batch_keeps_them_busy() -> None:
    """Alone it is no quicker. Eight stages alternate, and each batch reads the weights again."""
    one, of_one = (estimate_decode(model_on(pp=pp), 1, LOCAL, 4096).seconds for pp in (1, 2))
    assert one < of_one < 1.1 * one
    eight, of_eight = (estimate_decode(model_on(pp=pp), 1, LOCAL, 4096, 8).seconds for pp in (1, 2))
    assert 0.8 * eight < of_eight < 1.2 * eight


def test_heads_are_not_cut() -> None:
    """Of 32 heads, one of five members has 7. Of 64 members, 32 have one head."""

    def attention_s(instances: int) -> float:
        return prefill(instances, ALLTOALL, 64_000, cluster=replace(A100S, hosts=8)).breakdown.attention_s

    assert attention_s(5) == pytest.approx(7 / 32 * prefill(1, LOCAL, 64_000).breakdown.attention_s, rel=0.03)
    assert attention_s(64) == attention_s(32) < attention_s(16)


def test_the_bound_is_equation_2() -> None:
    alone = prefill(1, LOCAL, 16384).seconds
    assert prefill(4, RING_KV, 16384).lower_bound_s == pytest.approx(alone / 2 * (1 / 4 + 1 / 16))


def test_ring_kv_hides_messages_under_attention_and_gather_kv_nothing() -> None:
    """A long prompt hides every hop inside a host. A gather sends as many bytes, and none are hidden."""
    ring, gather = prefill(8, RING_KV, 256_000), prefill(8, GATHER_KV, 256_000)
    assert ring.breakdown.exchange_s == 0 < gather.breakdown.exchange_s
    assert ring.bytes_exchanged == gather.bytes_exchanged
    short = prefill(16, RING_KV, 1000)
    assert short.breakdown.exchange_s > 0


def test_ring_q_asks_all_members_at_once() -> None:
    """A decoded token waits for one query and one result, independent of the number of members."""
    waits_s = [estimate_decode(model_on(instances=n), n, RING_Q, 4096).breakdown.exchange_s for n in (2, 8)]
    starts_s = [32 * 2 * model_on(instances=n).topology.alltoall_s(0.0, tuple(range(n))) for n in (2, 8)]
    assert waits_s == [pytest.approx(start_s, rel=0.1) for start_s in starts_s]
    assert starts_s[1] < 1.3 * starts_s[0]


def test_ring_q_hides_queries_under_a_member_s_own_attention_only() -> None:
    """A prompt has many queries. The queries of a ring would travel under the attention of all members but the last."""
    model, members = model_on(instances=4), 4
    share = Share(queries=8192, pairs=8192 * 16384, scores=8192 * 32768, held=8192)
    channel = Channel(
        exchange=RING_Q, group=(0, 8, 1, 9), shares=Shares.of([share] * members), keys=4 * 8192, decode=False
    )
    layer, topology = model.layer, replace(model.topology, hosts=[0] * 8 + [1] * 8)
    found = channel_time(layer, topology, channel)
    width = layer.heads * layer.model.attention.head_dim * 2
    sent_s, returned_s = (topology.alltoall_s(3 * 8192 * size, channel.group) for size in (width, width + 4 * 32))
    assert sent_s > found.attention_s / members
    assert found.exposed_s == pytest.approx(sent_s - found.attention_s / members + returned_s)


def test_each_member_s_queries_of_a_prompt_read_all_keys_that_are_held() -> None:
    """So few queries behind many keys take as long as their members are many, while one of them takes no longer."""
    model = model_on(instances=4)

    def attended_s(decode: bool) -> float:
        share = Share(queries=1, pairs=1_000_000, scores=1_000_000, held=1_000_000)
        channel = Channel(
            exchange=RING_Q, group=(0, 1, 2, 3), shares=Shares.of([share] * 4), keys=4_000_000, decode=decode
        )
        return channel_time(model.layer, model.topology, channel).attention_s

    assert attended_s(decode=False) == pytest.approx(4 * attended_s(decode=True), rel=0.1)


def test_a_share_counts_the_pairs_of_its_runs() -> None:
    runs = (Run(3, 7), Run(10, 20, 4))
    [share] = shares_of(RING_KV, (runs,), 5, 30)
    seen = [position + 1 for run in runs for position in run.positions]
    assert (share.queries, share.pairs) == (len(seen), sum(seen))
    assert (share.scores, share.held) == (30 * len(seen), 5 + len(seen))


@pytest.mark.parametrize("members", [2, 4, 8, 16])
def test_bytes_are_those_of_the_rules(members: int) -> None:
    model = model_on(instances=members)
    shape, tokens = model.layer.model.attention, 1024
    share = Share(queries=tokens // members, pairs=0, scores=0, held=tokens / members)
    shares = Shares.of([share] * members)
    kv_bytes, rows = tokens * shape.kv_bytes, shape.num_heads + max(shape.num_kv_heads, members)

    def sent(exchange: Exchange) -> float:
        channel = Channel(
            exchange=exchange, group=tuple(range(members)), shares=shares, keys=float(tokens), decode=False
        )
        return exchanged_bytes(model.layer, channel)

    assert sent(RING_KV) == sent(GATHER_KV) == (members - 1) * kv_bytes
    assert sent(ALLTOALL) == pytest.approx((members - 1) / members * 2 * rows * tokens * shape.head_dim * 2)
    assert sent(RING_Q) == (members - 1) * tokens * shape.num_heads * (2 * shape.head_dim * 2 + 4)


def test_even_chains_send_half_of_a_gather() -> None:
    """Equations 5 and 7 of KV-Runahead."""
    assert prefill(4, CHAIN, 4096).bytes_exchanged == prefill(4, GATHER_KV, 4096).bytes_exchanged / 2


def test_cached_keys_do_not_run_through_chains() -> None:
    """Each of four members gets the three quarters of cached keys that it lacks. New keys travel as without a cache."""
    kv_bytes = 32 * model_on().layer.model.attention.kv_bytes
    sent = prefill(4, CHAIN, 12288, 8192).bytes_exchanged
    assert sent == prefill(4, CHAIN, 4096).bytes_exchanged + 3 * 8192 * kv_bytes


def test_a_chain_behind_cached_tokens_pays_for_sending_them_in_every_layer() -> None:
    """They come from all members, so over the network it waits about as long as a gather of all keys."""
    chained, gathered = (prefill(16, one, 262_144, 245_760) for one in (CHAIN, GATHER_KV))
    assert chained.breakdown.exchange_s > 0.8 * gathered.breakdown.exchange_s


def test_members_that_have_cached_keys_wait_for_the_last_to_come_to_a_layer() -> None:
    """Without: 3 seconds each in every layer. With: both come to the layer together, 5 seconds before they attend."""
    members = [Member(before_s=1, behind_s=2, message_s=0), Member(before_s=1, behind_s=4, message_s=0)]
    assert skewed(members, 2) == [6, 10]
    assert skewed(members, 2, gather_s=5) == [9 + 5 + 2, 9 + 5 + 4]


def test_a_message_of_a_rendezvous_waits_for_its_receiver() -> None:
    """Layers of 1 + 2 s and messages of 4 s: eagerly sent, the second is under way while the receiver computes."""
    pair = [Member(before_s=1, behind_s=2, message_s=4), Member(before_s=1, behind_s=2, message_s=0)]
    assert skewed(pair, 1) == skewed(pair, 1, rendezvous=True) == [3, 1 + 4 + 2]
    assert skewed(pair, 2) == [6, 5 + 4 + 2]  # the link is free at 5, the message there at 9
    assert skewed(pair, 2, rendezvous=True) == [6, 7 + 4 + 2]  # it leaves at 7


def test_unfused_attention_computes_hidden_scores_too() -> None:
    """Twice the pairs of a causal mask, and rectangles in a chain, which has fewer of them."""
    model = model_on(instances=2, kernels="eager")
    whole = Share(queries=4096, pairs=4096 * 4097 / 2, scores=4096**2, held=4096)
    alone = Channel(exchange=LOCAL, group=(0,), shares=Shares.of([whole]), keys=4096, decode=False)
    half = replace(alone, shares=Shares.of([whole._replace(scores=whole.scores / 2)]))
    full_s, half_s = (channel_time(model.layer, model.topology, one).attention_s for one in (alone, half))
    assert full_s == pytest.approx(2 * half_s, rel=0.01)
    gathered, chained = prefill(2, GATHER_KV, 16384, kernels="eager"), prefill(2, CHAIN, 16384, kernels="eager")
    assert chained.memory.scores == gathered.memory.scores  # the last piece sees all keys either way
    assert chained.seconds < gathered.seconds


@pytest.mark.parametrize("name", ["llama-7b", "falcon-7b", "falcon-1b"])
def test_the_host_takes_as_long_for_a_layer_of_any_architecture(name: str) -> None:
    """Unfused code on a short prompt waits for it: 3.0 to 3.3 ms a layer, although these differ in their operators."""
    model = model_on(instances=4, kernels="eager", name=name)
    found = estimate_prefill(model, 4, CHAIN, 1024)
    assert 3.0e-3 < found.seconds / model.layer.model.attention.num_layers < 3.3e-3


def test_messages_and_repeated_heads_are_started_too() -> None:
    """Keys and values of four members are eight messages. To repeat them for more query heads takes two starts."""

    def host_s(name: str, messages: int) -> float:
        return model_on(kernels="eager", name=name).layer.host_s(messages)

    more_s = host_s("llama-7b", 8) - host_s("llama-7b", 0)
    assert more_s == pytest.approx(4 * (host_s("llama-7b-gqa8", 0) - host_s("llama-7b", 0)))
    assert model_on().layer.host_s(8) == model_on().layer.host_s(0) < host_s("llama-7b", 0)


def test_searched_pieces_beat_even_ones_and_come_first_longer() -> None:
    model = model_on(instances=4, kernels="eager", name="llama-7b")
    even = estimate_prefill(model, 4, CHAIN, 8192)
    searched = estimate_prefill(model, 4, CHAIN, 8192, fractions="search")
    assert searched.seconds < even.seconds
    assert sum(searched.partition) == 8192
    assert searched.partition[0] > searched.partition[-1]


def test_narrow_weights_are_smaller_and_faster_where_the_device_has_them() -> None:
    config = catalog.model_config("llama-3-70b")
    for hardware, faster in (("h100-sxm-80g", True), ("a100-sxm-80g", False)):
        cluster = Devices(hardware=hardware, gpus_per_host=8)
        wide, narrow = (
            estimate_prefill(
                rooflines(from_config(config, name="70b", precision=precision), cluster, Cluster.of("tp8"))[0],
                1,
                LOCAL,
                8192,
            )
            for precision in (HALF, NARROW)
        )
        assert narrow.memory.weights < wide.memory.weights
        assert (narrow.seconds < 0.9 * wide.seconds) == faster


def test_the_memory_error_names_the_part_that_does_not_fit() -> None:
    found = prefill(1, LOCAL, 256_000).memory
    assert not found.fits
    assert re.fullmatch(r"15\.0 weights \+ 31\.2 KV \+ .* GiB per GPU > 80\.0 GiB", found.arithmetic)
    assert prefill(2, RING_KV, 256_000).memory.fits


def test_devices_of_a_host_share_a_network_that_is_the_host_s() -> None:
    """A ring of 16 GPUs crosses once, of 2 x tp8 with eight messages at a time."""
    per_gpu, per_host = (
        Devices(hardware="a100-sxm-80g", gpus_per_host=8, hosts=2, link=name)
        for name in ("rdma-400g", "efa-400g-per-host")
    )
    crossing = [model_on(cluster, 2, 8).topology.send_s(1e9, 0, 1) for cluster in (per_gpu, per_host)]
    assert crossing[1] > 6 * crossing[0]
    alone = model_on(per_host, 16, 1).topology
    assert alone.send_s(1e9, 7, 8) == pytest.approx(1e9 / (50e9 * 0.92), rel=0.01)


@pytest.mark.parametrize("link", ["rdma-400g", "efa-400g-per-host"])
@pytest.mark.parametrize(("instances", "tp"), [(16, 1), (8, 2), (2, 8), (2, 1)])
def test_an_instance_sends_as_quickly_as_its_ranks_together(link: str, instances: int, tp: int) -> None:
    """Also over a link that they share."""
    topology = model_on(replace(A100S, link=link), instances, tp).topology
    sent_s = topology.send_s(1e9, 0, instances - 1) - topology.send_s(0.0, 0, instances - 1)
    assert tp * 1e9 / topology.bytes_per_s == pytest.approx(sent_s)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ParallelSpec(instances=4, tp=8), r"4xtp8 needs 4 \* 8 = 32 GPUs, but there are 2 hosts \* 8 = 16"),
        (ParallelSpec(tp=16), r"cannot share 9 query heads"),
    ],
)
def test_impossible_clusters_are_refused(spec: ParallelSpec, message: str) -> None:
    model = from_config(catalog.model_config("smollm2-135m"), name="smollm2-135m")
    with pytest.raises(ValueError, match=message):
        rooflines(model, A100S, Cluster(spec=spec))


def test_impossible_questions_are_refused() -> None:
    model = model_on(instances=2)
    with pytest.raises(ValueError, match="more than the cached tokens, but 5 given with 5 cached"):
        estimate_prefill(model, 2, RING_KV, 5, 5)
    with pytest.raises(ValueError, match="2 instances share a prompt by an exchange"):
        estimate_prefill(model, 2, LOCAL, 5)
    with refused("fractions"):
        estimate_prefill(model, 2, CHAIN, 5000, fractions=(0.2, 0.3, 0.5))
    with refused("gpus_per_host"):
        Devices(hardware="a10", gpus_per_host=0)


def part(request: int, start: int, stop: int, group: tuple[int, ...], exchange: Exchange) -> Part:
    layout = "single" if len(group) == 1 or stop - start == 1 else "contiguous" if exchange == CHAIN else "zigzag"
    runs = shard_span(layout, start, stop, len(group))
    sample = Sample(instance=group[-1] if exchange == CHAIN else group[0], position=stop)
    return part_of(group, request_id=request, start=start, stop=stop, runs=runs, exchange=exchange, sample=sample)


def step_cost(instances: int) -> RooflineCost:
    model = from_config(catalog.model_config("llama-3-8b"), name="llama-3-8b")
    return RooflineCost(model, A100S, Cluster(spec=ParallelSpec(instances=instances)), block_size=256)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("cached", [0, 4096])
def test_a_step_of_one_prompt_takes_its_estimate(exchange: Exchange, cached: int) -> None:
    forward = Forward(number=0, parts=(part(0, cached, 16384, (0, 1, 2, 3), exchange),))
    seconds = seconds_of(step_cost(4), forward)
    assert max(seconds.values()) == pytest.approx(prefill(4, exchange, 16384, cached).seconds, rel=1e-6)


def test_a_decode_step_takes_its_estimate() -> None:
    parts = tuple(part(request, 4095, 4096, (0,), LOCAL) for request in range(8))
    seconds = seconds_of(step_cost(4), Forward(number=0, parts=parts))
    assert seconds == {0: pytest.approx(estimate_decode(model_on(), 1, LOCAL, 4096, 8).seconds)}


def test_chains_leave_decoding_to_one_member() -> None:
    chained, alone = (estimate_decode(model_on(instances=4), n, CHAIN, 4096, 8) for n in (4, 1))
    assert chained == alone
    assert estimate_decode(model_on(instances=4), 4, RING_Q, 4096, 8).partition == (2, 2, 2, 2)


def test_batched_decodes_share_the_weights_and_prompts_pay_for_themselves() -> None:
    cost = step_cost(4)

    def seconds(*parts: Part) -> dict[int, float]:
        return seconds_of(cost, Forward(number=0, parts=parts))

    one = seconds(part(0, 1000, 1001, (0,), LOCAL))[0]
    many = seconds(*(part(request, 1000, 1001, (0,), LOCAL) for request in range(16)))[0]
    assert one < many < 2 * one
    prompt = part(20, 0, 8192, (0, 1), RING_KV)
    both = seconds(prompt, *(part(request, 1000, 1001, (0,), LOCAL) for request in range(16)))
    assert max(seconds(prompt)[0], many) < both[0] < seconds(prompt)[0] + many
    assert seconds(prompt)[1] < both[1] <= both[0], "instances without decodes wait for instances with decodes"


def test_groups_that_share_members_wait_for_each_other() -> None:
    cost = step_cost(4)
    decodes = [part(request, 1000, 1001, (0, 1), RING_Q) for request in range(2)]
    of_one = seconds_of(cost, Forward(number=0, parts=(decodes[0],)))
    head_s = of_one[0] - of_one[1]
    assert head_s == pytest.approx(cost.lines[0].layer.head_s(1)), "the first member samples"
    joined = seconds_of(cost, Forward(number=0, parts=(decodes[0], part(5, 0, 8192, (1, 2), RING_KV))))
    assert joined == pytest.approx({0: joined[2] + head_s, 1: joined[2] + head_s, 2: joined[2]}, rel=1e-6)
    assert joined[2] > 2 * of_one[1], "which is the prompt's time"
    apart = seconds_of(cost, Forward(number=0, parts=(decodes[0], part(5, 0, 8192, (2, 3), RING_KV))))
    assert apart[1] < apart[3] == pytest.approx(joined[2], rel=0.1), "groups apart do not wait"


def test_instances_of_a_step_end_after_their_own_work() -> None:
    """Members of a chain end one after the other. An instance that only passes a token on needs no time."""
    seconds = seconds_of(step_cost(4), Forward(number=0, parts=(part(0, 0, 65536, (0, 1, 2, 3), CHAIN),)))
    assert seconds[0] < seconds[1] < seconds[2] < seconds[3]
    passed = replace(part(0, 10, 11, (0,), LOCAL), unknown_on=3)
    assert seconds_of(step_cost(4), Forward(number=0, parts=(passed,)))[3] == 0
    beside = part(1, 0, 1000, (1,), LOCAL)
    assert seconds_of(step_cost(4), Forward(number=0, parts=(passed, beside)))[3] == 0, "also together with a prompt"


def test_a_link_that_the_devices_of_a_host_share_is_between_hosts() -> None:
    assert Devices(hardware="a100-sxm-40g", gpus_per_host=8, hosts=2, link="efa-400g-per-host").num_gpus == 16
    with refused("link"):
        Devices(hardware="a100-sxm-40g", gpus_per_host=8, hosts=2, link="nvlink3")
    with refused("link"):
        Devices(hardware="a100-sxm-40g", gpus_per_host=8, link="efa-400g-per-host")


GROUPS = ((0,), (3,), (0, 1), (1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7))


@st.composite
def drawn_part(draw: st.DrawFn) -> Part:
    """A decode or a piece of a prompt."""
    group, start = draw(st.sampled_from(GROUPS)), draw(st.integers(0, 10**5))
    new = draw(st.one_of(st.just(1), st.integers(1, 10**4)))
    exchange = draw(st.sampled_from(EXCHANGES)) if len(group) > 1 else LOCAL
    return part(draw(st.integers(0, 99)), start, start + new, group, exchange)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(drawn_part(), min_size=1, max_size=5), min_size=2, max_size=5))
def test_earlier_queries_change_no_time(steps: list[list[Part]]) -> None:
    cost = step_cost(8)
    for parts in steps:
        forward = Forward(number=0, parts=tuple(parts))
        assert seconds_of(cost, forward) == seconds_of(step_cost(8), forward)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(1, 10**5), st.integers(1, 9)), min_size=1, max_size=5),
    st.sampled_from(KERNELS),
    st.dictionaries(st.integers(0, 7), st.integers(1, 9)),
)
def test_instances_take_the_times_of_their_channels(
    drawn: list[tuple[tuple[int, ...], int, int]], kernels: Kernels, tokens: dict[int, int]
) -> None:
    """Also if other steps differ in one value only."""
    model = model_on(instances=8, kernels=kernels)
    tokens = dict.fromkeys(range(8), 0) | tokens
    channels = [decode_channel(RING_Q if len(group) > 1 else LOCAL, group, *sizes) for group, *sizes in drawn]
    found = model.times(channels, tokens, tokens)
    alone = [model.times([channel], tokens, tokens) for channel in channels]
    for instance, one in found.items():
        for name in ("attention_s", "overhead_s", "exchange_s"):
            whole = sum(getattr(each[instance], name) for each in alone)
            assert getattr(one, name) == pytest.approx(whole)
        bare = model.times([], {instance: tokens[instance]}, tokens)[instance]
        assert (one.linear_s, one.elementwise_s, one.head_s) == (bare.linear_s, bare.elementwise_s, bare.head_s)
        assert one.total_s == sum(one.as_dict().values())
