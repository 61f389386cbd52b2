"""Measures an 8B shape with random weights in bfloat16 on one GPU: prompts, decode steps, the kernel for KV in blocks.

    python benchmarks/gpu_ceilings.py --json FOLDER/ceilings.json
    python benchmarks/gpu_8b.py FOLDER [--parts cudnn flash ...] [--limit-s 60] [--warm 1]

The parts are the engine with the attention kernels that it `chosen`, and with only `cudnn` or `flash`; `reads`, the
decode kernel alone; `mixed`, a prompt while chats decode; and `transformers` with the same shape. Each part writes its
numbers to FOLDER/8b_PART.json after every measurement. `tools/gpu_page.py` makes tables of them.

MFU is by the operations of the prompt and the product in bfloat16 that was measured for FOLDER/ceilings.json. Reads and
decode steps go by the copy there. If a prompt would take longer than `--limit-s`, or has more tokens than KV memory,
only a part of it is computed. The seconds of the rest are predicted from the prompts before. The first time of a prompt
compiles kernels and makes plans of cuDNN. `--warm` more times follow if the first took less than a third of the limit.
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
"""More than the caches of a device hold: KV is read from memory, if pools of so many bytes take turns."""
_AGAIN = 3
"""A prompt is computed again where that took less than this part of the limit."""
_CHAT_TOKENS = 1000
_PARTS_OF_PROMPT = 64
_FREE_SHARE = 0.4
"""The part of free memory that `reads` takes at most."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one prompt, alone.

    Attributes:
        first_s: to its first token, the first time that there is such a prompt.
        warm_s: the same, each time after that.
        num_computed: the tokens that were computed; the rest is predicted.
        mfu: of the median warm time, or of the first without one.
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
    """The speed at which the decode kernel reads KV of one layer, and the part of a copy's that it is."""

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


class Found(msgspec.Struct, kw_only=True):
    """Holds all that one part has found."""

    prompts: list[Prompt] = []
    steps: list[Step] = []
    reads: list[Read] = []
    mixed: list[Mixed] = []


