"""Small copies of a model, on which a split is tried before workers start.

A copy keeps the number of layers, the order of their kinds, widths, heads and experts, since faults of a split depend
on them. Only the first layer of each kind in each pipeline stage has weights. All other layers return their input. The
vocabulary, the sliding windows and the chunks are small, and the weights are random.

If the copy would have more than `_MAX_WEIGHTS` weights, its widths are divided by a power of two. Head sizes are
divided too if RoPE allows it. The numbers of heads and experts stay. A divided width is a multiple of 8, or of 8
times the ranks, exactly if the model's width is. So shares are as even, and as aligned, as shares of the model.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from longspan.attn.spec import AttnSpec
from longspan.attn.spec_reader import rope_dicts
from longspan.model.files import FAILURES, ModelFiles, one_line
from longspan.model.info import ModelInfo
from longspan.model.probe import observe
from longspan.model.skeleton import (
    BUILT_WITH,
    build_skeleton,
    decoder_layers,
    layer_kind,
    load_config,
    text_config,
)
from longspan.model.stages import PassThrough
from longspan.model.store import named_tensors

_log = logging.getLogger("longspan")
_MAX_WEIGHTS = 64 << 20
"""Weights of a copy, 270 MB in float32, unless only larger copies work. Larger copies take more than a second."""
_VOCAB_SIZE = 64
_SLOPE = 0.7
"""The last outputs of a matrix are `exp(2 * 0.7)` = 4 times as large as the first."""
_LENGTHS = {
    "sliding_window": 5,
    "window_size": 5,
    "original_max_position_embeddings": 8,
    "floor_scale": 4,
    "attention_chunk_size": 5,
}
"""Upper bounds of lengths in tokens, so that prompts of a dozen tokens exceed them."""
_DIVISORS = (2, 4, 8, 16, 32, 64, 3, 5, 9, 15, 45)
_ALIGNED = 8
"""Elements in 16 bytes of bfloat16."""
_WIDTH = re.compile("(_size|_dim|_rank)$|^d_model$|^d_ff$|^n_embd$|^n_inner$")
_NO_WIDTH = re.compile("vocab|window|chunk|block|kernel|cache|group|patch|batch|conv|head|position|num_")
_HEAD_DIMS = ("head_dim", "global_head_dim")


@dataclass(frozen=True, kw_only=True)
class ShrunkenModel:
    """A copy of a model, with the attributes of `StoredTensors` that a `Model` needs.

    Attributes:
        module: the copy as transformers builds it, with its weights.
        info: the facts of the copy.
        layers: the numbers of the layers with weights.
        tensors: all parameters and buffers, by name.
        aliases: for each further name of a tied parameter, its name in `tensors`.
        levels: none, a copy is not quantised.
    """

    module: PreTrainedModel
    info: ModelInfo
    layers: Sequence[int]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    levels: ClassVar[dict[str, Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.owner(name)]

    def check(self) -> None:
        """Do nothing: its tensors are in memory, and no file can change them."""

    def owner(self, name: str) -> str:
        """Return the first of the names that are tied to this name."""
        return self.aliases.get(name, name)

    def is_drawn(self, name: str) -> bool:
        """Return False for every name of the copy: all its tensors are stored."""
        return name not in self.tensors and name not in self.aliases

    def shape(self, name: str) -> torch.Size:
        return self[name].shape

    def skeleton(self, attention: str) -> PreTrainedModel:
        """Return another module tree with the same tensors, and with an attention function of transformers."""
        shared: dict[int, Any] = {id(tensor): tensor for tensor in self.tensors.values()}
        module = copy.deepcopy(self.module, shared)
        module.config._attn_implementation = attention  # noqa: SLF001 - as `set_attn_implementation`, unchecked
        return module

    def logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Compute logits `[tokens, vocab]` of one prompt by transformers alone, with its own attention.

        Without `positions` the model numbers the tokens itself.
        """
        module, row = self.skeleton("eager"), {} if positions is None else {"position_ids": positions[None]}
        with torch.no_grad():
            output = module(input_ids=tokens[None], use_cache=False, **row)
        logits: Tensor = output.logits[0]
        return logits


