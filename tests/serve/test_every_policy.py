"""Every policy on a server: it answers, its options change, it is re-sharded, and it survives the loss of workers.

Each of these ends in the tokens of the oracle, or in an error at the moment of the request.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
from engines import ThreadLLM
from oracle import Oracle
from server_client import Reply
from server_process import KEY, ServerProcess, running
from thread_server import ThreadServer, thread_server

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.errors import ParameterError
from longspan.policy.registry import policy_names

SPECS = ("1", "2", "tp2")
ROLES = {"prefill_parallel": "2", "decode_parallel": "1"}
PHASES = {"prefill_parallel": "pp2", "decode_parallel": "tp2", "host_kv_gib": 0.02}
EXACT = json.dumps({"levels": 2, "drop": 0.0})
"""Settings of sparse attention that drop no token."""
DROPPING = json.dumps({"levels": 3, "drop": {"2": 0.5, "3": 0.9}})
REMEDY = re.compile(r"\b(choose|give|start (?:anew|again|a new)|allow|use|leave)\b")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy, and the expected result of changes.

    Attributes:
        engine: options of the engine.
        policy: the policy in force, if it differs from the chosen policy.
        change: values of options that may change.
        specs: further parallel specs, with roles or phases.
        refused: the parallel specs that the policy cannot serve on.
        fragile: the parallel specs that cannot lose a worker.
        shrinks_to: the parallel spec after a worker is lost and not replaced. None if such a loss is refused.
    """

    name: str
    engine: Mapping[str, Any] = field(default_factory=lambda: {"parallel": "3"})
    options: Mapping[str, str] = field(default_factory=dict)
    policy: str | None = None
    change: Mapping[str, Any] = field(default_factory=dict)
    specs: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    fragile: tuple[str, ...] = ("tp2",)
    shrinks_to: str | None = "2"

    @property
    def given(self) -> dict[str, Any]:
        sizes = {"threads_per_rank": 1, "block_size": 16, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 64}
        return {"policy": self.name, "skip_tokenizer_init": True, **sizes, **self.engine}

    def args(self, model: Path) -> EngineArgs:
        return EngineArgs(str(model), **self.given, policy_options=dict(self.options))

    def flags(self, model: Path) -> list[str]:
        flags = [str(model)]
        for name, value in self.given.items():
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        for name, text in self.options.items():
            flags += ["-o", f"{name}={text}"]
        return flags


