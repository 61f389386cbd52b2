"""A Hugging Face causal language model, unmodified, whose attention is done by whoever calls `Model.forward`.

longspan registers an attention function with transformers. A model built with its name calls it in every layer with q,
k, v after RoPE. No mask function is registered under that name, so transformers builds no mask. What attends for one
call comes with the call's keyword arguments, which transformers' models hand down to the attention; nothing is global.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from longspan.attn.paged import on_device
from longspan.attn.spec import as_output, probe_positions
from longspan.model.files import ModelFiles
from longspan.model.fused import Reduce, fuse_head, fuse_layers
from longspan.model.info import ModelInfo
from longspan.model.sharding import Shard, attention_modules, sum_partial_results
from longspan.model.skeleton import build_skeleton, decoder_layers, load_config, trunk_path
from longspan.model.stages import LayerArguments, PassThrough, Stage, recorded_arguments
from longspan.model.store import DTYPES, StoredTensors, map_levels
from longspan.model.whole_step import Attend, RotaryTable, SingleTokens, WholeStep, whole_step

if TYPE_CHECKING:
    from longspan.model.graph_step import GraphStep, Recording

SERVE = "longspan"
"""The attention function of a model that serves."""


class Stored(Protocol):
    """The stored parameters and buffers of a model, by name, see `StoredTensors`."""

    @property
    def info(self) -> ModelInfo: ...

    def owner(self, name: str) -> str: ...

    def is_drawn(self, name: str) -> bool: ...

    def shape(self, name: str) -> torch.Size: ...

    def __getitem__(self, name: str) -> Tensor: ...


class Model:
    """One rank's view of a model: all of it, or some `layers`, or one of `tp` shares of these.

    On CPU its parameters are views of the mapped weights.

    Args:
        stored: the stored weights; None to map them anew.
        skeleton: the modules to fill; None to build them.
        fused: computes layers by our own kernels, which must be loaded, where they know them.
        whole_steps: computes steps of single tokens as a whole, where that is possible, not layer by layer.
        recording: how such steps can be recorded; None where they cannot.

    Attributes:
        info: of the whole model.
        specs: what the attention of each layer, of any stage, computes on a rank with this share.
        first_kv_heads: which KV head of the whole model is the first of this share, for each layer.
        shard: which share this is.
        stage: which layers these are; None for all.
        layers: the modules of its layers, by number.
        copied_bytes: of parameters that are no views of the mapped weights.
    """

    def __init__(
        self,
        files: ModelFiles,
        device: torch.device,
        *,
        tp_index: int = 0,
        tp: int = 1,
        layers: range | None = None,
        stored: Stored | None = None,
        skeleton: PreTrainedModel | None = None,
        fused: bool = False,
        whole_steps: bool = True,
        recording: Recording | None = None,
    ) -> None:
        self.module = _skeleton(files) if skeleton is None else skeleton
        self._device = device
        self._stored = StoredTensors(files.weights, device) if stored is None else stored
        self.info = self._stored.info
        self.shard = Shard(index=tp_index, size=tp, specs=self.info.specs)
        self.specs = self.shard.local_specs
        self.first_kv_heads = tuple(self.shard.share(spec).kv_heads.start for spec in self.info.specs)
        is_whole = layers is None or len(layers) == self.info.num_layers
        decoder = decoder_layers(self.module)
        own = {layer: decoder[layer] for layer in (range(len(decoder)) if layers is None else layers)}
        self.layers = {number: layer for number, layer in own.items() if not isinstance(layer, PassThrough)}
        self.stage = None if layers is None or is_whole else Stage(self.module, self.info, layers, self.specs)
        self.copied_bytes = _fill(self.module, self._stored, device, self.shard)
        switch_length = self.info.rope_switch_length
        self._longrope = None if switch_length is None else _pin_longrope(self.module, switch_length)
        self._reduce: Reduce | None = None
        if tp > 1:
            sum_partial_results(self.module, self.shard, self._sum, self._stored.shape)
        self._whole_step: WholeStep | GraphStep | None = None
        self._rotary_table = RotaryTable(self._rotary_of_positions)
        is_alone = tp == 1 and self.stage is None
        if fused:
            self._fuse(own, files.weights, whole_steps=whole_steps and is_alone)
        elif whole_steps and is_alone and recording is not None and recording.fits(self.specs):
            from longspan.model.graph_step import GraphStep  # noqa: PLC0415 - CUDA devices alone

            self._whole_step = GraphStep(self._all_logits, self.specs, recording, device)
        self._inputs: tuple[Tensor, Tensor]
        self._output: object
        self._trunk = trunk_path(self.module)
        self.module.get_submodule(self._trunk).register_forward_hook(self._keep_output)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        keep: Tensor,
        attend: Attend,
        rope_lengths: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Runs one packed row of tokens and returns float32 logits `[n, vocab]` of the tokens indexed by `keep` `[n]`.

        `tokens` and `positions` `[tokens]` may belong to several requests; `attend` keeps them apart. It is called once
        per layer, in order, with q, k, v after RoPE; these may be strided views and are its to keep.
        `rope_lengths` `[tokens]` is each token's request length for RoPE, read iff `info.rope_switch_length` is set.
        All are int64 on the host; on the device only where `attend` cannot tell single tokens.
        With n = 0 no logits are computed. At least one token is needed.

        A stage behind the first is given the `hidden` states `[1, tokens, hidden]` that the one before returned in
        place of logits.
        """
        assert tokens.shape == positions.shape and tokens.numel() > 0, (tokens.shape, positions.shape)
        if self._whole_step is not None and (step := _single_tokens(attend)) is not None:
            assert len(keep) == len(tokens), "such a step samples after every token"
            if (logits := self._whole_step(tokens, positions, rope_lengths, step)) is not None:
                return logits.float()
        row = tokens, positions, keep, rope_lengths
        tokens, positions, keep, rope_lengths = on_device(row, self._device)
        self._inputs = tokens, positions
        if self._longrope is not None:
            self._longrope.pin(rope_lengths)
        if self.stage is not None:
            if not self.stage.is_last:
                return self.stage.before_head(hidden, **self._arguments(attend))
            self.stage.begin(hidden)
        return self._call(keep, attend)

    @torch.no_grad()
    def logits(self, rows: Sequence[int]) -> Tensor:
        """Returns logits `[n, vocab]` (float32) of more tokens of the latest `forward`, by their indices; n is at least
        1.
        """
        layers = self.module.get_submodule(self._trunk)
        self.module.set_submodule(self._trunk, _Replay(self._output))
        try:
            return self._call(torch.tensor(rows, device=self._inputs[0].device), None)
        finally:
            self.module.set_submodule(self._trunk, layers)

    @property
    def last_hidden(self) -> Tensor:
        """The final hidden states `[tokens, hidden]` of the latest `forward` that did not compute a step as a whole."""
        hidden: Tensor = self._output[0]  # type: ignore[index]  # transformers' outputs are tuples, too
        return hidden[0]

    @torch.no_grad()
    def rotary(self, positions: Tensor, rope_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines `[1, tokens, rotary_dim]` of tokens, see `forward` for the arguments."""
        if self._longrope is not None:
            self._longrope.pin(rope_lengths)
        layers = getattr(self.module, self.module.base_model_prefix)
        like = torch.empty(1, 0, 0, dtype=self.module.dtype, device=positions.device)
        cos, sin = layers.rotary_emb(like, positions[None])
        return cos, sin

    @torch.no_grad()
    def layer_arguments(self, positions: Tensor, rope_lengths: Tensor) -> LayerArguments:
        """Returns what the model hands to each layer besides hidden states, for tokens `[tokens]` on its device.

        Examples are RoPE of the layer's type and query scaling. No layer runs.
        """
        if self._longrope is not None:
            self._longrope.pin(rope_lengths)
        layers = getattr(self.module, self.module.base_model_prefix)
        with recorded_arguments(self.layers) as found:
            row = {"input_ids": torch.zeros_like(positions)[None], "position_ids": positions[None]}
            layers(**row, use_cache=False, attend=None)
        return found

    def stored_attention(self, layer: int) -> dict[str, Tensor]:
        """Returns the unsharded parameters of a layer's attention, on the CPU."""
        return {name: self._stored[path].cpu() for name, path in self._attention_paths(layer).items()}

    def attention_shapes(self, layer: int) -> dict[str, torch.Size]:
        """Returns the shapes of the unsharded parameters of a layer's attention."""
        return {name: self._stored.shape(path) for name, path in self._attention_paths(layer).items()}

    def _attention_paths(self, layer: int) -> dict[str, str]:
        attention = attention_modules(self.module)[layer]
        [path] = [path for path, module in self.module.named_modules() if module is attention]
        return {name: f"{path}.{name}" for name, _ in attention.named_parameters()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of its parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.module.parameters(), *self.module.buffers()))

    def forget_pool(self) -> None:
        """Lets go of the KV that it has read in place."""
        if self._whole_step is not None:
            self._whole_step.forget_pool()

    @contextmanager
    def summed_by(self, reduce: Reduce) -> Iterator[None]:
        """Sums the layers' outputs over the ranks of the instance by `reduce` inside a block; a whole model sums none.

        All ranks call it equally often, in the same order.
        """
        before, self._reduce = self._reduce, reduce
        try:
            yield
        finally:
            self._reduce = before

    def _fuse(self, layers: Mapping[int, nn.Module], weights: Path, *, whole_steps: bool) -> None:
        """Lets our own kernels compute what they know of these layers, and of the output head if it is here."""
        positions = probe_positions(self.module.config, self.info.context_length)
        # A share of tensor parallelism reads the weights that the levels stand for.
        levels = {} if self.shard.size > 1 else map_levels(weights)
        own_weights = self.module.named_parameters(remove_duplicate=False)
        by_address = {weight.data_ptr(): levels[name] for name, weight in own_weights if name in levels}
        with self.summed_by(lambda partial: partial):
            reduce = None if self.shard.size == 1 else self._sum
            fused = fuse_layers(layers, self.specs, reduce, self._rotary_of_positions, by_address, positions)
        head = None
        if self.stage is None or self.stage.is_last:
            head = fuse_head(self.module.get_output_embeddings(), by_address)
        if whole_steps and head is not None and len(fused) == self.info.num_layers:
            in_order = [fused[layer] for layer in layers]
            rotary, forward = self._rotary_of_row, self._all_logits
            self._whole_step = whole_step(self.module, in_order, head, rotary, forward, positions)
            self._rotary_table.clear()

    def _rotary_of_positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(positions, _one_length(positions))

    def _rotary_of_row(self, positions: Tensor, rope_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotary_table(positions) if self._longrope is None else self.rotary(positions, rope_lengths)

    def _all_logits(self, tokens: Tensor, positions: Tensor, rope_lengths: Tensor, attend: Attend) -> Tensor:
        keep = torch.arange(len(tokens), device=tokens.device)
        return self.forward(tokens, positions, keep, attend, rope_lengths)

    def _sum(self, partial: Tensor) -> Tensor:
        assert self._reduce is not None, "a share of a model needs the sums over all shares"
        return self._reduce(partial)

    def _keep_output(self, _layers: nn.Module, _inputs: object, output: object) -> None:
        self._output = output

    def _call(self, keep: Tensor, attend: Attend | None) -> Tensor:
        output = self.module(logits_to_keep=keep, **self._arguments(attend))
        logits: Tensor = output.logits[0]
        return logits.float()

    def _arguments(self, attend: Attend | None) -> dict[str, Any]:
        tokens, positions = self._inputs
        return {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, "attend": attend}


def _skeleton(files: ModelFiles) -> PreTrainedModel:
    config = load_config(files.config_dir, files.trust_remote_code)
    return build_skeleton(config, files.trust_remote_code, dtype=DTYPES[files.dtype], attn_implementation=SERVE)


class _Replay(nn.Module):
    """Stands for the decoder layers when the head is asked for more of what they gave last."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: object, **__: object) -> object:
        return self._output


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


AttentionInterface.register(SERVE, _serve)


def _one_length(positions: Tensor) -> Tensor:
    return torch.full_like(positions, int(positions.max()) + 1)


def _single_tokens(attend: Attend) -> SingleTokens | None:
    found: SingleTokens | None = attend.single_tokens() if hasattr(attend, "single_tokens") else None
    return found


def _fill(model: nn.Module, stored: Stored, device: torch.device, shard: Shard) -> int:
    """Replaces every meta parameter and buffer by the stored one, or its share; tied names get one Parameter.

    Returns the bytes of the parameters that had to be copied.
    """
    parameters: dict[str, nn.Parameter] = {}
    copied_bytes = 0
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        owner = stored.owner(name)
        if owner not in parameters:
            share, is_view = _share(stored, name, device, shard)
            copied_bytes += 0 if is_view else share.nbytes
            parameters[owner] = nn.Parameter(share, requires_grad=False)
        _set(model, name, parameters[owner])
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        # Some modules write to their buffers (longrope does): a private copy, they are small.
        _set(model, name, stored[name].to(device, copy=True))
    # No module may keep a tensor elsewhere.
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [(name, value) for name, module in model.named_modules() for value in vars(module).values()]
    left = [name for name, value in named if isinstance(value, Tensor) and value.is_meta]
    assert not left, f"tensors of these modules were not loaded: {left}"
    return copied_bytes


def _share(stored: Stored, name: str, device: torch.device, shard: Shard) -> tuple[Tensor, bool]:
    """Returns a rank's share of a parameter, and whether it is a view of the stored one, or as good as that.

    Of a matrix that was drawn for it nothing else is kept, and it is gone before the next one is drawn.
    """
    tensor = stored[name]
    share = shard.cut(name, tensor).to(device)
    is_view = share.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if is_view and stored.is_drawn(name) and share.numel() < tensor.numel():
        share = share.clone()
    return share, is_view


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


class _PinnedLongRope(nn.Module):
    """Stands in for a model's longrope `rotary_emb` and gives each token the factors of its own request.

    transformers picks longrope's factors by the largest position of the whole call. In a packed call that would make
    one request's result depend on its neighbours', and a request's early chunks on how it was cut. Here every token
    carries the length at which its request is pinned. The original module is called with the tokens of the short
    requests, then with those of the long ones and one sentinel position that makes it choose the long factors; so the
    numbers are transformers' own.
    """

    def __init__(self, inner: nn.Module, switch_length: int) -> None:
        super().__init__()
        self.inner = inner
        self.switch_length = switch_length
        self._is_long: Tensor | None = None

    def pin(self, lengths: Tensor) -> None:
        """Sets the pinned request length of every token `[tokens]` of the next call."""
        self._is_long = lengths > self.switch_length

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self._is_long is not None, "pin() comes before every call"
        is_long, self._is_long = self._is_long, None
        if not is_long.any():
            cos, sin = self.inner(x, position_ids=position_ids)
            return cos, sin
        sentinel = position_ids.new_full((1, 1), self.switch_length)
        long_ids = torch.cat((position_ids[:, is_long], sentinel), dim=1)
        cos, sin = (part[:, :-1] for part in self.inner(x, position_ids=long_ids))
        if is_long.all():
            return cos, sin
        short_cos, short_sin = self.inner(x, position_ids=position_ids[:, ~is_long])
        return _interleave(is_long, short_cos, cos), _interleave(is_long, short_sin, sin)


def _pin_longrope(model: nn.Module, switch_length: int) -> _PinnedLongRope:
    """Replaces the model's one longrope module in place and returns the replacement."""
    found = [name for name, module in model.named_modules() if getattr(module, "rope_type", None) == "longrope"]
    assert len(found) == 1, f"one rotary module expected, found {found}"
    pinned = _PinnedLongRope(model.get_submodule(found[0]), switch_length)
    model.set_submodule(found[0], pinned)
    return pinned


def _interleave(is_long: Tensor, short: Tensor, long: Tensor) -> Tensor:
    both = short.new_empty((1, is_long.shape[0], short.shape[-1]))
    both[:, ~is_long] = short
    both[:, is_long] = long
    return both
