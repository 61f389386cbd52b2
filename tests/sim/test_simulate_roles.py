"""`longspan simulate` with roles, and the table of improvement rates."""

from __future__ import annotations

import json

import pytest
from fake_llm import run

from longspan.core.options import SchedulingArgs
from longspan.policy.tetris.rates import IMPROVEMENT_RATES, RateTable
from longspan.sim.experiment import request_rates
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload, text

HOST = ("llama-3-8b", "--hardware", "a100-sxm-80g", "--gpus-per-host", "8")
ROLES = ("--prefill-parallel", "4", "--decode-parallel", "tp4", "--policy", "tetris")
FEW = ("--workload", "short", "--num-requests", "20", "--seed", "3", "--json")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run("simulate", *arguments) == 0
    return capsys.readouterr().out


def test_decode_instances_of_larger_tp_are_quicker_between_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    split = json.loads(printed(capsys, *HOST, *ROLES, *FEW, "--rate", "0.5", "--output-len", "20"))
    alike = json.loads(printed(capsys, *HOST, "--policy", "tetris", *FEW, "--rate", "0.5", "--output-len", "20"))
    assert split["num_completed"] == alike["num_completed"] == 20
    assert split["tbt_p50_s"] < alike["tbt_p50_s"] / 1.8


def test_one_backend_serves_all(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*HOST, *ROLES, *FEW, "--rate", "8", "--output-len", "5", "--link-gbytes-per-s", "0.5")
    one = json.loads(printed(capsys, *arguments, "--transfer-backends", "1"))
    all_of_them = json.loads(printed(capsys, *arguments))
    assert one["num_completed"] == 20
    assert one["ttft_p99_s"] == all_of_them["ttft_p99_s"], "first tokens come from where prompts are computed"
    assert one["e2e_p50_s"] > 1.1 * all_of_them["e2e_p50_s"]


def test_decodes_of_csps_do_not_wait_for_prompts_of_other_instances() -> None:
    """A short request decodes while long ones come, which then decode on both of its instances."""
    short = Arrival(due_s=0.0, prompt=text(1, 100), output_len=200)
    long = [Arrival(due_s=0.1 * index, prompt=text(3 * index, 40_000), output_len=50) for index in range(1, 4)]
    tbt_s = {}
    for where in ({"prefill_parallel": "2", "decode_parallel": "2"}, {"parallel": "4"}):
        cluster = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=4, **where)
        scheduling = SchedulingArgs(policy="csps", max_num_batched_tokens=8192)
        result = make_experiment("llama-3-8b", cluster, scheduling).run(Workload(arrivals=[short, *long], shares=False))
        assert [one.num_output_tokens for one in result.served] == [200, 50, 50, 50]
        tbt_s[len(where)] = result.served[0].mean_tbt_s
    assert tbt_s[2] < 0.7 * tbt_s[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill-parallel", "4"), "--prefill-parallel '4' needs --decode-parallel, too"),
        ((*ROLES, "--parallel", "8"), "--parallel and --prefill-parallel exclude each other"),
        (("--prefill-parallel", "4", "--decode-parallel", "tp2"), r"instances\(4\) * tp(1) + instances(1) * tp(2) = 6"),
        (("--transfer-backends", "2"), "--transfer-backends 2 is for instances that decode only"),
        ((*ROLES, "--transfer-backends", "0"), "--transfer-backends must be at least 1, but 0 given"),
        ((*ROLES[:4], "--policy", "context"), "--policy context prefills and decodes on the same instances"),
        (
            ("--policy", "context", "--profile-improvement-rates"),
            "--policy must be tetris, which has improvement rates, but context given",
        ),
        ((*ROLES, "-o", "improvement_rate=0.2", "--profile-improvement-rates"), "leave it out"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert run("simulate", *HOST, *FEW, "--rate", "1", *arguments) == 2
    assert message.replace("\\", "") in capsys.readouterr().err


def test_profiled_improvement_rates_are_those_of_the_least_mean_ttft(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*HOST, *ROLES, *FEW, "--rate", "0.8", "--profile-improvement-rates")
    found = json.loads(printed(capsys, *arguments))
    table = RateTable.parse(found["improvement_rates"])
    assert [rate for rate, _ in table.entries] == [0.5, 1.0]
    for rate, best in table.entries:
        means_s = found["ttft_mean_s"][f"{rate:g}"]
        assert len(means_s) == len(IMPROVEMENT_RATES)
        assert means_s[f"{best:g}"] == min(means_s.values())
    assert printed(capsys, *arguments[:-4], *arguments[-3:]).strip() == f"improvement_rates={table}"
    again = printed(capsys, *HOST, *ROLES, *FEW, "--rate", "1", "-o", f"improvement_rates={table}")
    assert json.loads(again)["num_completed"] == 20


def test_request_rates_to_profile_are_a_grid() -> None:
    assert request_rates(1.2) == (0.5, 1.0, 1.5)
    with pytest.raises(ValueError, match="above 0 and at most 1000"):
        request_rates(0)