class NoCopyError(ValueError):
    """No copy of a model can be built and run. The message is the reason of the last attempt."""


def shrink(
    files: ModelFiles,
    info: ModelInfo,
    *,
    stages: Sequence[range],
    tp: int,
    try_out: Callable[[ShrunkenModel], object],
    dtype: torch.dtype = torch.float32,
) -> ShrunkenModel:
    """Return a small copy for these stages that `try_out` can run.

    Some models cannot be small, for example if their code needs a token that the small vocabulary lacks. Raise
    NoCopyError if no copy works. The largest attempt has 16 times the usual size.
    """
    config = load_config(files.config_dir, files.trust_remote_code)
    layers = list(decoder_layers(build_skeleton(config, files.trust_remote_code)))
    kept = _kept(layers, info.specs, stages)
    num_weights = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    sizes = [
        (chosen, has_small_vocab, divisor, with_heads)
        for chosen, has_small_vocab in ((kept, True), (kept, False), ([*range(len(layers))], True))
        for divisor, with_heads in _divisors(text_config(config), tp)
    ]
    reason = "its layers are too large"
    for max_weights in (_MAX_WEIGHTS, 4 * _MAX_WEIGHTS, 16 * _MAX_WEIGHTS):
        for chosen, has_small_vocab, divisor, with_heads in sizes:
            if sum(num_weights[layer] for layer in chosen) > max_weights * divisor**2:
                continue
            try:
                small = _small_config(config, divisor, with_heads=with_heads, has_small_vocab=has_small_vocab)
                module = _empty(files, small, info, chosen, dtype)
                if (total := sum(weight.numel() for weight in module.parameters())) > max_weights:
                    continue
                _draw(module)
                copied = _with_facts(module, info, chosen)
                try_out(copied)
            except FAILURES as error:
                reason = one_line(error)
                continue
            if total > _MAX_WEIGHTS:
                _log.info("the split is tried on %.1f GB of weights, since no smaller copy works", total * 4e-9)
            return copied
    raise NoCopyError(reason)


def _kept(layers: Sequence[nn.Module], specs: Sequence[AttnSpec], stages: Sequence[range]) -> list[int]:
    """Return the first layer of each kind in each stage."""
    kept: list[int] = []
    for stage in stages:
        first: dict[object, int] = {}
        for layer in stage:
            first.setdefault((specs[layer], tuple(layer_kind(layers[layer]))), layer)
        kept += first.values()
    return kept


def _divisors(config: PreTrainedConfig, tp: int) -> Iterator[tuple[int, bool]]:
    """Yield divisors of widths, from 1 on, and whether head sizes are divided too."""
    yield 1, False
    widths = [width for value in _widths(config).values() for width in (value if isinstance(value, list) else [value])]
    head_dims = [value for name, value in vars(config).items() if name in _HEAD_DIMS and isinstance(value, int)]
    lists = [value for rope in rope_dicts(config) for value in rope.values() if isinstance(value, list)]
    for divisor in _DIVISORS:
        if all(_divides(divisor, width, tp) for width in widths):
            heads_shrink = all(_is_section(value) and not any(n % divisor for n in value) for value in lists)
            if head_dims and heads_shrink and all(_divides(divisor, head_dim, 1) for head_dim in head_dims):
                yield divisor, True
            if head_dims or heads_shrink:  # heads without a size of their own shrink with the hidden size
                yield divisor, False


def _is_section(value: list[object]) -> bool:
    """Return True for numbers of dimensions, as in `mrope_section`. Other lists of RoPE have a factor per dimension."""
    return all(type(number) is int for number in value)


