"""What the arguments of `LLM` mean on this machine: checks, defaults, and how many tokens fit."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from longspan.attn import native
from longspan.core.cluster import Cluster, Location, ParallelSpec, locations_of_ranks
from longspan.core.config import Limits
from longspan.core.exchange import GATHER_HIDDEN
from longspan.errors import ParameterError
from longspan.model.files import ModelFiles, cache_root
from longspan.model.info import ModelInfo
from longspan.model.sharding import Shard, check_can_be_split, check_degree
from longspan.model.store import DTYPES
from longspan.runtime.capacity import default_kv_bytes, move_bytes
from longspan.runtime.kv.pool import bytes_per_block
from longspan.text.tokenizer import load_tokenizer

_HOSTS = "LONGSPAN_HOSTS"
_log = logging.getLogger("longspan")

ParametersT = ParamSpec("ParametersT")
SelfT = TypeVar("SelfT")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Arguments:
    """Those of `LLM`.

    Attributes:
        model: the alias `smollm2-135m`, a local folder, or a hub id.
        instances, tp, pp: copies of the model and their inner split; or all three as `parallel="2xtp2"`.
        prefill_parallel, decode_parallel: instead, specs of instances that only prefill and of others that only decode.
        transfer_backends: how many transfers of KV a decode instance receives at once; by default one per prefill
            instance.
        threads_per_rank: CPU threads per worker; by default the cores are shared evenly.
        attention_backend: `native` is a kernel of our own, compiled on first use, for bfloat16 on CPUs with
            AVX512_BF16; `torch` is PyTorch's; `auto` takes the former where it can be had.
        policy: `auto`, `chunked`, `context`, `runahead`, `tetris`, `fixed-sp`, `loongserve` or
            `loongserve-disagg`, with `policy_options`.
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
        step_timeout_s: a worker that has a step to run and completes none for so long is taken for lost.

    Raises:
        TypeError: for one that there is not.
    """

    model: str = "smollm2-135m"
    _: KW_ONLY
    instances: int = 1
    tp: int = 1
    pp: int = 1
    parallel: str | None = None
    prefill_parallel: str | None = None
    decode_parallel: str | None = None
    transfer_backends: int | None = None
    threads_per_rank: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    attention_backend: str = "auto"
    policy: str = "auto"
    policy_options: Mapping[str, str] | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    max_model_len: int | None = None
    block_size: int = 256
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    record_times: bool = False
    trust_remote_code: bool = False
    step_timeout_s: float = 300.0

    def check(self) -> None:
        """Raises ValueError for what can be told to be wrong without the model."""
        _ = self.cluster, self.threads, self.limits
        check_device(self.device)
        at_least_one(
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
        )
        check_timeout(self.step_timeout_s)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster follows from whichever spelling was used; its KV pools have no sizes yet.

        Raises:
            ValueError: for two spellings, a role without the other, or transfer backends that are not possible.
        """
        cluster = self._instances()
        return replace(cluster, locations=locations(cluster.num_ranks))

    def _instances(self) -> Cluster:
        at_least_one(transfer_backends=self.transfer_backends)
        if self.prefill_parallel is None and self.decode_parallel is None:
            spec = _parallel_spec(self.parallel, self.instances, self.tp, self.pp)
            return Cluster(spec=spec, transfer_backends=self.transfer_backends)
        if self.prefill_parallel is None or self.decode_parallel is None:
            given, missing = ("prefill", "decode") if self.decode_parallel is None else ("decode", "prefill")
            raise ValueError(
                f"{given}_parallel {self.prefill_parallel or self.decode_parallel!r} needs {missing}_parallel, too: "
                "who prefills for others does not decode"
            )
        if self.parallel is not None or (self.instances, self.tp, self.pp) != (1, 1, 1):
            raise ValueError(
                f"prefill_parallel {self.prefill_parallel!r} and decode_parallel {self.decode_parallel!r} say all "
                "about the instances: give neither parallel nor instances, tp and pp"
            )
        return Cluster(
            spec=ParallelSpec.parse(self.prefill_parallel),
            decode_spec=ParallelSpec.parse(self.decode_parallel),
            transfer_backends=self.transfer_backends,
        )

    @cached_property
    def threads(self) -> int:
        """CPU threads of each rank."""
        return threads_per_rank(self.threads_per_rank, self.cluster.num_ranks)

    @cached_property
    def limits(self) -> Limits:
        """The bounds of a step."""
        return Limits(max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs)


def unpacked(
    kind: Callable[ParametersT, ValueT],
) -> Callable[[Callable[[SelfT, ValueT], None]], Callable[Concatenate[SelfT, ParametersT], None]]:
    """Lets a method that takes a `kind` be called with what makes one."""
    signature = inspect.signature(kind)

    def unpack(method: Callable[[SelfT, ValueT], None]) -> Callable[Concatenate[SelfT, ParametersT], None]:
        @wraps(method)
        def taking_all(self: SelfT, /, *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> None:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}() {error}") from None  # and not of `kind`, which nobody called
            method(self, kind(*args, **kwargs))

        itself = next(iter(inspect.signature(method).parameters.values()))
        shown = signature.replace(parameters=[itself, *signature.parameters.values()], return_annotation=None)
        taking_all.__signature__ = shown  # type: ignore[attr-defined]  # read by inspect
        return taking_all

    return unpack


