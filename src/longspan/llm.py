"""`LLM`, the Python API: loads a model on one or several instances and generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from queue import Empty, SimpleQueue
from typing import Self, TypeVar, Unpack, cast

from tqdm import tqdm

from longspan.core.sampling import SamplingParams
from longspan.driver import Call, Driver, Update
from longspan.local_engine import LocalEngine
from longspan.outputs import RequestOutput
from longspan.text.input_processor import EngineRequest, Message, Prompt, TemplateOptions, conversations
from longspan.text.output_processor import Choice, RequestState


class Progress:
    """Shows finished prompts and tokens per second for several prompts, if stderr is a terminal."""

    def __init__(self, states: Sequence[RequestState], *, is_shown: bool) -> None:
        self._states = states
        self._bar = tqdm(
            total=len(states),
            desc="prompts",
            unit="prompt",
            dynamic_ncols=True,
            disable=None if is_shown and len(states) > 1 else True,  # None: enabled on a terminal
        )
        self.interval_s = None if self._bar.disable else _REFRESH_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self) -> None:
        if self._bar.disable:
            return
        num_done = sum(state.finished for state in self._states)
        elapsed_s = max(self._bar.format_dict["elapsed"], 1e-9)
        speeds = (count / elapsed_s for count in count_tokens(self._states))
        self._bar.set_postfix_str("input {:.1f} tok/s, output {:.1f} tok/s".format(*speeds), refresh=False)
        self._bar.update(num_done - self._bar.n)


def count_tokens(states: Sequence[RequestState]) -> tuple[int, int]:
    """Count prompt tokens of requests with output, and output tokens so far."""
    prompts = (len(state.engine_request.token_ids) for state in states if state.num_taken)
    return sum(prompts), sum(state.num_taken for state in states)


_REFRESH_S = 0.1
"""Seconds between two updates of a progress bar."""
_POLL_S = 0.01
"""Seconds after which `finish_each` asks again for a group. A lower value starts groups earlier and wakes the thread
more often."""
TagT = TypeVar("TagT")
MAX_WAITING_TOKENS = 2**21
"""Default limit of the prompt tokens that wait in `finish_each`."""


class _WaitingCall:
    """A call whose caller's thread waits for updates."""

    def __init__(self, driver: Driver, *, each_token: bool) -> None:
        self.num_running = 0
        self._driver = driver
        self._updates = SimpleQueue[Update | BaseException]()
        self._call = Call(put=self._updates.put, each_token=each_token)

    def start(self, states: Sequence[RequestState]) -> None:
        self.num_running += len(states)
        if states:
            self._driver.start(self._call, states)

    def next(self, timeout_s: float | None = None) -> Update | None:
        """Return the next update, or None after the timeout. Raise the error that ends the call."""
        self._driver.check_process()
        try:
            update = self._updates.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(update, BaseException):
            raise update
        self.num_running -= update.finished
        return update

    def leave(self) -> None:
        if self.num_running:
            self._driver.leave(self._call)


