"""Simulations by a profile: sparse attention has its price, and options that need the model's sizes work."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run
from invented_tuned import invented_tuned
from msgspec import structs
from step_seconds import seconds_of
from test_profile import SUBJECT

from longspan.core.cluster import Cluster
from longspan.core.exchange import ALLTOALL, Exchange, exchange_of
from longspan.core.layouts import shard_span
from longspan.core.options import SchedulingArgs
from longspan.core.sparse import SparseSetting
from longspan.core.steps import Forward, Part, Sample
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.pricing import whole_prompt_s
from longspan.cost.profile import Decode, Prefill, Profile, Transfer
from longspan.cost.shape import ModelShape
from longspan.cost.step_cost import StepCost
from longspan.policy.csps.chooser import CsaChooser
from longspan.policy.csps.search import Configuration
from longspan.policy.facts import Facts
from longspan.sim.spec import ClusterSpec, Faults
from longspan.simulation import make_experiment

SMOLLM = ModelShape(num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, bytes_per_element=4)
MACHINE = "a processor of some kind"


def measured(*, link_s_per_byte: float = 1e-9, pair_s: float = 1e-8) -> Profile:
    """Make the profile of a machine with this speed of links and of attention."""
    found = Profile(profile_key=structs.replace(SUBJECT, model="/models/smollm2-135m", machine=MACHINE))
    for members, exchange in ((1, "local"), (2, "alltoall"), (2, "gather_hidden")):
        for new, cached in ((1000, 0), (4000, 0), (16000, 0), (1000, 8000)):
            seconds = 0.01 + (5e-5 * new + pair_s * new * (cached + new / 2)) / members
            prefill = Prefill(
                members=members, exchange=exchange, new_tokens=new, cached_tokens=cached, seconds=(seconds,)
            )
            found = found.with_measured(prefill)
    for members, exchange in ((1, "local"), (2, "ring_q")):
        for batch, context in ((1, 1000), (4, 1000), (1, 8000)):
            decode = Decode(
                members=members,
                exchange=exchange,
                batch=batch,
                context_tokens=context,
                seconds=(0.012 + 1e-9 * batch * context,),
            )
            found = found.with_measured(decode)
    for size in (2**12, 2**20, 2**24):
        seconds = 1e-5 + size * link_s_per_byte
        found = found.with_transfer(Transfer(kind="point_to_point", members=2, num_bytes=size, seconds=(seconds,)))
    return found


def setting(drop: float, *, partition: int = 4096) -> SparseSetting:
    return SparseSetting(partition=partition, segments=(1,), drop=(((drop,),),))


def prompt(exchange: Exchange, start: int = 0, stop: int = 8192, *, sampled: bool = True) -> Forward:
    runs = shard_span("contiguous", start, stop, 2, head=0)
    part = Part(
        request_id=0,
        start=start,
        stop=stop,
        tokens=range(stop - start),
        group=(0, 1),
        runs=runs,
        exchange=exchange,
        first_block=0,
        blocks=(),
        sample=Sample(instance=1, position=stop) if sampled and stop == 8192 else None,
    )
    return Forward(number=1, parts=(part,))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(measured().to_json())
    return path


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    assert run("simulate", "smollm2-135m", *arguments, "--json") == 0
    shown = capsys.readouterr()
    found: dict[str, Any] = json.loads(shown.out)
    return found, shown.err


def test_dropped_tokens_shorten_a_simulated_prompt(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of a file and of a tuned file save time, and more drops save more."""
    base = ("--profile", str(profile), "--policy", "csps", "--gpus-per-host", "2", "-o", "threshold=1000")
    requests = ("--workload", "medium", "--rate", "0.1", "--num-requests", "4", "--output-len", "2")
    ttft_s = {}
    for drop in (0.25, 0.5):
        file = tmp_path / f"{drop}.yaml"
        file.write_text(f"levels: 2\ndrop: {drop}\n")
        ttft_s[drop] = simulated(capsys, *base, *requests, "--csa", str(file))[0]["ttft_p50_s"]
    exact_s = simulated(capsys, *base, *requests, "--csa", "off")[0]["ttft_p50_s"]
    assert ttft_s[0.5] < 0.95 * ttft_s[0.25] < 0.9 * exact_s
    found, words = simulated(capsys, *base, *requests, "--csa", "auto", "--max-accuracy-loss", "30")
    assert found["ttft_p50_s"] < 0.95 * exact_s
    assert f"csa goes by the speeds of {MACHINE}" in words


