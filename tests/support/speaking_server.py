"""The API server over a fake engine whose outputs are a given text, of a model whose template has tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fake_server import FakeEngine
from msgspec.structs import replace
from tool_models import tool_tokenizer
from wire_world import deltas_of

from longspan.core.request import FinishReason
from longspan.serve.client import EngineClient
from longspan.serve.errors import ServeError
from longspan.serve.output_queue import OutputQueue
from longspan.serve.server import Server
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import EngineRequest, InputProcessor


class SpeakingEngine(FakeEngine):
    """Answers each request with `text`, one token per delta.

    Attributes:
        reasons: the finish reason and the stop reason.
        error: ends each answer after all tokens but the last, if given.
        engine_requests: all requests so far.
    """

    def __init__(self, template: str) -> None:
        super().__init__()
        self.tokenizer: Any = tool_tokenizer(template, with_markers=True)
        self.text = "It rains."
        self.reasons: tuple[FinishReason, int | str | None] = ("stop", None)
        self.error: ServeError | None = None
        self.engine_requests: list[EngineRequest] = []

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return self.engine_requests[-1].text or ""

    async def submit(self, engine_requests: Sequence[EngineRequest]) -> OutputQueue:
        [engine_request] = engine_requests
        self.engine_requests.append(engine_request)
        queue = OutputQueue(engine_requests, lambda _: None)
        queue.accept(0)
        token_ids = self.tokenizer.encode(self.text, add_special_tokens=False)
        finish_reason, stop_reason = self.reasons
        for delta in deltas_of(engine_request, [token_ids], finish_reason=finish_reason, by=self.tokenizer):
            if delta.finish_reason is None:
                queue.put(0, delta)
            elif self.error is None:
                queue.put(0, replace(delta, stop_reason=stop_reason))
            else:
                queue.fail(self.error)
        return queue


def make_speaking_server(template: str = "qwen3", **settings: Any) -> tuple[Server, SpeakingEngine]:
    """A server of the model `tiny` and its engine."""
    engine = SpeakingEngine(template)
    tokenizer = engine.tokenizer
    input_processor = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=2048)
    settings = {"model_names": ("tiny",), **settings}
    return Server(cast("EngineClient", engine), input_processor, ServerSettings(**settings)), engine
