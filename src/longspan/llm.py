"""`LLM`, the Python API: loads a model on one or several instances and generates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from numbers import Integral
from typing import ClassVar, Self, TypeVar, Unpack, cast, get_args

from tqdm import tqdm

from longspan.args import EngineArgs, unpacked
from longspan.core.sampling import SamplingParams
from longspan.core.sparse_plan import Savings, savings
from longspan.core.steps import Link
from longspan.errors import WorkerLostError
from longspan.model.store import DTYPES
from longspan.outputs import RequestOutput
from longspan.service import Service
from longspan.text.input_processor import EngineRequest, Message, Prompt, TemplateOptions, conversations
from longspan.text.output_processor import Choice, RequestState


class Progress:
    """Shows finished prompts and tokens per second on stderr if it is a terminal and there are several prompts."""

    def __init__(self, states: Sequence[RequestState], *, wanted: bool) -> None:
        self._states = states
        self._bar = tqdm(
            total=len(states),
            desc="prompts",
            unit="prompt",
            dynamic_ncols=True,
            disable=None if wanted and len(states) > 1 else True,  # None: unless stderr is no terminal
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self) -> None:
        if self._bar.disable:
            return
        num_done = sum(one.finished for one in self._states)
        elapsed_s = max(self._bar.format_dict["elapsed"], 1e-9)
        speeds = (count / elapsed_s for count in count_tokens(self._states))
        self._bar.set_postfix_str("input {:.1f} tok/s, output {:.1f} tok/s".format(*speeds), refresh=False)
        self._bar.update(num_done - self._bar.n)


def count_tokens(states: Sequence[RequestState]) -> tuple[int, int]:
    """Counts prompt tokens of requests that have put a token out, and output tokens so far."""
    prompts = (len(state.engine_request.token_ids) for state in states if state.num_taken)
    return sum(prompts), sum(state.num_taken for state in states)


TagT = TypeVar("TagT")
MOST_WAITING_TOKENS = 2**21
"""Tokens of prompts that wait at once, when they are taken as there is room."""


class LLM:
    """Generates, for one caller after the other or for streams read in turns; close it with `shutdown`, or use `with`.

    Args:
        given: what `EngineArgs` has, `model` first and the others by name.

    Raises:
        ValueError: for a wrong argument, an unknown or unsupported model, or too little memory.
        WorkerLostError: when a worker does not start.
    """

    make_service: ClassVar[Callable[[EngineArgs], Service]] = Service
    """A subclass may start the workers in another way."""

    @unpacked(EngineArgs)
    def __init__(self, given: EngineArgs) -> None:
        self.service = service = type(self).make_service(given)
        self.engine, self.input_processor, self.info = service.engine, service.input_processor, service.info
        self.facts, self.profile_key, self.max_model_len = service.facts, service.profile_key, service.max_model_len
        self._choices: dict[int, Choice] = {}  # of calls under way, by request id
        self._abort_asked = self._closed = False
        self._lost: WorkerLostError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes one prompt, or a list of them together, and returns their outputs in order.

        `use_tqdm` shows a progress bar for more than one prompt, if stderr is a terminal.

        Raises:
            ValueError: when a prompt is empty, too long, or not of a known form; nothing is generated then.
            WorkerLostError: when a worker dies or raises.
        """
        return list(self.generate_each(prompts, sampling_params, use_tqdm=use_tqdm))

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> Iterator[RequestOutput]:
        """Generates like `generate`, but yields each output as soon as it and all before it have finished."""
        every = _every(prompts)
        params = _one_each(sampling_params, len(every))
        process = self.input_processor.process
        return self._in_order([process(*one) for one in zip(every, params, strict=True)], use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them, as the model's chat template renders it.

        A message is a mapping with `role` and `content`; see `TemplateOptions` for the other arguments.

        Raises:
            ValueError: see `generate`; also for a missing template, or one that refuses the messages.
            WorkerLostError: when a worker dies or raises.
        """
        all_messages = conversations(messages)
        params = _one_each(sampling_params, len(all_messages))
        process = self.input_processor.process_chat
        requests = [process(messages, p, template) for messages, p in zip(all_messages, params, strict=True)]
        return list(self._in_order(requests, use_tqdm=use_tqdm))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt and yields its cumulative output whenever a token has come; see `generate`."""
        return self._stream(self.input_processor.process(prompt, sampling_params or SamplingParams()))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Iterator[RequestOutput]:
        """Answers one conversation and yields the cumulative output whenever a token has come; see `chat`."""
        return self._stream(self.input_processor.process_chat(messages, sampling_params or SamplingParams(), template))

    def finish_each(
        self,
        groups: Iterable[tuple[TagT, Sequence[EngineRequest]] | None],
        *,
        most: int,
        most_waiting_tokens: int = MOST_WAITING_TOKENS,
        stepped: Callable[[Sequence[Choice]], object] | None = None,
    ) -> Iterator[tuple[TagT, list[RequestState]]]:
        """Runs groups of engine requests and yields each group as soon as all of it has finished.

        Groups are taken from `groups` while there is room: fewer than `most` are under way, and the prompts of those
        that have no token yet hold fewer than `most_waiting_tokens`. A None among them puts the next off until another
        step is done. After `abort` no more are taken.
        `stepped` is told after each step what is under way, for a progress bar.
        """
        source, running = iter(groups), list[tuple[TagT, list[RequestState]]]()
        with self._call() as choices:
            while True:
                self._check_up()
                while len(running) < most and _waiting_tokens(running) < most_waiting_tokens:
                    if (group := next(source, None)) is None:
                        break
                    tag, engine_requests = group
                    running.append((tag, [self._state(engine_request) for engine_request in engine_requests]))
                    for state in running[-1][1]:
                        self._start(state, choices)
                done = [group for group in running if _finished(group[1])]
                running = [group for group in running if not _finished(group[1])]
                for tag, states in done:
                    ended = [choice for state in states for choice in state.choices]
                    for choice in ended:
                        choices.remove(choice)
                        del self._choices[choice.request.id]
                    yield tag, states
                    if any(choice.request.finish_reason == "abort" for choice in ended):
                        source = iter(())
                if not running and not done:
                    return
                if not done:
                    self._step()
                    if stepped is not None:
                        stepped(choices)

    def abort(self) -> None:
        """Ends all calls under way after the step in flight; they return what there is, finished by `abort`.

        May be called by a signal handler or another thread.
        """
        self._abort_asked = True

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Raises the ValueError that `generate` would raise for this prompt and policy, and generates nothing."""
        engine_request = self.input_processor.process(prompt, sampling_params or SamplingParams())
        self.engine.check(len(engine_request.token_ids))

    def render_chat(self, messages: Sequence[Message], **template: Unpack[TemplateOptions]) -> str:
        """Formats a chat by the model's template, see `InputProcessor.render_chat`."""
        return self.input_processor.render_chat(messages, **template)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, see `InputProcessor.tokenize`."""
        return self.input_processor.tokenize(text, add_special_tokens=add_special_tokens)

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Changes the policy between calls, see `Service.set_policy`; cached KV stays."""
        self.service.set_policy(policy, options)

    def reshard(self, parallel: str) -> None:
        """Lets the workers take another parallel spec, with as many ranks, fewer or more, while calls go on.

        They keep their processes and the mapped weights. Further workers start for a spec that takes more, and ranks
        that it does not take stay idle. KV on devices is computed anew, unless there is a pool on the host
        (`host_kv_gib`).

        Raises:
            ValueError: for a spec that model, policy or hosts cannot do with.
            RuntimeError: while another change is under way.
        """
        self.service.reshard(parallel)
        with self._call():  # if no other is under way, that completes the change
            pass

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of finished requests, also on hosts and disks, so that no prompt starts from any of it.

        Raises:
            RuntimeError: when requests are unfinished.
        """
        self.service.reset_prefix_cache()

    @property
    def bytes_exchanged(self) -> dict[str, int]:
        """Payload bytes sent by all ranks so far, per exchange and in `total`."""
        return self._bytes_over(get_args(Link))

    @property
    def bytes_between_hosts(self) -> dict[str, int]:
        """The part of `bytes_exchanged` that went from one host to another."""
        return self._bytes_over(("other_host",))

    def _bytes_over(self, links: Collection[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for (exchange, link), num_bytes in self.engine.bytes_sent.items():
            found[exchange] = found.get(exchange, 0) + (num_bytes if link in links else 0)
        return {**found, "total": sum(found.values())}

    def sparse_savings(self, output: RequestOutput) -> Savings | None:
        """Returns what sparse attention saved a request; None when it was computed exactly."""
        layers = [(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in self.info.specs]
        parts, cluster = output.metrics.sparse_parts, self.engine.config.cluster
        stages = [cluster.layers(0, stage) for stage in range(cluster.pp(0))]
        return savings(parts, layers, stages, DTYPES[self.service.files.dtype].itemsize) if parts else None

    def worker_times(self) -> list[dict[str, float]]:
        """Returns seconds by rank: attention, linear layers, waiting for messages and for the controller, and the rest.

        They count from the start to the latest step; empty without `record_times`. What computes on a CPU counts the
        seconds that it had a core, and waiting those of the clock.
        """
        return [dict(times) for times in self.service.executor.worker_times]

    def shutdown(self) -> None:
        """Stops the workers; can be called again."""
        self._closed = True
        self.service.close()

    def _in_order(self, engine_requests: Sequence[EngineRequest], *, use_tqdm: bool) -> Iterator[RequestOutput]:
        states = [self._state(engine_request) for engine_request in engine_requests]
        num_out = 0
        with Progress(states, wanted=use_tqdm) as progress, closing(self._drive(states)) as steps:
            for _ in steps:
                progress.update()
                while num_out < len(states) and states[num_out].finished:
                    yield states[num_out].output()
                    num_out += 1
        for one in states[num_out:]:  # finished while another call drove the engine
            yield one.output()

    def _stream(self, engine_request: EngineRequest) -> Iterator[RequestOutput]:
        state, seen, told = self._state(engine_request), 0, False
        with closing(self._drive([state])) as steps:
            for _ in steps:
                if state.num_taken > seen or state.finished:
                    seen, told = state.num_taken, state.finished
                    yield state.output()
        if not told:  # it ended while another call drove the engine
            yield state.output()

    def _state(self, engine_request: EngineRequest) -> RequestState:
        return RequestState(engine_request, self.input_processor.tokenizer)

    def _drive(self, states: Sequence[RequestState]) -> Generator[None, None, None]:
        """Runs the engine until all of these have finished; aborts what is left when the caller stops early."""
        with self._call() as choices:
            for state in states:
                self._start(state, choices)
            while not _finished(states):
                self._check_up()
                self._step()
                yield

    @contextmanager
    def _call(self) -> Iterator[list[Choice]]:
        """Opens a call; the list has the choices that it starts until it ends."""
        self._check_up()
        choices: list[Choice] = []
        try:
            self._complete_finished()
            yield choices
        except WorkerLostError as error:
            self._lost = error
            raise
        finally:
            for choice in choices:
                del self._choices[choice.request.id]
                if self._lost is None and not self._closed:
                    # Whoever leaves early does not wait: a step in flight completes during later calls.
                    self.engine.finish(choice.request, "abort")

    def _start(self, state: RequestState, choices: list[Choice]) -> None:
        state.start(self.engine)
        choices += state.choices
        self._choices.update((choice.request.id, choice) for choice in state.choices)

    def _complete_finished(self) -> None:
        """Takes the completions of steps that only finished requests are in, unless others run: their KV can be reused
        then.
        """
        if not self._choices:
            self._abort_asked = False
            while self.engine.has_unfinished:
                self.engine.step()

    def _step(self) -> None:
        """Runs one engine step, on behalf of all calls under way: streams may be read in turns."""
        if self._abort_asked:
            self._abort_asked = False
            for choice in self._choices.values():
                choice.abort(self.engine)
            return
        for request in self.engine.step():
            if request.id in self._choices:
                self._choices[request.id].take_new_tokens(self.engine)

    def _check_up(self) -> None:
        if self._lost is not None:
            raise WorkerLostError(self._lost.rank, f"{self._lost.reason}; this engine is down, make a new one")
        if self._closed:
            raise RuntimeError("this engine was shut down: make a new LLM")


def _finished(states: Sequence[RequestState]) -> bool:
    return all(state.finished for state in states)


def _waiting_tokens(groups: Sequence[tuple[object, Sequence[RequestState]]]) -> int:
    return sum(len(one.engine_request.token_ids) for _, states in groups for one in states if not one.num_taken)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, number: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if len(params) != number:
        raise ValueError(f"{number} prompts, but {len(params)} sampling params: give one for all, or one each")
    return list(params)


def _every(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    first: object = prompts[0] if len(prompts) else None
    if isinstance(first, Integral):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
