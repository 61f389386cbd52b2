"""The share of a model that one rank of tensor parallelism has. `model.sharding` has the rules that cut weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan.attn.spec import AttnSpec
from longspan.core.splits import HeadShare, split_heads
from longspan.model.files import ModelError
from longspan.model.info import ModelInfo
from longspan.model.roles import LayerRoles


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a model that one of `size` ranks computes. All other fields describe the whole model.

    Attributes:
        specs: the attention of each layer.
        layers_path, roles: see `ModelInfo`.
        transposed: names of modules with stacked experts `[experts, inputs, outputs]`.
        interleaved: names of modules with stacked experts whose outputs of gate and up projection alternate.
    """

    index: int
    size: int
    specs: tuple[AttnSpec, ...]
    layers_path: str = "model.layers"
    roles: tuple[LayerRoles, ...] = ()
    transposed: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()

    @classmethod
    def of(cls, info: ModelInfo, *, index: int = 0, size: int = 1, **forms: frozenset[str]) -> Shard:
        """Return a share. `forms` are the forms of stacked experts."""
        path, roles = info.layers_path, info.roles
        return cls(index=index, size=size, specs=info.specs, layers_path=path, roles=roles, **forms)

    def within(self, layer: int, *, index: int, size: int) -> Shard:
        """Return share `index` of `size` of this share, to cut one layer."""
        own, spec = self.roles_in(layer), self.specs[layer]
        matrices = {path: role.of_share(spec, self.share(spec)) for path, role in own.matrices.items()}
        roles = tuple(
            replace(own, matrices=matrices) if number == layer else other for number, other in enumerate(self.roles)
        )
        return replace(self, index=index, size=size, specs=self.local_specs, roles=roles)

    def layer_of(self, name: str) -> tuple[int, str] | None:
        """Return the number of the layer of a parameter or module, and its path in the layer. None if it is in none."""
        path = re.match(rf"{re.escape(self.layers_path)}\.(\d+)\.(.+)", name)
        return None if path is None else (int(path[1]), path[2])

    def attention_path(self, layer: int) -> str:
        """Return the path of a layer's attention module. Rules for names use `self_attn` if it was not observed."""
        return f"{self.layers_path}.{layer}.{self.roles_in(layer).attention or 'self_attn'}"

    def has_output(self, layer: int) -> bool:
        """Return False if the output projection is outside of the attention module, or is not cut by heads."""
        roles = self.roles_in(layer)
        matrices = roles.matrices.items()
        return not roles.attention or any(
            role.sums == "heads" and path.startswith(f"{roles.attention}.") for path, role in matrices
        )

    def roles_in(self, layer: int) -> LayerRoles:
        return self.roles[layer] if self.roles else LayerRoles()

    @property
    def local_specs(self) -> tuple[AttnSpec, ...]:
        """The attention of each layer with this rank's heads."""
        return tuple(spec.of_heads(self.share(spec)) for spec in self.specs)

    def share(self, spec: AttnSpec) -> HeadShare:
        return split_heads(spec.num_heads, spec.num_kv_heads, self.size)[self.index]

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's slice of a parameter, a view if it is one piece. Raise ModelError if no rule fits."""
        if self.size == 1:
            return weight
        from longspan.model.sharding import pieces  # noqa: PLC0415 - only with tensor parallelism

        if (cut := pieces(self, name, weight.shape)) is None:
            return weight
        dim, ranges = cut
        if not any(ranges) and (weight.ndim == 1 or name.endswith("bias")):  # which another rank adds to the sum
            return torch.zeros_like(weight)
        slices = [weight.narrow(dim, own.start, len(own)) for own in ranges]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim)


def check_degree(specs: Sequence[AttnSpec], tp: int, num_sharing: int = 1) -> None:
    """Raise ModelError if `tp` ranks, whose shares `num_sharing` instances split again, leave one without a head."""
    for spec in specs:
        for share in split_heads(spec.num_heads, spec.num_kv_heads, tp):
            if not share.heads:
                raise ModelError(
                    f"tp {tp} is too much for layers with {spec.num_heads} query heads and {spec.num_kv_heads} KV "
                    "heads: some rank would have no head; use a smaller tp and more instances"
                )
            if not all(part.heads for part in split_heads(len(share.heads), len(share.kv_heads), num_sharing)):
                raise ModelError(
                    f"exchange gather_hidden splits {len(share.heads)} query heads and {len(share.kv_heads)} KV heads "
                    f"between {num_sharing} instances, and one would have none: use fewer, or another exchange"
                )
