"""An engine core under any mix of requests, cancellations and lost workers, on simulated ranks."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cost import LinearCost

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.core.cluster import Cluster as Instances
from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.fleets import without
from longspan.core.options import PolicySettings
from longspan.core.policy import Policy
from longspan.core.regrouping import Change
from longspan.core.steps import Completion, Step
from longspan.errors import OutOfMemoryError, WorkerLostError
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.serve import engine_loop
from longspan.serve.engine_loop import EngineLoop
from longspan.serve.messages import (
    Accepted,
    Add,
    Cancel,
    Command,
    Delta,
    EngineSetup,
    Failed,
    FinishedChoice,
    Quit,
    Report,
    Restarted,
    Restarting,
    StepOutputs,
)
from longspan.sim.executor import SimExecutor, VirtualClock
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import Choice

_VOCAB, _BLOCKS, _BLOCK_SIZE = 64, 16, 4
_CAPACITY = 2 * _BLOCKS * _BLOCK_SIZE


class Workers:
    """Simulated workers that can be lost. The engine must not use lost workers."""

    def __init__(self, clock: VirtualClock) -> None:
        self.inner = SimExecutor(clock=clock, vocab_size=_VOCAB, cost=LinearCost(base_s=0.001, per_token_s=0.01))
        self.are_lost = self.are_gone = False
        self.loss = WorkerLostError(0, "it was killed")
        self.stuck: set[int] = set()  # requests of the engine whose next token cannot be sampled
        self.non_finite: set[int] = set()  # requests with NaN from now on
        self.wakeup: Any = None

    def submit(self, step: Step) -> None:
        assert not self.are_gone, f"{step} for workers that are gone"
        self.inner.submit(step)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        if self.are_lost:
            self.are_gone = True
            raise self.loss
        return [self._stuck(completion) for completion in self.inner.poll(timeout_s)]

    def _stuck(self, completion: Completion) -> Completion:
        sampled = [
            replace(one, error="no token fits") if one.request_id in self.stuck else one for one in completion.sampled
        ]
        found = tuple(one.request_id for one in completion.sampled if one.request_id in self.non_finite)
        return replace(completion, sampled=tuple(sampled), non_finite=found)


class Cluster:
    """In place of a `Service`."""

    block_bytes = 100
    policy_settings = PolicySettings(name="context", options={})
    max_model_len = _CAPACITY
    setup = SimpleNamespace(facts=Facts(), policy=SimpleNamespace(traffic=None))

    def __init__(self, num_instances: int) -> None:
        self.clock = VirtualClock()
        self.executor = Workers(self.clock)
        self.input_processor = SimpleNamespace(tokenizer=None)
        self.failures: deque[Exception] = deque()
        self.engine = Engine(
            policy=_policy(num_instances),
            executor=self.executor,
            clock=self.clock,
            config=EngineConfig(
                cluster=Instances.of(str(num_instances), num_blocks=[_BLOCKS] * num_instances),
                block_size=_BLOCK_SIZE,
                max_model_len=_CAPACITY,
                max_num_batched_tokens=16,
                max_num_seqs=4,
            ),
        )

    def can_grow(self) -> bool:
        return False

    def restart(self) -> None:
        if self.failures:
            raise self.failures.popleft()
        self.executor = Workers(self.clock)
        self.engine.restart(self.executor)

    def shrink(self, *ranks: int) -> None:
        fleet = self.engine.config.fleet
        for rank in ranks:
            fleet = without(fleet, rank)
        [cluster] = fleet
        if self.failures:
            raise self.failures.popleft()
        self.executor = Workers(self.clock)
        self.engine.restart(self.executor, Change(cluster=cluster, policy=_policy(cluster.num_instances)))


def _policy(num_instances: int) -> Policy:
    return make_policy("context", num_instances=num_instances, options={"threshold": "16"})


@dataclass(kw_only=True)
class Asked:
    """A request as its server sees it."""

    num_prompt_tokens: int
    num_choices: int
    max_tokens: int
    was_accepted: bool
    request_ids: list[int] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_finished: int = 0
    end: str | None = None


class ApiServer:
    """Also replaces the socket: the loop reads its messages, and it checks the messages of the loop."""

    def __init__(self, num_instances: int = 2, **limits: int) -> None:
        self.cluster = Cluster(num_instances)
        self.asked: dict[int, Asked] = {}
        self.num_ended: Counter[str] = Counter()
        self.num_first = self.num_prompt_tokens = self.num_gaps = 0
        self.longest: list[int] = []
        self.finished: list[FinishedChoice] = []
        self.states: list[str] = []
        self.reasons: list[str] = []
        self.num_kv_violations: list[int] = []  # one entry per report
        self._commands: deque[bytes] = deque()
        setup = EngineSetup(
            engine=EngineArgs(), **({"max_num_queued_reqs": 3, "max_num_queued_tokens": 2**20} | limits)
        )
        self.loop = EngineLoop(self.cluster, setup, self)  # type: ignore[arg-type]
        self._decoder = msgspec.msgpack.Decoder(Report)

    def poll(self, _: int) -> bool:
        return bool(self._commands)

    def recv(self) -> bytes:
        return self._commands.popleft()

    def tell(self, command: Command) -> None:
        self._commands.append(msgspec.msgpack.encode(command))

    def add(self, num_tokens: int, max_tokens: int = 4, n: int = 1, *, is_accepted: bool = False) -> int:
        number = len(self.asked)
        params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
        prompt = tuple((number * 7 + at) % _VOCAB for at in range(num_tokens))
        engine_request = EngineRequest(text=None, token_ids=prompt, params=params)
        self.asked[number] = Asked(
            num_prompt_tokens=num_tokens, num_choices=n, max_tokens=max_tokens, was_accepted=is_accepted
        )
        self.tell(Add(id=number, engine_request=engine_request, is_accepted=is_accepted))
        return number

    def cancel(self, number: int) -> None:
        self.tell(Cancel(number))
        asked = self.asked[number]
        asked.end = asked.end or "cancelled"

    def turn(self) -> None:
        """As `EngineLoop.run` does."""
        try:
            self.advance()
        except WorkerLostError as error:
            self.restart(error)

    def advance(self) -> None:
        self.loop._advance()

    def restart(self, error: WorkerLostError) -> None:
        self.loop._restart(error)

    def turn_until_lost(self) -> None:
        """Completions that are there already are taken first."""
        for _ in range(100):
            self.advance()

    def finish(self) -> None:
        """Until nothing is left to do."""
        for _ in range(2000):
            self.turn()
            if not self.cluster.engine.has_unfinished and not self._commands:
                return
        pytest.fail("requests do not end")

    def send(self, data: bytes) -> None:
        match self._decoder.decode(data):
            case Accepted(number):
                choices = self.loop._running.choices.items()
                ids = sorted((index, request) for request, (served, index) in choices if served.id == number)
                self.asked[number].request_ids = [request for _, request in ids]
            case Failed(int(number), reason, is_full=True):
                assert not self.asked[number].was_accepted
                self.reasons.append(reason)
                self._end(number, "full")
            case Failed(int(number), reason, param):
                is_refused = "refused" in reason or "maximum context length" in reason
                assert is_refused == (param == "prompt"), "the error names the field to change"
                self.reasons.append(reason)
                self._end(number, "refused" if is_refused else "failed" if param is None else param)
            case StepOutputs() as step:
                for delta in step.deltas:
                    self._take(delta)
                self.num_ended.update(choice.reason for choice in step.finished)
                self.finished += step.finished
                self.num_first += len(step.ttft_s)
                self.num_prompt_tokens += step.num_prompt_tokens
                self.num_gaps += len(step.tbt_s)
                self.longest += step.longest_outputs
                if step.stats is not None:
                    self.num_kv_violations.append(step.stats.num_kv_violations)
            case Restarting() | Restarted() as state:
                self.states.append(type(state).__name__)

    def _take(self, delta: Delta) -> None:
        asked = self.asked[delta.id]
        assert asked.end in {None, "cancelled"}, "nothing is sent after the end"
        asked.tokens.setdefault(delta.choice, []).extend(delta.token_ids)
        asked.num_finished += delta.finish_reason is not None
        if asked.num_finished == asked.num_choices:
            self._end(delta.id, "finished")

    def _end(self, number: int, end: str) -> None:
        asked = self.asked[number]
        assert asked.end in {None, "cancelled"}, (number, asked.end, end)
        asked.end = asked.end or end

    def check(self) -> None:
        """Every request has ended and got the right tokens, each once. No block is in use."""
        num_choices = 0
        for number, asked in self.asked.items():
            assert asked.end is not None, number
            num_choices += len(asked.request_ids)
            for index, tokens in asked.tokens.items():
                first = asked.num_prompt_tokens
                wanted = [_token(asked.request_ids[index], first + at) for at in range(asked.max_tokens)]
                assert tokens == (wanted if asked.end == "finished" else wanted[: len(tokens)])
            if asked.end == "finished":
                assert len(asked.tokens) == asked.num_choices
        assert self.num_ended.total() == num_choices
        for choice in self.finished:
            asked = self.asked[choice.id]
            assert (choice.n, choice.max_tokens) == (asked.num_choices, asked.max_tokens)
            assert 0 <= choice.num_cached_tokens < choice.num_prompt_tokens == asked.num_prompt_tokens
        told = [asked for asked in self.asked.values() if asked.tokens.get(0)]
        assert self.num_first == len(told)
        assert self.num_prompt_tokens == sum(asked.num_prompt_tokens for asked in told)
        outputs = [tokens for asked in self.asked.values() for tokens in asked.tokens.values()]
        accepted = [asked for asked in self.asked.values() if asked.request_ids]
        assert len(self.longest) == len(accepted), "each request counts once, when it ends"
        if all(asked.end == "finished" for asked in accepted):
            assert sorted(self.longest) == sorted(asked.max_tokens for asked in accepted)
        assert self.num_gaps == sum(max(0, len(tokens) - 1) for tokens in outputs)
        assert not self.loop._served
        assert not self.loop._running.choices
        assert not any(self.cluster.engine.load().used_blocks)


def _token(request_id: int, position: int) -> int:
    return zlib.crc32(f"{request_id} {position}".encode()) % _VOCAB


_ADD = st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 12), st.integers(1, 3), st.booleans())
_CANCEL = st.tuples(st.just("cancel"), st.integers(0, 30))
_TURN, _LOSE, _TOO_LONG = st.just(("turn",)), st.just(("lose",)), st.just(("add", _CAPACITY, 1, 1, False))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(_ADD, _ADD, _CANCEL, _TURN, _TURN, _TURN, _LOSE, _TOO_LONG), max_size=60))
def test_every_request_ends_and_gets_each_token_once(actions: list[tuple[Any, ...]]) -> None:
    server, num_losses = ApiServer(), 0
    for name, *values in actions:
        if name == "add":
            length, max_tokens, n, is_accepted = values
            server.add(length, max_tokens, n, is_accepted=is_accepted)
        elif name == "cancel" and values[0] in server.asked:
            server.cancel(values[0])
        elif name == "lose" and num_losses < 3:  # more of them, without a token between, end the process
            num_losses += 1
            server.cluster.executor.are_lost = True
            server.turn()
        else:
            server.turn()
    server.finish()
    server.check()


def test_a_request_fails_at_its_second_loss_and_not_at_its_first() -> None:
    server = ApiServer()
    twice = server.add(60, 12)
    server.turn()
    server.cluster.executor.are_lost = True
    server.turn()
    once = server.add(8)
    server.turn()
    server.cluster.executor.are_lost = True
    server.turn()
    server.finish()
    assert (server.asked[twice].end, server.asked[once].end) == ("failed", "finished")
    assert server.states == ["Restarting", "Restarted"] * 2
    assert server.num_ended == {"error": 1, "length": 1}
    server.check()


def test_violation_of_the_kv_account_is_logged_once_and_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    server = ApiServer()
    for is_wrong in (False, True, True):
        server.add(30, 5)
        server.finish()
        server.turn()
        assert len(caplog.records) == is_wrong
        server.cluster.engine.kv.pool(1).allocate(not is_wrong)
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "1 violations" in record.message and "of pool 1 has 1 references" in record.message
    assert f"pool 1: {_BLOCKS} blocks, 1 in use" in record.message
    assert [asked.end for asked in server.asked.values()] == ["finished"] * 3
    assert server.num_kv_violations[0] == 0 and server.num_kv_violations[-1] == 1
    server.turn()
    assert len(caplog.records) == 1, "an idle loop checks once per idle period"


@pytest.mark.parametrize("kind", [WorkerLostError, OutOfMemoryError])
def test_a_request_that_fails_with_workers_names_a_lack_of_memory(kind: type[WorkerLostError]) -> None:
    server = ApiServer()
    server.add(60, 12)
    for _ in range(2):
        server.turn()
        server.cluster.executor.are_lost, server.cluster.executor.loss = True, kind(0, "it was killed")
        server.turn()
    server.finish()
    [reason] = server.reasons
    assert reason.startswith("workers were lost 2 times")
    assert ("memory" in reason) == (kind is OutOfMemoryError)


@pytest.mark.parametrize("num_turns", [1, 4])
@pytest.mark.parametrize(("cause", "end"), [("stuck", "structured_outputs"), ("non_finite", "failed")])
def test_a_request_fails_with_a_choice_that_cannot_go_on_and_no_other_does(
    num_turns: int, cause: str, end: str
) -> None:
    """Only a grammar is the sender's choice: for it, the failure names the parameter."""
    server = ApiServer()
    stuck, other = server.add(8, 12, n=3), server.add(8, 12)
    for _ in range(num_turns):
        server.turn()
    setattr(server.cluster.executor, cause, {server.asked[stuck].request_ids[1]})
    server.finish()
    assert (server.asked[stuck].end, server.asked[other].end) == (end, "finished")
    assert server.num_ended == {"error": 3, "length": 1}
    assert sum(choice.is_corrupted for choice in server.finished) == (cause == "non_finite")
    server.check()


