"""Measure an 8B shape with random weights in bfloat16 on one GPU: prompts, decode steps, the kernel for paged KV.

    python benchmarks/gpu_ceilings.py --json FOLDER/ceilings.json
    python benchmarks/gpu_8b.py FOLDER [--parts cudnn flash ...] [--limit-s 60] [--warm 1]

These are the parts. `chosen` is the engine with the attention kernels that it selects itself. `cudnn` and `flash` use
only these kernels. `reads` is the decode kernel alone. `mixed` is a prompt while chats decode. `transformers` has the
same shape. Each part writes its numbers to FOLDER/8b_PART.json after every measurement. `tools/gpu_page.py` makes
tables of them.

MFU is the prompt's FLOPS, divided by the FLOPS of the bfloat16 product in FOLDER/ceilings.json. Reads and decode steps
are compared with the copy in that file. If a prompt would take longer than `--limit-s`, or has more tokens than KV
memory, only a part of it is computed. The seconds of the remaining part are predicted from earlier prompts. The first
run of a prompt compiles kernels and makes plans of cuDNN. `--warm` more runs follow if the first took less than a third
of the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from contestants.serving import Submission
from contestants.transformers_loop import complete
from gpu_ceilings import COPY, PRODUCT, least_seconds
from transformers import AutoConfig, AutoModelForCausalLM

from longspan import LLM, SamplingParams
from longspan.attn.backends import CudaKernel, backend_of
from longspan.attn.paged import PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.request import Request
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.catalog import model_config
from longspan.cost.profile import fit_times
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.messages import WorkerConfig
from longspan.service import Service

TINY = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_KERNELS: dict[str, CudaKernel | None] = {"chosen": None, "cudnn": "cudnn", "flash": "flash"}
_PARTS = ("reads", *_KERNELS, "mixed", "transformers")
_CPU_PARTS = ("reads", "chosen", "mixed", "transformers")
_MAX_LENGTH = 2**20
"""Positions of the shape, so that all runs with one checkpoint have the same configuration."""
_NEW_TOKENS = 17
_BLOCK_SIZE = 256
_CACHED_BYTES = 128 << 20
"""Bytes of all pools that `reads` alternates between. They exceed a device's caches, so KV is read from memory."""
_AGAIN = 3
"""A prompt is computed again if its first run took less than the limit divided by this number."""
_CHAT_TOKENS = 1000
_PARTS_OF_PROMPT = 64
_FREE_SHARE = 0.4
"""Largest share of free memory that `reads` uses."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one prompt, alone.

    Attributes:
        first_s: seconds to the first token in the first run.
        warm_s: the same for each later run.
        num_computed: number of computed tokens. The seconds of all further tokens are predicted.
        mfu: of the median of `warm_s`, or of `first_s` if that is empty.
    """

    length: int
    first_s: float
    warm_s: list[float]
    num_computed: int
    mfu: float | None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The median milliseconds between tokens of a batch of requests, each behind a context of this length.

    Attributes:
        share: of the measured copy, by the bytes of weights and KV that a step reads.
    """

    context: int
    batch: int
    ms: float
    share: float | None


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """The speed at which the decode kernel reads KV of one layer, also as a share of a copy's speed."""

    context: int
    batch: int
    gb_per_s: float
    share: float | None


