"""Engines on Ray nodes in network namespaces, which only reach each other: exact answers and counted bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hosts_driver
import pytest
from hosts import Host, network_hosts, why_not
from oracle import Oracle
from ray_nodes import RayNodes, ray_nodes, why_no_ray
from texts import topic_tokens

pytestmark = pytest.mark.hosts
ONE_PER_HOST = {"threads_per_rank": 2}
"""Each host has two CPUs."""
EXCHANGES = ("ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden", "chain")
MODELS = ("odd", "smollm2")
MAX_TOKENS = 4
Cluster = tuple[Sequence[Host], RayNodes]
Models = dict[str, tuple[str, Oracle]]
"""The name of each model for an engine, and its reference."""


@contextmanager
def ray_hosts(number: int) -> Iterator[Cluster]:
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    with network_hosts(number) as hosts, ray_nodes(hosts, num_cpus=2) as nodes:
        yield hosts, nodes


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with ray_hosts(2) as made:
        yield made


@pytest.fixture
def models(odd: Path, odd_oracle: Oracle, smollm2_oracle: Oracle) -> Models:
    return {"odd": (str(odd), odd_oracle), "smollm2": ("smollm2-135m", smollm2_oracle)}


def prompt_of(length: int, name: str, start: int = 0) -> list[int]:
    tokens = topic_tokens()[start : start + length]
    return [*tokens] if name == "smollm2" else [5 + token % 190 for token in tokens]


def drive(cluster: Cluster, model: str, runs: list[dict[str, Any]], tmp_path: Path, **options: Any) -> dict[str, Any]:
    """Run `hosts_driver` on the first host."""
    hosts, nodes = cluster
    order = {"model": model, "runs": runs, "options": {"ray_address": nodes.address, **options}}
    env = {**os.environ, "LONGSPAN_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, hosts_driver.__file__, json.dumps(order))
    with hosts[0].popen(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as driver:
        output, errors = driver.communicate(timeout=400)
    assert driver.returncode == 0, errors.decode()[-4000:]
    facts: dict[str, Any] = json.loads(output.splitlines()[-1])
    return facts


def check_exchanges(cluster: Cluster, name: str, models: Models, tmp_path: Path) -> None:
    """Check each exchange between one instance per host: its tokens, and its bytes between hosts."""
    (model, oracle), number, prompt = models[name], len(cluster[0]), prompt_of(200, name)
    runs = [{"prompt": prompt, "max_tokens": MAX_TOKENS, "policy": {"exchange": exchange}} for exchange in EXCHANGES]
    facts = drive(cluster, model, runs, tmp_path, parallel=str(number), enable_prefix_caching=False, **ONE_PER_HOST)
    assert facts["hosts"] == [*range(number)]
    for run in facts["runs"]:
        assert run["tokens"] == oracle.complete(prompt, MAX_TOKENS).token_ids
        assert run["crossed"] == run["sent"] == run["formula"]


@pytest.mark.parametrize("name", MODELS)
def test_every_exchange_on_two_hosts_is_exact_and_sends_the_bytes_of_its_formula(
    name: str, pair: Cluster, models: Models, tmp_path: Path
) -> None:
    check_exchanges(pair, name, models, tmp_path)


def test_every_exchange_on_three_hosts(models: Models, tmp_path: Path) -> None:
    with ray_hosts(3) as cluster:
        check_exchanges(cluster, "odd", models, tmp_path)


@pytest.mark.parametrize(("name", "copies"), [("odd", 2), ("smollm2", 1)])
def test_sums_of_tensor_parallel_ranks_stay_on_their_host(
    name: str, copies: int, pair: Cluster, models: Models, tmp_path: Path
) -> None:
    """Each instance of `tp2` is on one host. Only keys and values cross the link.

    Both shards of the odd model hold its only KV head, and both send it.
    """
    model, oracle = models[name]
    prompt = prompt_of(200, name)
    run = {"prompt": prompt, "max_tokens": MAX_TOKENS, "policy": {"exchange": "ring_kv"}}
    facts = drive(pair, model, [run], tmp_path, parallel="2xtp2", enable_prefix_caching=False)
    [done] = facts["runs"]
    assert facts["hosts"] == [0, 0, 1, 1]
    assert done["tokens"] == oracle.complete(prompt, MAX_TOKENS).token_ids
    assert done["crossed"] == {"ring_kv": copies * done["formula"]["ring_kv"]}
    sums = 2 * 2 * len(prompt) * facts["hidden_size"] * 4 * facts["layers"]  # of attention, and of the feed-forward
    assert done["sent"] == {**done["crossed"], "all_reduce": sums}


@pytest.mark.parametrize("name", MODELS)
def test_pipeline_stages_on_two_hosts_send_hidden_states(
    name: str, pair: Cluster, models: Models, tmp_path: Path
) -> None:
    model, oracle = models[name]
    prompt = prompt_of(200, name)
    run = {"prompt": prompt, "max_tokens": MAX_TOKENS}
    facts = drive(pair, model, [run], tmp_path, parallel="pp2", **ONE_PER_HOST)
    assert facts["hosts"] == [0, 1]
    assert facts["runs"][0]["tokens"] == oracle.complete(prompt, MAX_TOKENS).token_ids
    states = (len(prompt) + MAX_TOKENS - 1) * facts["hidden_size"] * 4
    assert facts["all_crossed"] == facts["all"] == {"hidden_states": states, "tokens": MAX_TOKENS * 8}


@pytest.mark.parametrize(("name", "lengths", "host_gib"), [("odd", (500, 40), 0.02), ("smollm2", (600, 40), 0.25)])
def test_a_context_larger_than_all_devices_lies_on_two_hosts(
    name: str,
    lengths: tuple[int, ...],
    host_gib: float,
    pair: Cluster,
    models: Models,
    tmp_path: Path,
) -> None:
    """The KV of a prompt is in the memory and on the disks of both hosts."""
    model, oracle = models[name]
    prompts = [prompt_of(length, name, start=1000 * number) for number, length in enumerate(lengths)]
    tiers = {"host_kv_gib": host_gib, "disk_kv_gib": host_gib, "disk_kv_dir": str(tmp_path / "kv")}
    runs = [{"prompt": prompt, "max_tokens": 8} for prompt in prompts]
    sizes = {"num_gpu_blocks_override": 6, "max_model_len": 1024}
    facts = drive(pair, model, runs, tmp_path, parallel="2", **sizes, **tiers, **ONE_PER_HOST)
    assert facts["hosts"] == [0, 1]
    assert [run["tokens"] for run in facts["runs"]] == [oracle.complete(prompt, 8).token_ids for prompt in prompts]
    assert facts["device_tokens"] < lengths[0] / 2
    assert len(facts["used"]) == 2 and all(facts["used"]) and facts["all_crossed"]
    assert len({path.parent.name for path in (tmp_path / "kv").glob("*/host-*/*.kv")}) == 2
