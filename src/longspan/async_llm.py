"""`AsyncLLM`, the Python API for asyncio: requests of all tasks share steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sized
from typing import Self

from longspan.args import EngineArgs, unpacked
from longspan.core.sampling import SamplingParams
from longspan.driver import Call, Update
from longspan.local_engine import LocalEngine
from longspan.outputs import RequestOutput
from longspan.text.input_processor import EngineRequest, Prompt
from longspan.text.output_processor import RequestState

_LONG_PROMPT = 1024
"""Characters or token ids from which another thread processes a prompt, to keep the event loop free. For shorter
prompts, the switch to the thread of about 0.1 ms takes longer than the processing."""


class AsyncLLM(LocalEngine):
    """Generates for the tasks of any event loop, with vLLM's names. The arguments are the fields of `EngineArgs`.

    Loading the model and every method other than `generate` and `abort` blocks: call them by `asyncio.to_thread`. For
    errors see `LLM`.
    """

    @unpacked(EngineArgs)
    def __init__(self, given: EngineArgs) -> None:
        super().__init__(**vars(given))
        self._calls: dict[str, Call] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**vars(engine_args))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt and yield its cumulative output after each token.

        The request also ends by `abort`, or when the generator is closed or its task cancelled.

        Raises:
            ValueError: the prompt is empty, too long, or of no known form, or the id is in use.
            WorkerLostError: a worker dies or raises.
        """
        self._driver.check()
        updates, loop = asyncio.Queue[Update | BaseException](), asyncio.get_running_loop()

        def put(update: Update | BaseException) -> None:
            try:
                loop.call_soon_threadsafe(updates.put_nowait, update)
            except RuntimeError:  # the event loop was closed, so no task waits
                self._driver.leave(call)

        call, is_running = Call(put=put, each_token=True), True
        if self._calls.setdefault(request_id, call) is not call:
            raise ValueError(f"request_id {request_id!r} is the id of an unfinished request: choose another one")
        try:
            engine_request = await self._processed(prompt, sampling_params)
            state = RequestState(engine_request, self.input_processor.tokenizer, request_id=request_id)
            self._driver.start(call, [state])
            while is_running:
                self._driver.check_process()
                update = await updates.get()
                if isinstance(update, BaseException):
                    raise update
                is_running = not update.finished
                yield update.output()
        finally:
            del self._calls[request_id]
            if is_running:
                self._driver.leave(call)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by their ids. Each yields a last output, finished by `abort`. Unknown ids are ignored."""
        for known_id in (request_id,) if isinstance(request_id, str) else request_id:
            if (call := self._calls.get(known_id)) is not None:
                self._driver.abort(call)

    async def _processed(self, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        process = self.input_processor.process
        parts = prompt.values() if isinstance(prompt, Mapping) else (prompt,)
        if max((len(part) for part in parts if isinstance(part, Sized)), default=0) < _LONG_PROMPT:
            return process(prompt, params)
        return await asyncio.to_thread(process, prompt, params)
