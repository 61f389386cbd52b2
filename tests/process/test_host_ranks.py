"""Ranks on hosts of a test, without Ray: exact answers, counted bytes, and closed ports."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from exchange_bytes import bytes_of_layer, tokens_of_members
from host_ranks import llm_on, placed, start_on
from hosts import Host, network_hosts, why_not
from oracle import Oracle, assert_exact
from port_scan import handshake, refuses
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.cost.profile import Profile
from longspan.cost.profile_key import ProfileKey
from longspan.errors import ParameterError
from longspan.profiling.links import time_links
from longspan.profiling.run import measure_links

KEY = ProfileKey(model="m", dtype="float32", device="cpu", tp=1, threads=1, kernel="torch", machine="m")
EXCHANGES = ("ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden", "chain")
TOKENS, BLOCK = 200, 16
PROMPT = [5 + token % 190 for token in topic_tokens()[:TOKENS]]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_logits=True)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
SHARED: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": BLOCK,
    "enable_prefix_caching": False,
    "policy": "context",
    "policy_options": {"threshold": "0"},
}


@contextmanager
def started(num_hosts: int, model: str, parallel: str, locations: str = "") -> Iterator[tuple[Sequence[Host], LLM]]:
    """Start an engine whose ranks are on hosts. Skip the test where this machine cannot make hosts."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with (
        pytest.MonkeyPatch.context() as patch,
        network_hosts(num_hosts, gigabits=1) as hosts,
    ):
        patch.setenv("LONGSPAN_HOSTS", "")
        with llm_on(hosts, locations)(model, parallel=parallel, **SHARED) as llm:
            yield hosts, llm


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[tuple[Sequence[Host], LLM]]:
    """Two instances on two hosts. Each rank imports transformers, so tests share them."""
    with started(2, str(tiny), "2") as made:
        yield made


def sent_by(llm: LLM, before: dict[str, int], *, between_hosts: bool) -> Counter[str]:
    after = llm.bytes_between_hosts if between_hosts else llm.bytes_exchanged
    return Counter({kind: count - before.get(kind, 0) for kind, count in after.items() if kind != "total"})


def check_exchange(hosts: Sequence[Host], llm: LLM, exchange: str, oracle: Oracle) -> None:
    """Check the answer, the bytes that one step sends between hosts, and that they pass through the interfaces."""
    members = len(hosts)
    llm.set_policy("context", {"exchange": exchange, "threshold": "0"})
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert_exact(output, oracle.complete(PROMPT, 4))
    received, before = sum(host.received_bytes() for host in hosts), llm.bytes_between_hosts
    [output] = llm.generate([PROMPT], ONE_TOKEN, use_tqdm=False)
    sent = sent_by(llm, before, between_hosts=True)
    tokens = tokens_of_members(output, exchange, TOKENS, members, BLOCK)
    assert +sent == {exchange: bytes_of_layer(llm, exchange, tokens) * llm.info.num_layers}
    assert llm.bytes_between_hosts == llm.bytes_exchanged, "each host has one rank"
    received = sum(host.received_bytes() for host in hosts) - received
    assert sent.total() < received < 1.2 * sent.total() + 100_000, "with headers and commands"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_on_two_hosts_is_exact_and_sends_the_bytes_of_its_formula(
    exchange: str, pair: tuple[Sequence[Host], LLM], oracle: Oracle
) -> None:
    check_exchange(*pair, exchange, oracle)


@pytest.mark.full
def test_every_exchange_on_three_hosts(tiny: Path, oracle: Oracle) -> None:
    with started(3, str(tiny), "3") as (hosts, llm):
        for exchange in EXCHANGES:
            check_exchange(hosts, llm, exchange, oracle)


@pytest.mark.full
def test_sums_of_tensor_parallel_ranks_stay_on_their_host(tiny: Path, oracle: Oracle) -> None:
    """Each instance of `tp2` is on one host. Only keys and values of the ring cross the link."""
    with started(2, str(tiny), "2xtp2") as (_, llm):
        assert llm.engine.config.cluster.hosts == (0, 0, 1, 1)
        llm.set_policy("context", {"exchange": "ring_kv", "threshold": "0"})
        [output] = llm.generate([PROMPT], ONE_TOKEN, use_tqdm=False)
        tokens = tokens_of_members(output, "ring_kv", TOKENS, 2, BLOCK)
        crossed, everywhere = (sent_by(llm, {}, between_hosts=far) for far in (True, False))
        layers, shape = llm.info.num_layers, llm.facts.shape
        assert shape is not None
        assert +crossed == {"ring_kv": bytes_of_layer(llm, "ring_kv", tokens) * layers}
        sums = 2 * 2 * TOKENS * shape.hidden_size * 4 * layers  # of attention, and of the feed-forward layer
        assert everywhere - crossed == {"all_reduce": sums}
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert_exact(output, oracle.complete(PROMPT, 4))


