"""The API server over a fake engine, without any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from fastapi import FastAPI
from starlette.routing import BaseRoute
from starlette.testclient import TestClient

from longspan.core.options import PolicySettings
from longspan.serve.app import make_app
from longspan.serve.client import EngineClient
from longspan.serve.messages import CacheConfig, Delta, FinishedChoice, Started, Stats, StepOutputs
from longspan.serve.output_queue import OutputQueue
from longspan.serve.server import Server
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import EngineRequest, InputProcessor

OUTPUT = [5, 6]
"""The text of every choice of every answer."""
POLICY = PolicySettings(
    name="tetris",
    options={"improvement_rate": "auto", "chunking": True, "min_chunk": 256, "sp_sizes": "1,2"},
    changeable=("improvement_rate", "chunking", "min_chunk"),
)
STARTED = Started(
    name="tiny",
    tokenizer_dir=None,
    trust_remote_code=False,
    vocab_size=100,
    max_model_len=64,
    max_num_seqs=1,
    parallel="2",
    cache_config=CacheConfig(block_size=16, cache_dtype="float32", enable_prefix_caching=True),
    policy=POLICY,
    stats=Stats(num_kv_blocks=20, used_blocks=[0, 0], busy_s=[0.0, 0.0]),
)
STATS = Stats(
    num_running=3,
    num_waiting=2,
    num_restarts=1,
    num_preemptions=4,
    num_prefix_queries=50,
    num_prefix_hits=30,
    num_transitions=5,
    transition_swap_s=0.25,
    transition_reshard_s=2.0,
    num_kv_blocks=20,
    num_host_blocks=9,
    used_blocks=[5, 2],
    host_blocks=3,
    disk_blocks=6,
    block_bytes=100,
    busy_s=[1.5, 0.5],
    bytes_sent={("ring_kv", "same_host"): 1000, ("ring_q", "other_host"): 24},
)


class FakeEngine:
    """Replaces an `EngineClient`. Answers at once, or raises `failure`."""

    def __init__(self) -> None:
        self.started, self.stats, self.state = STARTED, STATS, "serving"
        self.on_step: Callable[[StepOutputs], None] = lambda _: None
        self.on_loss: Callable[[], None] = lambda: None
        self.failure: Exception | None = None
        self.num_sent = len(OUTPUT)
        """Tokens after which an answer fails by `failure`, if there is one."""
        self.policy = POLICY
        self.updates: list[dict[str, str]] = []
        """Changes of the policy that were asked for."""
        self.parallel = STARTED.parallel

    async def update_policy(self, options: dict[str, str]) -> PolicySettings:
        self.updates.append(options)
        if self.failure is not None:
            raise ValueError(str(self.failure))
        self.policy = PolicySettings(name="tetris", options=POLICY.options | options, changeable=POLICY.changeable)
        return self.policy

    async def reshard(self, parallel: str) -> str:
        if self.failure is not None:
            raise self.failure
        self.parallel = parallel
        return parallel

    async def submit(self, engine_requests: Sequence[EngineRequest]) -> OutputQueue:
        if self.failure is not None and not self.num_sent:
            raise self.failure
        queue = OutputQueue(engine_requests, lambda _: None)
        for index, engine_request in enumerate(engine_requests):
            queue.accept(index)
            self._send(queue, index, engine_request)
        if self.failure is not None:
            queue.fail(cast("Any", self.failure))
        return queue

    def _send(self, queue: OutputQueue, index: int, engine_request: EngineRequest) -> None:
        done, n = self.num_sent == len(OUTPUT), engine_request.params.n
        step = StepOutputs(
            deltas=[_delta(index, choice, self.num_sent, finished=done) for choice in range(n)],
            finished=[_finished(engine_request, choice) for choice in range(n if done else 0)],
            ttft_s=[1.5],
            num_prompt_tokens=len(engine_request.token_ids),
            num_cached_tokens=1,
            tbt_s=[0.25] * n * (self.num_sent - 1),
            longest_outputs=[len(OUTPUT)] if done else [],
        )
        self.on_step(step)
        for choice in step.finished:
            queue.finished.append((index, choice))
        for delta in step.deltas:
            queue.put(index, delta)


def _finished(engine_request: EngineRequest, choice: int) -> FinishedChoice:
    return FinishedChoice(
        id=0,
        reason="length",
        num_prompt_tokens=len(engine_request.token_ids),
        num_output_tokens=len(OUTPUT),
        num_cached_tokens=1,
        n=engine_request.params.n,
        max_tokens=engine_request.params.max_tokens or 0,
        is_first_choice=choice == 0,
        is_corrupted=False,
        queue_s=0.5,
        prefill_s=1.0,
        decode_s=0.25,
        ttft_s=1.5,
        e2e_s=1.75,
    )


def _delta(number: int, choice: int, num_tokens: int, *, finished: bool) -> Delta:
    return Delta(
        id=number,
        choice=choice,
        text="",
        token_ids=OUTPUT[:num_tokens],
        logprobs=None,
        finish_reason="length" if finished else None,
        stop_reason=None,
        num_cached_tokens=1,
    )


def make_server(**settings: Any) -> Server:
    """A server of a model without a tokenizer."""
    input_processor = InputProcessor(tokenizer=None, vocab_size=STARTED.vocab_size, max_model_len=STARTED.max_model_len)
    engine = cast("EngineClient", FakeEngine())
    return Server(engine, input_processor, ServerSettings(**{"model_names": ("tiny",), **settings}))


def fake_of(server: Server) -> FakeEngine:
    """Its engine."""
    return cast("Any", server.engine)


def client_of(server: Server) -> TestClient:
    """A client that sees responses instead of the server's exceptions."""
    return TestClient(make_app(server), raise_server_exceptions=False)


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """Method and path of every route."""
    return {(method, route.path) for route in _flat(app.routes) for method in route.methods}


def _flat(routes: Sequence[BaseRoute]) -> Iterator[Any]:
    for route in routes:
        if hasattr(route, "path"):
            yield route
        else:  # a router that is included
            yield from _flat(cast("Any", route).original_router.routes)
