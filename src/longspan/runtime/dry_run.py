"""Dry run of a model split on a few tokens: each rank is a worker thread with a small copy of the model.

Two prompts are computed together in chunks. One token of each is decoded before the controller has the previous token.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from longspan.attn.backends import backend_of
from longspan.attn.comm import CommError
from longspan.attn.memory import Wires
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_Q, Exchange
from longspan.core.layouts import shard_span
from longspan.core.runs import Layout, positions
from longspan.core.steps import UNKNOWN, Forward, Part, Sample, Sampling
from longspan.model.adapter import SERVE, Model
from longspan.model.files import FAILURES, ModelError, ModelFiles, ResourceError, one_line
from longspan.model.info import ModelInfo
from longspan.model.shrunken import NoCopyError, ShrunkenModel, shrink
from longspan.model.store import DTYPES
from longspan.runtime.block_records import kv_record
from longspan.runtime.messages import Done
from longspan.runtime.pool import KvPool
from longspan.runtime.timing import Stopwatch
from longspan.runtime.worker import Transports, Worker

_log = logging.getLogger("longspan")
_CPU = torch.device("cpu")
PROMPT_LENGTHS, _CHUNK = (14, 6), 3
"""Prompt lengths in tokens, and the length of the last prefill chunk. All instances share the first prompt."""
_BLOCK_SIZE, _NUM_BLOCKS = 2, 32
_TIMEOUT_S = 60.0
"""Seconds until a receive fails because the peer sends no such message. A trial takes 0.1 s."""
_MAX_ERROR = 1e-4
"""Maximum difference of a logit or logprob, in standard deviations of the logits. Rounding errors are below 1e-5."""


class WrongSplitError(ValueError):
    """The results of a split differ from the whole model."""


class DryRuns:
    """Runs splits of one model. Keeps its small copies for later runs.

    Args:
        tp: the maximum number of shards of a split.
    """

    def __init__(self, files: ModelFiles, info: ModelInfo, *, tp: int) -> None:
        self._files, self._info, self._tp = files, info, tp
        self._copies: dict[tuple[torch.dtype, tuple[range, ...]], ShrunkenModel] = {}  # by dtype and stages

    def problem(self, cluster: Cluster, exchange: Exchange) -> str:
        """Return why a cluster whose instances share a prompt fails, or an empty string if it works.

        Results are compared in float32. In the precision of the model, the run must only complete.

        Raises:
            ResourceError: a trial lacks memory or time. A later start may succeed.
        """
        try:
            for dtype in dict.fromkeys((torch.float32, DTYPES[self._files.dtype])):
                small = self._copy(cluster, dtype)
                if dtype == torch.float32:
                    _check_positions(small)
                _try_split(self._files, small, cluster, exchange)
        except NoCopyError as error:
            _check_was_tried(error)
            if cluster.num_ranks > 1:
                return f"no small copy of the model could be made to check it: {error}"
            _log.warning("the model was not checked, since no small copy of it could be made: %s", error)
        except (WrongSplitError, ModelError) as error:
            return str(error)
        except FAILURES as error:
            _check_was_tried(error)
            return one_line(error)
        return ""

    def _copy(self, cluster: Cluster, dtype: torch.dtype) -> ShrunkenModel:
        stages = tuple(cluster.layers(0, stage) for stage in range(cluster.pp(0)))
        if (dtype, stages) not in self._copies:
            self._copies[dtype, stages] = shrink(
                self._files, self._info, stages=stages, tp=self._tp, try_out=_run_whole, dtype=dtype
            )
        return self._copies[dtype, stages]


def _check_was_tried(error: Exception) -> None:
    """Raise ResourceError if the machine caused an error, not the split."""
    if isinstance(error, CommError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        problem = f"a small copy of the model could not be run ({one_line(error)})"
        raise ResourceError(f"{problem}: start again with more free memory and cores") from error


def _check_positions(small: ShrunkenModel) -> None:
    """Raise ModelError if the model does not number positions from 0. It then has no single correct output.

    Examples are RoBERTa and related models, whose positions begin after the index of the padding token.
    """
    prompt = _prompts(small)[0]
    reference, logits = _reference(small, prompt), small.logits(torch.tensor(prompt), None).double()
    if not (logits - reference).abs().max() <= _MAX_ERROR * reference.std():
        raise ModelError("its answer depends on whether position_ids are given, so transformers disagrees with itself")


def _run_whole(small: ShrunkenModel) -> None:
    """Run the unsplit model with transformers. Raises ValueError for NaN."""
    for prompt in _prompts(small):
        _reference(small, prompt)


def _prompts(small: ShrunkenModel) -> list[list[int]]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, small.info.vocab_size, length).tolist() for length in PROMPT_LENGTHS]


def _reference(small: ShrunkenModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits `[tokens, vocab]` of a prompt, computed by transformers. Raises ValueError for NaN."""
    logits = small.logits(torch.tensor(tokens), torch.arange(len(tokens))).double()
    if not logits.isfinite().all():
        raise ValueError("transformers computes logits that are not finite")
    return logits


def _try_split(files: ModelFiles, small: ShrunkenModel, cluster: Cluster, exchange: Exchange) -> None:
    """Run all ranks of a cluster. Raises WrongSplitError for wrong results, and the error of a failed rank."""
    groups = [tuple(cluster.instances), (0,)]
    requests = [
        _Request(number, prompt, group, exchange if len(group) > 1 else LOCAL)
        for number, (prompt, group) in enumerate(zip(_prompts(small), groups, strict=True))
    ]
    free = [itertools.count() for _ in cluster.instances]
    forwards = []
    for step in range(3):
        stops = [(request.length - _CHUNK, request.length, request.length + 1)[step] for request in requests]
        parts = tuple(request.part(stop, free) for request, stop in zip(requests, stops, strict=True))
        forwards.append(Forward(number=step, parts=parts))
    with _one_thread():
        done = _run(files, small, cluster, forwards)
    for request in requests:
        _compare(small, request, done)


