"""A server under attack: clients that leave, floods, kill -9, signals. Real processes, real models."""

from __future__ import annotations

import math
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from server_client import Client, Metrics, Reply, num_ended
from server_process import ServerProcess, running
from texts import topic_tokens
from tiny_models import make_tiny

pytestmark = pytest.mark.attack

_MANY_TOKENS = 400
"""Tokens of a request that still runs when the metrics show it, which are reported twice a second."""
_TIE = 1e-3
"""Where the two best log-probabilities are closer than this, either token is right."""

Servers = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One per list of arguments: started when it is first asked for, and again when a test has ended it."""
    latest: dict[tuple[str, ...], ServerProcess] = {}
    with ExitStack() as stack:

        def get(*arguments: str) -> ServerProcess:
            if arguments not in latest or latest[arguments].process.poll() is not None:
                log = tmp_path_factory.mktemp("server") / "log"
                latest[arguments] = stack.enter_context(running(*arguments, log=log))
            return latest[arguments]

        yield get


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def smollm2(servers: Servers) -> ServerProcess:
    flags = ("--parallel", "2", "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "16")
    return servers("smollm2-135m", *flags)


@pytest.fixture
def bounded(servers: Servers, tiny: Path) -> ServerProcess:
    flags = ("--max-num-queued-reqs", "50", "--max-num-queued-tokens", "8000", "--max-num-seqs", "16")
    return servers(str(tiny), "--skip-tokenizer-init", *flags)


@pytest.fixture
def pair(servers: Servers, tiny: Path) -> ServerProcess:
    """Two instances, and a queue that is shorter than the number of running requests."""
    return servers(str(tiny), "--skip-tokenizer-init", "--parallel", "2", "--max-num-queued-reqs", "16")


def check_metrics(metrics: Metrics, *, num_replayed: int = 0) -> None:
    """Check the metrics of an idle server. A recomputed request has a first token twice."""
    assert all(value >= 0 and math.isfinite(value) for value in metrics.values()), metrics
    for name in ("e2e_request_latency_seconds", "request_generation_tokens"):
        assert metrics[f"{name}_count"] == num_ended(metrics)
    assert metrics["time_to_first_token_seconds_count"] <= num_ended(metrics) + num_replayed
    assert metrics["prefix_cache_hits_total"] <= metrics["prefix_cache_queries_total"]


def check_same(reply: Reply, solo: Reply) -> None:
    """The same tokens, up to where the model itself is undecided."""
    assert reply.status == 200, reply.data
    ids, expected = reply.token_ids, solo.token_ids
    assert len(ids) == len(expected)
    for index, (token, wanted) in enumerate(zip(ids, expected, strict=True)):
        if token != wanted:
            best = sorted(solo.body["choices"][0]["logprobs"]["top_logprobs"][index].values())
            assert best[-1] - best[-2] < _TIE, f"token {index} is {token}, not {wanted}"
            return


def solo_answers(client: Client, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Reply]:
    """Each alone."""
    return [client.complete(prompt=prompt, max_tokens=max_tokens, logprobs=2) for prompt in prompts]


def at_once(asks: Sequence[Callable[[], Reply]]) -> tuple[ThreadPoolExecutor, list[Future[Reply]]]:
    threads = ThreadPoolExecutor(len(asks))
    return threads, [threads.submit(ask) for ask in asks]


def prompts_of(num_tokens: int, number: int) -> list[list[int]]:
    """Prompts for tiny models that have no beginning in common."""
    return [[3 + (index * 37 + at * (index + 5)) % 190 for at in range(num_tokens)] for index in range(number)]


def asking(client: Client, prompt: Sequence[int], max_tokens: int, *, stream: bool) -> Callable[[], Reply]:
    return lambda: client.complete(prompt=prompt, max_tokens=max_tokens, stream=stream, timeout_s=100)


# ---------------------------------------------------------------- clients that leave, and time that is up


def test_clients_that_leave_long_prefills_leave_nothing_behind(smollm2: ServerProcess) -> None:
    client, tokens = smollm2.client, topic_tokens()
    prompts = [list(tokens[start : start + 6000]) for start in range(0, 25 * 300, 300)]
    asks = ({"prompt": prompts[0], "max_tokens": 4}, {"prompt": "The capital of France is", "max_tokens": 8})
    before = [client.complete(**ask).body["choices"][0]["text"] for ask in asks]
    assert "Paris" in before[1]
    for prompt in prompts[1:5]:  # every block has been used once
        client.leave_after(0.5, prompt=prompt, max_tokens=4)
    num_aborted = num_ended(client.wait_until_idle(), "abort")
    memory_bytes = smollm2.memory_bytes()
    for index, prompt in enumerate(prompts[5:25]):
        client.leave_after(0.5, prompt=prompt, max_tokens=4, stream=bool(index % 2))
    metrics = client.wait_until_idle()
    assert num_ended(metrics, "abort") - num_aborted == 20
    check_metrics(metrics)
    assert smollm2.memory_bytes() - memory_bytes < 50e6
    assert [client.complete(**ask).body["choices"][0]["text"] for ask in asks] == before


def test_a_deadline_ends_a_long_prefill(smollm2: ServerProcess) -> None:
    client = smollm2.client
    num_aborted = num_ended(client.metrics(), "abort")
    start_s = time.monotonic()
    body = {"prompt": list(topic_tokens()[1000:8000]), "max_tokens": 4}
    reply = client.ask("POST", "/v1/completions", body, x_request_timeout="0.6")
    assert reply.status == 504
    assert reply.body["error"]["type"] == "timeout_error"
    assert time.monotonic() - start_s < 30
    metrics = client.wait_until_idle()
    assert num_ended(metrics, "abort") - num_aborted == 1


def test_the_event_loop_stays_free(smollm2: ServerProcess) -> None:
    """While texts of 1 MB are tokenised and a prompt of 8K tokens is computed."""
    client = smollm2.client
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    text = (text * (1 + 1_000_000 // len(text)))[:1_000_000]
    worst_s = []
    for attempt in range(5):  # the machine may be busy with other things once
        long = list(topic_tokens()[attempt * 500 : attempt * 500 + 8000])
        asks = [lambda: client.complete(prompt=text)] * 3 + [
            lambda long=long: client.ask("POST", "/v1/completions", {"prompt": long}, x_request_timeout="3")
        ]
        threads, replies = at_once(asks)
        worst_s.append(0.0)
        with threads:
            while not all(reply.done() for reply in replies):
                start_s = time.monotonic()
                assert client.ask("GET", "/live").status == 200
                worst_s[-1] = max(worst_s[-1], time.monotonic() - start_s)
        assert [reply.result().status for reply in replies] == [400, 400, 400, 504]
        assert "maximum context length" in replies[0].result().body["error"]["message"]
        if worst_s[-1] < 0.3:
            return
    pytest.fail(f"/live took {worst_s} s")


# ---------------------------------------------------------------- floods


@pytest.mark.parametrize(
    ("num_requests", "num_prompt_tokens", "flag"),
    [(300, 20, "--max-num-queued-reqs"), (150, 800, "--max-num-queued-tokens")],
)
def test_a_flood_is_answered_or_refused(
    bounded: ServerProcess, num_requests: int, num_prompt_tokens: int, flag: str
) -> None:
    client = bounded.client
    prompts = prompts_of(num_prompt_tokens, 5)
    solo = solo_answers(client, prompts, 12)
    num_done = num_ended(client.wait_until_idle(), "length")
    threads, futures = at_once([asking(client, prompts[i % 5], 12, stream=i % 3 == 0) for i in range(num_requests)])
    with threads:
        replies = [future.result() for future in futures]
    answered = [index for index, reply in enumerate(replies) if reply.status == 200]
    for index in answered:
        check_same(replies[index], solo[index % 5])
    refused = [reply for reply in replies if reply.status != 200]
    for reply in refused:
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        error = reply.body["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "queue_full")
        assert flag in error["message"] or "would wait for the engine" in error["message"]
    assert refused
    assert len(answered) >= 4
    assert client.ask("GET", "/health").status == 200
    metrics = client.wait_until_idle()
    assert num_ended(metrics, "length") - num_done == len(answered)
    assert metrics["generation_tokens_total"] == metrics["request_generation_tokens_sum"]
    check_metrics(metrics)
    check_same(client.complete(prompt=prompts[0], max_tokens=12), solo[0])


def test_sigterm_lets_admitted_requests_finish(bounded: ServerProcess) -> None:
    client, prompts = bounded.client, prompts_of(50, 4)
    solo = solo_answers(client, prompts, 40)
    threads, futures = at_once([asking(client, prompts[i % 4], 40, stream=i % 8 > 3) for i in range(40)])
    with threads:
        client.wait_until_running(16)
        bounded.terminate()
        time.sleep(0.3)
        assert client.complete(prompt=prompts[0]).status == 503
        for index, future in enumerate(futures):
            check_same(future.result(), solo[index % 4])
    bounded.close(30)


# ---------------------------------------------------------------- kill -9


def _check_recovery(client: Client, futures: Sequence[Future[Reply]], within_s: float) -> None:
    """`/health` falls and rises again, and every request ends, in time."""
    start_s = time.monotonic()
    client.wait_for_health(503, 60)
    client.wait_for_health(200, 60)
    _, pending = wait(futures, timeout=max(0.0, start_s + within_s - time.monotonic()))
    assert not pending, f"{len(pending)} of {len(futures)} requests have not ended after {within_s} s"


@pytest.mark.parametrize("what", ["worker", "forkserver"])
def test_requests_go_on_after_workers_were_killed(pair: ServerProcess, what: str) -> None:
    client = pair.client
    prompts = [*prompts_of(40, 3), *prompts_of(1500, 1)]  # the last one is sharded
    solo = solo_answers(client, prompts, _MANY_TOKENS)
    old = [process for process in pair.family if process.pid != pair.one("engine").pid]
    num_restarts = client.metrics()["worker_restarts_total"]
    asks = [asking(client, prompts[i % 4], _MANY_TOKENS, stream=i >= 4) for i in range(8)]
    threads, futures = at_once(asks)
    with threads:
        client.wait_until_running(4)
        pair.kill(what)
        _check_recovery(client, futures, within_s=120)
        for index, future in enumerate(futures):
            check_same(future.result(), solo[index % 4])
    metrics = client.wait_until_idle()
    assert metrics["worker_restarts_total"] == num_restarts + 1
    check_metrics(metrics)
    gone, alive = psutil.wait_procs([process for process in old if process not in pair.family], timeout=60)
    assert len(gone) == (2 if what == "worker" else 3), "the old workers"
    assert not alive


def test_a_fleet_goes_on_without_a_lost_worker(servers: Servers, tiny: Path) -> None:
    """Three instances and then two, under load. Streams continue where they were."""
    server = servers(
        str(tiny), "--skip-tokenizer-init", "--parallel", "3", "--threads-per-rank", "1", "--max-worker-restarts", "0"
    )
    client, prompts = server.client, [*prompts_of(40, 3), *prompts_of(1500, 1)]
    solo = solo_answers(client, prompts, _MANY_TOKENS)
    threads, futures = at_once([asking(client, prompts[i % 4], _MANY_TOKENS, stream=i >= 4) for i in range(12)])
    with threads:
        client.wait_until_running(6)
        server.kill("worker")
        _check_recovery(client, futures, within_s=120)
        for index, future in enumerate(futures):
            check_same(future.result(), solo[index % 4])
    metrics = client.wait_until_idle()
    assert metrics["worker_restarts_total"] == 0
    check_metrics(metrics)
    assert len(server.one("forkserver").children()) == 2
    check_same(client.complete(prompt=prompts[3], max_tokens=_MANY_TOKENS), solo[3])


def test_a_request_that_runs_in_two_losses_fails(pair: ServerProcess) -> None:
    client, [prompt] = pair.client, prompts_of(30, 1)
    [solo] = solo_answers(client, [prompt], 20)
    num_failed = num_ended(client.metrics(), "error")
    threads, futures = at_once([asking(client, prompt, 3500, stream=stream) for stream in (False, True)])
    with threads:
        for _ in range(2):
            client.wait_until_running(2)
            time.sleep(0.3)
            assert not any(future.done() for future in futures)
            pair.kill("worker")
            client.wait_for_health(503, 60)
            client.wait_for_health(200, 60)
        whole, stream = (future.result(timeout=120) for future in futures)
    assert whole.status == 500
    for error in (whole.body["error"], stream.events[-1]["error"]):
        assert error["type"] == "server_error"
        assert "2 times while this request ran" in error["message"]
    metrics = client.wait_until_idle()
    assert num_ended(metrics, "error") - num_failed == 2
    check_metrics(metrics)
    check_same(client.complete(prompt=prompt, max_tokens=20), solo)


def test_requests_without_output_are_replayed_after_the_engine_process_was_killed(pair: ServerProcess) -> None:
    client, prompts = pair.client, prompts_of(900, 2)
    solo = solo_answers(client, prompts, 300)
    asks = [asking(client, prompts[i % 2], 300, stream=i >= 26) for i in range(30)]
    earlier, first = at_once(asks[:15])
    client.wait_until_running(15)
    later, second = at_once(asks[15:])  # all together, they are more than the queue of the new engine may hold
    futures = [*first, *second]
    with earlier, later:
        client.wait_until_running(30)
        pair.kill("engine")
        _check_recovery(client, futures, within_s=120)  # Python, PyTorch and transformers start again
        for index, future in enumerate(futures):
            reply = future.result()
            if index >= 26 and "error" in reply.events[-1]:
                assert "the engine core was lost" in reply.events[-1]["error"]["message"]
            else:
                check_same(reply, solo[index % 2])
    assert any("error" in future.result().events[-1] for future in futures[26:]), "a stream had begun"
    check_metrics(client.wait_until_idle(), num_replayed=len(futures))


def test_nothing_is_left_when_the_api_server_is_killed(pair: ServerProcess) -> None:
    client, [prompt] = pair.client, prompts_of(1500, 1)
    threads, futures = at_once([asking(client, prompt, 500, stream=False) for _ in range(4)])
    with threads:
        client.wait_until_running(2)
        assert len(pair.family) == 4, "the engine core, the fork server, and two workers"
        pair.kill("API server")
        for future in futures:
            assert future.exception(timeout=60) is not None
    pair.close(60)
