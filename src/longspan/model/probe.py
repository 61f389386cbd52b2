"""The models that longspan can serve, and their facts, from their configuration and a run of a few tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from longspan.attn.spec import AttnSpec, as_output
from longspan.attn.spec_reader import CHUNKED, LAYER_TYPES, UnsupportedAttentionError, read_spec, rope_dicts
from longspan.model.dequantise import weight_format
from longspan.model.files import FAILURES, ModelError, one_line
from longspan.model.info import ModelInfo
from longspan.model.skeleton import (
    BUILT_WITH,
    build_skeleton,
    decoder_layers,
    layers_path,
    left_out,
    load_config,
    text_config,
)
from longspan.model.trace import Trace, find_roles

if TYPE_CHECKING:
    from longspan.model.cache_interface import HandedKv

PROBE = "longspan_probe"
"""The name of the attention function in transformers, for models that `gather_info` runs."""


def check_supported(config_dir: Path, trust_remote_code: bool) -> None:
    """Raise ModelError with the first reason why longspan cannot serve the model of this folder, if any."""
    config = load_config(config_dir, trust_remote_code)
    weight_format(config_dir)
    for problem in _config_problems(config):
        raise ModelError(f"{config.model_type} is not supported: {problem}")
    for problem in _class_problems(build_skeleton(config, trust_remote_code)):
        raise ModelError(f"{config.model_type} is not supported: {problem}")


def _config_problems(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model: longspan serves decoder-only ones"
    config = text_config(config)
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        yield f"it has layers of type {', '.join(unknown)}: longspan serves full, sliding-window and chunked attention"
    if CHUNKED in (getattr(config, "layer_types", None) or ()) and not getattr(config, "attention_chunk_size", None):
        yield f"it has layers of type {CHUNKED} without an attention_chunk_size"
    if getattr(config, "num_hidden_layers", None) == 0:
        yield "its configuration states no layers"
    if getattr(config, "kv_lora_rank", None):
        yield "it compresses keys and values (multi-head latent attention)"
    rope_types = {kind for rope in rope_dicts(config) if (kind := rope.get("rope_type"))}
    if any("dynamic" in kind for kind in rope_types):
        yield "dynamic RoPE makes a request's result depend on earlier requests: use yarn or longrope scaling"
    if "longrope" in rope_types and "rope_type" not in config.rope_parameters:
        yield "it uses longrope in some layers only"


def _class_problems(model: PreTrainedModel) -> Iterator[str]:
    if getattr(model, "_is_stateful", False):
        yield "it has recurrent (Mamba or linear-attention) layers: longspan serves attention only"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        yield "its class cannot compute the logits of chosen tokens (logits_to_keep)"
    if any(getattr(module, "is_causal", None) is False for module in model.modules()):
        yield "its attention is bidirectional: longspan serves decoder-only causal language models"
    if not _supports_interface(model):
        try:
            _all_specs(model)
        except _NoValuesError:  # the probe of the loaded model decides
            pass
        except ModelError as error:
            yield str(error)


def gather_info(model: PreTrainedModel, config_dir: Path) -> ModelInfo:
    """Build the ModelInfo of a model loaded with `PROBE`, from its configuration and a dry run of two tokens.

    Raise ModelError if an AttnSpec cannot describe a layer, or the configuration states no context length, or other
    sliding windows than the observed ones.
    """
    config = text_config(model.config)
    specs, by_cache = _all_specs(model)
    _check_windows(config, specs)
    with NoProducts():
        observed, swapped = (observe(model, tokens, by_cache=by_cache) for tokens in ((0, 1), (1, 0)))
        roles = () if by_cache else find_roles(model, specs)
    arguments, others = observed.arguments, swapped.arguments
    return ModelInfo(
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layer_weights=sum(weight.numel() for weight in decoder_layers(model).parameters()) / config.num_hidden_layers,
        context_length=_context_length(config),
        eos_token_ids=_eos_token_ids(model.config, config_dir),
        specs=specs,
        rope_switch_length=_rope_switch_length(config),
        layers_return_tuples=observed.returns_tuples,
        passed_width=observed.passed_width,
        reads_tokens=len(arguments) != len(others) or not all(map(torch.equal, arguments, others)),
        layers_path=layers_path(model),
        roles=roles,
        attends_by_cache=by_cache,
        left_out=tuple(left_out(model)),
    )


def _all_specs(model: PreTrainedModel) -> tuple[tuple[AttnSpec, ...], bool]:
    """Return the attention of each layer, and whether it is reached by the KV cache."""
    by_cache = not _supports_interface(model)
    try:
        specs = _probe_specs(model, (0, 1), by_cache=by_cache)
    except _NoArgumentsError:
        by_cache, specs = True, _probe_specs(model, (0, 1), by_cache=True)
    num_layers: int = text_config(model.config).num_hidden_layers
    if sorted(specs) != list(range(num_layers)):
        raise ModelError(
            f"{type(model).__name__}: {len(specs)} of its {num_layers} layers use transformers' attention interface: "
            "longspan needs all of them to"
        )
    ordered = tuple(specs[layer] for layer in range(num_layers))
    if by_cache:
        _check_long(model, ordered)
    return ordered, by_cache


def _check_long(model: PreTrainedModel, specs: Sequence[AttnSpec]) -> None:
    """Refuse a class that computes other attention for a prompt of the context length than for two tokens."""
    from longspan.model.cache_interface import hand_by_cache  # noqa: PLC0415 - few classes need it

    layers: list[int] = []

    def attend(layer: int, q: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
        layers.append(layer)
        return torch.zeros_like(q)

    config = copy.deepcopy(model.config)
    config._attn_implementation = BUILT_WITH  # noqa: SLF001 - as `set_attn_implementation`, unchecked
    tokens = [0] * _context_length(text_config(config))
    for device in ("meta", "cpu"):
        with torch.device(device), no_init_weights():
            fresh = type(model)(config).eval()
        layers.clear()
        with suppress(_NoValuesError), NoProducts():
            _run(fresh, tokens, hand_by_cache(attend, specs))
            break
    if sorted(layers) != [*range(len(specs))]:
        raise _unsupported(f"{type(model).__name__} computes other attention for long prompts")


def _supports_interface(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_supports_attention_backend", False))


def _probe_specs(model: PreTrainedModel, tokens: Sequence[int], *, by_cache: bool) -> dict[int, AttnSpec]:
    """Run a model with the attention `PROBE`. Return the attention of every layer that calls it."""
    specs: dict[int, AttnSpec] = {}
    _run(model, tokens, _cache_into(specs, text_config(model.config)) if by_cache else {"specs": specs})
    return specs


def _run(model: PreTrainedModel, tokens: Sequence[int], arguments: Mapping[str, Any]) -> None:
    row = torch.tensor([list(tokens)], device=model.device)
    positions = torch.arange(len(tokens), device=model.device)[None]
    model.config._attn_implementation = PROBE  # noqa: SLF001 - as `set_attn_implementation`, unchecked
    try:
        with torch.no_grad():
            model(input_ids=row, position_ids=positions, use_cache=False, **arguments)
    except FAILURES as error:
        if isinstance(error, ModelError) or "specs" in arguments:
            raise
        if model.device.type == "meta" and isinstance(error, RuntimeError):
            raise _NoValuesError from error
        reason = f"it {error}" if isinstance(error, UnsupportedAttentionError) else one_line(error)
        name = type(model).__name__
        raise _unsupported(f"{name} does not use transformers' attention interface, and {reason}") from error


def _cache_into(specs: dict[int, AttnSpec], config: PreTrainedConfig) -> Mapping[str, object]:
    """Return the arguments of a model that hands keys and values to its cache. The attention is stored in `specs`."""
    from longspan.model.cache_interface import RecordingKv  # noqa: PLC0415 - few classes need it

    stated = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None)
    length = getattr(config, "max_position_embeddings", None)
    return {"past_key_values": RecordingKv(specs, stated_kv_heads=stated, context_length=length)}


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_MATRIX = 2


class NoProducts(TorchFunctionMode):
    """Skips matrix products, which would read all weights of a model.

    Results still depend on tokens: an output is the mean of the inputs, and an embedding is the token.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - the result of that function
        if function is functional.linear:
            x, weight = args[:2]
            return x.mean(-1, keepdim=True).expand(*x.shape[:-1], len(weight)).clone()
        if function in _PRODUCTS and (args[1].ndim == _MATRIX or isinstance(args[1], nn.Parameter)):  # not of heads
            x, weight = args
            return x.mean(-1, keepdim=True).expand(*x.shape[:-1], weight.shape[-1]).clone()
        if function is functional.embedding:
            tokens, weight = args[:2]
            return tokens[..., None].to(weight.dtype).expand(*tokens.shape, weight.shape[1]).clone()
        return function(*args, **(kwargs or {}))