def test_a_request_with_undecodable_tokens_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    server, take = ApiServer(), Choice.take_new_tokens
    bad, good = server.add(8, 12, n=2), server.add(8, 12)

    def taking(choice: Choice) -> bool:
        is_stopped = take(choice)
        if choice.request.id == server.asked[bad].request_ids[1] and choice.num_taken == 4:
            raise OverflowError("no such character")
        return is_stopped

    monkeypatch.setattr(Choice, "take_new_tokens", taking)
    server.finish()
    assert (server.asked[bad].end, server.asked[good].end) == ("failed", "finished")
    assert server.num_ended == {"error": 2, "length": 1}
    server.check()


def test_a_request_between_two_steps_can_fail_after_a_loss() -> None:
    """It holds KV, but no step names it. Its end is sent to workers, and its workers are gone."""
    num_between = 0
    for num_turns in range(12):
        server = ApiServer()
        server.add(1, 40)
        server.add(16, 40)  # on the other instance, which takes longer
        server.turn()
        server.cluster.executor.are_lost = True
        server.turn()
        server.turn()
        server.add(60)  # both instances wait for one another to begin with it
        for _ in range(num_turns):
            server.turn()
        server.cluster.executor.are_lost = True
        with pytest.raises(WorkerLostError) as lost:
            server.turn_until_lost()
        requests = server.cluster.engine._queues.requests.values()
        num_between += any(request.group and not request.in_flight for request in requests)
        server.restart(lost.value)
        server.finish()
        server.check()
    assert num_between, "no request was between two steps"


