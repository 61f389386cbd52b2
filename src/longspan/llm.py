"""The Python face: `LLM` loads a model on one or several instances and generates."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from longspan.core.engine import Engine, EngineConfig
from longspan.core.errors import WorkerLostError
from longspan.core.parallel import ParallelSpec
from longspan.core.protocols import Limits
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.kv.pool import bytes_per_block
from longspan.model.files import ModelFiles
from longspan.model.info import ModelInfo
from longspan.model.source import prepare
from longspan.model.store import DTYPES, read_info
from longspan.model.tokenizer import Detokenizer, load_tokenizer
from longspan.outputs import CompletionOutput, RequestOutput
from longspan.policy import make_policy
from longspan.runtime.capacity import default_kv_bytes
from longspan.runtime.launch import start_workers
from longspan.runtime.local import MonotonicClock

_log = logging.getLogger("longspan")
ChoiceT = TypeVar("ChoiceT")


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
        spec = _parallel_spec(parallel, instances, tp, pp)
        threads = _threads_per_rank(threads_per_rank, spec.num_ranks)
        _check_device(device)
        _at_least_one(
            block_size=block_size, max_model_len=max_model_len, num_gpu_blocks_override=num_gpu_blocks_override
        )
        limits = Limits(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        chosen = make_policy(policy, num_instances=spec.instances, options=policy_options or {})
        files = prepare(model, dtype=dtype, load_format=load_format, seed=seed, trust_remote_code=trust_remote_code)
        self._tokenizer = None if skip_tokenizer_init else _require_tokenizer(files)
        self.info = read_info(files.weights)
        num_blocks = num_gpu_blocks_override or _num_blocks(
            self.info, files, device, spec.instances, block_size, kv_cache_memory_bytes
        )
        capacity = chosen.capacity_tokens(num_blocks=num_blocks, block_size=block_size)
        self.max_model_len = _max_model_len(self.info.context_length, capacity, max_model_len)
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
        self._tracked: dict[int, _Tracked] = {}
        self._lost: WorkerLostError | None = None
        self._closed = False

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes all prompts (texts or lists of token ids) together and returns their outputs in order.

        Raises:
            ValueError: when a prompt is empty, too long, or not of a known form; nothing is generated then.
            WorkerLostError: when a worker dies or raises.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise ValueError("prompts must be a list of texts or of token-id lists: put a single prompt into a list")
        params = _one_each(SamplingParams() if sampling_params is None else sampling_params, len(prompts))
        jobs = [self._job(prompt) for prompt in prompts]
        tracked = [self._track(prompt, ids, p) for (prompt, ids), p in zip(jobs, params, strict=True)]
        for _ in self._drive(tracked):
            pass
        return [one.output() for one in tracked]

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt and yields its cumulative output whenever a token has come; see `generate`."""
        text, ids = self._job(prompt)
        tracked = self._track(text, ids, sampling_params or SamplingParams())
        seen = 0
        for _ in self._drive([tracked]):
            if tracked.num_taken > seen:
                seen = tracked.num_taken
                yield tracked.output()
        if tracked.num_taken > seen:  # another call has driven the engine meanwhile
            yield tracked.output()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, special tokens as the tokenizer adds them."""
        ids: list[int] = self._need_tokenizer()(text)["input_ids"]
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
        while not self._tracked and self._engine.has_unfinished:
            self._engine.step()
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

    def _job(self, prompt: str | Sequence[int]) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            text, ids = prompt, tuple(self.tokenize(prompt)) if prompt else ()
        else:
            text, ids = None, _token_ids(prompt)
        wrong = next((i for i in ids if not 0 <= i < self.info.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"token id {wrong!r} is not in the vocabulary: ids go from 0 to {self.info.vocab_size - 1}"
            )
        self._engine.check(len(ids))
        return text, ids

    def _drive(self, tracked: Sequence[_Tracked]) -> Iterator[None]:
        """Runs the engine until all of these are finished; what is left when the caller stops early is aborted."""
        self._check_up()
        for one in tracked:
            one.start(self._engine)
            self._tracked[one.request.id] = one
        try:
            while any(one.request.finish_reason is None for one in tracked):
                self._check_up()
                for request in self._engine.step():
                    if request.id in self._tracked:  # of any call: streams may be read in turns
                        self._tracked[request.id].take_new_tokens(self._engine)
                yield
        except WorkerLostError as error:
            self._lost = error
            raise
        finally:
            for one in tracked:
                del self._tracked[one.request.id]
                if self._lost is None and not self._closed:
                    # Whoever leaves early does not wait: a step in flight completes during later calls.
                    self._engine.finish(one.request, "abort")

    def _check_up(self) -> None:
        if self._lost is not None:
            raise WorkerLostError(self._lost.rank, f"{self._lost.reason}; this engine is down, make a new one")
        if self._closed:
            raise RuntimeError("this engine was shut down: make a new LLM")

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ValueError("there is no tokenizer (skip_tokenizer_init): give prompts as lists of token ids")
        return self._tokenizer

    def _track(self, prompt: str | None, ids: tuple[int, ...], params: SamplingParams) -> _Tracked:
        if self._tokenizer is None and params.stop_strings:
            raise ValueError("stop strings need a tokenizer, but there is none (skip_tokenizer_init)")
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, ids, params.stop_strings, min_tokens=params.min_tokens)
        return _Tracked(prompt, ids, params, detokenizer)


class _Tracked:
    """A request with its text."""

    request: Request

    def __init__(
        self, prompt: str | None, ids: tuple[int, ...], params: SamplingParams, detokenizer: Detokenizer | None
    ) -> None:
        self._prompt, self._ids, self._params, self._detokenizer = prompt, ids, params, detokenizer
        self.num_taken = 0

    def start(self, engine: Engine) -> None:
        self.request = engine.add(self._ids, self._params)

    def take_new_tokens(self, engine: Engine) -> None:
        """Turns new tokens into text and ends the request at a stop string."""
        new = self.request.output[self.num_taken :]
        self.num_taken += len(new)
        if self._detokenizer is None:
            return
        self._detokenizer.add(new, finished=self.request.finish_reason is not None)
        if self._detokenizer.stopped_by is not None:
            engine.finish(self.request, "stop")

    def output(self) -> RequestOutput:
        request = self.request
        logits = [np.frombuffer(data, dtype=np.float32) for data in request.logits]
        completion = CompletionOutput(
            index=0,
            text="" if self._detokenizer is None else self._detokenizer.text,
            token_ids=list(request.output),
            finish_reason=request.finish_reason,
            logits=logits if self._params.output_logits else None,
        )
        return RequestOutput(
            request_id=request.id,
            prompt=self._prompt,
            prompt_token_ids=list(request.prompt),
            outputs=[completion],
            finished=request.finish_reason is not None,
            metrics=request.metrics,
        )


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Token ids of any integer type."""
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise ValueError(f"a prompt is a text or a list of token ids, but {prompt!r:.60} given") from None