@dataclass(kw_only=True)
class Observed:
    """The facts that a run of a few tokens shows, of a model with the attention `PROBE`.

    Attributes:
        specs: the attention of the layers that call `PROBE`.
        arguments: the tensor arguments of each layer besides hidden states.
    """

    specs: dict[int, AttnSpec]
    returns_tuples: bool = False
    passed_width: int = 0
    arguments: list[Tensor]


def observe(model: PreTrainedModel, tokens: Sequence[int] = (0, 1), *, by_cache: bool) -> Observed:
    """Run a model with the attention `PROBE`, and record the arguments of its layers."""
    observed = Observed(specs={}, arguments=[])

    def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        hidden: Tensor = args[0] if args else kwargs.pop("hidden_states")
        observed.passed_width = hidden.numel() // len(tokens)
        observed.arguments += _tensors((args[1:], tuple(kwargs.values())))

    def after(_layer: nn.Module, _args: object, output: object) -> None:
        observed.returns_tuples = isinstance(output, tuple)

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in decoder_layers(model)]
    hooks += [layer.register_forward_hook(after) for layer in decoder_layers(model)]
    observed.specs = _probe_specs(model, tokens, by_cache=by_cache)
    for hook in hooks:
        hook.remove()
    return observed


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a value. Dictionaries are skipped: they hold results of earlier layers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    specs: dict[int, AttnSpec] | None = None,
    traces: dict[int, Trace] | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    if traces is not None:
        own = traces[module.layer_idx]  # type: ignore[index]  # the first run has checked that it is an int
        return own.attend(module, query, key, value), None
    handed: HandedKv | None = getattr(key, "handed", None)
    if handed is not None:
        if handed.values.shape != handed.keys.shape:
            raise _unsupported(f"{type(module).__name__} has values of another size than its keys")
        spec = _read_spec(module, query, handed.keys[None], handed.values[None], attention_mask, arguments)
        return as_output(handed.attend(query[0], spec))
    if specs is None:
        raise _NoArgumentsError
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer in specs:
        raise _unsupported(f"{type(module).__name__} has attention layers without a number of their own")
    specs[layer] = _read_spec(module, query, key, value, attention_mask, arguments)
    batch, num_heads, num_tokens, _ = query.shape
    return value.new_zeros(batch, num_tokens, num_heads, value.shape[-1]), None


