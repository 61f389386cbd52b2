"""A Hugging Face causal language model, unmodified, that computes attention by the `Attend` of each call.

longspan registers an attention function with transformers. A model built with its name calls it in every layer with q,
k, v after RoPE. No mask function is registered under that name, so transformers builds no mask. The `Attend` of a call
is one of its keyword arguments, which transformers' models hand down to the attention.
Classes that do not are reached by their KV cache, see `model.cache_interface`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from longspan.attn.spec import AttnSpec, as_output, padded, reads_cached_length
from longspan.model.files import ModelFiles
from longspan.model.shard import Shard
from longspan.model.skeleton import (
    BUILT_WITH,
    build_skeleton,
    decoder_layers,
    load_config,
    text_config,
    trunk_base,
    trunk_path,
)
from longspan.model.step import Attend, CurrentStep, Reduce, StepState
from longspan.model.store import DTYPES, StoredTensors
from longspan.model.trunk import LayerTrunk, SingleTokenTrunk, by_keyword

if TYPE_CHECKING:
    from longspan.model.cache_interface import HandedKv
    from longspan.model.fused import Rotary
    from longspan.model.graph_step import Forward, GraphStep
    from longspan.model.quantization import Levels
    from longspan.model.recording import Recording
    from longspan.model.shrunken import ShrunkenModel
    from longspan.model.stages import LayerArguments, Stage
    from longspan.model.whole_step import RotaryOf, WholeStep

_log = logging.getLogger("longspan")
SERVE = "longspan"
"""The name of the attention function in transformers, for models that serve."""


class Model:
    """One rank's share of a model: all layers or some, and all heads or one of `tp` shares of them.

    On CPUs the parameters are views of the mapped weights.

    Args:
        stored: the stored weights; None maps them.
        skeleton: the modules to fill; None builds them.
        fused: compute layers by our own kernels, which must be loaded, if the kernels know the layers.
        triton: compute layers with Triton's kernels, which the device or Triton's interpreter runs, likewise.
        whole_steps: compute a step of single tokens as a whole, if possible.
        recording: how to record such steps on the device; None if they cannot be recorded.

    Attributes:
        specs: the attention of each layer with this share of the heads; of all layers, with the layers of other stages.
        sinks: `[heads]` float32 of each own layer with sinks, by number, with this share of the heads.
        first_kv_heads: for each layer, the number of this share's first KV head in the whole model.
        stage: the pipeline stage; None for all layers.
        layers: the modules of the layers, by number.
        fallbacks: sentences on parts that our kernels do not compute, with the reason.
        copied_bytes: bytes of the parameters that are not views of the mapped weights.
        trunk: computes steps. The variant is chosen here.
    """

    def __init__(
        self,
        files: ModelFiles,
        device: torch.device,
        *,
        tp_index: int = 0,
        tp: int = 1,
        layers: range | None = None,
        stored: StoredTensors | ShrunkenModel | None = None,
        skeleton: PreTrainedModel | None = None,
        fused: bool = False,
        triton: bool = False,
        whole_steps: bool = True,
        recording: Recording | None = None,
    ) -> None:
        if skeleton is None:
            config, dtype = load_config(files.config_dir, files.trust_remote_code), DTYPES[files.dtype]
            skeleton = build_skeleton(config, files.trust_remote_code, dtype=dtype, attn_implementation=BUILT_WITH)
        self.module = skeleton
        skeleton.config._attn_implementation = SERVE  # noqa: SLF001 - as `set_attn_implementation`, unchecked
        self._current = CurrentStep()
        self._stored = StoredTensors(files, device) if stored is None else stored
        self.info = self._stored.info
        forms = {}
        if tp > 1:
            from longspan.model.sharding import expert_forms  # noqa: PLC0415 - only with tensor parallelism

            forms = expert_forms(self.module)
        self.shard = Shard.of(self.info, index=tp_index, size=tp, **forms)
        self.specs = self.shard.local_specs
        self.first_kv_heads = tuple(self.shard.share(spec).kv_heads.start for spec in self.info.specs)
        is_whole = layers is None or len(layers) == self.info.num_layers
        decoder = decoder_layers(self.module)
        self._base: Any = trunk_base(self.module)  # of any class
        own = {layer: decoder[layer] for layer in (range(len(decoder)) if layers is None else layers)}
        # a small copy of a model lacks the weights of some layers, which return their input
        self.layers = {number: layer for number, layer in own.items() if next(layer.parameters(), None) is not None}
        self.stage: Stage | None = None
        if layers is not None and not is_whole:
            from longspan.model.stages import Stage  # noqa: PLC0415 - only with pipeline parallelism

            self.stage = Stage(self.module, self.info, layers, self.specs, self._current)
        levels: Mapping[str, Levels] = {}
        if triton and files.quantization is not None:
            from longspan.model.triton_levels import levels_of  # noqa: PLC0415 - only for quantised weights

            levels = levels_of(self._stored.levels, self.shard)
        self.copied_bytes = _fill(self.module, self._stored, device, self.shard, levels)
        self._stored.check()  # copies on a device are of the right weights, too
        self.sinks = {number: _sinks(layer) for number, layer in self.layers.items() if self.specs[number].has_sinks}
        if self.info.rope_switch_length is not None:
            from longspan.model.longrope import pin_longrope  # noqa: PLC0415 - few models have it

            pin_longrope(self.module, self.info.rope_switch_length, self._current)
        parts = (part for layer in self.layers.values() for part in layer.modules())
        if not self.info.attends_by_cache and any(map(reads_cached_length, parts)):
            from longspan.model.cached_lengths import give_cached_lengths  # noqa: PLC0415 - few models need it

            give_cached_lengths(self.layers.values())
        if tp > 1:
            from longspan.model.sharding import sum_partial_results  # noqa: PLC0415 - only with tensor parallelism

            sum_partial_results(self.module, self.shard, self._current.reduce, self._stored.shape)
        hand = by_keyword
        if self.info.attends_by_cache:
            from longspan.model.cache_interface import hand_by_cache  # noqa: PLC0415 - few classes need it

            hand = partial(hand_by_cache, specs=self.specs)
        layer_trunk = LayerTrunk(self.module, self.stage, self._current, device, hand)
        self.fallbacks: list[str] = []
        step: WholeStep | GraphStep | None = None
        if triton:
            self._fuse_cuda()
        if fused:
            is_alone = tp == 1 and self.stage is None
            step = self._fuse(own, layer_trunk, whole_steps=whole_steps and is_alone)
        elif whole_steps and recording is not None:
            step = self._graph_step(layer_trunk.all_rows, {layer: self.specs[layer] for layer in own}, recording)
        self.trunk = layer_trunk if step is None else SingleTokenTrunk(step, layer_trunk)

    @torch.no_grad()
    def rotary(self, positions: Tensor, rope_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines `[1, tokens, rotary_dim]`. See `Rows` for the arguments."""
        trunk: Any = self.module.get_submodule(trunk_path(self.module))
        like = torch.empty(1, 0, 0, dtype=self.module.dtype, device=positions.device)
        with self._current.during(StepState(rope_lengths=rope_lengths)):
            cos, sin = trunk.rotary_emb(like, positions[None])
        return cos, sin

    @torch.no_grad()
    def layer_arguments(self, positions: Tensor, rope_lengths: Tensor) -> LayerArguments:
        """Return the arguments of each layer besides hidden states, for tokens `[tokens]` on the model's device.

        Examples are RoPE of the layer's type and query scaling. No layer runs.
        """
        from longspan.model.stages import recorded_arguments  # noqa: PLC0415 - only for layerwise exchanges

        row = {"input_ids": torch.zeros_like(positions)[None], "position_ids": positions[None]}
        with self._current.during(StepState(rope_lengths=rope_lengths)), recorded_arguments(self.layers) as arguments:
            self._base(**row, use_cache=False, attend=None)
        return arguments

    def stored_attention(self, layer: int) -> dict[str, Tensor]:
        """Return the unsharded parameters of a layer's attention, on the CPU."""
        self._stored.check()
        return {name: self._stored[path].cpu() for name, path in self._attention_paths(layer).items()}

    def attention_shapes(self, layer: int) -> dict[str, torch.Size]:
        """Return the shapes of the unsharded parameters of a layer's attention."""
        return {name: self._stored.shape(path) for name, path in self._attention_paths(layer).items()}

    def _attention_paths(self, layer: int) -> dict[str, str]:
        from longspan.model.sharding import attention_modules  # noqa: PLC0415 - only for unsharded weights

        attention = attention_modules(self.module, self.shard.roles)[layer]
        [path] = [path for path, module in self.module.named_modules() if module is attention]
        quantised = [f"{name}.weight" for name, part in attention.named_modules() if hasattr(part, "levels")]
        names = (*(name for name, _ in attention.named_parameters()), *quantised)
        return {name: f"{path}.{name}" for name in names}

    @property
    def weight_bytes(self) -> int:
        """The bytes of all parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.module.parameters(), *self.module.buffers()))

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum a partial result over the ranks of tensor parallelism in the call in progress."""
        return partial if self.shard.size == 1 else self._current.reduce(partial)

    def summed_by(self, reduce: Reduce) -> AbstractContextManager[None]:
        """Sum partial results by `reduce` in calls of single modules inside the block, as `LayerTrunk.run` does."""
        return self._current.during(StepState(reduce=reduce))

    def _fuse(self, layers: Mapping[int, nn.Module], trunk: LayerTrunk, *, whole_steps: bool) -> WholeStep | None:
        """Compute the layers and the head by our own kernels, where these know them, and whole steps if possible."""
        from longspan.attn.spec_reader import probe_positions  # noqa: PLC0415 - needs our own kernels
        from longspan.model.fused import fuse_head, fuse_layers  # noqa: PLC0415
        from longspan.model.quantization import map_levels  # noqa: PLC0415
        from longspan.model.whole_step import RotaryTable, whole_step  # noqa: PLC0415

        positions = probe_positions(text_config(self.module.config), self.info.context_length)
        # A share of tensor parallelism reads the bfloat16 weights, not the levels.
        levels = {} if self.shard.size > 1 else map_levels(self._stored.levels)
        own_weights = self.module.named_parameters(remove_duplicate=False)
        by_address = {weight.data_ptr(): levels[name] for name, weight in own_weights if name in levels}
        with self.summed_by(lambda partial: partial):
            reduce = None if self.shard.size == 1 else self._current.reduce
            rotary_at, log = self._rotary_of_positions, self._log_fallback
            fused = fuse_layers(layers, self.specs, reduce, rotary_at, by_address, positions, log=log)
        head = None
        if self.stage is None or self.stage.is_last:
            head = fuse_head(self.module.get_output_embeddings(), by_address, log)
        if not whole_steps or head is None or len(fused) < self.info.num_layers:
            return None
        table = RotaryTable(rotary_at)
        has_switch = self.info.rope_switch_length is not None
        rotary: RotaryOf = self.rotary if has_switch else lambda positions, _: table(positions)
        own = [fused[layer] for layer in layers]
        step = whole_step(self.module, own, head, rotary, trunk.all_rows, positions, log=log)
        table.clear()
        return step

    def _graph_step(self, forward: Forward, specs: Mapping[int, AttnSpec], recording: Recording) -> GraphStep | None:
        """Return the recorded steps of the layers in `specs`, if the kernels that compute their attention permit it."""
        from longspan.model.graph_step import GraphStep  # noqa: PLC0415 - CUDA devices alone

        if not recording.fits([*specs.values()]):
            return None
        return GraphStep(
            forward,
            specs,
            recording,
            self.module.device,
            dtype=self.module.dtype,
            sinks=self.sinks,
            width=0 if self.stage is None else self.stage.width,
            is_shared=self.shard.size > 1,
        )

    def _fuse_cuda(self) -> None:
        """Compute the layers by Triton's kernels, where these know them."""
        from longspan.attn.spec_reader import probe_positions  # noqa: PLC0415 - needs Triton
        from longspan.model.cuda_layers import fuse_cuda_layers  # noqa: PLC0415

        def arguments_at(positions: Tensor) -> LayerArguments:
            positions = positions.to(self.module.device)
            return self.layer_arguments(positions, torch.full_like(positions, int(positions.max()) + 1))

        reduce = None if self.shard.size == 1 else self._current.reduce
        positions = probe_positions(text_config(self.module.config), self.info.context_length)
        with self.summed_by(lambda partial: partial):
            fuse_cuda_layers(self.layers, self.specs, reduce, arguments_at, positions, log=self._log_fallback)

    def _log_fallback(self, text: str) -> None:
        _log.info("%s", text)
        self.fallbacks.append(text)

    def _rotary_of_positions(self, positions: Tensor) -> Rotary:
        return self.rotary(positions, torch.full_like(positions, int(positions.max()) + 1))