def test_an_idle_engine_and_a_long_step_send_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    server, heard_s = ApiServer(), list[float]()
    now = server.cluster.clock.now
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(engine_loop, "stats_of", lambda *_: heard_s.append(now()))
    server.turn()
    server.turn()
    cost = LinearCost(base_s=300.0)
    server.cluster.executor.inner = SimExecutor(clock=server.cluster.clock, vocab_size=_VOCAB, cost=cost)
    server.add(8, 2)
    server.finish()
    server.check()
    gaps = [after - before for before, after in pairwise(heard_s)]
    assert heard_s[-1] >= 300
    assert max(gaps) < 60 / 3


@pytest.mark.parametrize(
    ("limits", "lengths", "reason"),
    [
        (
            {"max_num_queued_reqs": 3},
            [60, 60, 20, 20, 20],
            "3 requests are waiting, of at most 3 (--max-num-queued-reqs)",
        ),
        (
            {"max_num_queued_tokens": 50},
            [60, 60, 20],
            "prompts of 60 tokens are waiting: with another 20 they would be more than 50 (--max-num-queued-tokens)",
        ),
        (
            {"max_num_queued_tokens": 50},
            [60, 30, 20, 1],
            "prompts of 50 tokens are waiting: with another 1 they would be more than 50 (--max-num-queued-tokens)",
        ),
    ],
)
def test_a_queue_is_bounded_in_requests_and_tokens_but_takes_any_prompt_alone(
    limits: dict[str, int], lengths: list[int], reason: str
) -> None:
    """The first prompt does not wait: both instances begin with it."""
    server = ApiServer(**limits)
    for length in lengths:
        server.add(length)
    server.finish()
    *others, last = [asked.end for asked in server.asked.values()]
    assert (set(others), last) == ({"finished"}, "full")
    assert server.reasons == [reason]
    server.check()


