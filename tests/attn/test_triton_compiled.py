"""Triton's kernels compiled for several GPUs, without one. They fit into shared memory and registers."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Row, pairwise

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
SHARED_MEMORY = 99 * 1024
"""Bytes that a block of an RTX 30 or 40 may have, which has the least of all that compute in bfloat16."""
ARCHITECTURES = (80, 90, 100)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, object],
    arch: int,
    **options: int,
) -> Any:
    """Compile for an architecture without a device. Strides are multiples of 16, as in most calls."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    even = [
        i for i, name in enumerate(names) if signature[name][0] == "*" or name.endswith(("_row", "_head", "_block"))
    ]
    source = compiler.ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in even})
    return compiler.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Return the bytes of a thread in local memory. Registers are there if a thread needs too many."""
    from triton import knobs

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [stack], [local] = (re.findall(rf"\b{name}:(\d+)", printed) for name in ("STACK", "LOCAL"))
    return int(stack) + int(local)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets in this process, and compiles nothing")
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return tmp_path


def check(kernel: Any, folder: Path, name: str) -> None:
    assert kernel.metadata.shared <= SHARED_MEMORY, name
    assert stack_bytes(kernel, folder) == 0, f"{name} has registers in local memory"


def attention_constants(dim: int, dtype: torch.dtype, *, has_softcap: bool) -> dict[str, object]:
    from longspan.attn.backends import triton as ours

    tile_rows, tile_keys = ours.attention_tile(dim, dtype)
    return {
        "has_softcap": has_softcap,
        "widen": False,
        "dim": dim,
        "width": ours.padded(dim),
        "tile_rows": tile_rows,
        "tile_keys": tile_keys,
    }


def attention_types(dtype: torch.dtype) -> dict[str, str]:
    types = dict.fromkeys(("q", "k", "v", "out"), TYPES[dtype]) | dict.fromkeys(("lse", "ratings"), "*fp32")
    return types | {"indices": "*i32", "seen": "*i64", "scale": "fp32", "softcap": "fp32"}


@pytest.mark.parametrize("row", pairwise({"arch": ARCHITECTURES, "dtype": tuple(TYPES), "dim": (40, 128, 256)}))
def test_attention_and_rating(folder: Path, row: Row) -> None:
    """With a softcap if heads have 40 or 256 elements, as Gemma 2's have."""
    from longspan.attn.backends import triton as ours

    arch, dtype, dim = row.values()
    constants, types = attention_constants(dim, dtype, has_softcap=dim != 128), attention_types(dtype)
    for kernel in (ours.band_kernel, ours.attend_kernel, ours.rate_kernel)[: 3 if dim == 128 else 1]:
        done = compiled(kernel, types, constants, arch, **ours.OPTIONS)
        assert done.metadata.shared > 0
        check(done, folder, kernel.fn.__name__)


@pytest.mark.parametrize("row", pairwise({"arch": ARCHITECTURES, "dtype": tuple(TYPES), "dim": (64, 128, 256)}))
def test_kernels_for_blocks(folder: Path, row: Row) -> None:
    from longspan.attn.backends import triton_paged as ours

    arch, dtype, dim = row.values()
    names = ("q", "keys", "values", "k", "v", "out")
    types = dict.fromkeys(names, TYPES[dtype]) | dict.fromkeys(("outs", "lses", "lse"), "*fp32")
    names = ("blocks", "low", "high", "owner", "last", "of_query", "offsets")
    types |= dict.fromkeys(names, "*i64") | {"scale": "fp32", "softcap": "fp32"}
    sizes: dict[str, object] = {"dim": dim, "width": dim, "block_size": 256, "tile_splits": ours.MERGED_SPLITS}
    sizes |= {"widen": False, "tile_rows": ours.TILE_ROWS, "tile_keys": ours.tile_keys(dim, dtype)}
    capped, options = {"has_softcap": dim == 64}, {"num_warps": ours.NUM_WARPS, "num_stages": ours.NUM_STAGES}
    split = compiled(ours.split_kernel, types | {"first": "*i64"}, sizes | capped, arch, **options)
    tile_bytes = ours.tile_keys(dim, dtype) * dim * dtype.itemsize
    assert split.metadata.shared >= 2 * (ours.NUM_STAGES - 1) * tile_bytes, "tiles are copied ahead"
    check(split, folder, "split_kernel")
    check(compiled(ours.merge_kernel, types, sizes, arch), folder, "merge_kernel")
    for offsets in ({}, {"offsets": None}):
        to_copy = {name: kind for name, kind in types.items() if name not in {*offsets, "block_size"}}
        constants = {name: size for name, size in sizes.items() if name != "block_size"}
        constants |= offsets | {"tile": ours.COPIED_TOKENS}
        check(compiled(ours.copy_kernel, to_copy, constants, arch), folder, "copy_kernel")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("ones", [(), ("num_queries", "num_kept", "num_keys", "readers")], ids=["many", "one"])
def test_all_compile_for_a_single_query_and_key_too(ones: tuple[str, ...]) -> None:
    """Triton makes constants of arguments that are 1."""
    from longspan.attn.backends import triton as ours

    def compiles(kernel: Any, types: dict[str, str], constants: dict[str, object]) -> bool:
        constants = constants | {name: 1 for name in ones if name in kernel.arg_names}
        return bool(compiled(kernel, types, constants, 80).asm["cubin"])

    attention = attention_constants(64, torch.bfloat16, has_softcap=True)
    assert compiles(ours.attend_kernel, attention_types(torch.bfloat16), attention)
    assert compiles(ours.band_kernel, attention_types(torch.bfloat16), attention)
    assert compiles(ours.rate_kernel, attention_types(torch.bfloat16), attention)
    sizes: dict[str, object] = {"dim": 80, "width": 128, "tile": ours.COPIED}
    types = dict.fromkeys(("first", "second", "first_out", "second_out"), "*bf16") | {"indices": "*i32"}
    assert compiles(ours.select_kernel, types, sizes)
    types = {"out": "*fp32", "lse": "*fp32", "partial": "*bf16", "partial_lse": "*fp32"}
    assert compiles(ours.combine_kernel, types | {"rows": "*i32"}, sizes)
    assert compiles(ours.combine_kernel, types, sizes | {"rows": None})


def test_a_register_in_local_memory_is_found(folder: Path) -> None:
    from longspan.attn.backends import triton as ours

    constants, types = attention_constants(64, torch.bfloat16, has_softcap=False), attention_types(torch.bfloat16)
    done = compiled(ours.band_kernel, types, constants, 80, num_stages=1, maxnreg=40)
    assert stack_bytes(done, folder) > 0
