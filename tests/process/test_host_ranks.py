"""Ranks on hosts of a test, without Ray."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import pytest
from host_ranks import HostLauncher, placed, start_on
from hosts import INTERFACE, Host, network_hosts, why_not
from oracle import Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.cost.profile import Profile
from longspan.cost.profile_key import ProfileKey
from longspan.errors import ParameterError
from longspan.profiling.run import measure_links
from longspan.service import Service

KEY = ProfileKey(model="m", dtype="float32", device="cpu", tp=1, threads=1, kernel="torch", machine="m")


def received_bytes(host: Host) -> int:
    return int(host.run("cat", f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").stdout)


@pytest.mark.full  # each rank imports transformers: 10 s on a quiet machine
def test_ranks_on_two_hosts_send_kv_over_the_link_and_are_exact(
    tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    prompt = [5 + token % 190 for token in topic_tokens()[:200]]
    with network_hosts(2, gigabits=1) as hosts:
        monkeypatch.setattr(LLM, "make_service", partial(Service, launcher=partial(HostLauncher, hosts=hosts)))
        with LLM(
            str(tiny),
            dtype="float32",
            skip_tokenizer_init=True,
            parallel="2",
            block_size=16,
            policy="context",
            policy_options={"threshold": "0"},
        ) as llm:
            before = [received_bytes(host) for host in hosts]
            [output] = llm.generate(
                [prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_logits=True)
            )
            received = [received_bytes(host) - start for host, start in zip(hosts, before, strict=True)]
            sent = llm.bytes_between_hosts["total"]
    assert_exact(output, oracle.complete(prompt, 4))
    assert 1.5 * sent > sum(received) > sent > 0


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
        profile = measure_links(profile, locations_of_ranks(2, text), start_on(ordered))
        profile = measure_links(profile, locations_of_ranks(2, "1"))
    largest = {
        transfer.link_class: statistics.median(transfer.seconds)
        for transfer in sorted(profile.transfers, key=lambda transfer: transfer.num_bytes)
        if transfer.kind == "point_to_point"
    }
    assert largest.keys() == {"other_host", "same_host"}
    assert largest["other_host"] > 0.8 * 2**24 / (0.2e9 / 8) and largest["other_host"] > 4 * largest["same_host"]