@pytest.mark.parametrize("kind", ["alltoall", "gather_hidden"])
def test_the_step_cost_falls_with_the_drop_ratio(kind: str) -> None:
    cost, exact = FittedCost(measured(), SMOLLM, block_size=256), exchange_of(kind)
    seconds = [seconds_of(cost, prompt(exact.sparse_form(setting(drop))))[0] for drop in (0.0, 0.25, 0.5, 1.0)]
    assert all(more > less for more, less in pairwise(seconds))
    assert seconds[1] < seconds_of(cost, prompt(exact))[0]


def test_a_step_is_priced_by_its_own_queries_and_keys() -> None:
    """A step in the first partition drops nothing. Steps in the second one drop half of all keys of the first."""
    cost = FittedCost(measured(link_s_per_byte=1e-11), SMOLLM, block_size=256)
    sparse, undropped = (ALLTOALL.sparse_form(setting(drop)) for drop in (0.5, 0.0))
    shares = [
        seconds_of(cost, prompt(sparse, *ends))[0] / seconds_of(cost, prompt(undropped, *ends))[0]
        for ends in ((0, 2048), (2048, 4096), (4096, 6144), (6144, 8192))
    ]
    assert shares[:2] == pytest.approx([1.0, 1.0])
    assert shares[2] < shares[3] < 0.9, "the last step has more keys of its own partition"


def test_bytes_count_where_links_are_slow() -> None:
    """Attention takes the same time on both machines. Dropped bytes save more on slow links."""
    sparse, shares = ALLTOALL.sparse_form(setting(0.5)), []
    for link_s_per_byte in (1e-11, 1e-9, 1e-8):
        cost = FittedCost(measured(link_s_per_byte=link_s_per_byte, pair_s=1e-10), SMOLLM, block_size=256)
        shares.append(seconds_of(cost, prompt(sparse))[0] / seconds_of(cost, prompt(ALLTOALL))[0])
    assert shares[0] > shares[1] > shares[2]


def chooser_of(facts: Facts, kind: str) -> CsaChooser:
    """Choose for two instances, by a tuned file of the facts' model."""
    return CsaChooser(structs.replace(invented_tuned(), shape=facts.shape), facts, (0, 1), kind)


def predicted_s(chooser: CsaChooser, cost: StepCost, kind: str, configuration: Configuration) -> tuple[float, float]:
    """Predict the seconds of a prompt by the chooser, and by the step cost, without the output head."""
    group = chooser.tables(2)[0].group
    exact, setting = exchange_of(kind), group.setting(8192, configuration)
    exchange = exact if setting is None else exact.sparse_form(setting)
    [step_s] = set(seconds_of(cost, prompt(exchange, sampled=False)).values())
    return chooser.ttft_s(group, 8192, configuration), step_s


CONFIGURATIONS = [(1, 0.0, ()), (2, 0.0, (1,)), (2, 0.4, (1,)), (2, 0.4, (4,)), (2, 0.9, (1,))]


@pytest.mark.parametrize("kind", ["alltoall", "gather_hidden"])
@pytest.mark.parametrize("chosen", CONFIGURATIONS)
def test_the_chooser_and_the_step_cost_predict_the_same_seconds(
    kind: str, chosen: tuple[int, float, tuple[int, ...]]
) -> None:
    profile = measured()
    cost, cluster = FittedCost(profile, SMOLLM, block_size=256), Cluster.of("2")
    facts = Facts(shape=SMOLLM, cluster=cluster, profile=profile, exact_s=partial(whole_prompt_s, cost))
    chooser_s, step_s = predicted_s(chooser_of(facts, kind), cost, kind, Configuration(*chosen))
    assert chooser_s == pytest.approx(step_s, rel=1e-9)


