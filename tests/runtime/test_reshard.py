"""A fleet changes while requests run: other parallel specs on the same workers, and fewer instances after a loss."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from engines import InOrderLauncher, Row, ThreadLLM, num_free_blocks, pairwise
from oracle import Oracle
from test_exact import prompts_of
from thread_launcher import WorkerThread

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.core.fleets import fleet_text
from longspan.core.request import ContextLengthError, Request
from longspan.errors import ParameterError, WorkerLostError
from longspan.service import Service

LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
HOST = {"host_kv_gib": 0.02}


def make_service(model: Path, launcher: type[InOrderLauncher] = InOrderLauncher, **given: object) -> Service:
    options = {"block_size": 16, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 48, **given}
    return Service(
        EngineArgs(str(model), dtype="float32", skip_tokenizer_init=True, **options),  # type: ignore[arg-type]
        launcher=launcher,
    )


def run_with(service: Service, changes: dict[int, str]) -> list[Request]:
    """Generate, and change the spec after the given numbers of engine steps, in the middle of requests."""
    engine = service.engine
    requests = [engine.add(prompt, LONG) for prompt in prompts_of(3, 90, 17, 40, 61, 25)]
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        if num_steps in changes:
            assert any(request.output for request in requests) and not all(r.finish_reason for r in requests)
            service.reshard(changes[num_steps])
    return requests


CHANGES = [
    ("pp2", ("tp2", "pp2")),
    ("2", ("tp2", "pp2")),
    ("2xpp2", ("tp4", "2")),
    ("3", ("1", "pp2")),
    ("1", ("3", "2xpp2")),
    ("tp2", ("1", "5")),
    ("tp2", ("2xtp2", "tp2pp2")),
]
"""The first spec, and the specs that follow it."""


@pytest.mark.parametrize(
    ("spec", "changes", "host"),
    [
        pytest.param(spec, changes, host, marks=[pytest.mark.full] if (number % 2 == 0) != bool(host) else [])
        for number, (spec, changes) in enumerate(CHANGES)
        for host in ({}, HOST)
    ],
)
def test_another_spec_in_mid_stream(
    tiny: Path, oracle: Oracle, spec: str, changes: tuple[str, str], host: dict[str, float]
) -> None:
    """Surplus ranks become idle, and missing ranks start. With a host tier no token is computed twice."""
    service = make_service(tiny, parallel=spec, policy="chunked", **host)
    try:
        requests = run_with(service, dict(zip((12, 24), changes, strict=True)))
        assert [str(one.cluster.spec) for one in service.engine.transitions] == [*changes]
        for request in requests:
            assert request.output == oracle.complete(request.prompt, 30).token_ids
            if host:
                assert request.metrics.num_computed_tokens == len(request.prompt) + 29
        account, cluster = service.engine.kv.account, service.engine.config.cluster
        assert all(
            account.num_free(pool) == account.num_blocks(pool) for pool in (*cluster.instances, *cluster.host_pools)
        )
    finally:
        service.close()


def test_a_fleet_that_is_too_large_is_refused(tiny: Path) -> None:
    service = make_service(tiny, parallel="2", policy="chunked", **HOST)
    try:
        with pytest.raises(ParameterError, match="13xpp5 takes 65 ranks, but a fleet grows to at most 64: start"):
            service.reshard("13xpp5")
        service.reshard("pp2")
        with pytest.raises(RuntimeError, match="a change of clusters is in progress"):
            service.reshard("tp2")
    finally:
        service.close()


@pytest.mark.parametrize(("before", "after", "length", "fits"), [("1", "4", 1200, True), ("4", "1", 1200, False)])
def test_requests_that_arrive_during_a_change_are_bounded_by_the_next_fleet(
    tiny: Path, oracle: Oracle, before: str, after: str, length: int, fits: bool
) -> None:
    service = make_service(tiny, parallel=before, policy="context")
    try:
        engine, prompt = service.engine, [3 + at * 37 % 190 for at in range(length)]
        first = engine.add([5, 9, 3], LONG)
        for _ in range(3):
            engine.step()
        for is_under_way in (False, True):
            if is_under_way:
                service.reshard(after)
            if fits != is_under_way:
                for check in (engine.check, lambda _: service.input_processor.process(prompt, LONG)):
                    with pytest.raises(ContextLengthError, match="maximum context length is 960 tokens"):
                        check(length)
            else:
                service.input_processor.process(prompt, LONG)
                engine.check(length)
        assert service.max_model_len == 960 * int(after)
        second = engine.add(prompt if fits else prompt[:300], LONG)
        while engine.has_unfinished:
            engine.step()
        for request in (first, second):
            assert request.output == oracle.complete(request.prompt, 30).token_ids
    finally:
        service.close()


def test_options_that_change_during_a_change_of_the_fleet_apply_to_later_requests(tiny: Path, oracle: Oracle) -> None:
    options = {"threshold": "30", "csa": json.dumps({"levels": 3, "drop": {"2": 0.5, "3": 0.9}})}
    service = make_service(tiny, parallel="2", policy="csps", policy_options=options)
    try:
        engine = service.engine
        sparse = engine.add([3 + at * 37 % 190 for at in range(300)], LONG)
        assert sparse.sparse is not None
        engine.step()
        service.reshard("3")
        still_sparse = engine.add(sparse.prompt, LONG)
        service.update_policy({"csa": "off"})
        exact = engine.add(sparse.prompt, LONG)
        assert (still_sparse.sparse is not None, exact.sparse) == (True, None)
        while engine.has_unfinished:
            engine.step()
        assert exact.output == oracle.complete(exact.prompt, 30).token_ids
    finally:
        service.close()


def test_an_engine_of_python_takes_files_of_settings_when_its_policy_changes(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "drop.yaml"
    file.write_text("levels: 3\ndrop: 0.25\n")
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, parallel="2", block_size=16) as llm:
        llm.set_policy("csps", {"csa": str(file)})
        assert json.loads(str(llm.service.policy_settings.options["csa"])) == {"levels": 3, "drop": 0.25}
        with pytest.raises(ParameterError, match="auto has no tuned file"):
            llm.set_policy("csps", {"csa": "auto"})


def test_the_longest_request_follows_the_policy_of_an_engine_of_python(tiny: Path) -> None:
    sizes = {"block_size": 16, "num_gpu_blocks_override": 60}
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, parallel="2", policy="chunked", **sizes) as llm:
        prompt = [3 + at * 37 % 190 for at in range(1200)]
        with pytest.raises(ContextLengthError):
            llm.check(prompt)
        llm.set_policy("context", {})
        llm.check(prompt)
        assert llm.max_model_len == 1920
        llm.reshard("1")
        assert llm.max_model_len == 960
        with pytest.raises(ContextLengthError):
            llm.check(prompt)


def test_an_engine_of_python_takes_another_spec(tiny: Path, oracle: Oracle) -> None:
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, parallel="2", policy="chunked", block_size=16) as llm:
        for spec in ("tp2", "pp2", "2"):
            llm.reshard(spec)
            [prompt] = prompts_of(70)
            [output] = llm.generate([prompt], LONG, use_tqdm=False)
            assert output.outputs[0].token_ids == oracle.complete(prompt, 30).token_ids
            assert str(llm.engine.config.cluster.spec) == spec
        assert all(free == llm.engine.kv.account.num_blocks(i) for i, free in enumerate(num_free_blocks(llm)))


@pytest.mark.parametrize(
    ("policy", "lost"),
    [
        ("chunked", 0),
        ("context", 1),
        ("chunked", 2),
        pytest.param("context", 0, marks=pytest.mark.full),
        pytest.param("chunked", 1, marks=pytest.mark.full),
        pytest.param("context", 2, marks=pytest.mark.full),
    ],
)
def test_requests_continue_after_an_instance_is_lost(tiny: Path, oracle: Oracle, lost: int, policy: str) -> None:
    service = make_service(tiny, parallel="3", policy=policy, **HOST)
    try:
        engine = service.engine
        requests = [engine.add(prompt, LONG) for prompt in prompts_of(3, 90, 17, 40, 61, 25)]
        for _ in range(20):
            engine.step()
        assert any(request.output for request in requests) and not all(r.finish_reason for r in requests)
        service.shrink(lost)
        assert engine.config.cluster.num_instances == 2
        while engine.has_unfinished:
            engine.step()
        for request in requests:
            assert request.output == oracle.complete(request.prompt, 30).token_ids
        host = engine.kv.pool(engine.config.cluster.host_pools[0])
        assert host.num_free == host.num_blocks
    finally:
        service.close()


class FailingLauncher(InOrderLauncher):
    """Starts no worker of the ranks in `broken`."""

    broken: tuple[int, ...] = ()

    def start(self, rank: int) -> WorkerThread:
        if rank in self.broken:
            raise WorkerLostError(rank, "it does not start")
        return super().start(rank)


def test_a_smaller_fleet_that_does_not_start_is_left_for_a_smaller_one(
    tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of three instances is lost, and then the first one does not start."""
    service = make_service(tiny, FailingLauncher, parallel="3", policy="chunked", **HOST)
    try:
        requests = [service.engine.add(prompt, LONG) for prompt in prompts_of(3, 90, 17)]
        for _ in range(20):
            service.engine.step()
        monkeypatch.setattr(FailingLauncher, "broken", (0,))
        with pytest.raises(WorkerLostError, match="rank 0"):
            service.shrink(2)
        monkeypatch.setattr(FailingLauncher, "broken", ())
        service.shrink(2, 0)
        assert service.engine.config.cluster.num_instances == 1
        while service.engine.has_unfinished:
            service.engine.step()
        for request in requests:
            assert request.output == oracle.complete(request.prompt, 30).token_ids
    finally:
        service.close()