CASES = {
    "auto": Case(name="auto"),
    "auto with options": Case(name="auto", options={"target_tbt": "0.5"}),
    "auto with csa": Case(name="auto", options={"csa": EXACT}, policy="csps", change={"csa": "off"}),
    "chunked": Case(name="chunked"),
    "context": Case(name="context", options={"threshold": "30"}),
    "runahead": Case(name="runahead", options={"threshold": "30"}),
    "tetris": Case(name="tetris", change={"improvement_rate": 0.4, "chunking": False, "min_chunk": 32}),
    "fixed-sp": Case(
        name="fixed-sp", engine={"parallel": "4"}, options={"sp": "2"}, refused=("1", "tp2"), fragile=SPECS
    ),
    "loongserve": Case(name="loongserve"),
    "loongserve-disagg": Case(
        name="loongserve-disagg", engine=ROLES, specs=("1 prefill + tp2 decode",), refused=SPECS, shrinks_to=None
    ),
    "roles": Case(
        name="tetris",
        engine={"prefill_parallel": "2", "decode_parallel": "2"},
        specs=("1 prefill + 2 decode", "2 prefill + tp2 decode"),
        change={"improvement_rate": 0.4, "chunking": False, "min_chunk": 32},
        fragile=("1 prefill + 2 decode", "2 prefill + tp2 decode"),
        shrinks_to="1 prefill + 2 decode",
    ),
    "csps": Case(name="csps", options={"threshold": "30"}, change={"csa": EXACT}),
    "csps with csa": Case(name="csps", options={"threshold": "30", "csa": EXACT}, change={"csa": "off"}),
    "fractions": Case(
        name="auto", options={"fractions": "0.5,0.3,0.2"}, policy="context", refused=SPECS, shrinks_to=None
    ),
    "sizes": Case(
        name="tetris", options={"sp_sizes": "1,3"}, change={"chunking": False}, refused=SPECS, shrinks_to=None
    ),
    "sizes of loongserve": Case(name="loongserve", options={"sp_sizes": "1,2"}, refused=("1", "tp2"), fragile=SPECS),
    "partition": Case(name="csps", options={"partition": "64"}, change={"csa": EXACT}),
    "partition of runahead": Case(name="runahead", options={"threshold": "30", "home": "computed"}),
    "seesaw": Case(name="seesaw", engine=PHASES, specs=("2 prefill + tp2 decode",), refused=SPECS, shrinks_to=None),
    "seesaw with spare instances": Case(
        name="seesaw",
        engine={**PHASES, "prefill_parallel": "4", "decode_parallel": "2xtp2"},
        specs=("3 prefill + tp2 decode", "pp2 prefill + 3 decode"),
        refused=SPECS,
        fragile=(),
        shrinks_to="3 prefill + tp2 decode",
    ),
    "prefill-first": Case(name="prefill-first"),
    "decode-first": Case(name="decode-first"),
}
SHORT, LONG = [5, 9, 3, 11] * 3, [3 + at * 37 % 190 for at in range(200)]


class Server(Protocol):
    """A server, whose processes may be threads."""

    def ask(self, method: str, path: str, body: object = None) -> Reply: ...

    def complete(self, **fields: object) -> Reply: ...

    def kill(self, what: str) -> None: ...


class ProcessServer:
    """A server of real processes."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self.ask, self.complete = server, server.client.ask, server.client.complete

    def kill(self, what: str) -> None:
        """Kill a process, and wait until the server serves again."""
        num_before = self._num_losses
        self._server.kill(what)
        deadline_s = time.monotonic() + 60
        while self._num_losses == num_before:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        self._server.client.wait_for_health(200, 60)

    @property
    def _num_losses(self) -> int:
        return len(
            re.findall(
                "new workers are being started|the other instances continue|starting another engine core",
                self._server.text(),
            )
        )


@contextmanager
def process_server(flags: list[str], log: Path) -> Iterator[ProcessServer]:
    with running(*flags, log=log, environment={"LONGSPAN_API_KEY": KEY}) as server:
        yield ProcessServer(server)


def check_answers(server: Server, oracle: Oracle) -> None:
    for prompt in (SHORT, LONG):
        reply = server.complete(prompt=prompt, max_tokens=4)
        assert reply.status == 200, reply.data
        assert reply.token_ids == oracle.complete(prompt, 4).token_ids


def settings_of(server: Server) -> dict[str, Any]:
    reply = server.ask("GET", "/admin/policy")
    assert reply.status == 200
    return reply.body


def spec_of(server: Server) -> str:
    return server.ask("GET", "/admin/parallel").body["parallel"]


def check_options(server: Server, case: Case) -> None:
    """Options are read. Changeable options change and are restored. All other changes are refused."""
    before = settings_of(server)
    assert before["policy"] == (case.policy or case.name)
    check_given(server, case)
    for name in before["options"].keys() - before["changeable"]:
        refused = server.ask("POST", "/admin/policy", {name: 1})
        assert (refused.status, refused.body["error"]["param"]) == (409, name)
    refused = server.ask("POST", "/admin/policy", {"no_option": 1})
    assert (refused.status, refused.body["error"]["param"]) == (400, "no_option")
    assert before == settings_of(server)
    assert case.change.keys() <= {*before["changeable"]}
    assert bool(case.change) == bool(before["changeable"])
    for name, value in case.change.items():
        changed = server.ask("POST", "/admin/policy", {name: value})
        assert changed.status == 200, changed.data
        assert changed.body["options"][name] == value
        restored = server.ask("POST", "/admin/policy", {name: case.options.get(name)})
        assert restored.body == settings_of(server) == before
        if name in case.options:
            assert server.ask("POST", "/admin/policy", {name: None}).status == 200
            assert server.ask("POST", "/admin/policy", {name: case.options[name]}).body == before


def check_given(server: Server, case: Case) -> None:
    """The options that were given are in force."""
    options = settings_of(server)["options"]
    assert {name: options[name] for name in case.options} == {n: settings_value(v) for n, v in case.options.items()}


def settings_value(text: str) -> object:
    """Return an option in the type in which the API has it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_reshards(server: Server, case: Case, oracle: Oracle, refused: tuple[str, ...]) -> None:
    for spec in (*SPECS, *case.specs):
        before, parallel = settings_of(server), spec_of(server)
        reply = server.ask("POST", "/admin/parallel", {"parallel": spec})
        if spec in refused:
            assert (reply.status, reply.body["error"]["param"]) == (400, "parallel")
            message = reply.body["error"]["message"]
            assert REMEDY.search(message), message
            values = ",".join((spec, *case.options.values())).split(",")
            assert any(re.search(rf"\b{re.escape(value)}\b", message) for value in values), message
            assert (settings_of(server), spec_of(server)) == (before, parallel)
        else:
            assert (reply.status, reply.body) == (200, {"parallel": spec})
            assert spec_of(server) == spec
            check_given(server, case)
        check_answers(server, oracle)


