"""The facts that an engine logs when it starts, and the advice that follows from them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import ThreadLLM

from longspan.start_facts import StartFacts, advice

GOOD = StartFacts(
    model="m",
    device="cpu",
    dtype="bfloat16",
    quantization=None,
    parallel="2",
    num_instances=2,
    tp=1,
    pp=1,
    policy="auto",
    kv_tokens=16_384,
    request_tokens=4_096,
    context_tokens=4_096,
    has_kernels=True,
    kernels_reason="",
    can_have_kernels=True,
    fallbacks=(),
    threads=4,
    cores=8,
    profile="found",
)
NO_COMPILER = {
    "has_kernels": False,
    "kernels_reason": "they cannot be compiled (FileNotFoundError: [Errno 2] No such file or directory: 'g++')",
}
BROKEN_COMPILER = {"has_kernels": False, "kernels_reason": "g++ failed: error: unknown flag"}
SLOW_DTYPE = {"has_kernels": False, "kernels_reason": "longspan's own are for bfloat16", "dtype": "float32"}
OLD_PROCESSOR = {"has_kernels": False, "kernels_reason": "the processor has no AVX512_BF16", "can_have_kernels": False}
FALLBACK = {"fallbacks": ("layers [1] are computed by PyTorch's operators",)}
NO_PROFILE = {"profile": None}
ADVICE: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing to change": ({}, None),
    "no compiler": (NO_COMPILER, "install g++"),
    "a compiler that fails": (BROKEN_COMPILER, "kernels: g++ failed: error: unknown flag"),
    "a slower dtype": (SLOW_DTYPE, "dtype bfloat16"),
    "kernels that were not wanted": (
        {"has_kernels": False, "kernels_reason": "attention_backend is torch"},
        "attention_backend auto",
    ),
    "bfloat16 on an old processor": (OLD_PROCESSOR, "dtype float32"),
    "float32 on an old processor": ({**OLD_PROCESSOR, "dtype": "float32"}, None),
    "layers without kernels": (FALLBACK, "docs/models.md"),
    "no profile": (NO_PROFILE, "run longspan profile m"),
    "no profile of one instance": ({**NO_PROFILE, "num_instances": 1}, None),
    "requests that do not fit": ({"request_tokens": 1_024}, "kv_cache_memory_bytes"),
    "CUDA": ({**SLOW_DTYPE, "device": "cuda"}, None),
    "memory before kernels": ({**NO_COMPILER, "request_tokens": 1_024}, "more KV memory"),
    "kernels before layers and profile": ({**NO_COMPILER, **FALLBACK, **NO_PROFILE}, "install g++"),
    "layers before the profile": ({**FALLBACK, **NO_PROFILE}, "docs/models.md"),
}


@pytest.mark.parametrize(("changes", "expected"), ADVICE.values(), ids=ADVICE)
def test_advice_is_the_change_that_helps_most(changes: dict[str, Any], expected: str | None) -> None:
    change = advice(replace(GOOD, **changes))
    assert change is None if expected is None else change is not None and expected in change


@pytest.mark.parametrize(
    ("changes", "line"),
    {
        "kernels": ({}, "kernels   longspan's own"),
        "reason": (OLD_PROCESSOR, "kernels   PyTorch's: the processor has no AVX512_BF16"),
        "fallback": (FALLBACK, "fallback  layers [1] are computed by PyTorch's operators"),
        "KV": ({}, "KV        16,384 tokens: 4.0 requests of 4,096"),
        "weights": ({"quantization": "int8"}, "model     m, bfloat16, weights in int8, on cpu"),
        "layout": ({}, "layout    2 (instances: 2, tp: 1, pp: 1)"),
        "hint": ({"hint": "do this"}, "hint      do this"),
    }.values(),
)
def test_block_has_one_line_per_fact(changes: dict[str, Any], line: str) -> None:
    assert f"  {line}" in replace(GOOD, **changes).block().splitlines()


def test_engine_logs_one_block_at_level_info(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longspan"):
        ThreadLLM(str(tiny), parallel="2", max_model_len=64, dtype="float32", skip_tokenizer_init=True).shutdown()
    [block] = [text for text in caplog.messages if text.startswith("the engine has started")]
    assert "requests of 64" in block and "layout    2 (instances: 2, tp: 1, pp: 1)" in block and "profile" in block
