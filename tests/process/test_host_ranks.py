"""Ranks on hosts of a test, without Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from host_ranks import HostLauncher
from hosts import INTERFACE, Host, network_hosts, why_not
from oracle import Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.service import Service


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