def test_the_last_instance_cannot_be_done_without(tiny: Path) -> None:
    service = make_service(tiny, parallel="pp2", policy="chunked")
    try:
        with pytest.raises(ParameterError, match="pp2 has no other instance: restart all workers"):
            service.shrink(0)
    finally:
        service.close()


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_spare_rank_takes_the_place_of_a_lost_one(tiny: Path, oracle: Oracle, lost: int) -> None:
    """The cluster stays complete also if a spare rank or a rank about to join is lost."""
    service = make_service(tiny, parallel="3", policy="chunked", **HOST)
    try:
        service.reshard("2")
        service.engine.step()
        assert service.engine.config.cluster.num_spare == 1
        [prompt] = prompts_of(90)
        request = service.engine.add(prompt, LONG)
        service.engine.step()
        service.shrink(lost)
        cluster = service.engine.config.cluster
        assert (str(cluster), cluster.num_spare, len(service.executor.worker_times)) == ("2", 0, 2)
        while service.engine.has_unfinished:
            service.engine.step()
        assert request.output == oracle.complete(prompt, 30).token_ids
    finally:
        service.close()


ROLES = {"prefill_parallel": "2", "decode_parallel": "2xtp2"}
PHASES = {"prefill_parallel": "2xpp2", "decode_parallel": "2xtp2", "policy": "seesaw", **HOST}


