"""The part of a multimodal model that computes text.

It is transformers' own class of the whole model, so names of weights, conversions of older names and the forward are
its own. Modules that a run of text does not call, such as vision towers, are removed before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from longspan.model.files import FAILURES, ModelError, one_line
from longspan.model.probe import PROBE
from longspan.model.skeleton import decoder_layers, text_config, trunk_path

_MAPPINGS = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
_RUN_ERRORS = (*FAILURES, AssertionError)
_NO_MASK = "longspan_no_mask"
"""A name for which transformers makes no mask, which needs values that the meta device has not."""
_building = Lock()
"""Held while a model is built, since `AutoModel.from_config` may be replaced meanwhile."""


def text_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a multimodal model without the modules for other inputs than text.

    Return None if transformers has no class for the whole model, or if `architectures` names a class for text alone.
    Such a class reads checkpoints with weights of the language model only.
    """
    known = [of for mapping in _MAPPINGS if type(config) in mapping for of in _classes(mapping[type(config)])]
    named = [of for of in known if of.__name__ in (config.architectures or ())]
    of: Any = next(iter([*named, *known]), None)
    return None if of is None or of.config_class is not type(config) else _without_other_parts(of)


def _classes(known: Any) -> tuple[type[PreTrainedModel], ...]:  # noqa: ANN401 - a class or several
    return known if isinstance(known, tuple) else (known,)


@cache
def _without_other_parts(of: Any) -> type[PreTrainedModel]:  # noqa: ANN401 - a class of transformers
    """Derive a class whose models lose the modules that text does not need.

    It keeps the name and the module of `of`, by which transformers finds the conversions of older checkpoints.
    """

    def init(model: PreTrainedModel, config: PreTrainedConfig, *args: object, **options: object) -> None:
        with _building:
            try:
                of.__init__(model, config, *args, **options)
            except ImportError:  # a vision tower needs another package
                with _language_model_only(config):
                    of.__init__(model, config, *args, **options)
        _leave_out(model)

    def from_config(
        own: Any,  # noqa: ANN401 - the class
        config: PreTrainedConfig,
        /,
        *,
        trust_remote_code: bool = False,  # noqa: ARG001 - transformers' own class
        attn_implementation: str = PROBE,  # which needs no mask, so masks need no values
        **options: object,
    ) -> PreTrainedModel:
        options["attn_implementation"] = attn_implementation
        return own._from_config(config, **options)  # noqa: SLF001 - as AutoModel does

    members = {"__init__": init, "from_config": classmethod(from_config), "__module__": of.__module__}
    return type(of.__name__, (of,), members)


@contextmanager
def _language_model_only(config: PreTrainedConfig) -> Iterator[None]:
    """Let `AutoModel.from_config` return empty modules instead of the models of other inputs."""
    build = AutoModel.from_config

    def from_config(part: PreTrainedConfig, **options: object) -> nn.Module:
        return build(part, **options) if part is text_config(config) else nn.Module()

    AutoModel.from_config = from_config
    try:
        yield
    finally:
        AutoModel.from_config = build


class _LayersReachedError(Exception):
    """The first layer was called."""


@torch.no_grad()
def _leave_out(model: PreTrainedModel) -> None:
    """Remove the modules next to the language model that a run of text does not call before its first layer.

    Set `left_out`: the names of the removed tensors by the path of their module. Output heads stay.
    """
    parts, called = _other_parts(model), set[str]()

    def note(path: str, *_: object) -> None:
        called.add(path)

    def stop(*_: object) -> None:
        raise _LayersReachedError

    hooks = [decoder_layers(model)[0].register_forward_pre_hook(stop)]
    for path, part in parts.items():
        hooks += [module.register_forward_pre_hook(partial(note, path)) for module in part.modules()]
    built_with = model.config._attn_implementation  # noqa: SLF001 - there is no public name
    model.config._attn_implementation = _NO_MASK  # noqa: SLF001
    try:
        row = torch.arange(2, device=model.get_input_embeddings().weight.device)[None]
        with suppress(_LayersReachedError):
            model(input_ids=row, position_ids=row, use_cache=False)
    except _RUN_ERRORS as error:
        problem = f"{type(model).__name__} does not compute text alone ({one_line(error)})"
        raise ModelError(f"{problem}: use a checkpoint of its language model") from error
    finally:
        model.config._attn_implementation = built_with  # noqa: SLF001
        for hook in hooks:
            hook.remove()
    left_out = {path: frozenset(part.state_dict()) for path, part in parts.items() if path not in called}
    for path in left_out:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {
        name: source for name, source in tied.items() if not any(name.startswith(f"{path}.") for path in left_out)
    }
    vars(model)["left_out"] = left_out


def _other_parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules next to the language model by path: all children of the modules around it, without heads."""
    names = trunk_path(model).split(".")
    around = [".".join(names[:depth]) for depth in range(len(names))]
    heads = [
        module.get_output_embeddings()
        for path in around
        if isinstance(module := model.get_submodule(path), PreTrainedModel)
    ]
    return {
        f"{path}.{name}" if path else name: child
        for path, own in zip(around, names, strict=True)
        for name, child in model.get_submodule(path).named_children()
        if name != own and not any(child is head for head in heads)
    }