def _read_spec(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: dict[str, Any]
) -> AttnSpec:
    try:
        return read_spec(module, query, key, value, mask, **arguments)
    except UnsupportedAttentionError as error:
        raise _unsupported(str(error)) from error


class _NoValuesError(Exception):
    """A class reads values that tensors on the meta device do not have."""


class _NoArgumentsError(Exception):
    """A class hands no keyword arguments to its attention."""


def _unsupported(problem: str) -> ModelError:
    return ModelError(f"{problem}: this architecture is not supported")


AttentionInterface.register(PROBE, _probe)


def _rope_switch_length(config: PreTrainedConfig) -> int | None:
    """Return the request length above which longrope uses its long factors, or None without two sets of factors."""
    for rope in rope_dicts(config):
        has_two_sets = rope.get("rope_type") == "longrope" and (
            rope["short_factor"] != rope["long_factor"] or rope.get("short_mscale") != rope.get("long_mscale")
        )
        if has_two_sets:
            return int(rope["original_max_position_embeddings"])
    return None


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
    """Refuse models that state their window only to transformers' mask, which longspan does not build."""
    if not hasattr(config, "sliding_window") and not getattr(config, "layer_types", None):
        return
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
    for own in (config, text_config(config)):
        eos = getattr(own, "eos_token_id", None) if eos is None else eos
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