def run_all(service: Service) -> None:
    while service.engine.has_unfinished:
        service.engine.step()


def assert_exact(service: Service, requests: list[Request], oracle: Oracle) -> None:
    """Every output is that of one rank, and all blocks are free."""
    for request in requests:
        assert request.output == oracle.complete(request.prompt, 30).token_ids
    account, cluster = service.engine.kv.account, service.engine.config.cluster
    pools = (*cluster.instances, *cluster.host_pools)
    assert all(account.num_free(pool) == account.num_blocks(pool) for pool in pools)


ROLE_CHANGES = {
    "specs": (
        (("2", "1"), ("1 prefill + tp2 decode", "3 prefill + 2 decode")),
        (("1", "1"), ("3", "2 prefill + 2 decode")),
        (("tp2", "2"), ("2 prefill + pp2 decode", "2")),
    ),
    "policy": ("tetris", "auto"),
    "host": ({}, HOST),
}


@pytest.mark.parametrize("row", pairwise(ROLE_CHANGES))
def test_roles_change_in_mid_stream(tiny: Path, oracle: Oracle, row: Row) -> None:
    (roles, changes), policy, host = row.values()
    service = make_service(tiny, prefill_parallel=roles[0], decode_parallel=roles[1], policy=policy, **host)
    try:
        requests = run_with(service, dict(zip((9, 40), changes, strict=True)))
        assert [str(one.cluster) for one in service.engine.transitions] == [*changes]
        assert_exact(service, requests, oracle)
    finally:
        service.close()


@pytest.mark.parametrize(
    ("lost", "remaining", "num_steps"),
    [
        (1, "1 prefill + 2xtp2 decode", 6),
        (1, "1 prefill + 2xtp2 decode", 14),
        (2, "2 prefill + tp2 decode", 6),
        (5, "2 prefill + tp2 decode", 14),
        pytest.param(2, "2 prefill + tp2 decode", 14, marks=pytest.mark.full),
        pytest.param(5, "2 prefill + tp2 decode", 6, marks=pytest.mark.full),
    ],
)
def test_roles_shrink_by_the_instance_of_a_lost_rank(
    tiny: Path, oracle: Oracle, lost: int, remaining: str, num_steps: int
) -> None:
    service = make_service(tiny, **ROLES, policy="tetris", **HOST)
    try:
        requests = [service.engine.add(prompt, LONG) for prompt in prompts_of(3, 90, 17, 40, 61, 25)]
        for _ in range(num_steps):
            service.engine.step()
        assert not all(request.finish_reason for request in requests)
        service.shrink(lost)
        assert fleet_text(service.engine.config.fleet) == remaining
        run_all(service)
        assert_exact(service, requests, oracle)
    finally:
        service.close()


