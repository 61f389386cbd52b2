"""Every error about a parameter names it, and says what to give instead or what to do."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import REMEDY, refused

from longspan import LLM

MAX_LACKING = 5
"""Errors without a word that is known as a remedy. The number may only fall."""
ROLES = {"prefill_parallel": "2", "decode_parallel": "1"}
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"prefill_parallel": "2"}, "prefill_parallel"),
    ({"decode_parallel": "tp2"}, "decode_parallel"),
    (ROLES | {"parallel": "3"}, "parallel"),
    (ROLES | {"tp": 2}, "tp"),
    (ROLES | {"transfer_backends": 0}, "transfer_backends"),
    ({"parallel": "2xtp2", "transfer_backends": 3}, "transfer_backends"),
    *(({name: 2}, name) for name in ("parallel", "prefill_parallel", "decode_parallel")),
    ({"device": "tpu"}, "device"),
    ({"device": "cuda"}, "device"),
    ({"dtype": "float16"}, "dtype"),
    ({"load_format": "gguf"}, "load_format"),
    ({"attention_backend": "fast"}, "attention_backend"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    *(({"step_timeout_s": seconds}, "step_timeout_s") for seconds in (0.0, -1.0, math.nan)),
]
"""Arguments that are wrong whatever the model, and the parameter that the error is about."""
OF_A_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"attention_backend": "native", "dtype": "float32"}, "attention_backend"),
    ({"parallel": "pp6"}, "pp"),
    ({"host_kv_gib": 1e-9}, "host_kv_gib"),
    ({"host_kv_gib": 1e6}, "host_kv_gib"),
    ({"host_kv_gib": 0.02, "enable_prefix_caching": False}, "host_kv_gib"),
]
SOURCES = Path(__file__).parents[1] / "src"


@pytest.mark.parametrize(("arguments", "parameter"), ARGUMENTS, ids=str)
def test_wrong_arguments_are_refused_before_the_model_is_read(
    arguments: dict[str, Any], parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(parameter):
        LLM("no/such/model", **arguments)


@pytest.mark.parametrize(("arguments", "parameter"), OF_A_MODEL, ids=str)
def test_arguments_that_do_not_fit_the_model_are_refused(arguments: dict[str, Any], parameter: str, tiny: Path) -> None:
    with refused(parameter):
        LLM(str(tiny), skip_tokenizer_init=True, **arguments)


def problems() -> Iterator[tuple[str, str]]:
    """Yield the place and the fixed words of each `ParameterError` whose text is written in its call."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ParameterError") and len(node.args) > 1:
                words = [part.value for part in ast.walk(node.args[1]) if isinstance(part, ast.Constant)]
                if words:
                    yield f"{path.relative_to(SOURCES)}:{node.lineno}", " ".join(map(str, words))


def test_errors_about_parameters_state_a_remedy() -> None:
    """Texts with most of their words in variables are left to the tests that raise them, see `refused`."""
    texts = {place: words for place, words in problems() if len(words.split()) > 3}
    assert len(texts) > 60
    lacking = {place: words for place, words in texts.items() if not REMEDY.search(words)}
    assert len(lacking) <= MAX_LACKING, lacking