@dataclass
class _Request:
    number: int
    prompt: list[int]
    group: tuple[int, ...]
    exchange: Exchange
    table: list[BlockRef] = field(default_factory=list)
    computed: int = 0
    sampled_on: int | None = None

    @property
    def length(self) -> int:
        return len(self.prompt)

    def part(self, stop: int, free: Sequence[Iterator[int]]) -> Part:
        """Return the part up to `stop`, in the next free blocks of each instance. Its decode token is unknown."""
        start, self.computed = self.computed, stop
        is_decode = start == self.length
        first = len(self.table)
        head = self.group.index(self.table[-1].instance) if start % _BLOCK_SIZE else 0
        layout: Layout = "zigzag" if len(self.group) > 1 and not is_decode else "single"
        runs = shard_span(layout, start, stop, len(self.group), align=_BLOCK_SIZE, head=head)
        for block in range(first, -(-stop // _BLOCK_SIZE)):
            member = next(m for m, own in enumerate(runs) if block * _BLOCK_SIZE in positions(own))
            self.table.append(BlockRef(self.group[member], next(free[self.group[member]])))
        last = next(m for m, own in enumerate(runs) if stop - 1 in positions(own))
        unknown_on, self.sampled_on = self.sampled_on, self.group[last] if stop >= self.length else None
        return Part(
            request_id=self.number,
            start=start,
            stop=stop,
            tokens=(UNKNOWN,) if is_decode else self.prompt[start:stop],
            group=self.group,
            runs=runs,
            exchange=(RING_Q if len(self.group) > 1 else LOCAL) if is_decode else self.exchange,
            first_block=first,
            blocks=tuple(self.table[first:]),
            sample=None if self.sampled_on is None else Sample(instance=self.sampled_on, position=stop),
            unknown_on=unknown_on if is_decode else None,
            sampling=Sampling(seed=0, output_logits=True, prompt_logprobs=0) if first == 0 else None,
            targets=self.prompt[start + 1 : stop + 1],
            rope_length=self.length + 1,
        )


def _run(files: ModelFiles, small: ShrunkenModel, cluster: Cluster, forwards: Sequence[Forward]) -> list[Done]:
    """Run the steps on all ranks. Raises the first error, preferring errors other than a lost peer."""
    wires = [Wires(timeout_s=_TIMEOUT_S) for _ in range(4)]

    def run(rank: int) -> list[Done]:
        try:
            worker = _worker(files, small, cluster, rank, wires)
            try:
                return [done for forward in forwards for done in (*worker.run(forward), *worker.finish())]
            finally:
                worker.close()
        except BaseException:
            for wire in wires:
                wire.close(rank)
            raise

    with ThreadPoolExecutor(cluster.num_ranks) as threads:
        futures = [threads.submit(run, rank) for rank in range(cluster.num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, CommError)):
        raise error
    return sorted((done for future in futures for done in future.result()), key=lambda done: done.number)


def _worker(files: ModelFiles, small: ShrunkenModel, cluster: Cluster, rank: int, wires: Sequence[Wires]) -> Worker:
    instance, stage, shard = cluster.at(rank)
    layers, backend = cluster.layers(instance, stage), backend_of(_CPU, compiled=False)
    skeleton = small.skeleton(SERVE)
    model = Model(files, _CPU, tp_index=shard, tp=cluster.tp(instance), layers=layers, stored=small, skeleton=skeleton)
    pool = KvPool(
        kv_record(model.info.specs, _BLOCK_SIZE, model.module.dtype),
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        dtype=model.module.dtype,
        device=_CPU,
        shard=shard,
        tp=cluster.tp(instance),
        layers=[layer for layer in small.layers if layer in layers],
        backend=backend,
    )
    return Worker(
        rank,
        cluster,
        model,
        pool,
        Transports.in_memory(wires, rank),
        backend=backend,
        files=files,
        watch=Stopwatch(enabled=False, device=_CPU),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread per rank, since all ranks compute concurrently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(small: ShrunkenModel, request: _Request, done: Sequence[Done]) -> None:
    """Raise WrongSplitError unless prompt logprobs and logits of sampled tokens equal the whole model's."""
    samples = [sample for step in done for sample in step.sampled if sample.request_id == request.number]
    scored = {
        position: logprob.logprob
        for step in done
        for scores in step.scored
        if scores.request_id == request.number
        for position, logprob in zip(scores.positions, scores.logprobs, strict=True)
    }
    if len(samples) != 2 or sorted(scored) != [*range(1, request.length)]:
        raise WrongSplitError(f"{len(samples)} tokens are sampled and {len(scored)} of the prompt are scored")
    reference = _reference(small, [*request.prompt, samples[0].token])
    logprobs, scale = reference.log_softmax(-1), reference.std().item()
    errors = {at: abs(logprob - logprobs[at - 1, request.prompt[at]].item()) for at, logprob in scored.items()}
    for row, sample in enumerate(samples, request.length - 1):
        logits = torch.frombuffer(bytearray(sample.logits), dtype=torch.float32).double()
        errors[row + 1] = (logits - reference[row]).abs().max().item()
    max_error = _MAX_ERROR if small.module.dtype == torch.float32 else torch.inf
    for position, error in sorted(errors.items()):
        if not error <= max_error * scale:
            raise WrongSplitError(f"logits differ by {error / scale:.2g} standard deviations at position {position}")