@pytest.mark.full
def test_pipeline_stages_on_two_hosts_send_hidden_states(tiny: Path, oracle: Oracle) -> None:
    with started(2, str(tiny), "pp2") as (_, llm):
        assert llm.engine.config.cluster.hosts == (0, 1)
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert_exact(output, oracle.complete(PROMPT, 4))
        sent, shape = sent_by(llm, {}, between_hosts=True), llm.facts.shape
        assert shape is not None
        assert +sent == {"hidden_states": (TOKENS + 3) * shape.hidden_size * 4, "tokens": 4 * 8}


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["2", "pp2"])
def test_smollm2_on_two_hosts(parallel: str, smollm2_oracle: Oracle) -> None:
    prompt = list(topic_tokens()[:600])
    with started(2, "smollm2-135m", parallel) as (_, llm):
        for exchange in EXCHANGES if parallel == "2" else ():
            llm.set_policy("context", {"exchange": exchange, "threshold": "0"})
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert_exact(output, smollm2_oracle.complete(prompt, 4))
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert_exact(output, smollm2_oracle.complete(prompt, 4))


def test_a_port_without_keys_would_be_noticed(pair: tuple[Sequence[Host], LLM]) -> None:
    (first, second), _ = pair
    with zmq.Context[zmq.Socket[bytes]]() as context:
        with first.inside():
            router = context.socket(zmq.ROUTER)
            port = router.bind_to_random_port(f"tcp://{first.address}")
        assert port in {listener.port for listener in first.listeners()}
        assert zmq.Event.HANDSHAKE_SUCCEEDED in handshake(second, f"tcp://{first.address}:{port}", curve=False)
        router.close(linger=0)


def test_ports_are_those_of_the_docs_and_none_takes_a_command_without_the_key(
    pair: tuple[Sequence[Host], LLM], oracle: Oracle
) -> None:
    """The engine has a port for commands and one for the rendezvous. Each rank has one of gloo."""
    hosts, llm = pair
    ranks = llm.service.executor.pids
    listeners = [(host, listener) for host in hosts for listener in host.listeners()]
    assert all(listener.kind == "tcp" and listener.address == host.address for host, listener in listeners)
    owners = Counter(pid for _, listener in listeners for pid in listener.pids)
    assert owners == {os.getpid(): 2, **dict.fromkeys(ranks, 1)}
    assert all(refuses(client, listener) for client in hosts for _, listener in listeners)
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert_exact(output, oracle.complete(PROMPT, 4))


def test_racks_of_a_topology_file_order_hosts(tmp_path: Path) -> None:
    hosts = [Host("", f"10.99.0.{number}", "", "") for number in (1, 2, 3)]
    (tmp_path / "racks.toml").write_text('[racks]\na = ["10.99.0.2"]\nb = ["10.99.0.1", "10.99.0.3"]\n')
    text, ordered = placed(hosts, 6, tmp_path / "racks.toml")
    assert text == "0-0,0-0,0-1,0-1,1-2,1-2"
    assert [host.address for host in ordered] == ["10.99.0.1", "10.99.0.3", "10.99.0.2"]
    assert placed(hosts[:2], 2) == ("0-0,0-1", hosts[:2])
    (tmp_path / "racks.toml").write_text('[racks]\na = ["10.99.0.2"]\n')
    with pytest.raises(ParameterError, match=r"topology lacks 10\.99\.0\.1, 10\.99\.0\.3"):
        placed(hosts, 6, tmp_path / "racks.toml")


@pytest.mark.full
def test_a_slow_link_between_hosts_is_measured_apart_from_links_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    with network_hosts(2, gigabits=0.2) as hosts:
        text, ordered = placed(hosts, 2)
        profile = Profile(profile_key=KEY)
        profile = measure_links(profile, locations_of_ranks(2, text), partial(time_links, start=start_on(ordered)))
        profile = measure_links(profile, locations_of_ranks(2, "1"))
    largest = {
        transfer.link_class: statistics.median(transfer.seconds)
        for transfer in sorted(profile.transfers, key=lambda transfer: transfer.num_bytes)
        if transfer.kind == "point_to_point"
    }
    assert largest.keys() == {"other_host", "same_host"}
    assert largest["other_host"] > 0.8 * 2**24 / (0.2e9 / 8) and largest["other_host"] > 4 * largest["same_host"]