def check_with_restarts(server: Server, case: Case, oracle: Oracle, *, kills_engine: bool = True) -> None:
    """New workers follow the first loss, a smaller fleet or a new engine core the second one.

    A new engine core has the full fleet.
    """
    check_answers(server, oracle)
    check_options(server, case)
    check_reshards(server, case, oracle, case.refused)
    parallel = spec_of(server)
    for what in ("worker", "worker"):
        server.kill(what)
        check_answers(server, oracle)
    if not kills_engine:
        return
    if case.change:
        assert server.ask("POST", "/admin/policy", case.change).status == 200
    before = settings_of(server)
    server.kill("engine")
    check_answers(server, oracle)
    assert (settings_of(server), spec_of(server)) == (before, parallel)


def check_without_restarts(server: Server, case: Case, oracle: Oracle) -> None:
    """The largest fleet that the policy can use follows a loss. A spec that could not survive one is refused."""
    check_answers(server, oracle)
    server.kill("worker")
    deadline_s = time.monotonic() + 60
    while spec_of(server) != case.shrinks_to:  # the loss is logged before the fleet shrinks
        assert time.monotonic() < deadline_s, f"{spec_of(server)} after the loss, not {case.shrinks_to}"
        time.sleep(0.02)
    check_answers(server, oracle)
    check_options(server, case)
    check_reshards(server, case, oracle, (*case.refused, *case.fragile))


def test_every_policy_has_a_case() -> None:
    assert {case.name for case in CASES.values()} == {*policy_names()}


# ---------------------------------------------------------------- threads


EXTRA = {
    "auto with options",
    "fractions",
    "sizes of loongserve",
    "seesaw with spare instances",
    "partition",
    "partition of runahead",
}
ON_THREADS = [
    pytest.param(case, id=name, marks=[pytest.mark.full] if name in EXTRA else []) for name, case in CASES.items()
]


@pytest.mark.parametrize("case", ON_THREADS)
def test_a_policy_answers_changes_is_resharded_and_survives(tiny: Path, oracle: Oracle, case: Case) -> None:
    with thread_server(case.args(tiny), max_worker_restarts=1) as server:
        check_with_restarts(server, case, oracle)