def check_split(info: ModelInfo, files: ModelFiles, cluster: Cluster, policy_options: Mapping[str, str]) -> None:
    """Raises ValueError when the model cannot be split between ranks as wanted."""
    shares_layers = policy_options.get("exchange") == GATHER_HIDDEN.kind
    if shares_layers and cluster.has_roles:
        raise ValueError(
            "exchange gather_hidden is not for instances that prefill only, whose KV goes to others: choose another"
        )
    degrees = sorted({cluster.tp(instance) for instance in cluster.instances})
    for tp in degrees:
        check_degree(info.specs, tp, cluster.num_instances if shares_layers else 1)
    if shares_layers or max(degrees) > 1:
        check_can_be_split(files, info.specs)


def _parallel_spec(parallel: str | None, instances: int, tp: int, pp: int) -> ParallelSpec:
    """The degrees, from whichever of their two spellings was used; ValueError when both were."""
    if parallel is None:
        return ParallelSpec(instances=instances, tp=tp, pp=pp).without_stages()
    if (instances, tp, pp) != (1, 1, 1):
        raise ValueError(f"parallel {parallel!r} says the same thing as instances, tp and pp: give one of them")
    return ParallelSpec.parse(parallel)


def threads_per_rank(threads: int | None, num_ranks: int) -> int:
    """CPU threads per rank: as asked for, or an even share of the cores."""
    if threads is None:
        return max(1, len(os.sched_getaffinity(0)) // num_ranks)
    at_least_one(threads_per_rank=threads)
    return threads


def locations(num_ranks: int) -> tuple[Location, ...]:
    """Locates every rank on this host, or where LONGSPAN_HOSTS pretends, see `locations_of_ranks`.

    Raises:
        ValueError: when it is neither a number of hosts nor a host for each rank.
    """
    try:
        return locations_of_ranks(num_ranks, os.environ.get(_HOSTS) or "1")
    except ValueError as error:
        raise ValueError(f"{_HOSTS}: {error}") from error


def at_least_one(**values: int | None) -> None:
    """Raises a ParameterError for the first argument below 1; None means not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ParameterError(name, f"must be at least 1, but {value} given", value)


def check_timeout(step_timeout_s: float) -> None:
    """Raises ValueError unless it is more than nothing."""
    if not step_timeout_s > 0:
        raise ParameterError("step_timeout_s", f"must be more than 0, but {step_timeout_s} given", step_timeout_s)


def check_device(device: str) -> None:
    """Raises ValueError for a kind of device that does not exist, or not here."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch finds no CUDA device here: use --device cpu")


def attention_kernel(backend: str, device: str, dtype: str) -> Path | None:
    """The compiled kernel of our own, if it is to be used; ValueError when it is asked for and cannot be had."""
    if backend not in ("auto", "native", "torch"):
        raise ValueError(f"unknown attention_backend {backend!r}: choose auto, native or torch")
    fits = (device, dtype) == ("cpu", "bfloat16")
    if backend == "native" and not fits:
        raise ValueError(f"attention_backend native is for bfloat16 on cpu, not for {dtype} on {device}: choose auto")
    if backend == "torch" or not fits:
        return None
    try:
        return native.build(cache_root() / "native")
    except native.UnavailableError as error:
        if backend == "native":
            raise ValueError(f"attention_backend native is not possible here: {error}; choose auto") from error
        _log.info("attention by PyTorch's kernels, since %s", error)
        return None


def require_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """The model's tokenizer; ValueError when it has none."""
    if files.tokenizer_dir is None:
        raise ValueError(
            f"model {files.name!r} comes without tokenizer files: add them, or skip_tokenizer_init and use token ids"
        )
    return load_tokenizer(files)


def num_blocks(info: ModelInfo, files: ModelFiles, given: Arguments) -> tuple[int, ...]:
    """KV blocks of each instance, or what the override says of all; ValueError when the memory of one holds none."""
    cluster, kv_bytes = given.cluster, given.kv_cache_memory_bytes
    if given.num_gpu_blocks_override is not None:
        return (given.num_gpu_blocks_override,) * cluster.num_instances
    found = {}
    for tp in {cluster.tp(instance) for instance in cluster.instances}:
        weight_bytes = files.weights.stat().st_size // tp
        default = default_kv_bytes(
            device=given.device,
            num_ranks=cluster.num_ranks,
            weight_bytes=weight_bytes,
            move_bytes=move_bytes(cluster),
        )
        found[tp] = _num_blocks(info, files, tp, given.block_size, default if kv_bytes is None else kv_bytes)
    return tuple(found[cluster.tp(instance)] for instance in cluster.instances)


def _num_blocks(info: ModelInfo, files: ModelFiles, tp: int, block_size: int, kv_bytes: int) -> int:
    """Of an instance of `tp` ranks; `kv_bytes` are those of each rank."""
    largest = Shard(index=0, size=tp, specs=info.specs).local_specs
    per_block = bytes_per_block(largest, block_size, DTYPES[files.dtype])
    if kv_bytes < per_block:
        raise ValueError(f"{kv_bytes} bytes of KV memory per rank hold no block of {per_block} bytes: allow more")
    return kv_bytes // per_block


def max_model_len(context_length: int, capacity: int, wanted: int | None) -> int:
    """The longest request in tokens; ValueError when more is wanted than the model or the KV pools can hold."""
    if wanted is not None and wanted > context_length:
        raise ValueError(f"max_model_len {wanted} exceeds the model's context of {context_length} tokens")
    if wanted is not None and wanted > capacity:
        raise ValueError(f"max_model_len {wanted} does not fit: the KV pools hold {capacity} tokens; allow more memory")
    if capacity < context_length and wanted is None:
        _log.info("the KV pools hold %d tokens, less than the model's context of %d", capacity, context_length)
    return wanted or min(context_length, capacity)
