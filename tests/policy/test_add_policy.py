"""A policy is one file: its options and a subclass of `Policy`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Cluster, Setup
from engines import ThreadLLM
from fake_llm import FakeLLM, run
from refusals import refused
from workloads import ALONE, assert_lawful

from longspan import SamplingParams
from longspan.core.options import at_least_one
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan
from longspan.policy import registry
from longspan.policy.batching import Batch, single_part


@dataclass(frozen=True, kw_only=True)
class LastOptions:
    """Options of `last`."""

    most: int = 100

    def __post_init__(self) -> None:
        at_least_one(most=self.most)


class Last(Policy, name="last"):
    """Every request goes to the last instance, at most `most` tokens of it in a step."""

    Options = LastOptions

    def plan(self, view: ClusterView) -> Plan:
        batch, last, most = Batch(view, frozenset(self.instances)), self.instances[-1], self.options.most
        for request in batch.running():
            batch.add(single_part(request, last, request.num_scheduled, batch.budget, most=most))
        for request in batch.waiting():
            if last in batch.instances:
                hit = view.kv.match(request, (last,))
                batch.add(single_part(request, last, hit.num_tokens, batch.budget, hit, most=most))
        return batch.plan()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    registry.register_policy(Last)


def test_a_registered_policy_serves() -> None:
    cluster = Cluster(Setup(policy="last", num_instances=3, options={"most": "30"}, num_blocks=20))
    requests = [cluster.add([number] * 100, max_tokens=20) for number in range(4)]
    cluster.run()
    assert_lawful(cluster)
    for request in requests:
        assert request.output == cluster.expected_output(request)
        assert {part.group for part in cluster.parts_of(request)} == {(2,)}
        assert max(part.stop - part.start for part in cluster.parts_of(request)) == 30


def test_an_llm_takes_it(tiny: Path) -> None:
    options = {"policy": "last", "policy_options": {"most": "30"}}
    with ThreadLLM(str(tiny), instances=2, skip_tokenizer_init=True, block_size=16, **options) as llm:
        [output] = llm.generate([[5] * 40], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert output.metrics.kv_tokens_per_instance == [0, 40]


@pytest.mark.usefixtures("fake_llm")
def test_the_command_line_takes_and_lists_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("generate", "--prompt", "x", "--policy", "last") == 0
    assert FakeLLM.last.arguments["policy"] == "last"
    monkeypatch.setenv("COLUMNS", "400")
    for verb in ("generate", "simulate"):
        capsys.readouterr()
        assert run(verb, "--help") == 0
        assert re.search(r"decode-first(, |\|)last", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "parameter"), [({"least": "1"}, "least"), ({"most": "0"}, "most"), ({"most": "all"}, "most")]
)
def test_its_options_are_checked(options: dict[str, str], parameter: str) -> None:
    with refused(parameter):
        registry.make_policy("last", num_instances=2, options=options)


@pytest.mark.parametrize("name", ["chunked", "context", "tetris", "loongserve", "decode-first"])
def test_the_record_of_a_run_has_five_lines(name: str) -> None:
    cluster = Cluster(Setup(policy=name, num_instances=1 if name in ALONE else 4))
    policy, plans = cluster.policy, []
    decide = policy.plan

    def record(view: ClusterView) -> Plan:
        plans.append(decide(view))
        return plans[-1]

    policy.plan = record  # type: ignore[method-assign]
    request = cluster.add(range(2000), max_tokens=3)
    cluster.run()
    recorded = [part.stop for plan in plans for batch in plan.batches for part in batch]
    assert recorded == [part.stop for part in cluster.parts_of(request)]
