"""The Python face: `LLM` loads a model on one or several instances and generates."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from numbers import Integral
from typing import Self, TypeVar, Unpack, cast

from transformers import PreTrainedTokenizerBase

from longspan import arguments, chat_template
from longspan.chat_template import Message, TemplateOptions
from longspan.core.engine import Engine, EngineConfig
from longspan.core.errors import WorkerLostError
from longspan.core.protocols import Limits
from longspan.core.sampling import SamplingParams
from longspan.model.source import prepare
from longspan.model.store import read_info
from longspan.outputs import RequestOutput
from longspan.policy import make_policy
from longspan.progress import Progress
from longspan.runtime.launch import start_workers
from longspan.runtime.local import MonotonicClock
from longspan.tracking import Choice, Job, Tracked

ChoiceT = TypeVar("ChoiceT")

Prompt = str | Sequence[int]
"""A text, or its token ids."""


class LLM:
    """A model served by worker processes; close it with `shutdown`, or use it as a context manager.

    Args:
        model: the alias `smollm2-135m`, a local folder, or a hub id.
        instances, tp, pp: copies of the model and their inner split; or all three as `parallel="2xtp2"`.
        threads_per_rank: CPU threads per worker; by default the cores are shared evenly.
        policy: `auto`, `chunked` or `context`, with `policy_options`.
        seed: of the random numbers of requests that bring no seed, and of dummy weights.
        skip_tokenizer_init: serve token ids only; no tokenizer files are needed.
        load_format: `auto`, or `dummy` for random weights.
        max_model_len: the longest request in tokens; by default the model's context.
        block_size: tokens per KV block.
        max_num_batched_tokens, max_num_seqs: bounds of one step per instance.
        kv_cache_memory_bytes, num_gpu_blocks_override: KV memory, or number of blocks, per instance (the latter on any
            device).
        enable_prefix_caching: reuse the KV of earlier requests that begin alike.
        async_scheduling: plan and send the next step while the present one runs.
        record_times: measure where workers spend their time, see `worker_times`; costs a little.

    Raises:
        ValueError: for a wrong argument, an unknown or unsupported model, or too little memory.
        WorkerLostError: when a worker does not start.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        instances: int = 1,
        tp: int = 1,
        pp: int = 1,
        parallel: str | None = None,
        threads_per_rank: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        policy: str = "auto",
        policy_options: Mapping[str, str] | None = None,
        seed: int = 0,
        skip_tokenizer_init: bool = False,
        load_format: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 256,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = True,
        record_times: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        spec = arguments.parallel_spec(parallel, instances, tp, pp)
        threads = arguments.threads_per_rank(threads_per_rank, spec.num_ranks)
        arguments.check_device(device)
        arguments.at_least_one(
            block_size=block_size, max_model_len=max_model_len, num_gpu_blocks_override=num_gpu_blocks_override
        )
        limits = Limits(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        chosen = make_policy(policy, num_instances=spec.instances, options=policy_options or {})
        files = prepare(model, dtype=dtype, load_format=load_format, seed=seed, trust_remote_code=trust_remote_code)
        self._tokenizer = None if skip_tokenizer_init else arguments.require_tokenizer(files)
        self.info = read_info(files.weights)
        num_blocks = num_gpu_blocks_override or arguments.num_blocks(
            self.info, files, device, spec.instances, block_size, kv_cache_memory_bytes
        )
        capacity = chosen.capacity_tokens(num_blocks=num_blocks, block_size=block_size)
        self.max_model_len = arguments.max_model_len(self.info.context_length, capacity, max_model_len)
        self._executor = start_workers(files, spec, device, threads, num_blocks, block_size, record_times=record_times)
        self._engine = Engine(
            policy=chosen,
            executor=self._executor,
            clock=MonotonicClock(),
            config=EngineConfig(
                num_instances=spec.instances,
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=self.max_model_len,
                eos_token_ids=self.info.eos_token_ids,
                rope_switch_length=self.info.rope_switch_length,
                limits=limits,
                prefix_caching=enable_prefix_caching,
                max_steps_in_flight=2 if async_scheduling else 1,
                seed=seed,
            ),
        )
        self._choices: dict[int, Choice] = {}  # of calls under way, by request id
        self._abort_asked = False
        self._lost: WorkerLostError | None = None
        self._closed = False

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
        """As `generate`, but each output comes as soon as it and all before it are there."""
        every = _every(prompts)
        params = _one_each(SamplingParams() if sampling_params is None else sampling_params, len(every))
        jobs = [self._job(prompt, p) for prompt, p in zip(every, params, strict=True)]
        return self._in_order([Tracked(job, self._tokenizer) for job in jobs], use_tqdm=use_tqdm)

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
            ValueError: see `generate`; also when there is no template, or it or a message is wrong.
            WorkerLostError: when a worker dies or raises.
        """
        all_messages = chat_template.conversations(messages)
        params = _one_each(SamplingParams() if sampling_params is None else sampling_params, len(all_messages))
        jobs = [self._chat_job(one, p, template) for one, p in zip(all_messages, params, strict=True)]
        return list(self._in_order([Tracked(job, self._tokenizer) for job in jobs], use_tqdm=use_tqdm))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt and yields its cumulative output whenever a token has come; see `generate`."""
        return self._stream(self._job(prompt, sampling_params or SamplingParams()))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Iterator[RequestOutput]:
        """Answers one conversation and yields the cumulative output whenever a token has come; see `chat`."""
        return self._stream(self._chat_job(messages, sampling_params or SamplingParams(), template))

    def abort(self) -> None:
        """Ends all calls under way after the step in flight; they return what there is, finished by `abort`.

        May be called by a signal handler or another thread.
        """
        self._abort_asked = True

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Raises the ValueError that `generate` would raise for this prompt, and generates nothing."""
        self._job(prompt, sampling_params or SamplingParams())

    def render_chat(self, messages: Sequence[Message], **template: Unpack[TemplateOptions]) -> str:
        """The text that `chat` gives to the model; tokenize it without adding special tokens.

        Raises:
            ValueError: when there is no template, or it or a message is wrong.
        """
        return chat_template.render(self._need_tokenizer(), messages, template)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds at its ends."""
        ids: list[int] = self._need_tokenizer()(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    @property
    def bytes_exchanged(self) -> dict[str, int]:
        """Payload bytes that the ranks have sent so far, per exchange, and in `total`."""
        return {**self._engine.bytes_sent, "total": sum(self._engine.bytes_sent.values())}

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank."""
        return self._executor.pids

    def worker_times(self) -> list[dict[str, float]]:
        """By rank, seconds in attention, linear layers, everything else, and waiting for messages and the controller.

        They count from the start to the latest step; empty without `record_times`.
        """
        return [dict(times) for times in self._executor.worker_times]

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Free KV blocks per instance, cached ones included; waits for steps that only finished requests are in."""
        self._settle()
        account = self._engine.account
        return tuple(account.pool(i).num_free for i in range(self._engine.config.num_instances))

    def shutdown(self) -> None:
        """Stops the workers; nothing of them is left. May be called again."""
        self._closed = True
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _chat_job(self, messages: Sequence[Message], params: SamplingParams, template: TemplateOptions) -> Job:
        text = self.render_chat(messages, **template)
        return self._checked(text, tuple(self.tokenize(text, add_special_tokens=False)), params)

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        if isinstance(prompt, str):
            return self._checked(prompt, tuple(self.tokenize(prompt)) if prompt else (), params)
        return self._checked(None, _token_ids(prompt), params)

    def _checked(self, text: str | None, ids: tuple[int, ...], params: SamplingParams) -> Job:
        vocab_size = self.info.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong!r} is not in the vocabulary: ids go from 0 to {vocab_size - 1}")
        if self._tokenizer is None and params.stop_strings:
            raise ValueError("stop strings need a tokenizer, but there is none (skip_tokenizer_init)")
        params.check_vocab(vocab_size)
        self._engine.check(len(ids))
        return Job(text=text, token_ids=ids, params=params)

    def _in_order(self, tracked: Sequence[Tracked], *, use_tqdm: bool) -> Iterator[RequestOutput]:
        num_out = 0
        with Progress(tracked, wanted=use_tqdm) as progress, closing(self._drive(tracked)) as steps:
            for _ in steps:
                progress.update()
                while num_out < len(tracked) and tracked[num_out].finished:
                    yield tracked[num_out].output()
                    num_out += 1
        for one in tracked[num_out:]:  # finished while another call drove the engine
            yield one.output()

    def _stream(self, job: Job) -> Iterator[RequestOutput]:
        tracked, seen = Tracked(job, self._tokenizer), 0
        with closing(self._drive([tracked])) as steps:
            for _ in steps:
                if tracked.num_taken > seen or tracked.finished:
                    seen = tracked.num_taken
                    yield tracked.output()
        if tracked.num_taken > seen:  # another call has driven the engine meanwhile
            yield tracked.output()

    def _drive(self, tracked: Sequence[Tracked]) -> Generator[None, None, None]:
        """Runs the engine until all of these are finished; what is left when the caller stops early is aborted."""
        self._check_up()
        choices: list[Choice] = []
        try:
            self._settle()
            for one in tracked:
                one.start(self._engine)
                choices += one.choices
            self._choices.update((choice.request.id, choice) for choice in choices)
            while not all(choice.finished for choice in choices):
                self._check_up()
                self._step()
                yield
        except WorkerLostError as error:
            self._lost = error
            raise
        finally:
            for choice in choices:
                del self._choices[choice.request.id]
                if self._lost is None and not self._closed:
                    # Whoever leaves early does not wait: a step in flight completes during later calls.
                    self._engine.finish(choice.request, "abort")

    def _settle(self) -> None:
        """Takes in the steps that only finished requests are in, unless others run: their KV can be reused then."""
        if not self._choices:
            self._abort_asked = False
            while self._engine.has_unfinished:
                self._engine.step()

    def _step(self) -> None:
        """One turn of the engine, on behalf of all calls under way: streams may be read in turns."""
        if self._abort_asked:
            self._abort_asked = False
            for choice in self._choices.values():
                choice.abort(self._engine)
            return
        for request in self._engine.step():
            if request.id in self._choices:
                self._choices[request.id].take_new_tokens(self._engine)

    def _check_up(self) -> None:
        if self._lost is not None:
            raise WorkerLostError(self._lost.rank, f"{self._lost.reason}; this engine is down, make a new one")
        if self._closed:
            raise RuntimeError("this engine was shut down: make a new LLM")

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ValueError("there is no tokenizer (skip_tokenizer_init): give prompts as lists of token ids")
        return self._tokenizer


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Token ids of any integer type."""
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise ValueError(f"a prompt is a text or a list of token ids, but {prompt!r:.60} given") from None


def _one_each(value: ChoiceT | Sequence[ChoiceT], number: int) -> list[ChoiceT]:
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{number} prompts, but {len(value)} sampling params: give one for all, or one each")
    return list(value)


def _every(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a list, or the one there is."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], Integral):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
