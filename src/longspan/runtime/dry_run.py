"""A split of a model, run in this process on a few tokens: every rank is a worker in a thread, the model a small copy.

Two prompts are computed in chunks, together, and a token of each is decoded before the controller knows the one before.
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
from longspan.model.files import ModelError, ModelFiles, one_line
from longspan.model.info import ModelInfo
from longspan.model.shrunken import FAILURES, NoCopyError, ShrunkenModel, shrink
from longspan.model.store import DTYPES
from longspan.runtime.block_records import kv_record
from longspan.runtime.executor.threads import memory_transports
from longspan.runtime.messages import Done
from longspan.runtime.pool import KvPool
from longspan.runtime.sampling import Vocabulary
from longspan.runtime.timing import Stopwatch
from longspan.runtime.worker import Worker

_log = logging.getLogger("longspan")
_CPU = torch.device("cpu")
PROMPT_LENGTHS, _CHUNK = (14, 6), 3
"""Tokens of the prompts, the first of which is shared; and those of the second prompt's first chunk."""
_BLOCK_SIZE, _NUM_BLOCKS = 2, 32
_TIMEOUT_S = 60.0
"""A rank that waits longer has peers that send less often. A trial takes a tenth of a second."""
_MAX_ERROR = 1e-4
"""The largest difference of a logit or a logprob, in standard deviations of logits. Roundings stay below 1e-5."""


class WrongSplitError(ValueError):
    """A split computes something else than the whole model."""


class DryRuns:
    """Runs splits of one model; its copies are kept from one to the next.

    Args:
        tp: the most shards of a split.
    """

    def __init__(self, files: ModelFiles, info: ModelInfo, *, tp: int) -> None:
        self._files, self._info, self._tp = files, info, tp
        self._copies: dict[tuple[torch.dtype, tuple[range, ...]], ShrunkenModel] = {}  # by dtype and stages

    def problem(self, cluster: Cluster, exchange: Exchange) -> str:
        """Returns the reason why a cluster whose instances share a prompt does not work, or an empty text.

        Results are compared in float32. In the precision of the model, workers must not fail.

        Raises:
            ModelError: when there is too little memory or time for a trial. Another start may have more.
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
                return f"it cannot be tried on a small copy: {error}"
            _log.warning("nothing was checked on a small copy of the model, since there is none: %s", error)
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
    """Raises ModelError if the machine is the cause of an error, not the split."""
    if isinstance(error, CommError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        problem = f"a small copy of the model could not be run ({one_line(error)})"
        raise ModelError(f"{problem}: start again with more free memory and cores") from error


def _check_positions(small: ShrunkenModel) -> None:
    """Raises ModelError if the model numbers tokens in another way than from 0 on: it has no single right answer then.

    Examples are RoBERTa and its relatives, which begin behind the number of the padding token.
    """
    prompt = _prompts(small)[0]
    wanted, found = _reference(small, prompt), small.logits(torch.tensor(prompt), None).double()
    if not (found - wanted).abs().max() <= _MAX_ERROR * wanted.std():
        raise ModelError("its answer depends on whether position_ids are given, so transformers disagrees with itself")


def _run_whole(small: ShrunkenModel) -> None:
    """Runs the model as transformers has it. Raises ValueError for NaN."""
    for prompt in _prompts(small):
        _reference(small, prompt)


def _prompts(small: ShrunkenModel) -> list[list[int]]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, small.info.vocab_size, length).tolist() for length in PROMPT_LENGTHS]


def _reference(small: ShrunkenModel, tokens: Sequence[int]) -> Tensor:
    """Returns the logits `[tokens, vocab]` of a prompt as transformers computes them. Raises ValueError for NaN."""
    logits = small.logits(torch.tensor(tokens), torch.arange(len(tokens))).double()
    if not logits.isfinite().all():
        raise ValueError("transformers computes logits that are not finite")
    return logits


def _try_split(files: ModelFiles, small: ShrunkenModel, cluster: Cluster, exchange: Exchange) -> None:
    """Runs all ranks of a cluster. Raises WrongSplitError for wrong results, and the error of a rank that fails."""
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
        """Returns the part up to `stop`, in the next free blocks of each instance. The token behind the prompt is
        unknown.
        """
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
    """Runs the steps on all ranks; raises the first error that is not the absence of a peer."""
    wires = [Wires(timeout_s=_TIMEOUT_S) for _ in range(4)]

    def run(rank: int) -> list[Done]:
        try:
            worker = _worker(files, small, cluster, rank, wires)
            try:
                return [worker.run(forward) for forward in forwards]
            finally:
                worker.close()
        except BaseException:
            for one in wires:
                one.close(rank)
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
        memory_transports(wires, rank),
        backend=backend,
        vocabulary=Vocabulary(files, size=small.info.vocab_size, eos_token_ids=()),
        watch=Stopwatch(enabled=False, device=_CPU),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets PyTorch use one thread per rank, since all ranks compute at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(small: ShrunkenModel, request: _Request, done: Sequence[Done]) -> None:
    """Raises WrongSplitError unless the logprobs of the prompt and the logits of sampled tokens are the model's."""
    sampled = [one for step in done for one in step.sampled if one.request_id == request.number]
    scored = {
        position: logprob.logprob
        for step in done
        for one in step.scored
        if one.request_id == request.number
        for position, logprob in zip(one.positions, one.logprobs, strict=True)
    }
    if len(sampled) != 2 or sorted(scored) != [*range(1, request.length)]:
        raise WrongSplitError(f"{len(sampled)} tokens are sampled and {len(scored)} of the prompt are scored")
    wanted = _reference(small, [*request.prompt, sampled[0].token])
    logprobs, scale = wanted.log_softmax(-1), wanted.std().item()
    errors = {at: abs(found - logprobs[at - 1, request.prompt[at]].item()) for at, found in scored.items()}
    for row, one in enumerate(sampled, request.length - 1):
        logits = torch.frombuffer(bytearray(one.logits), dtype=torch.float32).double()
        errors[row + 1] = (logits - wanted[row]).abs().max().item()
    max_error = _MAX_ERROR if small.module.dtype == torch.float32 else torch.inf
    for position, error in sorted(errors.items()):
        if not error <= max_error * scale:
            raise WrongSplitError(f"logits differ by {error / scale:.2g} standard deviations at position {position}")