def _serve(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # noqa: ARG001  # the probe has checked that it is None
    *,
    attend: Attend | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if attend is None:
        handed: HandedKv = key.handed  # type: ignore[attr-defined]  # of a class that hands no arguments
        return as_output(handed.attend(query[0]))
    layer: int = module.layer_idx  # type: ignore[assignment]  # the probe has checked that it is an int
    if (dim := value.shape[-1]) == key.shape[-1]:
        return as_output(attend(layer, query[0], key[0], value[0]))
    return as_output(attend(layer, query[0], key[0], padded(value[0], key.shape[-1]))[..., :dim])


AttentionInterface.register(SERVE, _serve)


def _sinks(layer: nn.Module) -> Tensor:
    """Return the sinks of a layer's attention. The probe has checked that they are its parameter `sinks`."""
    [sinks] = [sinks for part in layer.modules() if isinstance(sinks := getattr(part, "sinks", None), Tensor)]
    return sinks.detach().float()


def _fill(
    model: nn.Module,
    stored: StoredTensors | ShrunkenModel,
    device: torch.device,
    shard: Shard,
    levels: Mapping[str, Levels],
) -> int:
    """Replace every meta parameter and buffer by the stored one, or its share. Tied names get one Parameter.

    Linear layers whose weights have `levels` are replaced. Return the bytes of the parameters that had to be copied.
    """
    parameters: dict[str, nn.Parameter] = {}
    copied_bytes = 0
    linear = {f"{path}.weight" for path, part in model.named_modules() if isinstance(part, nn.Linear)}
    levels = {name: own for name, own in levels.items() if name in linear}  # other modules transpose their weights
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        if name in levels:
            continue
        owner = stored.owner(name)
        if owner not in parameters:
            share, is_view = _share(stored, name, device, shard)
            copied_bytes += 0 if is_view else share.nbytes
            parameters[owner] = nn.Parameter(share, requires_grad=False)
        _set(model, name, parameters[owner])
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        # Some modules write to their buffers (longrope does), so each model has copies. Buffers are small.
        _set(model, name, stored[name].to(device, copy=True))
    if levels:
        from longspan.model.triton_levels import put_levels  # noqa: PLC0415 - only for quantised weights

        copied_bytes += put_levels(model, levels, device)
    # No module may keep a tensor outside its parameters and buffers.
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [(name, value) for name, module in model.named_modules() for value in vars(module).values()]
    unloaded = [name for name, value in named if isinstance(value, Tensor) and value.is_meta]
    assert not unloaded, f"tensors of these modules were not loaded: {unloaded}"
    return copied_bytes


def _share(stored: StoredTensors | ShrunkenModel, name: str, device: torch.device, shard: Shard) -> tuple[Tensor, bool]:
    """Return a rank's share of a parameter, and whether it is a view of the stored tensor or all of a drawn one.

    A share of a drawn matrix is copied, so that the whole matrix is freed before the next one is drawn.
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