class Mixed(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is computed while chats decode.

    Attributes:
        ttft_s: of the prompt.
        tbt_p50_s: between the tokens of all chats, from the prompt's arrival to its first token.
        tbt_p99_s: the same.
    """

    length: int
    num_chats: int
    ttft_s: float
    tbt_p50_s: float
    tbt_p99_s: float


class Results(msgspec.Struct, kw_only=True):
    """The measurements of one part of this script."""

    prompts: list[Prompt] = []
    steps: list[Step] = []
    reads: list[Read] = []
    mixed: list[Mixed] = []


def main() -> int:
    """Measure the requested parts one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="*", help=f"of {', '.join(_PARTS)}; default: all of the device")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="llama-3-8b", help="tiny, or a model of `longspan estimate`")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**13, 2**15, 2**17, 2**19])
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32], help="numbers of requests with the shortest length"
    )
    parser.add_argument("--mixed-length", type=int, help="prompt of `mixed`; default: longest of --lengths")
    parser.add_argument("--peer-lengths", type=int, nargs="+", default=[2**13, 2**15], help="prompts of `transformers`")
    parser.add_argument("--limit-s", type=float, default=60.0, help="largest time of each prompt")
    parser.add_argument("--warm", type=int, default=1, help="runs of each prompt after the first")
    parser.add_argument("--checkpoint", type=Path, help="folder of the shape's configuration, made if it is missing")
    args = parser.parse_args()
    args.lengths.sort()
    if unknown := set(args.parts or ()) - set(_PARTS):
        parser.error(f"--parts names {', '.join(sorted(unknown))}; the parts are {', '.join(_PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here: take --device cpu --shape tiny --lengths 256 512")
    args.config = TINY if args.shape == "tiny" else model_config(args.shape)
    args.model = from_config(args.config, name=args.shape)
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LONGSPAN_CACHE"] = cache  # no profile of this machine counts, and the weights may go
        args.checkpoint = args.checkpoint or Path(cache, "checkpoint")
        _write_config(args)
        for part in (_PARTS if args.device == "cuda" else _CPU_PARTS) if args.parts is None else args.parts:
            print(f"{part} ...", file=sys.stderr, flush=True)
            _measure(part, args)
    return 0


def _write_config(args: argparse.Namespace) -> None:
    config = {**args.config, "max_position_embeddings": _MAX_LENGTH, "architectures": ["LlamaForCausalLM"]}
    args.checkpoint.mkdir(exist_ok=True)
    (args.checkpoint / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **config}))