def _parallel_spec(parallel: str | None, instances: int, tp: int, pp: int) -> ParallelSpec:
    if parallel is None:
        return ParallelSpec(instances=instances, tp=tp, pp=pp)
    if (instances, tp, pp) != (1, 1, 1):
        raise ValueError(f"parallel {parallel!r} says the same thing as instances, tp and pp: give one of them")
    return ParallelSpec.parse(parallel)


def _threads_per_rank(threads: int | None, num_ranks: int) -> int:
    if threads is None:
        return max(1, len(os.sched_getaffinity(0)) // num_ranks)
    _at_least_one(threads_per_rank=threads)
    return threads


def _at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, but {value} given")


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch finds no CUDA device here: use --device cpu")


def _require_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    if files.tokenizer_dir is None:
        raise ValueError(
            f"model {files.name!r} comes without tokenizer files: add them, or skip_tokenizer_init and use token ids"
        )
    return load_tokenizer(files)


def _num_blocks(
    info: ModelInfo, files: ModelFiles, device: str, num_instances: int, block_size: int, kv_bytes: int | None
) -> int:
    """Blocks per instance."""
    if kv_bytes is None:
        weight_bytes = files.weights.stat().st_size
        kv_bytes = default_kv_bytes(device=device, num_instances=num_instances, weight_bytes=weight_bytes)
    per_block = bytes_per_block(info.specs, block_size, DTYPES[files.dtype])
    if kv_bytes < per_block:
        raise ValueError(f"{kv_bytes} bytes of KV memory per instance hold no block of {per_block} bytes: allow more")
    return kv_bytes // per_block


def _max_model_len(context_length: int, capacity: int, wanted: int | None) -> int:
    if wanted is not None and wanted > context_length:
        raise ValueError(f"max_model_len {wanted} exceeds the model's context of {context_length} tokens")
    if wanted is not None and wanted > capacity:
        raise ValueError(f"max_model_len {wanted} does not fit: the KV pools hold {capacity} tokens; allow more memory")
    if capacity < context_length and wanted is None:
        _log.info("the KV pools hold %d tokens, less than the model's context of %d", capacity, context_length)
    return wanted or min(context_length, capacity)


def _one_each(value: ChoiceT | Sequence[ChoiceT], number: int) -> list[ChoiceT]:
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{number} prompts, but {len(value)} sampling params: give one for all, or one each")
    return list(value)
