"""The attention functions that longspan registers with transformers.

A model whose `_attn_implementation` is one of the two names below calls our function in every layer with q, k, v
after RoPE. No mask function is registered under these names, so transformers builds no mask. The function for the
call (`attend`) or the list to write to (`specs`) comes with the call's keyword arguments, which transformers' models
hand down to the attention; nothing is global.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from longspan.attn.spec import AttnSpec
from longspan.model.files import ModelError

SERVE = "longspan"
PROBE = "longspan_probe"

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, q [heads, tokens, head_dim], k and v [kv_heads, tokens, head_dim]) -> out [heads, tokens, head_dim]`"""

# Arguments that do not change what the layer computes; so do those that begin with "output_".
_HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "position_embeddings"}


def probe_specs(model: nn.Module, num_layers: int) -> tuple[AttnSpec, ...]:
    """Run two tokens through a model loaded with `PROBE` and return what each layer's attention computes.

    Raises ModelError when a layer wants something that an AttnSpec cannot say.
    """
    device = next(model.parameters()).device
    pair = torch.tensor([[0, 1]], device=device)
    specs: dict[int, AttnSpec] = {}
    with torch.no_grad():
        model(input_ids=pair, position_ids=pair, use_cache=False, specs=specs)
    if sorted(specs) != list(range(num_layers)):
        raise ModelError(
            f"{type(model).__name__}: {len(specs)} of its {num_layers} layers use transformers' attention interface; "
            "longspan needs all of them to"
        )
    return tuple(specs[layer] for layer in range(num_layers))


def _serve(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # noqa: ARG001  # the probe has checked that it is None
    *,
    attend: Attend,
    **_: object,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]  # the probe has checked that it is an int
    out = attend(layer, query[0], key[0], value[0])
    # Some models view what they get here, so it must be contiguous; the others would copy it themselves.
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    specs: dict[int, AttnSpec] | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    layer = getattr(module, "layer_idx", None)
    bidirectional = is_causal is False or getattr(module, "is_causal", True) is False
    problems = {
        "does not hand keyword arguments to its attention": specs is None,
        "has attention layers without a number of their own": layer is None or layer in (specs or ()),
        f"has attention arguments unknown to longspan ({', '.join(_unknown(others))})": bool(_unknown(others)),
        "builds its own attention mask": attention_mask is not None,
        "has bidirectional attention": bidirectional,
        "has keys and values of different head sizes": not query.shape[-1] == key.shape[-1] == value.shape[-1],
    }
    for problem in (text for text, holds in problems.items() if holds):
        raise ModelError(f"{type(module).__name__} {problem}; this architecture is not supported")
    assert specs is not None and layer is not None
    specs[layer] = AttnSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
    )
    return torch.zeros_like(query).transpose(1, 2), None


def _unknown(arguments: Mapping[str, object]) -> list[str]:
    given = (name for name, value in arguments.items() if value is not None and not name.startswith("output_"))
    return sorted(name for name in given if name not in _HARMLESS)


AttentionInterface.register(SERVE, _serve)
AttentionInterface.register(PROBE, _probe)
