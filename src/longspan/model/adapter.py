"""A Hugging Face causal language model, unmodified, whose attention is done by whoever calls `Model.forward`."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.model.bridge import SERVE, Attend
from longspan.model.files import ModelFiles
from longspan.model.info import ModelInfo, build_skeleton, load_config
from longspan.model.rope import PinnedLongRope, pin_longrope
from longspan.model.sharding import Shard, attention_modules, sum_partial_results
from longspan.model.store import DTYPES, map_tensors, read_info

Reduce = Callable[[Tensor], Tensor]
"""Sums `[1, tokens, hidden]` over the ranks of an instance."""


class Model:
    """One process's view of a model, or of its share of it. On CPU its parameters are views of the mapped weight file.

    Attributes:
        info: of the whole model.
        specs: what each layer's attention computes here.
        shard: which share this is.
        stored_attention: the unsharded parameters of each attention module in the weight file; empty for a whole model.
        reduce: of a share of a model: what sums outputs over the ranks of the instance. All of them call it equally
            often, in the same order.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        info: ModelInfo,
        longrope: PinnedLongRope | None,
        shard: Shard,
        stored: Mapping[str, Tensor],
    ) -> None:
        self.module = module
        self.info = info
        self.specs = shard.local_specs
        self.shard = shard
        self._longrope = longrope
        self.reduce: Reduce | None = None
        self.stored_attention: list[dict[str, Tensor]] = []
        if shard.size > 1:
            sum_partial_results(module, shard, self._sum)
            self.stored_attention = _stored_weights(module, attention_modules(module), stored)
        self._inputs: tuple[Tensor, Tensor]
        self._output: object
        getattr(module, module.base_model_prefix).register_forward_hook(self._keep_output)

    @classmethod
    def load(cls, files: ModelFiles, device: torch.device, *, tp_index: int = 0, tp: int = 1) -> "Model":
        """Map the prepared weights (and copy them to `device` unless it is the CPU), or one of `tp` shares of them.

        Raises ModelError when the weights of this architecture cannot be split.
        """
        config = load_config(files.config_dir, files.trust_remote_code)
        module = build_skeleton(config, files.trust_remote_code, dtype=DTYPES[files.dtype], attn_implementation=SERVE)
        info = read_info(files.weights)
        shard = Shard(index=tp_index, size=tp, specs=info.specs)
        stored = map_tensors(files.weights)
        _fill(module, stored, device, shard)
        switch_length = info.rope_switch_length
        longrope = None if switch_length is None else pin_longrope(module, switch_length)
        return cls(module, info, longrope, shard, stored)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        keep: Tensor,
        attend: Attend,
        rope_lengths: Tensor | None = None,
    ) -> Tensor:
        """Run one packed row of tokens and return float32 logits `[n, vocab]` of the tokens indexed by `keep` `[n]`.

        `tokens` and `positions` `[tokens]` (int64) may belong to several requests; `attend` keeps them apart. It
        is called once per layer, in order, with q, k, v after RoPE; these may be strided views and are its to keep.
        `rope_lengths` `[tokens]` is each token's request length for RoPE, needed iff `info.rope_switch_length` is set.
        With n = 0 no logits are computed. At least one token is needed.
        """
        assert tokens.shape == positions.shape and tokens.numel() > 0, (tokens.shape, positions.shape)
        if self._longrope is not None:
            assert rope_lengths is not None, "a longrope model needs rope_lengths"
            self._longrope.pin(rope_lengths)
        self._inputs = tokens, positions
        return self._call(keep, attend)

    @torch.no_grad()
    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits `[n, vocab]` (float32) of more tokens of the latest `forward`, by their indices; n is at least 1."""
        name = self.module.base_model_prefix
        layers = getattr(self.module, name)
        setattr(self.module, name, _Replay(self._output))
        try:
            return self._call(torch.tensor(rows, device=self._inputs[0].device), None)
        finally:
            setattr(self.module, name, layers)

    @torch.no_grad()
    def rotary(self, positions: Tensor, rope_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[1, tokens, rotary_dim]` of tokens, see `forward` for the arguments."""
        if self._longrope is not None:
            self._longrope.pin(rope_lengths)
        layers = getattr(self.module, self.module.base_model_prefix)
        like = torch.empty(1, 0, 0, dtype=self.module.dtype, device=positions.device)
        cos, sin = layers.rotary_emb(like, positions[None])
        return cos, sin

    def _sum(self, partial: Tensor) -> Tensor:
        assert self.reduce is not None, "a share of a model needs the sums over all shares"
        return self.reduce(partial)

    def _keep_output(self, _layers: nn.Module, _inputs: object, output: object) -> None:
        self._output = output

    def _call(self, keep: Tensor, attend: Attend | None) -> Tensor:
        tokens, positions = self._inputs
        output = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            attend=attend,
        )
        logits: Tensor = output.logits[0]
        return logits.float()


class _Replay(nn.Module):
    """Stands for the decoder layers when the head is asked for more of what they gave last."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self._output = output

    def forward(self, **_: object) -> object:
        return self._output


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device, shard: Shard) -> None:
    """Replace every meta parameter and buffer by the stored one, or its share; tied names get one Parameter."""
    parameters: dict[int, nn.Parameter] = {}
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        tensor = tensors[name]
        if id(tensor) not in parameters:
            parameters[id(tensor)] = nn.Parameter(shard.cut(name, tensor).to(device), requires_grad=False)
        _set(model, name, parameters[id(tensor)])
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        # Some modules write to their buffers (longrope does): a private copy, they are small.
        _set(model, name, tensors[name].to(device, copy=True))
    _assert_nothing_left(model)


def _stored_weights(
    module: nn.Module, attentions: Sequence[nn.Module], stored: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Returns the stored parameters of each attention module, by their names in it."""
    paths = {attention: path for path, attention in module.named_modules()}
    return [
        {name: stored[f"{paths[attention]}.{name}"] for name, _ in attention.named_parameters()}
        for attention in attentions
    ]


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


def _assert_nothing_left(model: nn.Module) -> None:
    """No module may keep a tensor where `_fill` does not see it."""
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [(name, value) for name, module in model.named_modules() for value in vars(module).values()]
    left = [name for name, value in named if isinstance(value, Tensor) and value.is_meta]
    assert not left, f"tensors of these modules were not loaded: {left}"
