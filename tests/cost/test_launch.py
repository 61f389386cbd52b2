"""How the modelled engine launches operators: its host time by launch mode, phase and group, and errors."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from fake_llm import run

from longspan import ClusterSpec
from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_KV, RING_Q
from longspan.cost.catalog import Launch
from longspan.cost.estimate import Estimate, estimate_decode, estimate_prefill
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.topology import Devices
from longspan.sim.spec import HardwareSpec
from longspan.simulation import read_architecture

MODES: tuple[Launch, ...] = get_args(Launch)


def line(launch: Launch | None, spec: str = "1", **given: Any) -> Roofline:
    devices = Devices(hardware="h100-sxm-80g", gpus_per_host=8)
    return rooflines(read_architecture("llama-3-8b"), devices, Cluster.of(spec), launch=launch, **given)[0]


def prompt(launch: Launch, length: int, instances: int = 1) -> Estimate:
    exchange = LOCAL if instances == 1 else RING_KV
    return estimate_prefill(line(launch, str(instances)), instances, exchange, length)


@pytest.mark.parametrize("length", [16, 128, 2048, 65_536])
def test_fewer_launches_never_take_longer(length: int) -> None:
    eager_s, graph_s, compiled_s = (prompt(mode, length).seconds for mode in MODES)
    assert eager_s == graph_s >= compiled_s


def test_short_prompts_wait_for_eager_launches_and_long_ones_do_not() -> None:
    """128 tokens of Llama 3 8B take 5 ms to compute on an H100, and 32 layers of 0.6 ms to launch."""
    short, long = ([prompt(mode, length) for mode in ("graph", "compiled")] for length in (128, 65_536))
    assert short[0].seconds == pytest.approx(32 * 600e-6, rel=0.01)
    assert short[1].breakdown.launch_s < 0.1 * short[1].seconds < 1e-3
    assert long[0].seconds == pytest.approx(long[1].seconds, rel=1e-3)


@pytest.mark.parametrize("instances", [2, 8])
def test_prompts_that_instances_share_are_not_compiled(instances: int) -> None:
    graph, compiled = (prompt(mode, 128, instances) for mode in ("graph", "compiled"))
    assert graph.seconds == compiled.seconds
    assert graph.breakdown.launch_s > 0


@pytest.mark.parametrize("instances", [1, 4])
def test_only_eager_decode_steps_wait_for_launches(instances: int) -> None:
    exchange = LOCAL if instances == 1 else RING_Q
    found = {mode: estimate_decode(line(mode, str(instances)), instances, exchange, 4096) for mode in MODES}
    assert found["eager"].breakdown.launch_s > 0 == found["graph"].breakdown.launch_s
    assert found["graph"].seconds == found["compiled"].seconds < found["eager"].seconds
    assert found["eager"].seconds > 32 * 600e-6


def test_small_all_reduces_are_nccl_s_without_graphs() -> None:
    """The kernels of engines start for the price of NCCL's start when the host launches them one by one."""
    eager, *others = (line(mode, "tp4").topology for mode in MODES)
    for size in (2**14, 2**20):
        assert others[0].all_reduce_s(size) == others[1].all_reduce_s(size) < eager.all_reduce_s(size)
    assert others[0].all_reduce_s(2**24) == eager.all_reduce_s(2**24)


def test_the_default_is_compiled_and_eager_for_unfused_attention() -> None:
    assert line(None).launch == "compiled"
    assert line(None, kernels="eager").launch == "eager"
    assert HardwareSpec().launch is None


@pytest.mark.parametrize("launch", ["graph", "compiled"])
@pytest.mark.parametrize("verb", ["estimate", "simulate"])
def test_unfused_attention_is_launched_eagerly(verb: str, launch: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--context", "1K") if verb == "estimate" else ("--rate", "1", "--num-requests", "1")
    given = ("--hardware", "a100-sxm-80g", "--attention", "eager", "--launch", launch)
    assert run(verb, "llama-7b", *given, *rest) == 2
    assert f"--launch {launch} needs fused attention" in capsys.readouterr().err


def test_profiles_have_measured_launches() -> None:
    with pytest.raises(ValueError, match="launch eager refines data sheets"):
        ClusterSpec(profile="some.json", launch="eager")  # type: ignore[arg-type]
