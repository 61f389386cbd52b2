"""What the rest of longspan needs to know about a model, without its weights."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from longspan.attn.spec import AttnSpec
from longspan.cost.architecture import ModelShape
from longspan.model.files import ModelError
from longspan.model.rope import rope_switch_length


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts of a model.

    `context_length` is in tokens (prompt and output together); `specs` has one entry per layer; `hidden_size` is the
    width of what passes from layer to layer.
    `rope_switch_length` is set for longrope models: a request whose length (tokens) is above it uses the long
    factors, for all of its tokens.
    """

    architecture: str
    num_layers: int
    vocab_size: int
    hidden_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    specs: tuple[AttnSpec, ...]
    rope_switch_length: int | None

    def shape(self, bytes_per_element: int) -> ModelShape:
        """Its sizes, of the first layer if they differ."""
        spec = self.specs[0]
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bytes_per_element=bytes_per_element,
        )

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ModelInfo":
        """The inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields["specs"] = tuple(AttnSpec(**spec) for spec in fields["specs"])
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return cls(**fields)


def gather_info(
    architecture: str, config: PreTrainedConfig, config_dir: Path, specs: tuple[AttnSpec, ...]
) -> ModelInfo:
    """Build the ModelInfo from the configuration and the specs that a dry run observed.

    Raises ModelError when the configuration states no context length, or sliding windows other than those observed.
    """
    _check_windows(config, specs)
    return ModelInfo(
        architecture=architecture,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=_context_length(config),
        eos_token_ids=_eos_token_ids(config, config_dir),
        specs=specs,
        rope_switch_length=rope_switch_length(config),
    )


def _context_length(config: PreTrainedConfig) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ModelError(f"{config.model_type}: config.json has no max_position_embeddings; add it")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("factor"):
        # Some checkpoints state the length before yarn stretches it.
        return max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length


def _check_windows(config: PreTrainedConfig, specs: tuple[AttnSpec, ...]) -> None:
    """Some models state their window to transformers' mask alone, which longspan does not see."""
    limit = _context_length(config)
    stated = min(getattr(config, "sliding_window", None) or limit, limit)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(specs)
    expected = [stated if kind == "sliding_attention" else limit for kind in types]
    observed = [min(spec.window or limit, limit) for spec in specs]
    if observed != expected:
        raise ModelError(
            f"{config.model_type} is not supported: its configuration states a sliding window of {stated} that its "
            "attention layers do not pass on"
        )


def _eos_token_ids(config: PreTrainedConfig, config_dir: Path) -> tuple[int, ...]:
    eos = None
    if (config_dir / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(config_dir).eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
