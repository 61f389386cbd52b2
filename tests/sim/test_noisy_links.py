"""`--noisy-link`: links whose speed changes at random from step to step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from fake_llm import run

from longspan.core.cluster import Cluster
from longspan.core.exchange import CHAIN, GATHER_HIDDEN, GATHER_KV, Exchange, exchange_of, of_any_layout
from longspan.core.options import SchedulingArgs
from longspan.cost.estimate import estimate_prefill
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.topology import Devices
from longspan.sim.noise import NoisyLink
from longspan.sim.run import Result
from longspan.sim.spec import ClusterSpec, Faults
from longspan.simulation import make_experiment, read_architecture
from longspan.workload.arrivals import Arrival, Workload, text

NUM_TOKENS, SLOW = 16_000, 1 / 128
EXCHANGES = [str(exchange) for exchange in (*of_any_layout(), GATHER_KV, GATHER_HIDDEN, CHAIN)]


def line(hosts: int) -> Roofline:
    devices = Devices(hardware="a100-sxm-80g", gpus_per_host=4 // hosts, hosts=hosts)
    return rooflines(read_architecture("llama-3-8b"), devices, Cluster.of("4"))[0]


def prefill_s(model: Roofline, exchange: Exchange) -> float:
    return estimate_prefill(model, 4, exchange, NUM_TOKENS).seconds


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", EXCHANGES)
def test_equal_noise_on_all_links_is_a_slower_link(name: str, hosts: int) -> None:
    quiet, exchange = line(hosts), exchange_of(name)
    links = (link.at(link.nominal_bytes_per_s * SLOW) for link in (quiet.topology.inside, quiet.topology.between))
    slow = replace(quiet, topology=replace(quiet.topology, **dict(zip(("inside", "between"), links, strict=True))))
    noisy = replace(quiet, topology=replace(quiet.topology, speed=lambda *_: SLOW))
    assert prefill_s(noisy, exchange) == pytest.approx(prefill_s(slow, exchange), rel=1e-12)
    assert prefill_s(noisy, exchange) > prefill_s(quiet, exchange)


@pytest.mark.parametrize("slow", [(0, 1), (1, 2), (2, 3)])
def test_one_slow_link_delays_a_collective_by_more_than_a_chain(slow: tuple[int, int]) -> None:
    """A collective waits for the link in every layer. Messages of a chain overlap the work of its members."""
    quiet = line(1)

    def speed(*pair: int) -> float:
        return 0.5 if tuple(sorted(pair)) == slow else 1.0

    noisy = replace(quiet, topology=replace(quiet.topology, speed=speed))
    gathered, chained = (prefill_s(noisy, e) - prefill_s(quiet, e) for e in (GATHER_KV, CHAIN))
    assert gathered > 2 * chained >= 0


def test_factors_depend_on_seed_step_and_pair_but_not_on_the_direction() -> None:
    noise = NoisyLink(low=0.25, high=0.75, seed=1)
    keys = [(step, first, second) for step in range(30) for first in range(4) for second in range(first)]
    factors = {key: noise.factor(*key) for key in keys}
    assert len(set(factors.values())) == len(keys)
    assert 0.25 <= min(factors.values()) < 0.3 and 0.7 < max(factors.values()) <= 0.75
    assert factors == {(step, a, b): noise.factor(step, b, a) for step, a, b in keys}
    assert all(replace(noise, seed=2).factor(*key) != factor for key, factor in factors.items())


ROLES = {"prefill_parallel": "4", "decode_parallel": "2xtp2"}
CASES = {"context": {"parallel": "4"}, "runahead": {"parallel": "4"}, "tetris": ROLES}
ASKED = [Arrival(due_s=0.2 * index, prompt=text(index, 20_000), output_len=8) for index in range(6)]


def served(policy: str, noise: NoisyLink | None) -> Result:
    cluster = ClusterSpec(hardware="a100-sxm-80g", **CASES[policy])
    experiment = make_experiment("llama-3-8b", cluster, SchedulingArgs(policy=policy), Faults(noisy_link=noise))
    return experiment.run(Workload(arrivals=ASKED, shares=False))


@pytest.mark.parametrize("policy", CASES)
def test_noise_is_the_same_for_a_seed_and_slows_a_run(policy: str) -> None:
    noise = NoisyLink(low=0.1, high=0.2, seed=3)
    quiet, noisy = served(policy, None).summary(), served(policy, noise).summary()
    assert served(policy, noise).summary() == noisy
    assert served(policy, replace(noise, seed=4)).summary() != noisy
    assert served(policy, NoisyLink(low=1.0, high=1.0, seed=3)).summary() == quiet
    assert noisy["makespan_s"] > quiet["makespan_s"]  # type: ignore[operator]


def test_noise_delays_the_transfer_of_kv_between_instances() -> None:
    """The second token waits for it. The first one does not."""
    cluster = ClusterSpec(hardware="a100-sxm-80g", prefill_parallel="1", decode_parallel="1")
    make = partial(make_experiment, "llama-3-8b", cluster, SchedulingArgs(policy="tetris"))
    asked = Workload(arrivals=[Arrival(due_s=0.0, prompt=text(0, 20_000), output_len=3)], shares=False)
    [quiet], [noisy] = (
        make(Faults(noisy_link=noise)).run(asked).served for noise in (None, NoisyLink(low=0.001, high=0.001, seed=0))
    )
    assert noisy.ttft_s == quiet.ttft_s and noisy.tbt_s[1] == pytest.approx(quiet.tbt_s[1])
    assert noisy.tbt_s[0] > 2 * quiet.tbt_s[0]


@pytest.mark.parametrize("value", ["", "1", "0.5:1", "0.5:1:x", "0.5:1:0.5", "a:1:0", "0.5:1:0:0"])
def test_another_form_is_a_mistake(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-3-8b", "--hardware", "a100-sxm-80g", "--rate", "1", "--noisy-link", value)
    assert run("simulate", *arguments) == 2
    assert "--noisy-link is LOW:HIGH:SEED, such as 0.5:1:0" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0:1:0", "-1:1:0", "1:0.5:0", "nan:1:0", "0.5:nan:0", "0.5:inf:0"])
def test_factors_are_above_0_and_in_order(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-3-8b", "--hardware", "a100-sxm-80g", "--rate", "1", "--noisy-link", value)
    assert run("simulate", *arguments) == 2
    assert "--noisy-link must be finite factors above 0" in capsys.readouterr().err