def test_requests_accepted_before_a_loss_keep_their_place_in_a_full_queue() -> None:
    server = ApiServer(max_num_queued_reqs=1)
    for _ in range(4):
        server.add(60)
    server.add(60, is_accepted=True)
    server.finish()
    assert [asked.end for asked in server.asked.values()] == ["finished", "finished", "full", "full", "finished"]
    server.check()


def test_quit_ends_the_loop_at_once() -> None:
    server = ApiServer()
    server.tell(Quit())
    server.cluster.executor.are_lost = True  # which would be noticed
    server.loop.run()
    assert not server.states


@pytest.mark.parametrize("error", [WorkerLostError(1, "it did not start"), OSError("no process")])
def test_workers_that_do_not_start_are_tried_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(engine_loop, "_PAUSE_S", 0.0)
    server = ApiServer()
    server.add(8)
    server.turn()
    server.cluster.executor.are_lost = True
    server.cluster.failures.extend([error] * 2)
    server.finish()
    server.check()
    assert server.asked[0].end == "finished"
    server.cluster.executor.are_lost = True
    server.cluster.failures.extend([error] * 3)
    with pytest.raises(type(error)):
        server.turn()


def lose(server: ApiServer, *failures: Exception) -> None:
    """Lose the workers. Then starts of the smaller fleet fail with `failures`."""
    server.cluster.executor.are_lost = True
    server.cluster.failures.extend(failures)
    server.turn()


