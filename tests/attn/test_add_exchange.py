"""Adding an exchange touches one file: here it is `broadcast`, with its traits, its tensors and its cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from cluster import Cluster, Setup
from engines import ThreadLLM
from fake_llm import FakeLLM, run
from oracle import Oracle, assert_exact
from refusals import refused
from step_seconds import seconds_of
from test_cost_model import step_cost
from torch import Tensor
from transports import Wires, run_members

from longspan import SamplingParams
from longspan.attn import exchanges as tensors
from longspan.attn.check import Request, attend, member_call, random_batch, random_spec
from longspan.attn.collectives import all_gather
from longspan.attn.comm import ALONE, Group, Transport
from longspan.attn.exchanges import Call
from longspan.core import exchange as kinds
from longspan.core.exchange import Exchange, Traits
from longspan.core.layouts import shard_span
from longspan.core.steps import Forward
from longspan.cost import channels
from longspan.cost.channels import Channel, ChannelTime, ExchangeCost, Layer, Topology, attention_s
from longspan.errors import PluginError

# ---------------------------------------------------------------- the exchange


def broadcast(call: Call) -> None:
    """Every member sends all its keys and values to every other."""
    messages = call.all_kv()
    all_gather(call.group, messages)
    for source, message in enumerate(messages):
        call.attend(source, message)


def seconds(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    sent_s = topology.gather_s(max(channel.shares.held) * layer.kv_bytes, channel.group)
    return ChannelTime(attention_s=attention_s(layer, channel.shares.busiest, keys=channel.keys), exposed_s=sent_s)


def num_bytes(layer: Layer, channel: Channel) -> float:
    return (len(channel.group) - 1) * layer.kv_bytes * sum(channel.shares.held)


@pytest.fixture(name="added")
def _added() -> Iterator[Exchange]:
    added = kinds.register_traits("broadcast", Traits(layouts=("zigzag", "striped")))
    tensors.exchange(added)(broadcast)
    channels.register_cost(added, ExchangeCost(num_bytes=num_bytes, time=seconds))
    yield added
    for registry in (kinds._TRAITS, tensors._REGISTERED, channels._COSTS):
        del registry[added.kind]  # keeps exchanges imported meanwhile, which register once


# ---------------------------------------------------------------- the rest of the system


def test_a_policy_schedules_it_in_the_simulated_engine_and_its_steps_have_a_cost(added: Exchange) -> None:
    options = {"exchange": "broadcast", "decode": "broadcast", "threshold": "20"}
    cluster = Cluster(Setup(num_instances=2, policy="context", options=options))
    request = cluster.add(range(100), max_tokens=3)
    cluster.run()
    parts = cluster.parts_of(request)
    assert {part.exchange for part in parts} == {added}
    assert request.metrics.exchanges == {"prefill": {"broadcast": 1}, "decode": {"broadcast": 2}}
    forward = Forward(number=0, parts=(parts[0],))
    [told] = msgspec.msgpack.decode(msgspec.msgpack.encode(forward), type=Forward).parts
    assert told.exchange == added
    times = seconds_of(step_cost(2), forward)
    assert set(times) == {0, 1}
    assert min(times.values()) > 0


def test_its_layouts_are_kept(added: Exchange) -> None:
    with refused("exchange"):
        Cluster(Setup(num_instances=2, policy="context", options={"exchange": added.kind, "layout": "contiguous"}))
    assert added in kinds.exchanges()
    assert added not in kinds.of_any_layout(), "automatic choices ignore layouts"


@pytest.mark.usefixtures("one_thread")
def test_ranks_compute_attention_with_it(added: Exchange) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        spec, batch = random_spec(draw), random_batch(draw, 3, in_order=False)

        def member(rank: int, transport: Transport) -> Tensor:
            group = Group(transport, range(3), rank, name=added.shown)
            return attend(member_call(added, group, batch, spec))  # noqa: B023

        for rank, found in enumerate(run_members(3, member, wires=Wires())):
            assert isinstance(found, Tensor), found
            wanted = torch.cat([request.wanted(rank, spec) for request in batch], dim=1)
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_queries", [0, 3])
def test_sinks_are_not_ignored_by_an_exchange_that_writes_results_itself(added: Exchange, num_queries: int) -> None:
    """`Call.finish` adds them to merged results only."""
    runs = shard_span("contiguous", 0, num_queries, 1)
    spec = replace(random_spec(random.Random(0)), has_sinks=True)
    call = member_call(added, ALONE, [Request(q_runs=runs, kv_runs=runs, seed=0)], spec)

    def write(call: Call) -> None:
        call.out.zero_()

    writing = tensors.AttentionExchange(attend=write)
    if num_queries:
        with pytest.raises(PluginError, match="broadcast writes results without the model's attention sinks"):
            writing.attend(call)
    else:
        writing.attend(call)


def test_an_llm_serves_with_it(added: Exchange, tiny: Path, oracle: Oracle) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_logits=True)
    options = {"policy": "context", "exchange": added.kind, "policy_options": {"threshold": "20"}}
    prompt = [5, 9, 3, 11] * 20
    with ThreadLLM(str(tiny), instances=2, skip_tokenizer_init=True, block_size=16, **options) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert llm.bytes_exchanged["broadcast"] > 0
    assert_exact(output, oracle.complete(prompt, 4))


@pytest.mark.usefixtures("added", "fake_llm")
def test_the_command_line_takes_and_lists_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("generate", "--prompt", "x", "--exchange", "broadcast") == 0
    assert FakeLLM.last.arguments["exchange"] == "broadcast"
    monkeypatch.setenv("COLUMNS", "400")
    for verb in ("generate", "simulate", "estimate"):
        capsys.readouterr()
        assert run(verb, "--help") == 0
        assert "chain, broadcast]" in capsys.readouterr().out