def _measure(part: str, args: argparse.Namespace) -> None:
    """Measure a part, and rewrite its file after every measurement."""
    results = Results()
    for _ in _steps(part, args, results):
        (args.folder / f"8b_{part}.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def _steps(part: str, args: argparse.Namespace, results: Results) -> Iterator[None]:
    if part == "reads":
        return _reads(args, results)
    if part == "mixed":
        return _mixed(args, results)
    return _by_transformers(args, results) if part == "transformers" else _by_engine(_KERNELS[part], args, results)


def _ceiling(args: argparse.Namespace, name: str) -> float | None:
    """Return a number of FOLDER/ceilings.json, or None if there is no such file."""
    path = args.folder / "ceilings.json"
    return float(json.loads(path.read_text(encoding="utf-8"))[name]) if path.exists() else None


def _mfu(args: argparse.Namespace, length: int, seconds: float) -> float | None:
    peak, model = _ceiling(args, PRODUCT), args.model
    assert isinstance(model, Architecture), "made from the config"
    return None if peak is None else model.prefill_flops(length) / seconds / (peak * 1e12)


def _step(args: argparse.Namespace, context: int, batch: int, seconds: float) -> Step:
    """Return a step with its share of the copy, by the bytes of all weights read and the KV of the whole context."""
    copied, model = _ceiling(args, COPY), args.model
    assert isinstance(model, Architecture), "made from the config"
    embedding = 0 if model.tied else model.head_bytes
    num_bytes = model.weight_bytes - embedding + batch * context * model.attention.kv_bytes * model.attention.num_layers
    share = None if copied is None else num_bytes / seconds / (copied * 1e9)
    return Step(context=context, batch=batch, ms=1e3 * seconds, share=share)


# ---------------------------------------------------------------- the engine


def _by_engine(kernel: CudaKernel | None, args: argparse.Namespace, results: Results) -> Iterator[None]:
    measured: list[tuple[int, float]] = []
    with _engine(kernel, args) as llm:
        for length in args.lengths:
            prompts, steps = len(results.prompts), len(results.steps)
            for prompt, step in _prompt(llm, args, length, measured):
                results.prompts[prompts:], results.steps[steps:] = [prompt], step
                yield
        for batch in args.batches:
            if batch > 1 and batch * (args.lengths[0] + _NEW_TOKENS + batch) <= _kv_capacity(llm):
                results.steps.append(_step(args, args.lengths[0], batch, _batch(llm, args.lengths[0], batch)))
                yield


def _engine(kernel: CudaKernel | None, args: argparse.Namespace) -> LLM:
    def launch(config: WorkerConfig) -> ProcessLauncher:
        return ProcessLauncher(msgspec.structs.replace(config, cuda_kernel=kernel))

    class WithKernel(LLM):
        make_service = partial(Service, launcher=launch)

    options: dict[str, Any] = {
        "device": args.device,
        "dtype": "bfloat16" if args.device == "cuda" else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "block_size": _BLOCK_SIZE,
    }
    return WithKernel(str(args.checkpoint), **options)


def _kv_capacity(llm: LLM) -> int:
    """Return the number of tokens whose KV fits into memory."""
    config = llm.engine.config
    return config.cluster.num_blocks[0] * config.block_size


def _prompt(
    llm: LLM, args: argparse.Namespace, length: int, measured: list[tuple[int, float]]
) -> Iterator[tuple[Prompt, list[Step]]]:
    """Compute the part of a prompt that memory and time allow, once or more, and decode behind it.

    Yields the report after each measured time.

    Args:
        measured: tokens and seconds of earlier prompts. This prompt is appended.
    """
    capacity = min(_kv_capacity(llm), llm.max_model_len) - _NEW_TOKENS
    computed = min(capacity, affordable(measured, length, args.limit_s))
    times, gaps_s = list[float](), list[float]()
    while not times or (len(times) <= args.warm and times[0] * _AGAIN <= args.limit_s):
        [request] = _run(llm, [_random(llm, computed, len(times))], _NEW_TOKENS)
        times.append(request.metrics.ttft_s or 0.0)
        gaps_s.append(statistics.median(request.metrics.tbt_s[1:]))
        of_this = [*measured, (computed, min(times))]
        left_s = predict_s(of_this, length) - predict_s(of_this, computed)
        first_s, *warm_s = (computed_s + left_s for computed_s in times)
        mfu = _mfu(args, length, statistics.median(warm_s or [first_s]))
        prompt = Prompt(length=length, first_s=first_s, warm_s=warm_s, num_computed=computed, mfu=mfu)
        step = _step(args, length, 1, statistics.median(gaps_s[1:] or gaps_s))
        yield prompt, [step] if computed == length else []
    measured.append((computed, min(times)))


def affordable(measured: Sequence[tuple[int, float]], length: int, limit_s: float) -> int:
    """Return the number of tokens of a prompt that a time limit allows, in 64ths of the prompt, at least one 64th."""
    part = -(-length // _PARTS_OF_PROMPT)
    return next((tokens for tokens in range(length, part, -part) if predict_s(measured, tokens) <= limit_s), part)


def predict_s(measured: Sequence[tuple[int, float]], length: int) -> float:
    """Return the seconds of a prompt by a profile's fit to measured prompts, or in proportion to a single one."""
    fit = fit_times([(tokens, 0, seconds) for tokens, seconds in measured])
    if fit is None:
        return sum(seconds * length / tokens for tokens, seconds in measured[:1])
    return fit.seconds(length, 0)


def _batch(llm: LLM, context: int, batch: int) -> float:
    """Decode requests together, and return the median seconds between tokens once all have their first token."""
    requests = _run(llm, [_random(llm, context, f"{batch} {index}") for index in range(batch)], batch + _NEW_TOKENS)
    latest = max(requests, key=lambda request: request.metrics.arrival_s + (request.metrics.ttft_s or 0.0))
    return statistics.median(latest.metrics.tbt_s[1:_NEW_TOKENS])


def _mixed(args: argparse.Namespace, results: Results) -> Iterator[None]:
    """Compute a prompt alone, and then with each batch of decoding chats: twice, where the second run counts."""
    length = args.mixed_length or args.lengths[-1]
    with _engine(None, args) as llm:
        for num_chats in (0, *args.batches):
            _, warm = (_among_chats(llm, length, num_chats, seed) for seed in range(2))
            results.mixed.append(warm)
            yield


def _among_chats(llm: LLM, length: int, num_chats: int, seed: int) -> Mixed:
    """Start chats behind 1,000 tokens each, and a prompt once all decode. End the chats after its first token."""
    engine = llm.engine
    endless = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    drawn = [_random(llm, _CHAT_TOKENS, f"{num_chats} {chat} {seed}") for chat in range(num_chats)]
    chats = [engine.add(tuple(prompt), endless) for prompt in drawn]
    while any(len(chat.metrics.tbt_s) < _NEW_TOKENS for chat in chats):
        engine.step()
    before = [len(chat.metrics.tbt_s) for chat in chats]
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = engine.add(tuple(_random(llm, length, f"{num_chats} {seed}")), one_token)
    while prompt.metrics.ttft_s is None:
        engine.step()
    gaps_s = [gap for chat, first in zip(chats, before, strict=True) for gap in chat.metrics.tbt_s[first:]]
    for chat in chats:
        engine.finish(chat, "abort")
    while engine.has_unfinished:
        engine.step()
    p50_s, p99_s = np.percentile(gaps_s or [0.0], [50, 99])
    return Mixed(
        length=length,
        num_chats=num_chats,
        ttft_s=prompt.metrics.ttft_s,
        tbt_p50_s=float(p50_s),
        tbt_p99_s=float(p99_s),
    )


def _run(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    """Complete prompts together. A token's time is taken when the host has its id, so the device's work is included."""
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add(tuple(prompt), params) for prompt in prompts]
    while engine.has_unfinished:
        engine.step()
    return requests


def _random(llm: LLM, length: int, seed: int | str) -> list[int]:
    """Draw a prompt that shares no prefix with prompts of other seeds."""
    drawn = np.random.default_rng([length, *str(seed).encode()]).integers(llm.info.vocab_size, size=length)
    token_ids: list[int] = drawn.tolist()
    return token_ids


# ---------------------------------------------------------------- the decode kernel


def _reads(args: argparse.Namespace, results: Results) -> Iterator[None]:
    shape, device = args.model.attention, torch.device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    spec = AttnSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        window=None,
        softcap=None,
    )
    backend, copied, draw = backend_of(device, compiled=False), _ceiling(args, COPY), np.random.default_rng(0)
    for context, batch in product(args.lengths, args.batches):
        per_request = -(-context // _BLOCK_SIZE)
        num_bytes = 2 * batch * per_request * _BLOCK_SIZE * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        if num_bytes > _FREE_SHARE * _free_bytes(device):
            continue
        size = (batch * per_request, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
        tables = draw.permutation(size[0]).reshape(batch, per_request).tolist()
        requests = [Reads(blocks=blocks, start=0, stop=context) for blocks in tables]
        pools = [
            PagedKv(keys=_normal(size, dtype, device), values=_normal(size, dtype, device))
            for _ in range(-(-_CACHED_BYTES // num_bytes))
        ]
        plans = cycle([(kv, backend.plan(requests, kv)) for kv in pools])
        q = _normal((shape.num_heads, batch, shape.head_dim), dtype, device)

        def read(plans: Iterator[tuple[PagedKv, PagedPlan]] = plans, q: torch.Tensor = q) -> None:
            backend.attend_paged(q, *next(plans), spec)

        for _ in pools:
            read()  # plans are uploaded
        seconds = least_seconds(read, device)
        rate = num_bytes * context / (per_request * _BLOCK_SIZE) / seconds / 1e9
        results.reads.append(
            Read(context=context, batch=batch, gb_per_s=rate, share=None if copied is None else rate / copied)
        )
        yield
        del pools, plans, read  # the next pools may need the memory


def _normal(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=device).normal_()


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of free device memory, the allocator's cache included. On CPUs there is no limit."""
    if device.type == "cpu":
        return sys.maxsize
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


# ---------------------------------------------------------------- transformers


def _by_transformers(args: argparse.Namespace, results: Results) -> Iterator[None]:
    config = AutoConfig.from_pretrained(args.checkpoint)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for length in args.peer_lengths:
        times = []
        for seed in range(2):
            drawn = np.random.default_rng([length, seed]).integers(config.vocab_size, size=length).tolist()
            [timeline] = complete(model, [Submission(prompt=drawn, new_tokens=_NEW_TOKENS)])
            times.append(timeline.arrivals_s[0] - timeline.submitted_s)
        first_s, again_s = times
        gaps_s = np.diff(timeline.arrivals_s)[1:]
        mfu = _mfu(args, length, again_s)
        results.prompts.append(Prompt(length=length, first_s=first_s, warm_s=[again_s], num_computed=length, mfu=mfu))
        results.steps.append(_step(args, length, 1, float(np.median(gaps_s))))
        yield


if __name__ == "__main__":
    sys.exit(main())