def test_a_role_keeps_its_last_instance(tiny: Path) -> None:
    service = make_service(tiny, prefill_parallel="2", decode_parallel="1", policy="tetris")
    try:
        with pytest.raises(ParameterError, match=r"2 prefill \+ 1 decode has no other decode instance: restart"):
            service.shrink(2)
    finally:
        service.close()


@pytest.mark.parametrize("num_steps", [3, 12, 25])
def test_phases_change_in_mid_stream(tiny: Path, oracle: Oracle, num_steps: int) -> None:
    """In any phase, and while the policy changes clusters itself."""
    service = make_service(tiny, **PHASES)
    try:
        requests = [service.engine.add(prompt, LONG) for prompt in prompts_of(3, 90, 17, 40, 61, 25)]
        for spec in ("2 prefill + tp2 decode", "pp2 prefill + 3 decode", "2xpp2 prefill + tp4 decode"):
            for _ in range(num_steps):
                service.engine.step()
            if fleet_text(service.engine.config.fleet) == fleet_text(
                service.setup.config.fleet
            ):  # the change before is complete
                service.reshard(spec)
        run_all(service)
        assert (
            fleet_text(service.engine.config.fleet)
            == fleet_text(service.setup.config.fleet)
            != "2xpp2 prefill + 2xtp2 decode"
        )
        assert_exact(service, requests, oracle)
    finally:
        service.close()


@pytest.mark.parametrize(
    ("num_steps", "lost"),
    [
        (3, 0),
        (12, 3),
        (25, 0),
        pytest.param(3, 3, marks=pytest.mark.full),
        pytest.param(12, 0, marks=pytest.mark.full),
        pytest.param(25, 3, marks=pytest.mark.full),
    ],
)
def test_phases_shrink_both(tiny: Path, oracle: Oracle, num_steps: int, lost: int) -> None:
    service = make_service(tiny, **PHASES)
    try:
        requests = [service.engine.add(prompt, LONG) for prompt in prompts_of(3, 90, 17, 40, 61, 25)]
        for _ in range(num_steps):
            service.engine.step()
        assert not all(request.finish_reason for request in requests)
        service.shrink(lost)
        assert fleet_text(service.engine.config.fleet) == "pp2 prefill + tp2 decode"
        run_all(service)
        assert_exact(service, requests, oracle)
        with pytest.raises(
            ParameterError, match=r"pp2 prefill \+ tp2 decode needs all of its 2 ranks in one of its ph"
        ):
            service.shrink(1)
    finally:
        service.close()


def test_phases_need_two_specs_that_differ(tiny: Path) -> None:
    service = make_service(tiny, **PHASES)
    try:
        with pytest.raises(ParameterError, match=r"\(2\) is one cluster, but seesaw needs two: give both"):
            service.reshard("2")
        with pytest.raises(ParameterError, match="pp2 equals `prefill_parallel`"):
            service.reshard("pp2 prefill + pp2 decode")
    finally:
        service.close()


def test_the_memory_of_hosts_is_there_already(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(tiny, parallel="pp2", policy="chunked", **HOST)
    before = service.engine.config.cluster.host_blocks
    try:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20, total=2**34))
        service.reshard("tp2")
        service.engine.step()
        assert str(service.engine.config.cluster) == "tp2"
        assert service.engine.config.cluster.host_blocks == before
    finally:
        service.close()


def test_the_policy_stays_while_clusters_change(tiny: Path) -> None:
    """The new one would be lost: the change brings its own."""
    service = make_service(tiny, parallel="pp2", policy="chunked")
    try:
        service.reshard("tp2")
        with pytest.raises(RuntimeError, match="while clusters do: call step until they have"):
            service.set_policy("prefill-first", {})
        assert service.policy_settings.name == "chunked"
    finally:
        service.close()


def test_workers_lost_before_they_change(tiny: Path, oracle: Oracle) -> None:
    """The restarted workers apply the change that was requested of the lost ones."""
    service = make_service(tiny, parallel="pp2", policy="chunked")
    try:
        engine = service.engine
        requests = [engine.add(prompt, LONG) for prompt in prompts_of(3, 40, 17)]
        for _ in range(6):
            engine.step()
        service.reshard("tp2")
        service.restart()
        while engine.has_unfinished:
            engine.step()
        assert [str(one.cluster.spec) for one in engine.transitions] == ["tp2"]
        for request in requests:
            assert request.output == oracle.complete(request.prompt, 30).token_ids
    finally:
        service.close()
