"""Find the roles of matrices, by a run of one layer of each kind with marked outputs.

Each matrix returns ones instead of its product, with NaN in a few outputs of a few tokens. NaN in queries, keys or
values shows to which heads an output belongs. NaN in the input of another matrix shows the inner dimension of both.
Attention returns NaN only, so a matrix that reads NaN only is the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from longspan.attn.spec import AttnSpec
from longspan.model.files import FAILURES
from longspan.model.roles import LayerRoles, Role, Sums
from longspan.model.skeleton import decoder_layers, layer_kind
from longspan.model.stages import recorded_arguments

_FAILURES = (*FAILURES, AssertionError)
"""The exceptions of a layer that cannot be run with marked outputs. Its matrices have no roles then."""


def find_roles(model: PreTrainedModel, specs: Sequence[AttnSpec]) -> tuple[LayerRoles, ...]:
    """Return the roles in each layer of a model with the attention `PROBE`. The weights of matrices are not read."""
    layers = decoder_layers(model)
    tokens = torch.zeros(1, max(2 * (spec.num_heads + 2 * spec.num_kv_heads) for spec in specs), dtype=torch.int64)
    tokens = tokens.to(model.device)
    traces: dict[int, Trace] = {}
    with suppress(*_FAILURES), torch.no_grad(), recorded_arguments(dict(enumerate(layers))) as arguments:
        model(input_ids=tokens, position_ids=tokens, use_cache=False, traces=traces)
    kinds = [(spec, tuple(layer_kind(layer))) for layer, spec in zip(layers, specs, strict=True)]
    found: dict[object, LayerRoles] = {}
    for number, kind in enumerate(kinds):
        if kind not in found:
            traces[number] = Trace(layers[number], specs[number])
            found[kind] = traces[number].run(arguments[number]) if number in arguments else LayerRoles()
    return tuple(found[kind] for kind in kinds)


class Trace:
    """One run of a layer. The attention function calls `attend`."""

    def __init__(self, layer: nn.Module, spec: AttnSpec) -> None:
        self._layer, self._spec = layer, spec
        self._paths = {module: path for path, module in layer.named_modules()}
        self._attention = ""
        self._marks: dict[str, tuple[range, Role]] = {}  # by path: the marked tokens, and a role of `parts` outputs
        self._roles: dict[str, Role] = {}

    def run(self, arguments: dict[str, Any]) -> LayerRoles:
        """Run the layer with these arguments, and with ones as hidden states."""
        hidden, *others = (name for name in arguments if name != "self")
        ones = torch.ones_like(arguments[hidden])
        with suppress(*_FAILURES), torch.no_grad(), self._replaced():
            self._layer(ones, **{name: arguments[name] for name in others})
        if not any(role.sums == "heads" for role in self._roles.values()):
            return LayerRoles()
        return LayerRoles(attention=self._attention, matrices=self._roles | self._experts())

    def _experts(self) -> dict[str, Role]:
        """Return the roles of stacked experts `[experts, inputs, outputs]`, which state their form."""
        return {
            f"{path}.{name}": role
            for module, path in self._paths.items()
            if getattr(module, "is_transposed", False) and module.is_concatenated and not module.has_bias
            for name, role in (
                ("gate_up_proj", Role(parts=2, is_transposed=True)),
                ("down_proj", Role(sums="inner", is_transposed=True)),
            )
        }

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Read the marks of `[1, heads, tokens, head_dim]`, and return the output of attention, all NaN."""
        self._attention = self._paths[module]
        heads, keys, values = (tensor[0].isnan().any(-1) for tensor in (query, key, value))  # [heads, tokens]
        for path, (tokens, role) in self._marks.items():
            of_kinds = [marks[:, tokens.start : tokens.stop] for marks in (heads, keys, values)]
            # Some layers use keys as values. Their blocks arrive in both, with the same number.
            num_arrived = of_kinds[0].sum(0) + (of_kinds[1] | of_kinds[2]).sum(0)
            if bool((num_arrived == 1).all()):
                first = torch.cat(of_kinds).int().argmax(0)
                self._roles[path] = Role(heads=tuple(first.tolist()), is_transposed=role.is_transposed)
        self._marks.clear()
        num_heads, num_tokens = query.shape[1:3]
        return query.new_full((1, num_tokens, num_heads, value.shape[-1]), torch.nan)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Replace the forwards of matrices, norms and stacked experts.

        A norm would spread NaN, and experts would take seconds. Both return their input instead.
        """
        replaced = []
        for module, path in self._paths.items():
            weights = [*module.parameters()]
            is_norm = weights and all(weight.ndim == 1 for weight in weights) and not [*module.children()]
            if isinstance(module, nn.Linear | Conv1D):
                vars(module)["forward"] = self._forward(path, module)
            elif is_norm or hasattr(module, "is_concatenated"):
                vars(module)["forward"] = lambda x, *_, **__: x
            else:
                continue
            replaced.append(module)
        try:
            yield
        finally:
            for module in replaced:
                del vars(module)["forward"]

    def _forward(self, path: str, module: nn.Linear | Conv1D) -> Callable[..., Tensor]:
        is_transposed = isinstance(module, Conv1D)
        num_outputs = module.weight.shape[int(is_transposed)]

        def forward(x: Tensor, *_: object, **__: object) -> Tensor:
            out = x.new_ones(*x.shape[:-1], num_outputs)
            if not self._reads_marks(path, x.reshape(-1, x.shape[-1]).isnan(), is_transposed=is_transposed):
                self._mark(path, out.view(-1, num_outputs), is_transposed=is_transposed)
            return out

        return forward

    def _mark(self, path: str, out: Tensor, *, is_transposed: bool) -> None:
        """Mark outputs `[tokens, outputs]`: each block of `head_dim` before attention, and three outputs after it."""
        num_outputs, size = out.shape[1], 1 if self._attention else self._spec.head_dim
        last = num_outputs // size - 1
        blocks = (0, 1, last) if self._attention else range(last + 1)
        start = max((tokens.stop for tokens, _ in self._marks.values()), default=0)
        tokens = range(start, start + len(blocks))
        if last < 0 or num_outputs % size or tokens.stop > len(out):
            return
        self._marks[path] = tokens, Role(parts=num_outputs, is_transposed=is_transposed)
        for token, block in zip(tokens, blocks, strict=True):
            out[token, block * size : (block + 1) * size] = torch.nan

    def _reads_marks(self, path: str, marks: Tensor, *, is_transposed: bool) -> bool:
        """Return whether a matrix reads the outputs of attention or of other matrices, from NaN `[tokens, inputs]`."""
        num_tokens, num_inputs = marks.shape
        sums: Sums = ""
        if self._attention and num_tokens and bool(marks.all()):
            sums = "heads" if num_inputs == self._spec.num_heads * self._spec.head_dim else ""
            if not sums:
                return True
        for source, (tokens, role) in self._marks.items() if self._attention else ():
            columns = [0, min(1, role.parts - 1) % num_inputs, (role.parts - 1) % num_inputs]
            read = marks[tokens.start : tokens.stop].nonzero().tolist()
            if role.parts % num_inputs == 0 and read == [*map(list, enumerate(columns))]:
                parts = role.parts // num_inputs
                self._roles[source], sums = Role(parts=parts, is_transposed=role.is_transposed), "inner"
        if sums:
            self._roles[path] = Role(sums=sums, is_transposed=is_transposed)
        return bool(sums)