def main() -> int:
    """Measures the parts that are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="*", help=f"of {', '.join(_PARTS)}; all of the device if not given")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="llama-3-8b", help="tiny, or one that `longspan estimate` knows")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**13, 2**15, 2**17, 2**19])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="of the shortest, decoded")
    parser.add_argument("--mixed-length", type=int, help="of the prompt among chats; the longest of --lengths")
    parser.add_argument("--peer-lengths", type=int, nargs="+", default=[2**13, 2**15], help="of transformers")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each prompt")
    parser.add_argument("--warm", type=int, default=1, help="times that each prompt is computed after the first")
    parser.add_argument("--checkpoint", type=Path, help="folder of the shape's configuration, made if it is missing")
    asked = parser.parse_args()
    asked.lengths.sort()
    if unknown := set(asked.parts or ()) - set(_PARTS):
        parser.error(f"--parts names {', '.join(sorted(unknown))}; the parts are {', '.join(_PARTS)}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here: take --device cpu --shape tiny --lengths 256 512")
    asked.config = TINY if asked.shape == "tiny" else model_config(asked.shape)
    asked.model = from_config(asked.config, name=asked.shape)
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LONGSPAN_CACHE"] = cache  # no profile of this machine counts, and the weights may go
        asked.checkpoint = asked.checkpoint or Path(cache, "checkpoint")
        _write_config(asked)
        for part in (_PARTS if asked.device == "cuda" else _CPU_PARTS) if asked.parts is None else asked.parts:
            print(f"{part} ...", file=sys.stderr, flush=True)
            _measure(part, asked)
    return 0


def _write_config(asked: argparse.Namespace) -> None:
    config = {**asked.config, "max_position_embeddings": _MAX_LENGTH, "architectures": ["LlamaForCausalLM"]}
    asked.checkpoint.mkdir(exist_ok=True)
    (asked.checkpoint / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **config}))


def _measure(part: str, asked: argparse.Namespace) -> None:
    """Writes the file of a part, anew whenever something was found."""
    found = Found()
    for _ in _steps(part, asked, found):
        (asked.folder / f"8b_{part}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


def _steps(part: str, asked: argparse.Namespace, found: Found) -> Iterator[None]:
    if part == "reads":
        return _reads(asked, found)
    if part == "mixed":
        return _mixed(asked, found)
    return _by_transformers(asked, found) if part == "transformers" else _by_engine(_KERNELS[part], asked, found)


def _ceiling(asked: argparse.Namespace, name: str) -> float | None:
    """Returns what was measured of the device; None where nothing was."""
    path = asked.folder / "ceilings.json"
    return float(json.loads(path.read_text(encoding="utf-8"))[name]) if path.exists() else None


def _mfu(asked: argparse.Namespace, length: int, seconds: float) -> float | None:
    peak, model = _ceiling(asked, PRODUCT), asked.model
    assert isinstance(model, Architecture), "made from the config"
    return None if peak is None else model.prefill_flops(length) / seconds / (peak * 1e12)


def _step(asked: argparse.Namespace, context: int, batch: int, seconds: float) -> Step:
    """Counts the weights of all layers and of the output head, and the KV of the whole context."""
    copied, model = _ceiling(asked, COPY), asked.model
    assert isinstance(model, Architecture), "made from the config"
    embedding = 0 if model.tied else model.head_weights * model.attention.bytes_per_element
    num_bytes = model.weight_bytes - embedding + batch * context * model.attention.kv_bytes * model.attention.num_layers
    share = None if copied is None else num_bytes / seconds / (copied * 1e9)
    return Step(context=context, batch=batch, ms=1e3 * seconds, share=share)


# ---------------------------------------------------------------- the engine


def _by_engine(kernel: CudaKernel | None, asked: argparse.Namespace, found: Found) -> Iterator[None]:
    known: list[tuple[int, float]] = []
    with _engine(kernel, asked) as llm:
        for length in asked.lengths:
            prompts, steps = len(found.prompts), len(found.steps)
            for prompt, step in _prompt(llm, asked, length, known):
                found.prompts[prompts:], found.steps[steps:] = [prompt], step
                yield
        for batch in asked.batches:
            if batch > 1 and batch * (asked.lengths[0] + _NEW_TOKENS + batch) <= _room(llm):
                found.steps.append(_step(asked, asked.lengths[0], batch, _batch(llm, asked.lengths[0], batch)))
                yield


def _engine(kernel: CudaKernel | None, asked: argparse.Namespace) -> LLM:
    def launch(config: WorkerConfig) -> ProcessLauncher:
        return ProcessLauncher(msgspec.structs.replace(config, cuda_kernel=kernel))

    class WithKernel(LLM):
        make_service = partial(Service, launcher=launch)

    options: dict[str, Any] = {
        "device": asked.device,
        "dtype": "bfloat16" if asked.device == "cuda" else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "block_size": _BLOCK_SIZE,
    }
    return WithKernel(str(asked.checkpoint), **options)


def _room(llm: LLM) -> int:
    """Counts the tokens whose KV there is memory for."""
    config = llm.engine.config
    return config.cluster.num_blocks[0] * config.block_size


def _prompt(
    llm: LLM, asked: argparse.Namespace, length: int, known: list[tuple[int, float]]
) -> Iterator[tuple[Prompt, list[Step]]]:
    """Computes a prompt once or more, as much of it as there is memory and time for, and decodes behind it.

    Yields the report after each measured time.

    Args:
        known: tokens and seconds of the prompts before, to which this one is added.
    """
    room = min(_room(llm), llm.max_model_len) - _NEW_TOKENS
    computed = min(room, affordable(known, length, asked.limit_s))
    times, gaps_s = list[float](), list[float]()
    while not times or (len(times) <= asked.warm and times[0] * _AGAIN <= asked.limit_s):
        [request] = _run(llm, [_random(llm, computed, len(times))], _NEW_TOKENS)
        times.append(request.metrics.ttft_s or 0.0)
        gaps_s.append(statistics.median(request.metrics.tbt_s[1:]))
        of_this = [*known, (computed, min(times))]
        left_s = predict_s(of_this, length) - predict_s(of_this, computed)
        first_s, *warm_s = (one + left_s for one in times)
        mfu = _mfu(asked, length, statistics.median(warm_s or [first_s]))
        prompt = Prompt(length=length, first_s=first_s, warm_s=warm_s, num_computed=computed, mfu=mfu)
        step = _step(asked, length, 1, statistics.median(gaps_s[1:] or gaps_s))
        yield prompt, [step] if computed == length else []
    known.append((computed, min(times)))


def affordable(known: Sequence[tuple[int, float]], length: int, limit_s: float) -> int:
    """Returns how many tokens of a prompt take no longer than a limit, in steps of a 64th of it, but one at least."""
    part = -(-length // _PARTS_OF_PROMPT)
    return next((one for one in range(length, part, -part) if predict_s(known, one) <= limit_s), part)


def predict_s(known: Sequence[tuple[int, float]], length: int) -> float:
    """Returns the seconds of a prompt by those of others, as a profile does; in proportion, where there is only one."""
    fit = fit_times([(tokens, 0, seconds) for tokens, seconds in known])
    if fit is None:
        return sum(seconds * length / tokens for tokens, seconds in known[:1])
    return fit.seconds(length, 0)


def _batch(llm: LLM, context: int, batch: int) -> float:
    """Decodes some requests together, once the last of them has its first token; returns seconds between tokens."""
    requests = _run(llm, [_random(llm, context, f"{batch} {one}") for one in range(batch)], batch + _NEW_TOKENS)
    latest = max(requests, key=lambda one: one.metrics.arrival_s + (one.metrics.ttft_s or 0.0))
    return statistics.median(latest.metrics.tbt_s[1:_NEW_TOKENS])


def _mixed(asked: argparse.Namespace, found: Found) -> Iterator[None]:
    """Computes a prompt alone, and then among each of the batches as chats that decode: twice, and keeps the second."""
    length = asked.mixed_length or asked.lengths[-1]
    with _engine(None, asked) as llm:
        for num_chats in (0, *asked.batches):
            _, warm = (_among_chats(llm, length, num_chats, seed) for seed in range(2))
            found.mixed.append(warm)
            yield


def _among_chats(llm: LLM, length: int, num_chats: int, seed: int) -> Mixed:
    """Starts chats behind 1,000 tokens each, and a prompt once all decode; ends the chats after its first token."""
    engine = llm.engine
    endless = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    drawn = [_random(llm, _CHAT_TOKENS, f"{num_chats} {one} {seed}") for one in range(num_chats)]
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
    """Completes prompts together. Times are those of tokens at hand, so whatever the device had to do is done."""
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add(tuple(prompt), params) for prompt in prompts]
    while engine.has_unfinished:
        engine.step()
    return requests


def _random(llm: LLM, length: int, seed: int | str) -> list[int]:
    """Draws a prompt that has no prefix in common with others."""
    drawn = np.random.default_rng([length, *str(seed).encode()]).integers(llm.info.vocab_size, size=length)
    found: list[int] = drawn.tolist()
    return found


# ---------------------------------------------------------------- the decode kernel


def _reads(asked: argparse.Namespace, found: Found) -> Iterator[None]:
    shape, device = asked.model.attention, torch.device(asked.device)
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    spec = AttnSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        window=None,
        softcap=None,
    )
    backend, copied, draw = backend_of(device, compiled=False), _ceiling(asked, COPY), np.random.default_rng(0)
    for context, batch in product(asked.lengths, asked.batches):
        per_request = -(-context // _BLOCK_SIZE)
        num_bytes = 2 * batch * per_request * _BLOCK_SIZE * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        if num_bytes > _FREE_SHARE * _free_bytes(device):
            continue
        size = (batch * per_request, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
        tables = draw.permutation(size[0]).reshape(batch, per_request).tolist()
        asked_of = [Reads(blocks=blocks, start=0, stop=context) for blocks in tables]
        pools = [
            PagedKv(keys=_normal(size, dtype, device), values=_normal(size, dtype, device))
            for _ in range(-(-_CACHED_BYTES // num_bytes))
        ]
        turns = cycle([(kv, backend.plan(asked_of, kv)) for kv in pools])
        q = _normal((shape.num_heads, batch, shape.head_dim), dtype, device)

        def read(turns: Iterator[tuple[PagedKv, PagedPlan]] = turns, q: torch.Tensor = q) -> None:
            backend.attend_paged(q, *next(turns), spec)

        for _ in pools:
            read()  # plans are uploaded
        seconds = least_seconds(read, device)
        rate = num_bytes * context / (per_request * _BLOCK_SIZE) / seconds / 1e9
        found.reads.append(
            Read(context=context, batch=batch, gb_per_s=rate, share=None if copied is None else rate / copied)
        )
        yield
        del pools, turns, read  # the next ones may need the memory


def _normal(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=device).normal_()


def _free_bytes(device: torch.device) -> int:
    """Counts the device's memory that is free once what was let go is; on CPUs there is enough for what is tiny."""
    if device.type == "cpu":
        return sys.maxsize
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


# ---------------------------------------------------------------- transformers


def _by_transformers(asked: argparse.Namespace, found: Found) -> Iterator[None]:
    config = AutoConfig.from_pretrained(asked.checkpoint)
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    with torch.device(asked.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for length in asked.peer_lengths:
        times = []
        for turn in range(2):
            drawn = np.random.default_rng([length, turn]).integers(config.vocab_size, size=length).tolist()
            [timeline] = complete(model, [Submission(prompt=drawn, new_tokens=_NEW_TOKENS)])
            times.append(timeline.arrivals_s[0] - timeline.submitted_s)
        first_s, again_s = times
        gaps_s = np.diff(timeline.arrivals_s)[1:]
        mfu = _mfu(asked, length, again_s)
        found.prompts.append(Prompt(length=length, first_s=first_s, warm_s=[again_s], num_computed=length, mfu=mfu))
        found.steps.append(_step(asked, length, 1, float(np.median(gaps_s))))
        yield


if __name__ == "__main__":
    sys.exit(main())