@pytest.mark.parametrize("case", ON_THREADS)
def test_a_policy_survives_without_restarts_or_is_refused(tiny: Path, oracle: Oracle, case: Case) -> None:
    start = partial(thread_server, case.args(tiny), max_worker_restarts=0)
    if case.shrinks_to is None:
        with pytest.raises(ParameterError, match="is 0, but") as caught, start():
            pass
        assert caught.value.parameter == "max_worker_restarts"
        assert REMEDY.search(caught.value.problem)
        return
    with start() as server:
        check_without_restarts(server, case, oracle)


def test_violation_of_the_kv_account_is_counted_in_metrics(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The block is allocated while the engine core is idle. Answers stay the same."""
    case = Case(name="chunked", engine={"parallel": "2"}, options={})
    counter = 'longspan:kv_cache_violations_total{engine="0",model_name="tiny"} %d.0'
    with thread_server(case.args(tiny)) as server:
        answers = [server.complete(prompt=[7, 8, 9], max_tokens=6).token_ids]
        assert counter % 0 in metrics_when(server, counter % 0)
        server.service.engine.kv.pool(0).allocate(1)
        for _ in range(2):
            answers.append(server.complete(prompt=[7, 8, 9], max_tokens=6).token_ids)
            assert counter % 1 in metrics_when(server, counter % 1)
        assert answers[0] == answers[1] == answers[2]
    logged = [record.message for record in caplog.records if "violations" in record.message]
    assert len(logged) == 1 and "of pool 0 has 1 references" in logged[0]


def metrics_when(server: ThreadServer, line: str) -> str:
    """Return the metrics once they have a line, or after 10 seconds."""
    deadline_s = time.monotonic() + 10
    while line not in (text := server.ask("GET", "/metrics").data.decode()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return text


@pytest.mark.parametrize("spec", ["2", "1"])
def test_sparse_attention_stays_off_in_a_new_engine_core(tiny: Path, oracle: Oracle, spec: str) -> None:
    """On one instance policy `auto` without options is `chunked`, which has no option `csa` to change."""
    case = Case(name="auto", engine={"parallel": "2"}, options={"csa": DROPPING})
    with thread_server(case.args(tiny)) as server:
        assert (settings_of(server)["policy"], settings_of(server)["options"]["csa"]) == ("csps", DROPPING)
        assert server.ask("POST", "/admin/policy", {"csa": "off" if spec == "2" else None}).status == 200
        if spec != "2":
            assert server.ask("POST", "/admin/parallel", {"parallel": spec}).status == 200
        before = settings_of(server)
        assert before["options"].get("csa", "off") == "off"
        for _ in range(2):
            server.kill("engine")
            check_answers(server, oracle)
            assert (settings_of(server), spec_of(server)) == (before, spec)


def test_changes_of_two_policies_reach_a_new_engine_core(tiny: Path, oracle: Oracle) -> None:
    """Options that were changed before a re-shard are not forgotten by a change that follows it."""
    case = Case(name="auto", engine={"parallel": "2"}, options={"csa": DROPPING})
    with thread_server(case.args(tiny)) as server:
        assert server.ask("POST", "/admin/policy", {"csa": EXACT}).body["options"]["csa"] == EXACT
        assert server.ask("POST", "/admin/parallel", {"parallel": "3"}).status == 200
        assert server.ask("POST", "/admin/policy", {"max_accuracy_loss": None}).status == 200
        before = settings_of(server)
        server.kill("engine")
        check_answers(server, oracle)
        assert (settings_of(server), spec_of(server)) == (before, "3")


def test_auto_is_resharded_without_options(tiny: Path, oracle: Oracle) -> None:
    case = Case(name="auto", engine={"parallel": "2"})
    with thread_server(case.args(tiny)) as server:
        for spec, policy in (("tp2", "chunked"), ("pp2", "chunked"), ("1", "chunked"), ("2", "auto")):
            assert server.ask("POST", "/admin/parallel", {"parallel": spec}).body == {"parallel": spec}
            assert settings_of(server)["policy"] == policy
            check_answers(server, oracle)


def test_a_fleet_that_grows_shares_long_prompts(tiny: Path, oracle: Oracle) -> None:
    """Policy `auto` is `chunked` on one instance, and shares prompts on two."""
    case = Case(name="auto", engine={"parallel": "1"})
    with thread_server(case.args(tiny)) as server:
        assert settings_of(server)["policy"] == "chunked"
        assert server.ask("POST", "/admin/parallel", {"parallel": "2"}).status == 200
        assert settings_of(server)["policy"] == "auto"
        check_answers(server, oracle)
    prompt, params = [3 + at * 37 % 190 for at in range(700)], SamplingParams(temperature=0, max_tokens=4)
    given = {**case.given, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 2048}
    with ThreadLLM(str(tiny), **given) as llm:
        llm.reshard("2")
        [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle.complete(prompt, 4).token_ids
    assert len(output.metrics.kv_tokens_per_instance) == 2
    assert min(output.metrics.kv_tokens_per_instance) > 0


def num_generated(server: Server) -> float:
    [found] = re.findall(rb"longspan:generation_tokens_total\{\S* (\S+)", server.ask("GET", "/metrics").data)
    return float(found)


@pytest.mark.parametrize("case", [CASES["seesaw"], Case(name="chunked", engine={"parallel": "1"})], ids=["phases", "1"])
def test_requests_fail_with_the_remedy_when_a_fleet_can_neither_restart_nor_shrink(
    tiny: Path, oracle: Oracle, case: Case
) -> None:
    """A stream that has begun fails. A request without a sent token is answered by the next engine core."""
    with thread_server(case.args(tiny), max_worker_restarts=1) as server, ThreadPoolExecutor(2) as threads:
        server.kill("worker")
        check_answers(server, oracle)
        num_before = num_generated(server)
        stream, whole = (
            threads.submit(partial(server.complete, prompt=LONG, max_tokens=250, stream=stream))
            for stream in (True, False)
        )
        while num_generated(server) < num_before + 8:
            time.sleep(0.01)
        server.kill("worker")
        error = stream.result().events[-1]["error"]["message"]
        assert "the engine core was lost: worker rank 0 was lost" in error
        assert "--max-worker-restarts 1 allows no further replacement" in error
        assert "allow more restarts, or start again with more instances" in error
        assert whole.result().token_ids == oracle.complete(LONG, 250).token_ids
        check_answers(server, oracle)


# ---------------------------------------------------------------- processes


QUICK = {("csps", 0), ("csps with csa", 1)}
"""Losses with and without restarts, and of an engine core whose options were changed. Other cases are `full`.

On real processes, `test_killed_turns.py` kills ranks of `seesaw` and `test_serve_cli.py` has refusals by the engine.
"""
REAL = [
    pytest.param(case, restarts, id=f"{name}-{restarts}", marks=[] if (name, restarts) in QUICK else [pytest.mark.full])
    for name, case in CASES.items()
    for restarts in (0, 1)
]


@pytest.mark.parametrize(("case", "restarts"), REAL)
def test_processes_do_the_same(tiny: Path, oracle: Oracle, tmp_path: Path, case: Case, restarts: int) -> None:
    flags = [*case.flags(tiny), "--max-worker-restarts", str(restarts)]
    if case.shrinks_to is None and not restarts:
        command = [sys.executable, "-m", "longspan", "serve", *flags, "--port", "0"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 2
        assert "--max-worker-restarts is 0, but" in ended.stderr
        assert "Traceback" not in ended.stderr
        return
    with process_server(flags, tmp_path / "log") as server:
        if restarts:
            check_with_restarts(server, case, oracle, kills_engine=bool(case.change))
        else:
            check_without_restarts(server, case, oracle)