@pytest.mark.parametrize("kind", ["alltoall", "gather_hidden"])
@pytest.mark.parametrize("chosen", CONFIGURATIONS)
@pytest.mark.parametrize(("hosts", "gpus_per_host", "parallel"), [(1, 2, "2"), (2, 1, "2"), (2, 2, "2xtp2")])
def test_the_chooser_and_the_step_cost_predict_the_same_seconds_on_data_sheets(
    hosts: int, gpus_per_host: int, parallel: str, chosen: tuple[int, float, tuple[int, ...]], kind: str
) -> None:
    """The members are on one host, are on two hosts, or have two ranks each."""
    experiment = make_experiment(
        "llama-3-8b",
        ClusterSpec(hardware="a100-sxm-80g", hosts=hosts, gpus_per_host=gpus_per_host, parallel=parallel),
        SchedulingArgs(policy="csps", block_size=256),
    )
    chooser = chooser_of(experiment.facts, kind)
    chooser_s, step_s = predicted_s(chooser, experiment.cost, kind, Configuration(*chosen))
    assert chooser_s == pytest.approx(step_s, rel=1e-9)


def test_an_engine_s_facts_price_exact_prompts_by_the_profile() -> None:
    """Without a step cost the measured seconds of the exchange count, or the speeds alone if none were measured."""
    profile = measured()
    facts = Facts(shape=SMOLLM, profile=profile)
    assert facts.prompt_s(ALLTOALL, (0, 1), 8192) == profile.times()[2, ALLTOALL].seconds(8192)
    assert facts.prompt_s(ALLTOALL, (0, 1, 2), 8192) is None


def test_measured_sparse_prompts_correct_the_prediction() -> None:
    """They took 1.2 times the predicted seconds. Exact prompts and `gather_hidden` keep their prices."""
    profile = measured()
    plain = FittedCost(profile, SMOLLM, block_size=256)
    for length in (4000, 16000):
        sizes: dict[str, Any]
        sparse = ALLTOALL.sparse_form(setting(0.25, partition=length // 2)._replace(mode="kv"))
        times = [seconds_of(plain, prompt(exchange, 0, length))[0] for exchange in (sparse, ALLTOALL)]
        sizes = {"members": 2, "new_tokens": length, "cached_tokens": 0}
        exact = profile.find(Prefill(exchange="alltoall", **sizes, seconds=()))
        assert exact is not None
        sizes["seconds"] = (1.2 * exact.median_s * times[0] / times[1],)
        profile = profile.with_measured(Prefill(exchange="alltoall_sparse", **sizes))
    cost = FittedCost(profile, SMOLLM, block_size=256)
    for kind, factor in (("alltoall", 1.2), ("gather_hidden", 1.0)):
        exact = exchange_of(kind)
        for exchange, expected in ((exact.sparse_form(setting(0.5)), factor), (exact, 1.0)):
            times = [seconds_of(one, prompt(exchange))[0] for one in (cost, plain)]
            assert times[0] == pytest.approx(expected * times[1], rel=1e-6)
        facts = Facts(shape=SMOLLM, cluster=Cluster.of("2"), profile=profile, exact_s=partial(whole_prompt_s, cost))
        for chosen in (Configuration(1), Configuration(2, 0.4, (1,))):
            chooser_s, step_s = predicted_s(chooser_of(facts, kind), cost, kind, chosen)
            assert chooser_s == pytest.approx(step_s, rel=1e-9)


def test_slow_instances_slow_the_prices_of_the_chooser() -> None:
    cluster, seconds = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=2), []
    for slow in ({}, {0: 2.0, 1: 2.0}):
        experiment = make_experiment("llama-3-8b", cluster, SchedulingArgs(policy="csps"), Faults(slow=slow))
        chooser = chooser_of(experiment.facts, "alltoall")
        seconds.append(chooser.ttft_s(chooser.tables(2)[0].group, 8192, Configuration(2, 0.5, (2,))))
    assert seconds[1] == pytest.approx(2 * seconds[0])


@pytest.mark.parametrize("policy", ["chunked", "csps"])
def test_kv_on_hosts_is_reported_by_a_profile(policy: str, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--profile", str(profile), "--policy", policy, "--gpus-per-host", "2", "--host-kv-gib", "1")
    found, _ = simulated(capsys, *base, "--rate", "1", "--num-requests", "3", "--output-len", "2")
    assert found["num_completed"] == 3 and found["swap_bytes"] >= 0


def test_the_hint_names_the_simulated_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    hardware = ("--hardware", "a100-sxm-80g", "--gpus-per-host", "4", "--policy", "csps")
    _, words = simulated(capsys, *hardware, "--csa", "auto", "--rate", "1", "--num-requests", "2", "--output-len", "2")
    assert "a100-sxm-80g" in words and "this machine" not in words
