"""Tiny random checkpoints of the supported architectures, written as ordinary Hugging Face folders."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    Gemma2Config,
    Glm4Config,
    GptOssConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from longspan.model.source import smollm2_folder

SWITCH_LENGTH = 64
WINDOW = 32
CHUNK = 40
"""Tokens. No multiple of the blocks of most tests."""
_CONTEXT = 4096
BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": _CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

ODD = BASE | {"num_hidden_layers": 5, "num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80}
"""Heads and layers that divide by nothing."""


def longrope_parameters(half_dim: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": SWITCH_LENGTH,
        "short_factor": [1.0 + 0.1 * i for i in range(half_dim)],
        "long_factor": [2.0 + 1.5 * i for i in range(half_dim)],
    }


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": _CONTEXT // 4}

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.8,
}

TINY: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**BASE | {"tie_word_embeddings": True}),
    "llama-yarn": lambda: LlamaConfig(**BASE, rope_parameters=dict(_YARN)),
    "llama-longrope": lambda: LlamaConfig(**BASE, rope_parameters=longrope_parameters(8)),
    "phi3": lambda: Phi3Config(**BASE),
    "phi3-longrope": lambda: Phi3Config(
        **BASE, original_max_position_embeddings=SWITCH_LENGTH, rope_parameters=longrope_parameters(8)
    ),
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen3": lambda: Qwen3Config(**BASE),
    "mistral-window": lambda: MistralConfig(**BASE, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **BASE | {"num_hidden_layers": 4, "tie_word_embeddings": True},
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=30.0,
    ),
    "glm4": lambda: Glm4Config(**BASE, partial_rotary_factor=0.5),
    "mixtral": lambda: MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "llama4": lambda: Llama4TextConfig(
        **BASE | {"num_hidden_layers": 4},
        attention_chunk_size=CHUNK,
        no_rope_layer_interval=2,
        floor_scale=10,
        attn_scale=0.5,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=112,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **BASE | _EXPERTS,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        rope_parameters=_YARN | {"truncate": False},
    ),
    "granite_swa": lambda: GraniteSWAConfig(
        **BASE | _GRANITE, sliding_window=WINDOW, layer_rope_theta=[0, 10000.0, 500000.0]
    ),
    "mimo": lambda: MiMoV2FlashConfig(
        **BASE | _EXPERTS | {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 24},
        v_head_dim=16,
        moe_intermediate_size=64,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=WINDOW,
    ),
}
SINKS = ("gpt_oss", "granite_swa", "mimo")
"""The models with attention sinks, in all layers or in layers with a window."""


def make_tiny(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint `name` (a key of `TINY`) to `folder`, without a tokenizer, and return the folder.

    Weights are larger than at initialisation, so that attention is not uniform and the best logits stand apart.
    """
    return write_checkpoint(TINY[name](), folder, seed)


def make_speaking(folder: Path, config: PreTrainedConfig | None = None) -> Path:
    """Write one with the tokenizer and the chat template of SmolLM2: fast nonsense, in all of Unicode."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    config = config or TINY["llama"]()
    own = config.get_text_config()
    own.vocab_size, own.eos_token_id, own.bos_token_id = len(tokenizer), tokenizer.eos_token_id, None
    write_checkpoint(config, folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_bytes(folder: Path) -> Path:
    """Write one with a tokenizer of single bytes. Grammars for its 260 tokens take little time and memory."""
    alphabet = sorted(ByteLevel.alphabet())
    names = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = Tokenizer(BPE(vocab={name: number for number, name in enumerate([*names, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens(names)
    config = TINY["llama"]()
    config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id = len(names) + 256, 0, 1, None
    write_checkpoint(config, folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


@contextmanager
def without_timm() -> Iterator[None]:
    """Let transformers build models whose vision tower is one of timm, which is not installed. No text calls it."""
    build = AutoModel.from_config

    def from_config(config: PreTrainedConfig, **options: Any) -> Any:
        try:
            return build(config, **options)
        except ImportError:
            return torch.nn.Identity()

    AutoModel.from_config = from_config  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoModel.from_config = build  # type: ignore[method-assign]


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class that builds the model of a configuration: of a multimodal one, the whole model."""
    if config.get_text_config() is not config:
        for auto in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
            if type(config) in auto._model_mapping:
                return auto
    return AutoModelForCausalLM


def write_checkpoint(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Write a random float32 checkpoint of `config` to `folder`."""
    config.initializer_range = config.get_text_config().initializer_range = 0.12
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with without_timm():
            model = auto_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                # Biases, norm weights and the experts' offsets, which start as zeros or ones. Tied ones share memory.
                if tensor.ndim == 1 and tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return folder
