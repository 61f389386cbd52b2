"""Formats of quantised checkpoints whose weights are de-quantised at load: scaled float8, and MXFP4 of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.model.files import ModelError, one_line, quantization_config, read_json
from longspan.model.folder import CONFIG

_FP8, _COMPRESSED, _MXFP4 = "fp8", "compressed-tensors", "mxfp4"
_DEFAULT_BLOCK = (128, 128)
"""Rows and columns per scale of float8 weights if the configuration states none, as in transformers."""
_STRATEGIES = {"tensor", "channel", "block"}
"""The strategies of compressed-tensors whose scales have one meaning: per matrix, per row, or per block."""
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
"""Types of float8 weights in safetensors files."""
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Types of scales that hold only an exponent of two, plus 127."""
_ACTIVATIONS = re.compile(r"(^|[._])(input|output|activation|act)_scale(_inv|_ub)?$")
"""Names of scales for quantised activations, which longspan does not use."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 16 values of E2M1, by their four bits."""
_ROWS = 1024
"""Rows of a float8 matrix that are scaled at once, which bounds the memory for their values in float32."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The way in which a checkpoint stores quantised weights.

    Attributes:
        method: the `quant_method` of the configuration.
        block: rows and columns of a float8 weight per scale. None if scales are per matrix or per row only.
        plain: patterns of the names of modules whose weights are not quantised, as in transformers.
    """

    method: str
    block: tuple[int, int] | None = None
    plain: tuple[re.Pattern[str], ...] = ()

    def sources(self, types: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Return the names of the stored tensors of each tensor: itself, or the parts that `dequantise` needs.

        `types` has the type of each stored tensor, by name. Scales of activations are left out. Raise ModelError for a
        float8 weight without a scale, unless its module is one of `plain`.
        """
        parts = self._mxfp4_parts(types) if self.method == _MXFP4 else self._float8_parts(types)
        consumed = {name for names in parts.values() for name in names}
        left = (name for name in types if name not in consumed and not _ACTIVATIONS.search(name))
        return parts | {name: (name,) for name in left}

    def _mxfp4_parts(self, types: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        names = (name.removesuffix("_blocks") for name in types if name.endswith("_blocks"))
        return {name: (f"{name}_blocks", f"{name}_scales") for name in names if f"{name}_scales" in types}

    def _float8_parts(self, types: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        parts: dict[str, tuple[str, ...]] = {}
        for name in (name for name, kind in types.items() if kind in _FLOAT8):
            scale = next((name + end for end in ("_scale_inv", "_scale") if name + end in types), None)
            if scale is not None:
                parts[name] = (name, scale)
            elif not any(pattern.search(name.rpartition(".")[0]) for pattern in self.plain):
                problem = f"its float8 weight {name} has no {name}_scale_inv or {name}_scale"
                raise ModelError(f"{problem}: fetch the checkpoint again, or list the module in modules_to_not_convert")
        return parts

    def dequantise(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Compute a weight in `dtype` from the tensors that `sources` names. Raise ValueError for unknown shapes."""
        values, scales = stored
        if self.method == _MXFP4:
            return from_mxfp4(values, scales, dtype)
        return from_float8(values, scales, self.block, dtype)


def from_float8(weight: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """Multiply float8 weights `[..., rows, columns]` by their scales: one per block, per matrix or per row.

    The last blocks may be cut. Products are computed in float32 and rounded once.
    """
    rows, columns = weight.shape[-2:]
    height, width = _block_of(weight.shape, scales, block)
    factors = (scales.view(torch.uint8).float() - 127).exp2() if scales.dtype in _EXPONENTS else scales.float()
    factors = factors.reshape(*weight.shape[:-2], -(-rows // height), -(-columns // width))
    result, place = torch.empty(weight.shape, dtype=dtype), torch.arange(columns) // width
    for matrix, factor, target in zip(*(x.reshape(-1, *x.shape[-2:]) for x in (weight, factors, result)), strict=True):
        for start in range(0, rows, _ROWS):
            part = torch.arange(start, min(start + _ROWS, rows)) // height
            target[start : start + _ROWS] = matrix[start : start + _ROWS].float() * factor[part][:, place]
    return result


def _block_of(shape: torch.Size, scales: Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    rows, columns = shape[-2:]
    *stack, _, _ = shape
    if block is not None and scales.shape == (*stack, -(-rows // block[0]), -(-columns // block[1])):
        return block
    if scales.numel() == 1 and not stack:
        return rows, columns
    if scales.shape in ((*stack, rows, 1), (*stack, rows)):
        return 1, columns
    if scales.shape in ((*stack, 1, 1), (*stack, 1)):
        return rows, columns
    blocks = f"blocks of {block[0]} x {block[1]}" if block else "a scale per matrix or row"
    raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit weights of shape {tuple(shape)} in {blocks}")


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute stacked weights `[experts, inputs, outputs]` from `blocks` and `scales`, both uint8.

    `blocks` `[experts, outputs, groups, 16]` has two E2M1 values per byte, the low half first. `scales`
    `[experts, outputs, groups]` has the exponent of each group of 32 inputs, plus 127.
    """
    if blocks.ndim != 4 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"blocks of shape {tuple(blocks.shape)} do not fit scales of shape {tuple(scales.shape)}")
    pairs = torch.tensor([[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)])
    experts, outputs, groups, width = blocks.shape
    result = torch.empty(experts, 2 * groups * width, outputs, dtype=dtype)
    for expert in range(experts):
        values = pairs[blocks[expert].int()].flatten(-2)
        result[expert] = torch.ldexp(values, scales[expert].int()[..., None] - 127).flatten(1).T
    return result


def weight_format(config_dir: Path) -> WeightFormat | None:
    """Return the format that the config.json of a folder states, or None for plain weights.

    Raise ModelError for methods that longspan does not read.
    """
    stated = quantization_config(read_json(config_dir / CONFIG))
    if stated is None:
        return None
    try:
        return _read(stated)
    except _UnreadFormatError as error:
        problem = f"{config_dir}: its weights are quantised by {error}, which longspan does not de-quantise"
        raise ModelError(f"{problem}: use the unquantised checkpoint, or one in fp8 or mxfp4") from None
    except (AttributeError, TypeError, ValueError, re.error) as error:
        problem = f"{config_dir}/config.json has a quantization_config that cannot be used ({one_line(error)})"
        raise ModelError(f"{problem}: fetch it again") from error


class _UnreadFormatError(Exception):
    """A method of quantisation that longspan does not read. The message is its name."""


def _read(stated: dict[str, Any]) -> WeightFormat:
    method = stated.get("quant_method", "an unnamed method")
    if method not in _READERS:
        raise _UnreadFormatError(method)
    lists = [stated.get(key) or [] for key in ("modules_to_not_convert", "ignored_layers", "ignore")]
    names = [name for given in lists for name in ([given] if isinstance(given, str) else given)]
    patterns = tuple(_pattern(name) for name in names)
    return WeightFormat(method=method, block=_READERS[method](stated), plain=patterns)


def _pattern(name: str) -> re.Pattern[str]:
    """Compile a name of modules as transformers reads it: a prefix or pattern of whole parts, or the end of a name."""
    if name.startswith("re:"):
        return re.compile(f"^(?:{name[3:]})")
    return re.compile(rf"^(?:{name})(?=\.|$)|{re.escape(name)}$")


def _read_fp8(stated: dict[str, Any]) -> tuple[int, int] | None:
    if stated.get("expert_dtype", "fp8") != "fp8":
        raise _UnreadFormatError(f"{_FP8} with experts in {stated['expert_dtype']}")
    block = stated.get("weight_block_size", _DEFAULT_BLOCK)
    return None if block is None else _checked_block(block)


def _checked_block(block: Sequence[int]) -> tuple[int, int]:
    height, width = block
    if not (isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0):
        raise ValueError(f"weight blocks of {block}")
    return height, width


def _read_compressed(stated: dict[str, Any]) -> tuple[int, int] | None:
    """Read the groups of compressed-tensors. All must be float8 with scales of one meaning, and not sparse."""
    groups = [group.get("weights") or {} for group in (stated.get("config_groups") or {}).values()]
    kinds = {(group.get("type"), group.get("num_bits"), group.get("strategy")) for group in groups}
    sparsity = (stated.get("sparsity_config") or {}).get("format", "dense")
    is_read = (
        groups
        and all(kind == "float" and bits == 8 and strategy in _STRATEGIES for kind, bits, strategy in kinds)
        and stated.get("format") == "float-quantized"
        and sparsity == "dense"
        and not stated.get("transform_config")
    )
    blocks = {tuple(block) for group in groups if (block := group.get("block_structure"))}
    if not is_read or len(blocks) > 1:
        named = ", ".join(" ".join(map(str, kind)) for kind in sorted(kinds, key=str))
        raise _UnreadFormatError(f"{_COMPRESSED} ({stated.get('format')}: {named or 'no groups'}, {sparsity})")
    return _checked_block(next(iter(blocks))) if blocks else None


_READERS: dict[str, Callable[[dict[str, Any]], tuple[int, int] | None]] = {
    _FP8: _read_fp8,
    _COMPRESSED: _read_compressed,
    _MXFP4: lambda _: None,
}
"""Read the block of scales of each method's description."""