class LLM(LocalEngine):
    """Generates for callers in any thread. Calls share steps, and streams can be read alternately.

    Close it with `shutdown`, or use `with`. The arguments are the fields of `EngineArgs`, `model` first.

    Raises:
        ValueError: an argument is wrong, the model is unknown or unsupported, or there is too little memory.
        WorkerLostError: a worker does not start.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt, or several prompts together, and return their outputs in order.

        `use_tqdm` shows a progress bar for more than one prompt, if stderr is a terminal.

        Raises:
            ValueError: a prompt is empty, too long, or of no known form. Nothing is generated.
            WorkerLostError: a worker dies or raises.
        """
        return list(self.generate_each(prompts, sampling_params, use_tqdm=use_tqdm))

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> Iterator[RequestOutput]:
        """Generate like `generate`, but yield each output as soon as it and all previous outputs have finished."""
        self._driver.check()
        listed = _prompt_list(prompts)
        params = _params_list(sampling_params, len(listed))
        process = self.input_processor.process
        return self._in_order([process(*pair) for pair in zip(listed, params, strict=True)], use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, as the model's chat template renders them.

        A message is a mapping with `role` and `content`. See `TemplateOptions` for the other arguments.

        Raises:
            ValueError: as in `generate`, or the template is missing or refuses the messages.
            WorkerLostError: a worker dies or raises.
        """
        self._driver.check()
        all_messages = conversations(messages)
        params = _params_list(sampling_params, len(all_messages))
        process = self.input_processor.process_chat
        requests = [process(messages, p, template) for messages, p in zip(all_messages, params, strict=True)]
        return list(self._in_order(requests, use_tqdm=use_tqdm))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt and yield its cumulative output after each token, see `generate`."""
        self._driver.check()
        return self._stream(self.input_processor.process(prompt, sampling_params or SamplingParams()))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Iterator[RequestOutput]:
        """Answer one conversation and yield the cumulative output after each token, see `chat`."""
        self._driver.check()
        return self._stream(self.input_processor.process_chat(messages, sampling_params or SamplingParams(), template))

    def finish_each(
        self,
        groups: Iterable[tuple[TagT, Sequence[EngineRequest]] | None],
        *,
        max_groups: int,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
        stepped: Callable[[Sequence[Choice]], object] | None = None,
    ) -> Iterator[tuple[TagT, list[RequestState]]]:
        """Run groups of engine requests and yield each group as soon as all its requests have finished.

        The next group starts while fewer than `max_groups` run and the prompts of requests without a token have fewer
        than `max_waiting_tokens`. If `groups` yields None, the next group is requested after `_POLL_S`. After `abort`
        no further group starts. `stepped` is called with the running choices every few milliseconds, for a progress
        bar.
        """
        self._driver.check()
        source: Iterator[tuple[TagT, Sequence[EngineRequest]] | None] = iter(groups)
        running, ended, is_exhausted = list[tuple[TagT, list[RequestState]]](), set[RequestState](), False
        with self._call() as call:
            while True:
                while len(running) < max_groups and _waiting_tokens(running) < max_waiting_tokens:
                    try:
                        group = next(source)
                    except StopIteration:
                        is_exhausted = True
                        break
                    if group is None:
                        break
                    tag, engine_requests = group
                    running.append((tag, [self._state(engine_request) for engine_request in engine_requests]))
                    call.start(running[-1][1])
                done = [group for group in running if ended.issuperset(group[1])]
                running = [group for group in running if not ended.issuperset(group[1])]
                for tag, states in done:
                    ended.difference_update(states)
                    yield tag, states
                    if any(choice.request.finish_reason == "abort" for state in states for choice in state.choices):
                        source = iter(())
                if not running and not done:
                    return
                if not done:
                    update = call.next(None if is_exhausted and stepped is None else _POLL_S)
                    if update is not None:
                        ended.add(update.state)
                    choices = [choice for _, states in running for state in states for choice in state.choices]
                    if stepped is not None and choices:  # requests have no choices before they start
                        stepped(choices)

    def abort(self) -> None:
        """End all calls after the step in flight. They return the outputs so far, finished by `abort`.

        May be called by a signal handler or another thread.
        """
        self._driver.abort()

    def _in_order(self, engine_requests: Sequence[EngineRequest], *, use_tqdm: bool) -> Iterator[RequestOutput]:
        states = [self._state(engine_request) for engine_request in engine_requests]
        ended, num_out = set[RequestState](), 0
        with Progress(states, is_shown=use_tqdm) as progress, self._call() as call:
            call.start(states)
            while num_out < len(states):
                if (update := call.next(progress.interval_s)) is not None:
                    ended.add(update.state)
                progress.update()
                while num_out < len(states) and states[num_out] in ended:
                    yield states[num_out].output()
                    num_out += 1

    def _stream(self, engine_request: EngineRequest) -> Iterator[RequestOutput]:
        with self._call(each_token=True) as call:
            call.start([self._state(engine_request)])
            while call.num_running:
                if (update := call.next()) is not None:
                    yield update.output()

    def _state(self, engine_request: EngineRequest) -> RequestState:
        return RequestState(engine_request, self.input_processor.tokenizer)

    @contextmanager
    def _call(self, *, each_token: bool = False) -> Iterator[_WaitingCall]:
        """Open a call. If the caller stops early, its unfinished requests end."""
        call = _WaitingCall(self._driver, each_token=each_token)
        try:
            yield call
        finally:
            call.leave()


def _waiting_tokens(groups: Sequence[tuple[object, Sequence[RequestState]]]) -> int:
    return sum(len(state.engine_request.token_ids) for _, states in groups for state in states if not state.num_taken)


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, number: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if len(params) != number:
        raise ValueError(f"{number} prompts, but {len(params)} sampling params: give one for all or one for each")
    return list(params)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    first: object = prompts[0] if len(prompts) else None
    if isinstance(first, Integral):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
