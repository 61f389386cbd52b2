"""The attention functions that longspan registers with transformers.

A model whose `_attn_implementation` is one of the two names below calls our function in every layer with q, k, v
after RoPE. No mask function is registered under these names, so transformers builds no mask. The function for the
call (`attend`) or the list to write to (`specs`) comes with the call's keyword arguments, which transformers' models
hand down to the attention; nothing is global.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from longspan.attn.spec import AttnSpec, UnsupportedAttentionError, as_output, read_spec
from longspan.model.files import ModelError

SERVE = "longspan"
PROBE = "longspan_probe"

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, q [heads, tokens, head_dim], k and v [kv_heads, tokens, head_dim]) -> out [heads, tokens, head_dim]`"""


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
    return as_output(attend(layer, query[0], key[0], value[0]))


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    specs: dict[int, AttnSpec] | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if specs is None:
        raise _unsupported(f"{name} does not hand keyword arguments to its attention")
    if layer is None or layer in specs:
        raise _unsupported(f"{name} has attention layers without a number of their own")
    try:
        specs[layer] = read_spec(module, query, key, value, attention_mask, **arguments)  # type: ignore[arg-type]  # any
    except UnsupportedAttentionError as error:
        raise _unsupported(str(error)) from error
    return torch.zeros_like(query).transpose(1, 2), None


def _unsupported(problem: str) -> ModelError:
    return ModelError(f"{problem}; this architecture is not supported")


AttentionInterface.register(SERVE, _serve)
AttentionInterface.register(PROBE, _probe)
