"""What the arguments of `LLM` mean on this machine: checks, defaults, and how many tokens fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from longspan.attn import native
from longspan.core.fleet import Fleet, Roles
from longspan.core.parallel import ParallelSpec
from longspan.core.places import Place, places_of_ranks
from longspan.kv.pool import bytes_per_block
from longspan.model.cache import cache_root
from longspan.model.files import ModelFiles
from longspan.model.info import ModelInfo
from longspan.model.sharding import Shard, check_can_be_split, check_degree
from longspan.model.store import DTYPES
from longspan.model.tokenizer import load_tokenizer
from longspan.runtime.capacity import default_kv_bytes, move_bytes

_HOSTS = "LONGSPAN_HOSTS"
_log = logging.getLogger("longspan")


def fleet(
    parallel: str | None, instances: int, tp: int, pp: int, prefill_parallel: str | None, decode_parallel: str | None
) -> Fleet:
    """The instances, from whichever spelling was used.

    Raises:
        ValueError: for two spellings, or a role without the other.
    """
    if prefill_parallel is None and decode_parallel is None:
        return Fleet(spec=parallel_spec(parallel, instances, tp, pp))
    if prefill_parallel is None or decode_parallel is None:
        given, missing = ("prefill", "decode") if decode_parallel is None else ("decode", "prefill")
        raise ValueError(
            f"{given}_parallel {prefill_parallel or decode_parallel!r} needs {missing}_parallel, too: who prefills for "
            "others does not decode"
        )
    if parallel is not None or (instances, tp, pp) != (1, 1, 1):
        raise ValueError(
            f"prefill_parallel {prefill_parallel!r} and decode_parallel {decode_parallel!r} say all about the "
            "instances: give neither parallel nor instances, tp and pp"
        )
    return Fleet(spec=ParallelSpec.parse(prefill_parallel), decode_spec=ParallelSpec.parse(decode_parallel))


def roles(instances: Fleet, transfer_backends: int | None) -> Roles | None:
    """Who prefills and who decodes, with a backend for each that prefills unless told; None when all do both.

    Raises:
        ValueError: for a number of backends that is not possible, or means nothing here.
    """
    at_least_one(transfer_backends=transfer_backends)
    if instances.decode_spec is None:
        if transfer_backends is not None:
            raise ValueError(
                f"transfer_backends {transfer_backends} is for instances that decode only: give prefill_parallel and "
                "decode_parallel, too"
            )
        return None
    return Roles(
        num_prefill=instances.spec.instances,
        num_decode=instances.decode_spec.instances,
        backends=transfer_backends or instances.spec.instances,
    )


def check_split(info: ModelInfo, files: ModelFiles, instances: Fleet, policy_options: Mapping[str, str]) -> None:
    """Raises ValueError when the model cannot be split between ranks as wanted."""
    shares_layers = policy_options.get("exchange") == "gather_hidden"
    if shares_layers and instances.decode_spec is not None:
        raise ValueError(
            "exchange gather_hidden is not for instances that prefill only, whose KV goes to others: choose another"
        )
    for tp in sorted(set(instances.tps)):
        check_degree(info.specs, tp, instances.num_instances if shares_layers else 1)
    if shares_layers or max(instances.tps) > 1:
        check_can_be_split(files, info.specs)


def parallel_spec(parallel: str | None, instances: int, tp: int, pp: int) -> ParallelSpec:
    """The degrees, from whichever of their two spellings was used; ValueError when both were."""
    if parallel is None:
        return ParallelSpec(instances=instances, tp=tp, pp=pp)
    if (instances, tp, pp) != (1, 1, 1):
        raise ValueError(f"parallel {parallel!r} says the same thing as instances, tp and pp: give one of them")
    return ParallelSpec.parse(parallel)


def threads_per_rank(threads: int | None, num_ranks: int) -> int:
    """CPU threads per rank: as asked for, or an even share of the cores."""
    if threads is None:
        return max(1, len(os.sched_getaffinity(0)) // num_ranks)
    at_least_one(threads_per_rank=threads)
    return threads


def places(num_ranks: int) -> tuple[Place, ...]:
    """Where each rank is: on this host, or where LONGSPAN_HOSTS pretends, see `places_of_ranks`.

    Raises:
        ValueError: when it is neither a number of hosts nor a host for each rank.
    """
    try:
        return places_of_ranks(num_ranks, os.environ.get(_HOSTS) or "1")
    except ValueError as error:
        raise ValueError(f"{_HOSTS}: {error}") from error


def at_least_one(**values: int | None) -> None:
    """Raises a ValueError that names the first argument below 1; None means not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, but {value} given")


def check_timeout(step_timeout_s: float) -> None:
    """Raises ValueError unless it is more than nothing."""
    if not step_timeout_s > 0:
        raise ValueError(f"step_timeout_s must be more than 0, but {step_timeout_s} given")


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


def num_blocks(
    info: ModelInfo,
    files: ModelFiles,
    device: str,
    instances: Fleet,
    block_size: int,
    kv_bytes: int | None,
    *,
    override: int | None,
    backends: int = 0,
) -> tuple[int, ...]:
    """KV blocks of each instance, or what `override` says of all; ValueError when the memory of one holds none.

    Those that decode only have so many `backends`.
    """
    if override is not None:
        return (override,) * instances.num_instances
    found = {}
    for tp in set(instances.tps):
        weight_bytes = files.weights.stat().st_size // tp
        default = default_kv_bytes(
            device=device,
            num_ranks=instances.num_ranks,
            weight_bytes=weight_bytes,
            move_bytes=move_bytes(instances, backends),
        )
        found[tp] = _num_blocks(info, files, tp, block_size, default if kv_bytes is None else kv_bytes)
    return tuple(found[tp] for tp in instances.tps)


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