@pytest.mark.parametrize(
    ("failures", "num_left"),
    [
        ([WorkerLostError(0, "it does not start")], 2),
        ([WorkerLostError(2, "it does not start")], 2),
        ([WorkerLostError(1, "it does not start")] * 2, 1),
        ([OSError("no process")] * 2, 3),
        ([OSError("no process"), WorkerLostError(0, "it does not start"), OSError("no process")], 2),
    ],
)
def test_a_smaller_fleet_that_does_not_start_is_followed_by_another_attempt(
    monkeypatch: pytest.MonkeyPatch, failures: list[Exception], num_left: int
) -> None:
    """An instance whose worker does not start is left out, too. Without processes the same start is tried again."""
    monkeypatch.setattr(engine_loop, "_PAUSE_S", 0.0)
    server = ApiServer(4, max_worker_restarts=0)
    for length in (8, 30, 9):
        server.add(length)
    server.turn()
    lose(server, *failures)
    assert server.cluster.engine.config.cluster.num_instances == num_left
    server.finish()
    assert {asked.end for asked in server.asked.values()} == {"finished"}
    assert server.states == ["Restarting", "Restarted"]
    server.check()


@pytest.mark.parametrize(
    ("failures", "words"),
    [
        (
            [WorkerLostError(0, "it does not start")] * 3,
            "it does not start; --max-worker-restarts 0 allows .* cannot continue .* has no other .* allow more",
        ),
        ([OSError("no process")] * 3, "no process"),
    ],
)
def test_a_fleet_of_which_nothing_starts_ends_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, failures: list[Exception], words: str
) -> None:
    monkeypatch.setattr(engine_loop, "_PAUSE_S", 0.0)
    server = ApiServer(4, max_worker_restarts=0)
    server.add(8)
    server.turn()
    with pytest.raises((WorkerLostError, OSError), match=words):
        lose(server, *failures)
    assert not server.cluster.failures


_NO_START = st.sampled_from([WorkerLostError(0, "it does not start"), OSError("no process")])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(_NO_START, max_size=3), max_size=5), st.integers(1, 5), st.integers(0, 2))
def test_losses_end_in_answers_or_with_a_reason(losses: list[list[Exception]], num_instances: int, most: int) -> None:
    """Whatever fails while a fleet changes, and again before a token has come."""
    server = ApiServer(num_instances, max_worker_restarts=most)
    with patch.object(engine_loop, "_PAUSE_S", 0.0):
        for failures in losses:
            server.add(8)
            server.turn()
            try:
                lose(server, *failures)
            except (WorkerLostError, OSError) as error:
                assert str(error)  # noqa: PT017 - it may also not be raised
                return
            server.cluster.failures.clear()
        server.finish()
    server.check()