def _divides(divisor: int, width: int, tp: int) -> bool:
    return width % divisor == 0 and all(
        (width % unit == 0) == (width // divisor % unit == 0) for unit in (_ALIGNED, _ALIGNED * tp)
    )


def _widths(config: PreTrainedConfig) -> dict[str, int | list[int]]:
    """Return the widths of a configuration by name. A list has one width per layer."""
    return {
        name: value
        for name, value in vars(config).items()
        if _WIDTH.search(name) and not _NO_WIDTH.search(name) and _is_width(value)
    }


def _is_width(value: object) -> TypeGuard[int | list[int]]:
    """Return True for a number above 1, or a list of such numbers. In some models 1 is a flag, not a width."""
    widths = value if isinstance(value, list) else [value]
    return bool(widths) and all(type(width) is int and width > 1 for width in widths)


def _small_config(
    config: PreTrainedConfig, divisor: int, *, with_heads: bool, has_small_vocab: bool
) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    own = text_config(small)
    changes: dict[str, Any] = {
        name: [width // divisor for width in value] if isinstance(value, list) else value // divisor
        for name, value in _widths(own).items()
    }
    for name, value in vars(own).items():
        if type(value) is not int:
            continue
        if with_heads and name in _HEAD_DIMS:
            changes[name] = value // divisor
        elif name in _LENGTHS:
            changes[name] = min(value, _LENGTHS[name])
        elif has_small_vocab and "vocab_size" in name:
            changes[name] = min(value, _VOCAB_SIZE)
        elif has_small_vocab and name.endswith("_token_id"):
            changes[name] = value % _VOCAB_SIZE
    for name, value in changes.items():
        setattr(own, name, value)
    heads_shrink = with_heads or not any(type(getattr(own, name, None)) is int for name in _HEAD_DIMS)
    for rope in rope_dicts(own):
        assert isinstance(rope, dict), "the copy's own"
        sections = [name for name, value in rope.items() if isinstance(value, list) and _is_section(value)]
        rope.update({name: [number // divisor for number in rope[name]] for name in sections if heads_shrink})
        rope.update({name: min(rope[name], top) for name, top in _LENGTHS.items() if isinstance(rope.get(name), int)})
    return small


def _empty(
    files: ModelFiles, config: PreTrainedConfig, info: ModelInfo, kept: Sequence[int], dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model with uninitialised weights. Layers that are not `kept` return their input."""
    with no_init_weights():
        options = {"dtype": dtype, "attn_implementation": BUILT_WITH}
        module = build_skeleton(config, files.trust_remote_code, device="cpu", **options)
    module.tie_weights()
    layers = decoder_layers(module)
    for number in {*range(len(layers))} - {*kept}:
        layers[number] = PassThrough(layers[number], number, as_tuple=info.layers_return_tuples)
    return module.eval()


def _with_facts(module: PreTrainedModel, info: ModelInfo, kept: Sequence[int]) -> ShrunkenModel:
    observed = observe(module, by_cache=info.attends_by_cache)
    specs = list(info.specs)
    for layer, spec in observed.specs.items():
        expected = info.specs[layer]
        if (spec.num_heads, spec.num_kv_heads) != (expected.num_heads, expected.num_kv_heads):
            raise ValueError(f"layer {layer} of the copy has other heads than the model")
        if spec.head_dim % _ALIGNED and not expected.head_dim % _ALIGNED:
            raise ValueError(f"heads of the copy have {spec.head_dim} dimensions")
        specs[layer] = spec
    tensors, aliases = named_tensors(module)
    facts = replace(
        info,
        specs=tuple(specs),
        vocab_size=module.get_input_embeddings().weight.shape[0],
        hidden_size=text_config(module.config).hidden_size,
        passed_width=observed.passed_width,
        rope_switch_length=None if info.rope_switch_length is None else _LENGTHS["original_max_position_embeddings"],
    )
    return ShrunkenModel(module=module, info=facts, layers=kept, tensors=tensors, aliases=aliases)


def _draw(module: nn.Module) -> None:
    """Fill parameters with random numbers that keep activations near 1, so that each parameter changes the result.

    Later outputs of a matrix are larger. So heads and channels differ systematically, and the mean over a share is not
    the mean over all.
    """
    numbers = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        with torch.no_grad():
            weight.normal_(generator=numbers)
            if weight.ndim > 1:
                slope = torch.linspace(-_SLOPE, _SLOPE, weight.shape[-2]).exp()[:, None]
                weight.mul_(slope * weight.shape[-1] ** -0.5)
            else:
                weight.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
